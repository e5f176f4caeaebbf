"""The deadline child: a job whose result is overdue ends in `timeout`, with its file and its failure fact (R5)."""

from collections.abc import Sequence
from functools import partial
from uuid import UUID

import trio
from attrs import Factory, frozen

from armcore_trio import logs
from armcore_trio.borders import store
from armcore_trio.borders.database import QUERY_SECONDS, Connection, bounded
from armcore_trio.borders.store import Store
from armcore_trio.exchange.hearing import SETTLE_SECONDS, Hold, undisturbed_seconds
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.passes import BatchSize, Refusal, run_pass
from armcore_trio.protocol.lifecycle import Event, advance
from armcore_trio.settings import Settings
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import Stop

_log = logs.get(task="watchdog")

_BATCH_SIZE = 500


@frozen
class Watchdog:
    """Ends what was never answered. Only the database's clock decides (B49). `hearers` are the tasks by which answers come."""

    settings: Settings
    store: Store
    status: TaskStatus
    inbox: Inbox
    hearers: Sequence[TaskStatus]
    hold: Hold = Factory(Hold)
    size: BatchSize = Factory(lambda: BatchSize(_BATCH_SIZE))

    @property
    def heartbeat_seconds(self) -> float:
        """A wait and a batch, with as much again to spare."""
        return self.settings.watchdog_period_seconds + 2 * QUERY_SECONDS

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """Run a pass at once and every `WATCHDOG_PERIOD_SECONDS`, watching the connection in between."""
        async with self.store.open("watchdog") as connection:
            task_status.started()
            while not stop.requested:
                seconds = await self.run_once(connection, stop)
                with stop.interrupts():
                    await connection.rest(seconds)

    async def run_once(self, connection: Connection, stop: Stop) -> float:
        """End every job whose deadline has passed, save those whose answer may not have been heard (N11).

        Returns in how many seconds to look again.
        """
        self.status.beat()
        await self._set_deadlines(connection)
        async with bounded("a look at the clock"):
            instant, server_seconds = await store.read_clock(connection)
        # What was received before that instant may wait in our inbox.
        connected = self.inbox.hear is not None
        heard = await self.inbox.caught_up() or not connected
        undisturbed = min(undisturbed_seconds([self.status, *self.hearers]) if heard else 0.0, server_seconds)
        period_seconds = self.settings.watchdog_period_seconds
        held = self.hold.goes_on(undisturbed)
        expire = partial(self._expire_batch, connection, instant, undisturbed if held else None)
        await run_pass(expire, size=self.size, stop=stop, refused=self._log_refusal)
        return min(period_seconds, SETTLE_SECONDS - undisturbed) if held else period_seconds

    async def _set_deadlines(self, connection: Connection) -> None:
        async with bounded("a look for jobs without a deadline"):
            reply_timeout_seconds = self.settings.reply_timeout_seconds
            job_ids = await store.set_deadlines(connection, limit=_BATCH_SIZE, reply_timeout_seconds=reply_timeout_seconds)
        if job_ids:
            _log.warning("watchdog.deadline_was_missing", count=len(job_ids), job_ids=[str(job_id) for job_id in job_ids])

    async def _expire_batch(
        self,
        connection: Connection,
        instant: str,
        spared_seconds: float | None,
        limit: int,
        skip: set[UUID],
        claimed: list[UUID],
    ) -> None:
        self.status.beat()
        async with bounded("a watchdog pass"), connection.transaction():
            jobs = await store.claim_expired(connection, instant=instant, spared_seconds=spared_seconds, limit=limit, skip=skip)
            if not jobs:
                return
            claimed += [job.id for job in jobs]
            changes = [advance(job, Event.EXPIRED, "no result by the reply deadline") for job in jobs]
            await store.apply_changes(connection, [change for change in changes if change])
        self.status.totals["timed_out"] += len(jobs)
        _log.warning("watchdog.timed_out", count=len(jobs), job_ids=[str(job.id) for job in jobs], error_code="TIMEOUT")

    def _log_refusal(self, job_id: UUID, refusal: Refusal) -> None:
        self.status.totals["failed"] += 1
        _log.error("watchdog.write_refused", job_id=str(job_id), sqlstate=refusal.sqlstate, error=refusal.reason)
