"""The exchange at work in this process, and the bare loops beside it: jobs a second over freshly inserted jobs."""

import gc
import time
from collections.abc import Awaitable, Callable, Sequence

import psycopg
import trio

from armcore_trio.borders.bus import open_bus
from armcore_trio.borders.store import Store
from armcore_trio.daemon import GC_THRESHOLD
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.exchange.subscriber import Application, Intake
from armcore_trio.settings import Settings
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import Stop
from tests.bench import ceilings
from tests.bench.workload import Row, answers, clear, insert_jobs

_AT_ONCE = 50
"""Messages that arrive before the application has a turn."""

Half = Callable[[Sequence[Row]], Awaitable[float]]
"""Half a cycle over inserted jobs; returns seconds, less those for connecting."""


def run_half(half: Half, rows: Sequence[Row]) -> float:
    """As the daemon runs, which looks for garbage cycles seldom; the bare loops too."""
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    try:
        return trio.run(half, rows)
    finally:
        gc.set_threshold(*thresholds)


class NotOnce(Exception):
    """Something was done twice, or not at all."""


class Bench:
    """The contenders on one database. Each method clears it, inserts jobs, and returns jobs a second."""

    def __init__(self, settings: Settings, dsn: str) -> None:
        self.settings, self.dsn, self.store = settings, dsn, Store(dsn)

    def drain(self, jobs: int) -> float:
        """Queued jobs to confirmed `published`."""
        return self._rate(jobs, "queued", self.publish)

    def drain_ceiling(self, jobs: int) -> float:
        """The same by a bare loop."""
        return self._rate(jobs, "queued", self.publish_barely)

    def inbox(self, jobs: int) -> float:
        """Ack and result of each published job, from received bytes to committed rows."""
        return self._rate(jobs, "published", self.apply)

    def inbox_ceiling(self, jobs: int) -> float:
        """The same by bare set-based SQL."""
        return self._rate(jobs, "published", self.apply_barely)

    def cycle(self, jobs: int) -> float:
        """Drain, then inbox of the same jobs."""
        return self._rate(jobs, "queued", self.publish, self.apply)

    def cycle_ceiling(self, jobs: int) -> float:
        """The same by the two bare loops."""
        return self._rate(jobs, "queued", self.publish_barely, self.apply_barely)

    def _rate(self, jobs: int, status: str, *halves: Half) -> float:
        with psycopg.connect(self.dsn) as connection:
            clear(connection)
            rows = insert_jobs(connection, jobs, status)
        return jobs / sum(run_half(half, rows) for half in halves)

    async def publish(self, rows: Sequence[Row]) -> float:
        """Our publisher, until nothing is queued."""
        publisher = Publisher(self.settings, self.store, TaskStatus(), TaskStatus(), Inbox(1))
        async with self.store.open("bench") as connection, open_bus(self.settings, "bench") as bus:
            started = time.perf_counter()
            await publisher.run_once(connection, bus, Stop())
            seconds = time.perf_counter() - started
        self._expect(rows, "published", publisher.status.totals["published"])
        return seconds

    async def publish_barely(self, rows: Sequence[Row]) -> float:
        """The bare loop, until nothing is queued."""
        async with self.store.open("bench") as connection, open_bus(self.settings, "bench") as bus:
            started = time.perf_counter()
            await ceilings.drain(connection, bus, self.settings.outbox_batch_size)
            seconds = time.perf_counter() - started
        self._expect(rows, "published")
        return seconds

    async def apply(self, rows: Sequence[Row]) -> float:
        """Our subscriber's two parts, without the connection between them and NATS."""
        messages, stop = list(answers(rows)), Stop()
        inbox = Inbox(len(messages))
        intake = Intake(self.settings, inbox, TaskStatus())
        application = Application(self.settings, self.store, inbox, TaskStatus())
        async with trio.open_nursery() as nursery:
            await nursery.start(application.run, stop)
            started = time.perf_counter()
            for first in range(0, len(messages), _AT_ONCE):
                for message in messages[first : first + _AT_ONCE]:
                    intake._take(message)
                await trio.lowlevel.checkpoint()
            await inbox.wait_settled()
            seconds = time.perf_counter() - started
            stop.request()
        self._expect(rows, "done", application.status.totals["applied"] / 2)
        return seconds

    async def apply_barely(self, rows: Sequence[Row]) -> float:
        """Bare set-based SQL."""
        async with self.store.open("bench") as connection:
            started = time.perf_counter()
            await ceilings.inbox(connection, rows, self.settings.inbox_batch_size)
            seconds = time.perf_counter() - started
        self._expect(rows, "done")
        return seconds

    def _expect(self, rows: Sequence[Row], status: str, counted: float | None = None) -> None:
        query = "SELECT count(*) FROM recognition_job WHERE id = ANY (%s) AND status = %s"
        with psycopg.connect(self.dsn) as connection:
            [(found,)] = connection.execute(query, [[row.job_id for row in rows], status]).fetchall()
        if found != len(rows) or counted not in (None, found):
            raise NotOnce(f"of {len(rows)} jobs {found} became {status}, counted {counted}")
