"""How many jobs a second, against what PostgreSQL and NATS must do at the least, and against a table full of history."""

from functools import partial

import psycopg

from tests.bench.context import Context
from tests.bench.exchange import Bench, run_half
from tests.bench.figures import Row, Target
from tests.bench.workload import ORDERED_ID, RANDOM_ID, clear, insert_history, insert_jobs

_FINISHED = 1_000_000
_KNOWN = 100
"""Jobs there were when statistics were last collected."""


def drain(context: Context) -> list[Row]:
    """Queued to confirmed `published`."""
    bench = context.bench()
    ours, ceiling = context.turns(bench.drain, bench.drain_ceiling)
    return [Row("drain", "jobs/s", ours, "bare loop", ceiling, Target("at least", 0.7))]


def inbox(context: Context) -> list[Row]:
    """Ack and result of each job."""
    bench = context.bench()
    ours, ceiling = context.turns(bench.inbox, bench.inbox_ceiling)
    return [Row("inbox: ack and result", "jobs/s", ours, "bare SQL", ceiling, Target("at least", 0.55))]


def cycle(context: Context) -> list[Row]:
    """Drain, then inbox of the same jobs."""
    bench = context.bench()
    ours, ceiling = context.turns(bench.cycle, bench.cycle_ceiling)
    return [Row("full cycle: drain, then inbox", "jobs/s", ours, "both bare", ceiling)]


def history(context: Context) -> list[Row]:
    """Both halves beside a million finished jobs and in tables empty but for the turn's own.

    Nothing is vacuumed or analysed once there are a hundred jobs, so the statistics know nothing of the million. What a turn
    leaves beside the history joins it; the other tables are emptied. With random ids of what is inserted, which scatter over
    large indexes and touch a page for each instead of a page for many, one sees why those of the tables grow with time.
    """
    with context.database() as full:
        for dsn in (full, context.dsn):
            with psycopg.connect(dsn) as connection:
                insert_jobs(connection, _KNOWN, "done")
        with psycopg.connect(full) as connection:
            insert_history(connection, _FINISHED)
        contenders = [
            partial(_halves, context.bench(dsn), keep=dsn == full, new_id=new_id)
            for new_id in (ORDERED_ID, RANDOM_ID)
            for dsn in (full, context.dsn)
        ]
        turns = context.turns(*contenders)
    [ordered, ordered_alone, random, random_alone] = [list(zip(*found, strict=True)) for found in turns]
    beside, alone = f"beside {_FINISHED:,} finished jobs", "empty table"
    return [
        Row(f"drain {beside}", "jobs/s", ordered[0], alone, ordered_alone[0], Target("at least", 0.9)),
        Row("drain: the same with random ids", "jobs/s", random[0], alone, random_alone[0]),
        Row(f"inbox {beside}", "jobs/s", ordered[1], alone, ordered_alone[1]),
        Row("inbox: the same with random ids", "jobs/s", random[1], alone, random_alone[1]),
    ]


def _halves(bench: Bench, jobs: int, *, keep: bool, new_id: str = ORDERED_ID) -> tuple[float, float]:
    """Jobs a second of drain and of inbox."""
    with psycopg.connect(bench.dsn) as connection:
        if not keep:
            clear(connection)
        rows = insert_jobs(connection, jobs, "queued", new_id, vacuum=False)
    return jobs / run_half(bench.publish, rows), jobs / run_half(bench.apply, rows)
