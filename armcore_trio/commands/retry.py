"""`armcore-trio retry`: a new attempt for the files of failed jobs (R8)."""

import json
import sys
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import click
from attrs import frozen

from armcore_trio.borders import store
from armcore_trio.borders.database import Connection, bounded
from armcore_trio.borders.store import Store
from armcore_trio.commands.common import REFUSED, as_json
from armcore_trio.commands.reaching import with_store
from armcore_trio.errors import DependencyDown, RowsLocked, WriteRefused
from armcore_trio.protocol.lifecycle import RETRYABLE


@click.command("retry")
@click.argument("jobs", nargs=-1, required=True, type=click.UUID, metavar="JOB...")
@as_json
def command(jobs: tuple[UUID, ...], as_json: bool) -> None:
    """Give the files of failed jobs (timeout, dlq, error) a new attempt."""
    results: list[Retried] = []
    try:
        with_store(lambda database: retry(database, jobs, results))
    finally:
        _print(results, as_json=as_json)
    sys.exit(REFUSED if any(result.refusal for result in results) else 0)


def _print(results: Sequence["Retried"], *, as_json: bool) -> None:
    if as_json and results:
        click.echo(json.dumps([result.as_dict() for result in results]))
    elif not as_json:
        for result in results:
            done = f"attempt {result.attempt} is {result.new_job_id}"
            click.echo(f"{result.job_id}: {result.refusal or done}", err=bool(result.refusal))


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


async def retry(database: Store, job_ids: Sequence[UUID], results: list[Retried]) -> None:
    """Make a new attempt for each job, each in its own transaction, and add to `results` what became of it.

    A refused one does not stop the others. `DependencyDown` if the database goes away amid them: the one under way and the
    rest are then in `results` too.
    """
    async with database.open("retry") as connection:
        for number, job_id in enumerate(job_ids, 1):
            try:
                results.append(await _retry(connection, job_id))
            except DependencyDown as down:
                results.append(Retried(job_id, refusal=f"nobody knows: {down}"))
                results += [Retried(rest, refusal="not tried") for rest in job_ids[number:]]
                raise


async def _retry(connection: Connection, job_id: UUID) -> Retried:
    """The job's row and its file's are locked in that order, so that of two operators the second sees what the first did."""
    try:
        async with bounded("retry"), connection.transaction():
            candidate = await store.lock_for_retry(connection, job_id)
            if candidate is None:
                return Retried(job_id, refusal="there is no such job")
            if not candidate.has_file:
                return Retried(job_id, refusal="the file's row is gone")
            if candidate.latest_attempt > candidate.attempt:
                return Retried(job_id, refusal=f"attempt {candidate.latest_attempt} of its file exists")
            if candidate.status not in RETRYABLE:
                return Retried(
                    job_id, refusal=f"it is {candidate.status or 'without a status'}; only error, timeout and dlq can be retried"
                )
            if not candidate.current:
                return Retried(job_id, refusal="it is not its file's current job")
            new_job_id, attempt = await store.retry(connection, job_id)
    except RowsLocked:
        return Retried(job_id, refusal="it or its file is held by another session; try again later")
    except WriteRefused as refusal:
        return Retried(job_id, refusal=refusal.reason)
    return Retried(job_id, new_job_id, attempt)
