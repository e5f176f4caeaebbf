"""What the wake-up trigger costs those who insert, with a session that sleeps and is woken as the publisher's is."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import trio

from armcore_trio.borders.bus import Bus
from armcore_trio.borders.database import Connection
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import Stop
from tests.bench.context import Context
from tests.bench.figures import Row, Target
from tests.bench.workload import clear

_ROWS = 10_000
_CLIENTS, _THREADS, _SECONDS = 8, 2, 1

_LOCK = 27428886886183525
"""As in `fall_asleep.sql`."""
_LOOK = """
SELECT count(*) FROM (
    SELECT FROM recognition_job
    WHERE status = 'queued' AND created_at > coalesce(current_setting('bench.looked', true), '-infinity')::timestamptz
    LIMIT %(limit)s
) AS new
"""

_FILES = """
INSERT INTO stored_file (id, file_name)
SELECT ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid, 'sheet.xlsx' FROM generate_series(1, %(count)s) AS n
"""
_MANY = "INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'tabular' FROM stored_file"
_ONE = f"""
\\set file random(1, {_ROWS})
\\set attempt random(1, 2000000000)
INSERT INTO recognition_job (file_id, pipeline, attempt)
VALUES (('00000000-0000-0000-0000-' || lpad(:file::text, 12, '0'))::uuid, 'tabular', :attempt);
"""


def measure(context: Context) -> list[Row]:
    """One statement of many rows, and many clients of one row each, with the trigger and without.

    A publisher looks for them all the while in both cases: without the trigger it is kept awake by a lock, as an insert under
    way would hold it.
    """
    target = Target("at least", 0.9)
    with psycopg.connect(context.dsn, autocommit=True) as connection, _sleeper(context):
        many = partial(_insert_many, connection)
        single = partial(_pgbench, context)
        careless = partial(_pgbench, context, PGOPTIONS="-c synchronous_commit=off")
        contenders = [
            partial(_turn, connection, insert, trigger)
            for insert in (many, single, careless)
            for trigger in ("ENABLE", "DISABLE")
        ]
        found = context.turns(*contenders)
    return [
        Row(f"insert {_ROWS:,} rows at once, with the wake-up", "rows/s", found[0], "without", found[1], target),
        Row(f"insert single rows by {_CLIENTS} clients, with the wake-up", "rows/s", found[2], "without", found[3], target),
        Row("insert: the same, synchronous_commit off", "rows/s", found[4], "without", found[5]),
    ]


def _turn(connection: psycopg.Connection, insert: Callable[[], float], trigger: str, _: int) -> float:
    clear(connection)
    connection.execute(_FILES, {"count": _ROWS})
    connection.execute("VACUUM ANALYZE")
    connection.execute(f"ALTER TABLE recognition_job {trigger} TRIGGER recognition_job_notify".encode())
    if trigger == "DISABLE":
        connection.execute("NOTIFY recognition_job_queued")  # lets go of the lock, if it sleeps
        connection.execute("SELECT pg_advisory_lock_shared(%s)", [_LOCK])
    rate = insert()
    connection.execute("SELECT pg_advisory_unlock_all()")
    return rate


def _insert_many(connection: psycopg.Connection) -> float:
    started = time.perf_counter()
    connection.execute(_MANY)
    return _ROWS / (time.perf_counter() - started)


def _pgbench(context: Context, **environment: str) -> float:
    """Transactions a second."""
    with TemporaryDirectory() as directory:
        script = Path(directory) / "insert.sql"
        script.write_text(_ONE)
        options = ["-n", "-c", str(_CLIENTS), "-j", str(_THREADS), "-T", str(_SECONDS), "-f", str(script)]
        done = subprocess.run(
            [context.postgres._programs / "pgbench", *options, context.dsn],
            env={"PATH": os.environ["PATH"], **environment},
            check=True,
            capture_output=True,
            text=True,
        )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("tps = ")]
    return float(line.split()[2])


class _Looker(Publisher):
    """Wakes, looks and sleeps as the publisher does, and finds what it would publish, but publishes nothing."""

    async def run_once(self, connection: Connection, bus: Bus, stop: Stop) -> int:
        """A look."""
        return await self._publish(connection, bus, stop)

    async def _publish(self, connection: Connection, _: Bus, __: Stop) -> int:
        """How many rows came since the last look, up to a batch."""
        [(found,)] = await (await connection.execute(_LOOK, {"limit": self.size.now})).fetchall()
        await connection.execute("SELECT set_config('bench.looked', now()::text, false)")
        return int(found)


@contextmanager
def _sleeper(context: Context) -> Iterator[None]:
    """A publisher that notifications wake, in a thread of its own."""
    bench, stopped = context.bench(), threading.Event()
    looker = _Looker(bench.settings, bench.store, TaskStatus(), TaskStatus(), Inbox(1))

    async def publish() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(looker.run, Stop())
            await trio.to_thread.run_sync(stopped.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=[publish])
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
