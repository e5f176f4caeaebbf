"""The outbox child: queued jobs go out, unacknowledged ones go out again, those nobody acknowledges are given up (R1, R3).

A batch is claimed, marked, published and confirmed in one transaction: the rows stay locked meanwhile, so an ack that
overtakes the commit waits for it (D1.2), and a failure anywhere leaves them as they were.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from uuid import UUID

import trio
from attrs import Factory, frozen

from armcore_trio import logs
from armcore_trio.borders import store
from armcore_trio.borders.bus import ANSWER_SECONDS, Bus, Message, open_bus
from armcore_trio.borders.database import QUERY_SECONDS, Connection, bounded
from armcore_trio.borders.store import Store
from armcore_trio.exchange.hearing import SETTLE_SECONDS, undisturbed_seconds
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.exchange.passes import BatchSize, Refusal, run_pass
from armcore_trio.protocol.lifecycle import Change, Event, Job, Status, UnackedAction, advance, decide_unacked
from armcore_trio.protocol.messages import RequestInvalid, Source, build_request
from armcore_trio.settings import Settings
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import Stop

_log = logs.get(task="publisher")

_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.002, 0.05
"""How soon to look again while inserts are under way that will not notify: soon after a job, less and less so without."""
_PASS_SECONDS = QUERY_SECONDS + ANSWER_SECONDS
_ANY_NUMBER = 2**31 - 1


@frozen
class _Built:
    """A claimed batch, split into what can be sent and what can never be."""

    messages: list[Message]
    sources: list[Source]
    """What the messages were built from."""
    unbuildable: list[Change]


@frozen
class Publisher:
    """Publishes from `store` to NATS. `intake` and `inbox` tell whether an ack that was sent has been applied (D3.1)."""

    settings: Settings
    store: Store
    status: TaskStatus
    intake: TaskStatus
    inbox: Inbox
    size: BatchSize = Factory(lambda self: BatchSize(self.settings.outbox_batch_size), takes_self=True)
    refused: set[UUID] = Factory(set)
    """Queued jobs that the database refused: tried again by the next whole pass, not by each look in between."""

    @property
    def heartbeat_seconds(self) -> float:
        """A wait and a batch, with as much again to spare."""
        return self.settings.outbox_poll_seconds + 2 * _PASS_SECONDS

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """Run a pass at once and every `OUTBOX_POLL_SECONDS`, and publish in between when an insert wakes us (D1.6).

        Inserts notify only while we sleep, since a notification makes their commits queue up. So we sleep once there is
        nothing to publish, and look again then: what was committed before notified nobody.
        """
        async with self.store.open("publisher") as connection, open_bus(self.settings, "armcore-trio publisher") as bus:
            await store.listen(connection)
            task_status.started()
            asleep, nap_seconds = await store.fall_asleep(connection), _LONGEST_NAP_SECONDS
            due = trio.current_time()
            while not stop.requested:
                if trio.current_time() >= due:
                    published = await self.run_once(connection, bus, stop)
                    due = trio.current_time() + self.settings.outbox_poll_seconds
                else:
                    published = await self._publish(connection, bus, stop)
                if not asleep:
                    nap_seconds = _SHORTEST_NAP_SECONDS if published else min(2 * nap_seconds, _LONGEST_NAP_SECONDS)
                    asleep = not published and await store.fall_asleep(connection)
                    if asleep or published:
                        continue
                with stop.interrupts():
                    until_due = max(0.0, due - trio.current_time())
                    if await connection.notified(until_due if asleep else min(nap_seconds, until_due)):
                        await store.wake_up(connection)
                        asleep = False
                    elif asleep:
                        asleep = await store.fall_asleep(connection)

    async def run_once(self, connection: Connection, bus: Bus, stop: Stop) -> int:
        """Publish every queued job there is, then see to the unacknowledged ones, behind which new jobs never wait.

        Returns how many jobs were taken from the queue before the latter.
        """
        self.refused.clear()
        published = await self._publish(connection, bus, stop)

        async def repeat_batch(limit: int, skip: set[UUID], claimed: list[UUID]) -> None:
            await self._repeat_batch(connection, bus, limit, skip, claimed)
            await self._publish(connection, bus, stop)

        if await self._any_unacked(connection):
            await run_pass(repeat_batch, size=self.size, stop=stop, refused=self._log_refusal)
        return published

    async def _publish(self, connection: Connection, bus: Bus, stop: Stop) -> int:
        publish_batch = partial(self._publish_batch, connection, bus)
        return await run_pass(publish_batch, size=self.size, stop=stop, refused=self._log_refusal, skip=self.refused)

    async def _any_unacked(self, connection: Connection) -> bool:
        if self.intake.running_seconds() is None:
            return False
        async with bounded("a look for missing acks"):
            return await store.any_unacked(connection, ack_timeout_seconds=self.settings.ack_timeout_seconds)

    async def _publish_batch(self, connection: Connection, bus: Bus, limit: int, skip: set[UUID], claimed: list[UUID]) -> None:
        """One transaction: the rows are written first, so that nothing is sent for what the database would refuse."""
        reply_timeout_seconds = self.settings.reply_timeout_seconds
        async with self._accounted() as taken, bounded("a publishing pass", _PASS_SECONDS), connection.transaction():
            sources = await store.claim_queued(connection, limit=limit, reply_timeout_seconds=reply_timeout_seconds, skip=skip)
            if not sources:
                return
            claimed += [source.job_id for source in sources]
            taken.extend(claimed)
            built = self._build(sources, bus, Status.QUEUED)
            ids, subjects = [source.job_id for source in built.sources], self.settings.request_subjects
            await store.apply_changes(connection, built.unbuildable)
            await store.mark_published(connection, ids, subjects=subjects, reply_timeout_seconds=reply_timeout_seconds)
            await bus.publish_batch(built.messages)
        self._report("outbox.published", "published", built)

    async def _repeat_batch(self, connection: Connection, bus: Bus, limit: int, skip: set[UUID], claimed: list[UUID]) -> None:
        settings = self.settings
        async with bounded("a look at the clock"):
            instant, _ = await store.read_clock(connection)
        if not await self.inbox.caught_up():
            return
        async with self._accounted() as taken, bounded("a republishing pass", _PASS_SECONDS), connection.transaction():
            sources = await store.claim_unacked(
                connection,
                instant=instant,
                limit=limit,
                ack_timeout_seconds=settings.ack_timeout_seconds,
                reply_timeout_seconds=settings.reply_timeout_seconds,
                below_repeats=_ANY_NUMBER if self._could_have_heard() else settings.outbox_max_republish,
                skip=skip,
            )
            if not sources:
                return
            claimed += [source.job_id for source in sources]
            actions = [decide_unacked(source.republish_count, settings.outbox_max_republish) for source in sources]
            repeats = [s for s, action in zip(sources, actions, strict=True) if action is UnackedAction.REPUBLISH]
            hopeless = [s for s, action in zip(sources, actions, strict=True) if action is UnackedAction.DEAD_LETTER]
            taken.extend(source.job_id for source in repeats)
            built = self._build(repeats, bus, Status.PUBLISHED)
            dead = [self._dead_letter(source) for source in hopeless]
            counts = {source.job_id: source.republish_count + 1 for source in built.sources}
            await store.apply_changes(connection, built.unbuildable + dead)
            await store.mark_republished(connection, counts, reply_timeout_seconds=settings.reply_timeout_seconds)
            await bus.publish_batch(built.messages)  # even if empty: nothing is counted over a dead connection (D3.1)
        self._report("outbox.republished", "republished", built)
        if dead:
            self.status.totals["dead_lettered"] += len(dead)
            job_ids = [str(change.job.id) for change in dead]
            _log.warning("outbox.dead_lettered", count=len(dead), job_ids=job_ids, error_code="NO_ACK")

    @asynccontextmanager
    async def _accounted(self) -> AsyncIterator[list[UUID]]:
        """The books of one batch: jobs put into the list were taken, and have failed if the block does."""
        self.status.beat()
        taken: list[UUID] = []
        try:
            yield taken
        except BaseException:
            self.status.totals["failed"] += len(taken)
            raise
        finally:
            self.status.totals["taken"] += len(taken)

    def _could_have_heard(self) -> bool:
        """Whether the last wait for an ack was spent connected; an outage or a start in between begins it anew.

        After an outage the other instances need time too, to apply the acks they held (N11).
        """
        tasks = (self.status, self.intake)
        heard = [task.running_seconds() for task in tasks]
        waited = all(seconds is not None and seconds >= self.settings.ack_timeout_seconds for seconds in heard)
        return waited and undisturbed_seconds(tasks) >= SETTLE_SECONDS

    def _dead_letter(self, source: Source) -> Change:
        waited = f"no ack within {self.settings.ack_timeout_seconds:g} s of the request, nor of {source.republish_count} repeats"
        return _advance(source, Status.PUBLISHED, Event.UNACKED, waited)

    def _build(self, sources: Sequence[Source], bus: Bus, status: Status) -> _Built:
        built, subjects = _Built([], [], []), self.settings.request_subjects
        for source in sources:
            try:
                subject = subjects.get(source.pipeline)
                if subject is None:
                    raise RequestInvalid(f"unknown pipeline {source.pipeline!r}")
                message = Message(subject, build_request(source), f"{source.job_id}:{source.attempt}")
                if (size := message.size) > bus.max_payload:
                    raise RequestInvalid(f"the request has {size} bytes, the NATS server takes {bus.max_payload}")
            except RequestInvalid as problem:
                built.unbuildable.append(_advance(source, status, Event.UNBUILDABLE, str(problem)))
                continue
            built.messages.append(message)
            built.sources.append(source)
        return built

    def _report(self, event: str, total: str, built: _Built) -> None:
        """Say, after the commit, what it made true."""
        self.status.totals["confirmed"] += len(built.sources)
        if built.sources:
            self.status.totals[total] += len(built.sources)
            _log.info(event, count=len(built.sources), job_ids=[str(source.job_id) for source in built.sources])
        for change in built.unbuildable:
            self.status.totals["refused"] += 1
            _log.warning("outbox.refused", job_id=str(change.job.id), error_code=change.error_code, error=change.error_message)

    def _log_refusal(self, job_id: UUID, refusal: Refusal) -> None:
        _log.error("outbox.write_refused", job_id=str(job_id), sqlstate=refusal.sqlstate, error=refusal.reason)


def _advance(source: Source, status: Status, event: Event, message: str) -> Change:
    change = advance(Job(source.job_id, source.file_id, status), event, message)
    assert change is not None, f"{event} must be possible for a {status} job"
    return change
