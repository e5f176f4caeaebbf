"""What an operator does to jobs by hand: submit one, give a failed one a new attempt (R8)."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from attrs import frozen

from armcore_trio.borders import store
from armcore_trio.borders.database import Connection, bounded
from armcore_trio.borders.store import Store
from armcore_trio.errors import WriteRefused
from armcore_trio.protocol.lifecycle import RETRYABLE


@frozen
class Submitted:
    """A job that has been queued."""

    job_id: UUID
    file_id: UUID


async def submit(database: Store, *, bucket: str, key: str, file_name: str, pipeline: str, content_type: str | None) -> Submitted:
    """Register source object, file and job in one transaction. Raises `WriteRefused` if the object is registered already."""
    submitted = Submitted(uuid4(), uuid4())
    async with database.open("submit") as connection, bounded("submit"), connection.transaction():
        await store.submit(
            connection,
            job_id=submitted.job_id,
            file_id=submitted.file_id,
            bucket=bucket,
            key=key,
            file_name=file_name,
            content_type=content_type,
            pipeline=pipeline,
        )
    return submitted


@frozen
class Retried:
    """What became of one retry: a new job, or the reason why not."""

    job_id: UUID
    new_job_id: UUID | None = None
    attempt: int | None = None
    refusal: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        new = str(self.new_job_id) if self.new_job_id else None
        return {"job_id": str(self.job_id), "new_job_id": new, "attempt": self.attempt, "refusal": self.refusal}


async def retry(database: Store, job_ids: Sequence[UUID]) -> list[Retried]:
    """Make a new attempt for each job, each in its own transaction; a refused one does not stop the others."""
    async with database.open("retry") as connection:
        return [await _retry(connection, job_id) for job_id in job_ids]


async def _retry(connection: Connection, job_id: UUID) -> Retried:
    """The job's row and its file's are locked in that order, so that of two operators the second sees what the first did."""
    try:
        async with bounded("retry"), connection.transaction():
            candidate = await store.lock_for_retry(connection, job_id)
            if candidate is None:
                return Retried(job_id, refusal="there is no such job")
            if candidate.latest_attempt > candidate.attempt:
                return Retried(job_id, refusal=f"attempt {candidate.latest_attempt} of its file exists")
            if candidate.status not in RETRYABLE:
                return Retried(job_id, refusal=f"it is {candidate.status}; only error, timeout and dlq can be retried")
            if not candidate.current:
                return Retried(job_id, refusal="it is not its file's current job")
            new_job_id, attempt = await store.retry(connection, job_id)
    except WriteRefused as refusal:
        return Retried(job_id, refusal=refusal.reason)
    return Retried(job_id, new_job_id, attempt)
