"""Values that the core puts into its tables and this version does not know: they end no task (N01)."""

from typing import Any

import pytest

from armcore_trio.settings import DSN
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.commands import run
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange
from tests.support.records import Records
from tests.support.service import ServiceClient

pytestmark = pytest.mark.req("N01")

FOREIGN: list[Any] = ["cancelled", "DONE", "Published", " queued", "", "на паузе", None]


def set_status(db: Database, job: JobIds, status: str | None) -> None:
    """As a newer core would, which knows it."""
    db.execute("ALTER TABLE recognition_job DROP CONSTRAINT IF EXISTS recognition_job_status_check")
    db.execute("ALTER TABLE recognition_job ALTER COLUMN status DROP NOT NULL")
    db.execute("UPDATE recognition_job SET status = %s WHERE id = %s", status, job.id)


@pytest.mark.req("R2", "R4")
@pytest.mark.parametrize("status", FOREIGN)
async def test_a_result_for_a_status_of_the_cores_own_is_late_and_an_ack_is_ignored(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records, status: str | None
) -> None:
    foreign, published = db.insert_jobs(2, status="published")
    set_status(db, foreign, status)
    before = db.job(foreign), db.file(foreign)
    answers = await exchange.deliver(
        service,
        (envelopes.done(foreign), envelopes.result_id(foreign)),
        (envelopes.done(published), envelopes.result_id(published)),
        (envelopes.ack(foreign), None),
    )
    assert [(answer["outcome"], answer["reason"]) for answer in answers] == [
        ("late", status),
        ("applied", None),
        ("ignored", status),
    ]
    assert (db.job(foreign), db.file(foreign)) == before
    assert db.job(published)["status"] == "done"
    record = log.one("inbox.late")
    assert (record["job_id"], record["reason"]) == (str(foreign.id), status)


async def test_the_passes_leave_such_jobs_alone(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    foreign = db.insert_jobs(len(FOREIGN), published_at=clock.at(-100), reply_deadline=clock.at(-1))
    for job, status in zip(foreign, FOREIGN, strict=True):
        set_status(db, job, status)
    before = db.jobs(foreign)
    await exchange.publish()
    await exchange.expire()
    assert db.jobs(foreign) == before
    assert service.heard() == []


async def test_a_files_status_of_the_cores_own_is_as_good_as_any(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    db.execute("ALTER TABLE stored_file DROP CONSTRAINT stored_file_status_check")
    job, broken = db.insert_job(file={"status": "QUARANTINE"}), db.insert_job(pipeline="audio", file={"status": "QUARANTINE"})
    await exchange.publish()
    assert await exchange.outcomes(service, (envelopes.ack(job), None), (envelopes.done(job), "r")) == ["applied"] * 2
    assert (db.file(job)["status"], db.file(broken)["status"]) == ("PROCESSING", "ERROR")


@pytest.mark.req("R8")
@pytest.mark.parametrize("status", FOREIGN)
def test_a_retry_is_refused_in_one_line_that_names_the_status(dsn: str, db: Database, status: str | None) -> None:
    job = db.insert_job(status="error")
    set_status(db, job, status)
    result = run("retry", str(job.id), **{DSN: dsn})
    assert (result.returncode, result.stdout) == (1, "")
    named = status or "without a status"
    assert result.stderr == f"{job.id}: it is {named}; only error, timeout and dlq can be retried\n"


@pytest.mark.req("D1.5", "R8")
@pytest.mark.parametrize("attempt", [None, 0, -3, 2**40])
async def test_an_attempt_of_any_number_is_sent_or_refused_and_retried(
    dsn: str, db: Database, exchange: Exchange, service: ServiceClient, attempt: int | None
) -> None:
    db.execute("ALTER TABLE recognition_job ALTER COLUMN attempt TYPE bigint, ALTER COLUMN attempt DROP NOT NULL")
    job, good = db.insert_job(attempt=attempt), db.insert_job()
    await exchange.publish()
    fit = attempt is not None and attempt > 0
    assert {request.msg_id for request in service.heard()} == {good.msg_id} | ({f"{job.id}:{attempt}"} if fit else set())
    assert db.job(job)["status"] == ("published" if fit else "error")
    db.execute("UPDATE recognition_job SET status = 'error' WHERE id = %s", job.id)
    result = run("retry", str(job.id), **{DSN: dsn})
    assert result.stdout.startswith(f"{job.id}: attempt {(attempt or 0) + 1} is "), result.stderr


@pytest.mark.req("R3", "D4.2")
@pytest.mark.parametrize("metrics", ["NULL", "'null'", "'[1]'", "'7'", """'{"republish_count": "two"}'"""])
async def test_metrics_of_any_form_are_counted_in_and_merged(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, metrics: str
) -> None:
    db.execute("ALTER TABLE recognition_job ALTER COLUMN metrics DROP NOT NULL")
    job = db.insert_job(status="published", published_at=clock.at(-31))
    db.execute(f"UPDATE recognition_job SET metrics = {metrics}")
    await exchange.publish()
    assert db.job(job)["metrics"] == {"republish_count": 1}
    db.execute(f"UPDATE recognition_job SET metrics = {metrics}")
    assert await exchange.outcomes(service, (envelopes.done(job, metrics={"rows": 3}), "r")) == ["applied"]
    merged = {"rows": 3} | ({"republish_count": "two"} if "two" in metrics else {})
    assert db.job(job)["metrics"] == merged


@pytest.mark.req("R8")
def test_a_retry_is_queued_whatever_the_cores_default_is(dsn: str, db: Database) -> None:
    db.execute("ALTER TABLE recognition_job DROP CONSTRAINT recognition_job_status_check")
    db.execute("ALTER TABLE recognition_job ALTER COLUMN status SET DEFAULT 'draft'")
    job = db.insert_job(status="error")
    assert run("retry", str(job.id), **{DSN: dsn}).returncode == 0
    submitted = run("submit", "--bucket", "b", "--key", "k", "--name", "n", "--pipeline", "tabular", **{DSN: dsn})
    assert submitted.returncode == 0
    assert sorted(row["status"] for row in db.rows("recognition_job")) == ["error", "queued", "queued"]
