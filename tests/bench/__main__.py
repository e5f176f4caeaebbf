"""Drain and inbox rates against bare-loop ceilings, on embedded servers with fsync on. Prints a table; `--json` a document.

`--scale` measures instances that share a backlog instead.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psycopg
import trio

from armcore_trio import logs
from armcore_trio.bus import open_bus
from armcore_trio.embedded import Nats, Postgres
from armcore_trio.inbox import Inbox
from armcore_trio.migrate import migrate
from armcore_trio.publisher import Publisher
from armcore_trio.settings import DSN, URL, Settings, load
from armcore_trio.status import TaskStatus
from armcore_trio.store import Store
from armcore_trio.subscriber import Application, Intake
from armcore_trio.supervisor import Stop
from armcore_trio.values import LogFormat
from tests.bench import ceilings, scale
from tests.bench.workload import Row, answers, clear, insert_jobs

Measure = Callable[[int], Awaitable[float]]


class Bench:
    """The contenders, each measured in jobs a second over freshly inserted jobs."""

    def __init__(self, settings: Settings, dsn: str) -> None:
        self.settings, self.dsn, self.store = settings, dsn, Store(dsn)

    async def drain(self, jobs: int) -> float:
        """Queued jobs to confirmed `published`."""
        self._prepare(jobs, "queued")
        publisher = Publisher(self.settings, self.store, TaskStatus(), TaskStatus(), Inbox(1))
        async with self.store.open("bench") as connection, open_bus(self.settings, "bench") as bus:
            started = time.perf_counter()
            await publisher.run_once(connection, bus, Stop())
            return jobs / (time.perf_counter() - started)

    async def drain_ceiling(self, jobs: int) -> float:
        """The same by a bare loop."""
        self._prepare(jobs, "queued")
        async with self.store.open("bench") as connection, open_bus(self.settings, "bench") as bus:
            started = time.perf_counter()
            await ceilings.drain(connection, bus, self.settings.outbox_batch_size)
            return jobs / (time.perf_counter() - started)

    async def inbox(self, jobs: int) -> float:
        """Ack and result of each published job, from received bytes to committed rows."""
        messages = list(answers(self._prepare(jobs, "published")))
        inbox = Inbox(len(messages))
        intake = Intake(self.settings, inbox, TaskStatus())
        application = Application(self.settings, self.store, inbox, TaskStatus())

        async def arrive() -> None:
            for number, message in enumerate(messages):
                intake._take(message)
                if number % 50 == 0:
                    await trio.lowlevel.checkpoint()

        async with self.store.open("bench") as connection, trio.open_nursery() as nursery:
            started = time.perf_counter()
            nursery.start_soon(arrive)
            while application.status.totals["applied"] < len(messages):
                await inbox.wait_filled()
                await application.apply(connection, inbox.front(self.settings.inbox_batch_size))
            seconds = time.perf_counter() - started
        return jobs / seconds

    async def inbox_ceiling(self, jobs: int) -> float:
        """The same by bare set-based SQL."""
        rows = self._prepare(jobs, "published")
        async with self.store.open("bench") as connection:
            started = time.perf_counter()
            await ceilings.inbox(connection, rows, self.settings.inbox_batch_size)
            return jobs / (time.perf_counter() - started)

    def _prepare(self, jobs: int, status: str) -> list[Row]:
        with psycopg.connect(self.dsn) as connection:
            clear(connection)
            return insert_jobs(connection, jobs, status)


def main() -> None:
    """Run every pair in turn, several times, and print medians, spread and the ratio pair by pair."""
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", action="store_true", help="1, 2 and 4 instances sharing a backlog, instead of the ceilings")
    options = parser.parse_args()
    logs.configure(LogFormat.JSON, debug=False, secrets=[])
    with Postgres() as postgres, Nats() as nats:
        dsn = postgres.dsn()
        migrate(dsn)
        if options.scale:
            scale.main(dsn, nats.url, options.jobs, options.runs, as_json=options.json)
        bench = Bench(load({DSN: dsn, URL: nats.url}), dsn)
        pairs = {"drain": (bench.drain, bench.drain_ceiling), "inbox": (bench.inbox, bench.inbox_ceiling)}
        report = {name: _compare(*pair, options.jobs, options.runs) for name, pair in pairs.items()}
    if options.json:
        print(json.dumps(report))
        return
    print(f"{'':8}{'jobs/s':>22}{'ceiling':>22}{'ratio':>8}")
    for name, (ours, ceiling, ratio) in ((name, tuple(figures.values())) for name, figures in report.items()):
        print(f"{name:8}{_spread(ours):>22}{_spread(ceiling):>22}{statistics.median(ratio):>8.2f}")


def _compare(ours: Measure, ceiling: Measure, jobs: int, runs: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"ours": [], "ceiling": [], "ratio": []}
    for run in range(runs + 1):
        with _quiet():
            pair = trio.run(ours, jobs), trio.run(ceiling, jobs)
        if run > 0:  # the first warms up
            for name, value in zip(figures, (*pair, pair[0] / pair[1]), strict=True):
                figures[name].append(round(value, 3))
        print(f"\r{run}/{runs}", end="\r", file=sys.stderr, flush=True)
    return figures


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The log is written, as in production, but to nowhere."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


if __name__ == "__main__":
    main()
