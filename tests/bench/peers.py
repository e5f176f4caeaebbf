"""Others at work beside ours, turn by turn on the same servers: two queues on PostgreSQL, and the program of `plain.py`.

A queue's job is less than one of ours, which goes from `queued` by a published request, an ack and a result to `done`:
theirs are no-ops in tables of their own. What the versions in `constraints.txt` do for one:

- PgQueuer claims a hundred by one UPDATE that also inserts a log row for each, runs each no-op as a task, and deletes a
  hundred by one statement that inserts another log row for each. Both statements are transactions of their own.
- procrastinate claims one by an UPDATE inside a function and marks it `succeeded` by another, each in a transaction of its
  own on a connection that its pool has checked first, and triggers insert an event row for each. Jobs overlap, claims do not.

Each has what suits it. PgQueuer: asyncpg on one connection, durable tables, and uvloop, on which its own `pgq run` runs
workers (a pool is no faster, larger batches are hardly, its psycopg driver is far slower). procrastinate: its psycopg pool,
uvloop, which its own command does without and which is much faster, and of several concurrencies the one found best in a
try before the first turn. Their jobs are there beforehand, in vacuumed tables as ours are, and their clocks run from the
first job's entry until all is committed, so that neither a start nor the first claim counts.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
import nats
import psycopg
import uvloop
from pgqueuer import Job, PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver
from pgqueuer.types import QueueExecutionMode
from procrastinate import App, PsycopgConnector
from psycopg.conninfo import conninfo_to_dict

from tests.bench import latency, plain, workload
from tests.bench.context import Context, Measure
from tests.bench.exchange import NotOnce, run_half
from tests.bench.figures import Row, Target
from tests.bench.workload import answers
from tests.support.servers import fresh_database

_BATCH = 100
_CONCURRENCIES = (1, 2, 5, 10, 20)
_SLOW_JOBS = 1000
"""So many at the most where each takes milliseconds; rates compare all the same."""
_WAKE_RUNS, _SAMPLES = 3, 200
_WARM_UP = 20
_PAUSE_SECONDS = (0.02, 0.06)
_LIMIT_SECONDS = 10


def beside_pgqueuer(context: Context) -> list[Row]:
    """Our full cycle beside PgQueuer's no-ops."""
    with fresh_database(context.postgres, "template1") as dsn:
        uvloop.run(_install_pgqueuer(dsn))
        ours, theirs = context.turns(context.bench().cycle, lambda jobs: uvloop.run(_run_pgqueuer(dsn, jobs)))
    made_of = f"PgQueuer: claim and log {_BATCH}, no-op, delete and log {_BATCH}; no message, no schema"
    return [Row("full cycle beside PgQueuer", "jobs/s", ours, made_of, theirs, Target("at least", 0.45))]


async def _install_pgqueuer(dsn: str) -> None:
    connection = await _connect(dsn)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def _run_pgqueuer(dsn: str, jobs: int) -> float:
    """Jobs a second by one worker."""
    connection = await _connect(dsn)
    worker, queries, entries = PgQueuer(AsyncpgDriver(connection)), Queries(AsyncpgDriver(connection)), list[float]()

    async def enter(_: Job) -> None:
        entries.append(time.perf_counter())

    worker.entrypoint("no-op")(enter)
    await connection.execute("TRUNCATE pgqueuer, pgqueuer_log")
    await queries.enqueue(["no-op"] * jobs, [None] * jobs, [0] * jobs)
    await connection.execute("VACUUM ANALYZE")
    await worker.qm.run(batch_size=_BATCH, mode=QueueExecutionMode.drain)
    seconds = time.perf_counter() - entries[0]
    left = await connection.fetchval("SELECT count(*) FROM pgqueuer")
    await connection.close()
    _expect("PgQueuer", jobs, len(entries), jobs - left)
    return jobs / seconds


def beside_procrastinate(context: Context) -> list[Row]:
    """Our full cycle beside procrastinate's no-ops."""
    with fresh_database(context.postgres, "template1") as dsn:
        with _procrastinate(dsn, 1).open() as app:
            app.schema_manager.apply_schema()

        def theirs(jobs: int, concurrency: int) -> float:
            rate: float = uvloop.run(_run_procrastinate(dsn, min(jobs, _SLOW_JOBS), concurrency))
            return rate

        best = max(_CONCURRENCIES, key=lambda concurrency: theirs(context.jobs, concurrency))
        ours, others = context.turns(context.bench().cycle, lambda jobs: theirs(jobs, best))
    made_of = f"procrastinate ({best} at once): claim, no-op, mark, 2 commits and 2 event rows a job; no message, no schema"
    return [Row("full cycle beside procrastinate", "jobs/s", ours, made_of, others, Target("at least", 8))]


def _procrastinate(dsn: str, concurrency: int) -> App:
    """Every job can hold a connection, and one is left for the next claim."""
    return App(connector=PsycopgConnector(conninfo=dsn, min_size=concurrency + 1, max_size=concurrency + 1))


async def _run_procrastinate(dsn: str, jobs: int, concurrency: int) -> float:
    """Jobs a second by one worker."""
    app, entries = _procrastinate(dsn, concurrency), list[float]()

    async def enter() -> None:
        entries.append(time.perf_counter())

    task = app.task(name="no-op")(enter)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE procrastinate_jobs CASCADE")
        async with app.open_async():
            await task.batch_defer_async(*[{} for _ in range(jobs)])
            connection.execute("VACUUM ANALYZE")
            await app.run_worker_async(wait=False, concurrency=concurrency, install_signal_handlers=False, listen_notify=False)
            seconds = time.perf_counter() - entries[0]
        [(done,)] = connection.execute("SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'").fetchall()
    _expect("procrastinate", jobs, len(entries), done)
    return jobs / seconds


def beside_plain(context: Context) -> list[Row]:
    """Drain, inbox, and one after the other, beside the plain program's on equal rows."""
    bench = context.bench()

    def ours(jobs: int) -> dict[str, float]:
        rows = _queued(context, jobs)
        return _rates(jobs, run_half(bench.publish, rows), run_half(bench.apply, rows))

    def theirs(jobs: int) -> dict[str, float]:
        return asyncio.run(_run_plain(context, min(jobs, _SLOW_JOBS)))

    found = context.turns(ours, theirs)

    def row(half: str, made_of: str, target: Target | None = None) -> Row:
        rates, others = ([turn[half] for turn in turns] for turns in found)
        return Row(f"{half} beside the plain program", "jobs/s", rates, f"asyncio, {made_of}", others, target)

    return [
        row("drain", "a transaction a job: claim, publish, flush, mark"),
        row("inbox", "a transaction a message: validate, lock, update job, update file or insert object"),
        row("full cycle", "a transaction for each request, ack and result", Target("at least", 10)),
    ]


async def _run_plain(context: Context, jobs: int) -> dict[str, float]:
    rows = _queued(context, jobs)
    async with await psycopg.AsyncConnection.connect(context.dsn, autocommit=True) as connection:
        client = await nats.connect(context.nats.url)
        started = time.perf_counter()
        published = await plain.drain(connection, client)
        drained = time.perf_counter() - started
        await client.close()
        messages = list(answers(rows))
        started = time.perf_counter()
        applied = await plain.inbox(connection, messages)
        seconds = time.perf_counter() - started
    _expect("the plain program", jobs, published, applied / 2)
    return _rates(jobs, drained, seconds)


def _queued(context: Context, jobs: int) -> Sequence[workload.Row]:
    with psycopg.connect(context.dsn) as connection:
        workload.clear(connection)
        return workload.insert_jobs(connection, jobs, "queued")


def _rates(jobs: int, drained: float, applied: float) -> dict[str, float]:
    return {"drain": jobs / drained, "inbox": jobs / applied, "full cycle": jobs / (drained + applied)}


def wake(context: Context) -> list[Row]:
    """Our insert to wire beside PgQueuer's enqueueing to the job's entry, both idle, from just before the commit is sent.

    Ours goes to a daemon's process and on through NATS; PgQueuer's producer and worker share a process and its loop.
    """
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with fresh_database(context.postgres, "template1") as dsn:
        uvloop.run(_install_pgqueuer(dsn))
        for run in range(_WAKE_RUNS):
            with context.database() as own:
                ours.append(latency.wake(own, context.nats.url, _SAMPLES))
            theirs.append(uvloop.run(_wake_pgqueuer(dsn, _SAMPLES)))
            context.progress((run + 1) / _WAKE_RUNS)

    def row(percent: int, milliseconds: float) -> Row:
        both = [[1000 * statistics.quantiles(run, n=100)[percent - 1] for run in runs] for runs in (ours, theirs)]
        target = Target("below", milliseconds)
        made_of = "PgQueuer, job inserted to entered: notified, one claim"
        return Row(f"idle: insert to wire, p{percent}", "ms", both[0], made_of, both[1], target, target_is_ratio=False)

    return [row(50, 5), row(99, 15)]


async def _wake_pgqueuer(dsn: str, samples: int) -> list[float]:
    """Seconds, one sample after the other, with a pause at random before each."""
    connection, producer = await _connect(dsn), await _connect(dsn)
    worker, queries = PgQueuer(AsyncpgDriver(connection)), Queries(AsyncpgDriver(producer))
    entries: asyncio.Queue[float] = asyncio.Queue()

    async def enter(_: Job) -> None:
        entries.put_nowait(time.perf_counter())

    worker.entrypoint("no-op")(enter)
    running = asyncio.create_task(worker.qm.run(batch_size=_BATCH))
    seconds = []
    for _ in range(_WARM_UP + samples):
        await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))
        transaction = producer.transaction()
        await transaction.start()
        await queries.enqueue("no-op", None)
        started = time.perf_counter()
        await transaction.commit()
        seconds.append(await asyncio.wait_for(entries.get(), _LIMIT_SECONDS) - started)
    worker.shutdown.set()
    await running
    await connection.close()
    await producer.close()
    return seconds[_WARM_UP:]


async def _connect(dsn: str) -> Any:
    """By asyncpg, which takes no libpq string."""
    fields = conninfo_to_dict(dsn)
    return await asyncpg.connect(host=fields["host"], port=fields["port"], user=fields["user"], database=fields["dbname"])


def _expect(who: str, jobs: int, *counted: float) -> None:
    if set(counted) != {jobs}:
        raise NotOnce(f"{who} was given {jobs} jobs and did {counted}")


measures: Mapping[str, Measure] = {
    "pgqueuer": beside_pgqueuer,
    "procrastinate": beside_procrastinate,
    "plain": beside_plain,
    "wake": wake,
}
