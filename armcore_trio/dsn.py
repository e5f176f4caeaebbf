"""The connection string, read in one place for tasks, health probe, migrations and settings.

libpq's own parser reads it. Importing that takes a fifth of a second, so it waits until there is a string to read.
"""

from typing import Any


def check(dsn: str) -> dict[str, Any]:
    """The parameters of a connection string. Raises `ValueError` (without its text) if it cannot be meant.

    An unescaped `@` or `/` in a password makes libpq take the rest of it for a host or a port, and say so aloud.
    """
    import psycopg
    from psycopg import conninfo

    try:
        params = conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        raise ValueError("is not a PostgreSQL connection string") from None
    hosts, ports = (str(params.get(name) or "").split(",") for name in ("host", "port"))
    name = str(params.get("dbname") or "") if "://" in dsn else ""
    if "@" in name or any("@" in host[1:] for host in hosts) or not all(port == "" or port.isdecimal() for port in ports):
        raise ValueError("has a host or port that cannot be one: is a sign in the password not percent-encoded?")
    return dict(params)


def passwords(dsn: str) -> list[str]:
    """The secrets inside a connection string that `check` has accepted."""
    params = check(dsn)
    return [str(params[name]) for name in ("password", "sslpassword") if params.get(name)]
