"""The schema's migrations, run by the daemon itself or by hand. Alembic inside; one database migrates once, however many try.

Importing Alembic costs a third of a second, so only those who migrate import this module.
"""

import io
import time

import alembic.command
import psycopg
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg import conninfo
from sqlalchemy import Connection, NullPool, create_engine, exc, text

from armcore_trio import logs
from armcore_trio.borders.database import is_outage
from armcore_trio.borders.fitness import SCHEMA_VERSION, damaged
from armcore_trio.dsn import hosts
from armcore_trio.errors import Dependency, DependencyDown, WriteRefused
from armcore_trio.resources import MIGRATIONS

LOCK_ATTEMPT_SECONDS = 5
LOCK_SECONDS = 60
_ADVISORY_LOCK = 4_201_370_114  # any number of our own; it serialises instances that migrate at once

_SESSION = """
SET statement_timeout = 0; SET idle_in_transaction_session_timeout = '60s';
SET search_path = public; SET row_security = off; SET default_tablespace = ''"""

# A link that falls silent is given up after about half a minute, as libpq counts it.
_LIMITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}

# SQLSTATEs of a wait that ended without the lock: lock_not_available, deadlock_detected.
_LOCKED = frozenset({"55P03", "40P01"})


def migrate(dsn: str, revision: str | None = None, log: logs.Log | None = None) -> str:
    """Bring the schema to a revision, up or down; returns the one it had (`""` for none). Blocking: run it in a thread.

    Without a revision it goes up to the one this version needs, and leaves a newer one as it is.

    Waits for locks in short attempts, each said in the log, so that it never queues other work behind itself for long;
    raises `DependencyDown` after `LOCK_SECONDS` of them, or at once if the database is away. `WriteRefused` says what of the
    tables or the record of the revision has to be mended first (N15, N16).
    """
    log = log or logs.get()
    give_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return _attempt(dsn, revision)
        except exc.DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            diagnosis = getattr(error.orig, "diag", None)
            reason = " ".join(str(getattr(diagnosis, "message_primary", None) or error.orig).split())
            if state is not None and not is_outage(state):
                raise WriteRefused(state, reason) from None
            if state not in _LOCKED or time.monotonic() > give_up:
                raise DependencyDown(Dependency.DATABASE, f"migration: {reason}") from None
            log.warning("migrate.waiting_for_lock", error=reason)
        except CommandError as error:
            raise WriteRefused(None, f"migration: {error}") from None


def _attempt(dsn: str, revision: str | None) -> str:
    engine = create_engine("postgresql+psycopg://", creator=lambda: _connect(dsn), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text(f"{_SESSION}; SET lock_timeout = '{LOCK_ATTEMPT_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        before = _current(connection)
        known = revisions()
        if revision is not None and before > known[-1]:
            raise WriteRefused(
                None, f"the schema is at revision {before}, this version knows none above {known[-1]}: use the newer one"
            )
        config = _config()
        config.attributes["connection"] = connection
        if revision is None:
            revision = max(before, SCHEMA_VERSION)
        if revision == "base" or revision < before:
            alembic.command.downgrade(config, revision)
        elif revision > before:
            alembic.command.upgrade(config, revision)
        return before


def _connect(dsn: str) -> psycopg.Connection:
    """To the first host that lets us in, each with the limits of its own."""
    failure: psycopg.Error = psycopg.OperationalError("no host to connect to")
    for host in hosts(dsn, application_name="armcore-trio migrate", client_encoding="UTF8", **_LIMITS):
        try:
            return psycopg.connect(conninfo.make_conninfo("", **host))
        except psycopg.OperationalError as error:
            failure = error
    raise failure


def _current(connection: Connection) -> str:
    if connection.execute(text("SELECT to_regclass('armcore_trio_version')")).scalar() is None:
        return ""
    found = [str(row[0]) for row in connection.execute(text("SELECT version_num::text FROM armcore_trio_version"))]
    if damage := damaged(found):
        raise WriteRefused(None, damage)
    return found[0] if found else ""


def revisions() -> list[str]:
    """All there are, oldest first."""
    return sorted(found.revision for found in ScriptDirectory.from_config(_config()).walk_revisions())


def script(revision: str = SCHEMA_VERSION) -> str:
    """The SQL from an empty database to a revision, for a DBA to read, adapt and run."""
    config = _config()
    config.output_buffer = io.StringIO()
    alembic.command.upgrade(config, revision, sql=True)
    return config.output_buffer.getvalue()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
