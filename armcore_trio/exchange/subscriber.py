"""The inbox child, in two parts that fail and restart separately: intake (NATS to buffer) and application (buffer to database).

A batch of messages is applied in one transaction with the same result as one by one: the jobs are locked, each message
is decided on in order against the rows as the messages before it left them, and the outcome is written at once (R2, R4).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

import trio
from attrs import Factory, frozen

from armcore_trio import logs
from armcore_trio.borders import store
from armcore_trio.borders.bus import ANSWER_SECONDS, Message, Received, open_bus
from armcore_trio.borders.database import QUERY_SECONDS, Connection, bounded
from armcore_trio.borders.store import Store
from armcore_trio.errors import Dependency, DependencyDown, WriteRefused
from armcore_trio.exchange.inbox import Inbox, Pending
from armcore_trio.exchange.passes import BatchSize
from armcore_trio.protocol.lifecycle import Change, Job, Outcome, Verdict, receive
from armcore_trio.protocol.messages import Envelope, Invalid, Reason
from armcore_trio.settings import Settings
from armcore_trio.supervision.status import TaskStatus
from armcore_trio.supervision.supervisor import Stop

_log = logs.get(task="subscriber")

QUEUE_GROUP = "arm-core"
_IDLE_SECONDS = 10.0
"""How long a part waits for something to do before it gives a sign of life."""
_TOTALS = {Outcome.UNKNOWN_JOB: "unknown"}
_HARMLESS = frozenset({Outcome.DUPLICATE, Outcome.IGNORED})
_UNIQUE_VIOLATION = "23505"


@frozen
class Intake:
    """Takes messages from the queue group into the inbox."""

    settings: Settings
    inbox: Inbox
    status: TaskStatus
    heartbeat_seconds: float = 3 * _IDLE_SECONDS

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """Receive until the stop; then leave the group, take what was under way, and stay until all of it is answered."""
        async with open_bus(self.settings, "armcore-trio subscriber") as bus:
            try:
                with self.inbox.receiving():
                    await bus.subscribe(self.settings.result_subject, QUEUE_GROUP, self._take)
                    self.inbox.answer, self.inbox.hear = bus.publish_batch, bus.hear
                    task_status.started()
                    while not stop.requested:
                        self.status.beat()
                        with stop.interrupts():
                            await trio.sleep(_IDLE_SECONDS)
                    await bus.drain()
                await self._wait_settled()
            finally:
                self.inbox.answer = self.inbox.hear = None

    async def _wait_settled(self) -> None:
        settled = False
        while not settled:
            self.status.beat()
            with trio.move_on_after(_IDLE_SECONDS):
                await self.inbox.wait_settled()
                settled = True

    def _take(self, received: Received) -> None:
        pending = Pending(received, self.settings.inbox_max_bytes)
        self.status.totals["received"] += 1
        if not self.inbox.put(pending):
            abandon(pending, self.status, "the inbox is full")


def abandon(pending: Pending, status: TaskStatus, why: str) -> None:
    """A message that cannot be kept: its service will not be answered, and its job ends by repeat or deadline (D4.7)."""
    status.totals["abandoned"] += 1
    _log.error("inbox.abandoned", job_id=pending.job_id, msg_id=pending.msg_id, error=why)


@frozen
class Application:
    """Applies what the inbox holds."""

    settings: Settings
    store: Store
    inbox: Inbox
    status: TaskStatus
    heartbeat_seconds: float = _IDLE_SECONDS + 2 * (QUERY_SECONDS + ANSWER_SECONDS)
    size: BatchSize = Factory(lambda self: BatchSize(self.settings.inbox_batch_size), takes_self=True)

    async def run(self, stop: Stop, *, task_status: trio.TaskStatus[None]) -> None:
        """Apply batches as messages arrive, watching the connection while there are none."""
        async with self.store.open("subscriber") as connection, trio.open_nursery() as nursery:
            nursery.start_soon(self.inbox.read_ahead)
            task_status.started()
            while not stop.requested:
                if batch := self.inbox.front(self.size.now):
                    await self.apply(connection, batch)
                else:
                    self.status.beat()
                    with stop.interrupts():
                        await self._wait_filled(connection)
            nursery.cancel_scope.cancel()

    async def _wait_filled(self, connection: Connection) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._rest, connection, nursery.cancel_scope)
            await self.inbox.wait_filled()
            nursery.cancel_scope.cancel()

    @staticmethod
    async def _rest(connection: Connection, scope: trio.CancelScope) -> None:
        await connection.rest(_IDLE_SECONDS)
        scope.cancel()

    async def apply(self, connection: Connection, batch: Sequence[Pending]) -> None:
        """Apply the inbox's oldest messages, drop them from it, log and answer them. On an outage they all stay."""
        self.status.beat()
        try:
            verdicts = await self._commit(connection, batch)
        except WriteRefused as refusal:
            if len(batch) > 1:
                middle = len(batch) // 2
                await self.apply(connection, batch[:middle])
                await self.apply(connection, batch[middle:])
                return
            verdicts = [_refused(refusal)]
        except DependencyDown:
            self.size.failed()
            raise
        self.size.succeeded()
        with self.inbox.busy():
            self.inbox.drop(len(batch))
            self._report(batch, verdicts)
            await self._answer(batch, verdicts)

    async def _commit(self, connection: Connection, batch: Sequence[Pending]) -> list[Verdict]:
        envelopes = [pending.content for pending in batch if isinstance(pending.content, Envelope)]
        if not envelopes:
            return decide(batch, {}, self.settings.s3_bucket)[0]
        async with bounded("apply a batch of messages"), connection.transaction():
            jobs = await store.lock_jobs(connection, {envelope.job_id for envelope in envelopes})
            verdicts, changes = decide(batch, jobs, self.settings.s3_bucket)
            await store.apply_changes(connection, changes)
        return verdicts

    def _report(self, batch: Sequence[Pending], verdicts: Sequence[Verdict]) -> None:
        self.status.totals.update(Counter(_TOTALS.get(verdict.outcome, verdict.outcome.value) for verdict in verdicts))
        applied: dict[str, list[str]] = {}
        for pending, verdict in zip(batch, verdicts, strict=True):
            content = pending.content
            if pending.conflicting:
                _log.warning("inbox.conflicting_msg_ids", job_id=pending.job_id, msg_id=pending.msg_id)
            if verdict.change is not None:
                applied.setdefault(verdict.change.status, []).append(str(verdict.change.job.id))
                if pending.msg_id is None and not verdict.change.acked:
                    _log.warning("inbox.missing_msg_id", job_id=pending.job_id)
            else:
                detail = content.detail if isinstance(content, Invalid) else None
                log = _log.info if verdict.outcome in _HARMLESS else _log.warning
                log(
                    f"inbox.{verdict.outcome}",
                    job_id=pending.job_id,
                    msg_id=pending.msg_id,
                    status=None if isinstance(content, Invalid) else content.status,
                    reason=verdict.reason,
                    **({"error": detail} if detail else {}),
                )
        for status, job_ids in applied.items():
            _log.info("inbox.applied", status=status, count=len(job_ids), job_ids=job_ids)

    async def _answer(self, batch: Sequence[Pending], verdicts: Sequence[Verdict]) -> None:
        """Tell those who asked, after the commit (D4.8). An answer that cannot be sent is a warning: the commit stands."""
        answers = [
            Message(pending.reply, _answer(pending, verdict))
            for pending, verdict in zip(batch, verdicts, strict=True)
            if pending.reply
        ]
        if not answers:
            return
        try:
            if self.inbox.answer is None:
                raise DependencyDown(Dependency.NATS, "not connected")
            await self.inbox.answer(answers)
        except DependencyDown as down:
            _log.warning("inbox.answers_unsent", count=len(answers), error=str(down))


def decide(batch: Sequence[Pending], jobs: Mapping[UUID, Job], raw_bucket: str) -> tuple[list[Verdict], list[Change]]:
    """What each message does, in order, to the jobs as the messages before it left them. Pure.

    Returns a verdict for each message and one change for each job that changes.
    """
    now = dict(jobs)
    changes: dict[UUID, Change] = {}
    verdicts = []
    for pending in batch:
        content = pending.content
        if isinstance(content, Invalid):
            verdicts.append(Verdict(Outcome.INVALID, content.reason))
            continue
        verdict = receive(now.get(content.job_id), content, pending.msg_id, raw_bucket=raw_bucket)
        verdicts.append(verdict)
        if change := verdict.change:
            job_id = change.job.id
            now[job_id] = change.after()
            changes[job_id] = changes[job_id].then(change) if job_id in changes else change
    return verdicts, list(changes.values())


def _refused(refusal: WriteRefused) -> Verdict:
    taken = (refusal.sqlstate, refusal.table) == (_UNIQUE_VIOLATION, "s3_object")
    reason = Reason.KEY_TAKEN if taken else Reason.REFUSED_BY_DATABASE
    return Verdict(Outcome.INVALID, reason)


def _answer(pending: Pending, verdict: Verdict) -> bytes:
    return json.dumps({"outcome": verdict.outcome, "job_id": pending.job_id, "reason": verdict.reason}).encode()
