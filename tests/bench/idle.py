"""What a daemon with default settings costs while there is nothing to do."""

import os
import re
import time
from pathlib import Path

import psycopg

from tests.bench.context import Context
from tests.bench.figures import Row, Target
from tests.bench.loaded import loaded_daemon, work
from tests.support.servers import new_environment

_JOBS = 500
_SETTLE_SECONDS = 25
"""So long after the last change PostgreSQL still writes a snapshot of running transactions, and then no more."""
_WATCH_SECONDS = 30
"""The longest of the daemon's periods, the watchdog's, fits in once."""

_STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*)")
_BOUNDARIES = {"BEGIN", "COMMIT"}
_WAL = """
SELECT pg_current_wal_insert_lsn() - '0/0', (
    SELECT sum(wal.wal_bytes)
    FROM pg_stat_activity AS session CROSS JOIN LATERAL pg_stat_get_backend_wal(session.pid) AS wal
    WHERE session.application_name LIKE 'armcore-trio %'
)
"""


def measure(context: Context) -> list[Row]:
    """Half a minute after some work and a pause. The statements of its sessions, and of no others, are in the server's log."""
    with psycopg.connect(context.dsn, autocommit=True) as connection:
        environment = new_environment(f"{context.dsn} options='-c log_statement=all'", context.nats.url)
        with loaded_daemon(environment, context.nats.url) as daemon:
            work(connection, _JOBS)
            _wait(context, _SETTLE_SECONDS, 0)
            cpu, log, wal = _cpu_seconds(daemon.pid), len(context.postgres.log), _wal(connection)
            started = time.perf_counter()
            _wait(context, _WATCH_SECONDS, _SETTLE_SECONDS)
            seconds = time.perf_counter() - started
            cpu = _cpu_seconds(daemon.pid) - cpu
            statements = _STATEMENT.findall(context.postgres.log[log:])
            wal = tuple(after - before for after, before in zip(_wal(connection), wal, strict=True))
    boundaries = sum(statement in _BOUNDARIES for statement in statements)
    return [
        Row("idle: CPU of the daemon", "% of a core", [100 * cpu / seconds], target=Target("below", 0.5)),
        Row("idle: queries", "/min", [(len(statements) - boundaries) * 60 / seconds], target=Target("below", 60)),
        Row("idle: BEGIN and COMMIT", "/min", [boundaries * 60 / seconds]),
        Row("idle: WAL of the daemon's sessions", "bytes/min", [wal[1] * 60 / seconds], target=Target("below", 1)),
        Row("idle: WAL of the whole server", "bytes/min", [wal[0] * 60 / seconds]),
    ]


def _wait(context: Context, seconds: int, after: int) -> None:
    for second in range(seconds):
        time.sleep(1)
        context.progress((after + second + 1) / (_SETTLE_SECONDS + _WATCH_SECONDS))


def _cpu_seconds(pid: int) -> float:
    """User and system time so far, as Linux tells it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wal(connection: psycopg.Connection) -> tuple[int, ...]:
    """Bytes so far: of the whole server, and of the daemon's sessions."""
    [(server, sessions)] = connection.execute(_WAL).fetchall()
    return int(server), int(sessions)
