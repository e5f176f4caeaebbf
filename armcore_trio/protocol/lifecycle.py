"""The life of a recognition job, pure: which event moves which status where, and what else changes with it (R1-R5).

`TRANSITIONS` is the whole state machine; a pair that is not in it changes nothing. `receive` decides what one message
of a service does to one job. Nothing here does I/O, knows a clock or a connection.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from uuid import UUID

from attrs import evolve, frozen

from armcore_trio.protocol.messages import Envelope, ObjectKey, Reason, ServiceStatus


class Status(StrEnum):
    """`recognition_job.status`, as far as the exchange knows it. The core may have more: a job in such a one stays as it is."""

    QUEUED = "queued"
    PUBLISHED = "published"
    PROCESSING = "processing"
    DONE = "done"
    NEEDS_CHECK = "needs_check"
    ERROR = "error"
    TIMEOUT = "timeout"
    DLQ = "dlq"


FINAL = frozenset({Status.DONE, Status.NEEDS_CHECK, Status.ERROR, Status.TIMEOUT, Status.DLQ})
RETRYABLE = frozenset({Status.ERROR, Status.TIMEOUT, Status.DLQ})


class FileStatus(StrEnum):
    """`stored_file.status`, as far as the exchange moves it."""

    PROCESSING = "PROCESSING"
    ERROR = "ERROR"


class FailureKind(StrEnum):
    """`quality_failure_fact.failure_kind`."""

    SERVICE_ERROR = "SERVICE_ERROR"
    TIMEOUT = "TIMEOUT"
    NO_ACK = "NO_ACK"


class Event(StrEnum):
    """What can happen to a job."""

    PUBLISHED = "request confirmed"
    REPUBLISHED = "repeat confirmed"
    UNBUILDABLE = "no valid request"
    ACKED = "ack"
    DONE = "result done"
    NEEDS_CHECK = "result needs_check"
    FAILED = "result error"
    UNACKED = "repeats used up"
    EXPIRED = "deadline passed"


@frozen
class Transition:
    """Where an event leads. `file` None leaves the file alone; `error_code` None means the event brings its own, if any."""

    status: Status
    file: FileStatus | None = None
    fact: FailureKind | None = None
    error_code: str | None = None


_UNBUILDABLE = Transition(Status.ERROR, FileStatus.ERROR, error_code="INVALID_REQUEST")
_FAILED = Transition(Status.ERROR, FileStatus.ERROR, FailureKind.SERVICE_ERROR)
_EXPIRED = Transition(Status.TIMEOUT, FileStatus.ERROR, FailureKind.TIMEOUT, "TIMEOUT")

TRANSITIONS: Mapping[tuple[str | None, Event], Transition] = {
    (Status.QUEUED, Event.PUBLISHED): Transition(Status.PUBLISHED),
    (Status.QUEUED, Event.UNBUILDABLE): _UNBUILDABLE,
    (Status.QUEUED, Event.DONE): Transition(Status.DONE, FileStatus.PROCESSING),
    (Status.QUEUED, Event.NEEDS_CHECK): Transition(Status.NEEDS_CHECK, FileStatus.PROCESSING),
    (Status.QUEUED, Event.FAILED): _FAILED,
    (Status.PUBLISHED, Event.REPUBLISHED): Transition(Status.PUBLISHED),
    (Status.PUBLISHED, Event.UNBUILDABLE): _UNBUILDABLE,
    (Status.PUBLISHED, Event.ACKED): Transition(Status.PROCESSING, FileStatus.PROCESSING),
    (Status.PUBLISHED, Event.DONE): Transition(Status.DONE, FileStatus.PROCESSING),
    (Status.PUBLISHED, Event.NEEDS_CHECK): Transition(Status.NEEDS_CHECK, FileStatus.PROCESSING),
    (Status.PUBLISHED, Event.FAILED): _FAILED,
    (Status.PUBLISHED, Event.UNACKED): Transition(Status.DLQ, FileStatus.ERROR, FailureKind.NO_ACK, "NO_ACK"),
    (Status.PUBLISHED, Event.EXPIRED): _EXPIRED,
    (Status.PROCESSING, Event.DONE): Transition(Status.DONE),
    (Status.PROCESSING, Event.NEEDS_CHECK): Transition(Status.NEEDS_CHECK),
    (Status.PROCESSING, Event.FAILED): _FAILED,
    (Status.PROCESSING, Event.EXPIRED): _EXPIRED,
}


@frozen
class Job:
    """The part of a `recognition_job` row that decisions depend on."""

    id: UUID
    file_id: UUID | None
    status: str | None
    """A `Status`, or whatever else the core has put there (N01)."""
    result_msg_id: str | None = None


@frozen
class Change:
    """All that one or more events do to one job, its file, its fact and its objects: written in one transaction or not at all.

    `expected` is the status the row must still have when it is written. Service and metrics of None leave what is there;
    every other None is written.
    """

    job: Job
    expected: str | None
    status: Status
    file: FileStatus | None = None
    fact: FailureKind | None = None
    acked: bool = False
    service_name: str | None = None
    service_version: str | None = None
    metrics: Mapping[str, Any] | None = None
    error_code: str | None = None
    error_message: str | None = None
    result_schema_version: str | None = None
    result_msg_id: str | None = None
    result: ObjectKey | None = None
    raw: ObjectKey | None = None

    def after(self) -> Job:
        """The job as it will be, for the next event of the same batch."""
        return Job(self.job.id, self.job.file_id, self.status, self.result_msg_id or self.job.result_msg_id)

    def then(self, later: "Change") -> "Change":
        """Both changes as one, for two events of the same job in one batch (an ack and its result)."""
        return evolve(
            later,
            expected=self.expected,
            acked=self.acked or later.acked,
            file=later.file or self.file,
            fact=later.fact or self.fact,
        )


def advance(job: Job, event: Event, error_message: str | None = None) -> Change | None:
    """What an event of the core's own (publication, time) does to a job; None if it does nothing to a job in this status."""
    to = TRANSITIONS.get((job.status, event))
    if to is None:
        return None
    return Change(job, job.status, to.status, to.file, to.fact, error_code=to.error_code, error_message=error_message)


class UnackedAction(StrEnum):
    """What becomes of a job whose ack did not come in time (R3)."""

    REPUBLISH = "republish"
    DEAD_LETTER = "dead-letter"


def decide_unacked(republish_count: int, max_republish: int) -> UnackedAction:
    """After each wait without ack: another repeat while any is left, then the dead letter (D3.2)."""
    return UnackedAction.REPUBLISH if republish_count < max_republish else UnackedAction.DEAD_LETTER


class Outcome(StrEnum):
    """What became of a message; the word a service gets as answer (D4.8)."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    LATE = "late"
    IGNORED = "ignored"
    UNKNOWN_JOB = "unknown_job"
    INVALID = "invalid"


@frozen
class Verdict:
    """The outcome of one message, its reason code where one is due, and the change to write if it is `APPLIED`."""

    outcome: Outcome
    reason: str | None = None
    change: Change | None = None


_RESULT_EVENTS = {
    ServiceStatus.DONE: Event.DONE,
    ServiceStatus.NEEDS_CHECK: Event.NEEDS_CHECK,
    ServiceStatus.ERROR: Event.FAILED,
}


def receive(job: Job | None, envelope: Envelope, msg_id: str | None, *, raw_bucket: str) -> Verdict:
    """Decide what a service's valid envelope does to its job (R2, R4).

    `job` is None if no such job exists. Whether an object's key is taken, the database says when it is written (D4.4).
    """
    if job is None:
        return Verdict(Outcome.UNKNOWN_JOB)
    if envelope.status is ServiceStatus.PROCESSING:
        return _receive_ack(job, envelope)
    if msg_id is not None and job.result_msg_id == msg_id:
        return Verdict(Outcome.DUPLICATE)
    to = TRANSITIONS.get((job.status, _RESULT_EVENTS[envelope.status]))
    if to is None:
        return Verdict(Outcome.LATE, job.status)
    if reason := _refuse_keys(job, envelope):
        return Verdict(Outcome.INVALID, reason)
    service, error = envelope.service, envelope.error
    change = Change(
        job,
        job.status,
        to.status,
        to.file,
        to.fact,
        service_name=service.name,
        service_version=service.version,
        metrics={key: value for key, value in envelope.metrics.items() if key != "republish_count"},
        error_code=error.code if error else None,
        error_message=error.message if error else None,
        result_schema_version=envelope.result_schema_version,
        result_msg_id=msg_id,
        result=envelope.result_s3,
        raw=ObjectKey(raw_bucket, envelope.raw_s3_key) if envelope.raw_s3_key else None,
    )
    return Verdict(Outcome.APPLIED, change=change)


def _receive_ack(job: Job, envelope: Envelope) -> Verdict:
    to = TRANSITIONS.get((job.status, Event.ACKED))
    if to is None:
        return Verdict(Outcome.IGNORED, job.status)
    service = envelope.service
    change = Change(job, job.status, to.status, to.file, acked=True, service_name=service.name, service_version=service.version)
    return Verdict(Outcome.APPLIED, change=change)


def _refuse_keys(job: Job, envelope: Envelope) -> Reason | None:
    """A service may register its own job's objects only (D4.4)."""
    raw, result = envelope.raw_s3_key, envelope.result_s3
    if raw is not None and raw != f"raw/{job.id}.json":
        return Reason.RAW_KEY
    if result is not None:
        prefix = f"results/{job.file_id}/{job.id}/"
        inner = result.key.removeprefix(prefix).split("/")
        if not result.key.startswith(prefix) or any(part in {"", ".", ".."} for part in inner):
            return Reason.RESULT_KEY
    return None
