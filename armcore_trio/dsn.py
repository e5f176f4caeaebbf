"""The connection string, read in one place for tasks, health probe, migrations and settings.

libpq's own parser reads it. Importing that takes a fifth of a second, so it waits until there is a string to read.
"""

import random
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


def hosts(dsn: str, **more: str | int) -> list[dict[str, Any]]:
    """The parameters for each host to try, in order; `more` ones win over those of the string. Blocks: a service file is read.

    As libpq would, and it cannot be left to it: its waiting for a host has no limit unless it blocks. Raises `psycopg.Error`
    if the numbers of hosts and ports do not fit.
    """
    from psycopg import _conninfo_utils, conninfo

    params = conninfo.conninfo_to_dict(dsn, **more)
    said = _with_defaults(conninfo.make_conninfo("", **params))
    params |= {name: said[name] for name in ("host", "hostaddr", "port", "target_session_attrs") if name in said}
    attempts = [dict(attempt) for attempt in _conninfo_utils.split_attempts(params)]
    if said.get("load_balance_hosts") == "random":
        random.shuffle(attempts)
    if params.get("target_session_attrs") == "prefer-standby":
        return [attempt | {"target_session_attrs": wanted} for wanted in ("standby", "any") for attempt in attempts]
    return attempts


def _with_defaults(dsn: str) -> dict[str, str]:
    """The parameters with what the service file and the environment add, which only a connection that is begun knows.

    This one gets no further: a word that libpq does not know makes it refuse once it has read all. Nothing if no such
    service is found; connecting then tells.
    """
    from psycopg import conninfo, pq

    begun = pq.PGconn.connect_start(conninfo.make_conninfo(dsn, channel_binding="unknown").encode())
    try:
        return {option.keyword.decode(): option.val.decode() for option in begun.info if option.val is not None}
    finally:
        begun.finish()


def passwords(dsn: str) -> list[str]:
    """The secrets inside a connection string that `check` has accepted."""
    params = check(dsn)
    return [str(params[name]) for name in ("password", "sslpassword") if params.get(name)]
