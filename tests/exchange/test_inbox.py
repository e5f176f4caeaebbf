"""R4: each result is applied once: what it writes, what it leaves alone, what comes too late."""

from typing import Any
from uuid import uuid4

import pytest

from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange
from tests.support.records import Records
from tests.support.refusals import refuse, relent
from tests.support.service import ServiceClient

FINAL = ("done", "needs_check", "error", "timeout", "dlq")


@pytest.fixture
def job(db: Database) -> JobIds:
    """A job that a service has acknowledged."""
    ids = db.insert_job(status="processing", service_name="tabular-parser", service_version="2.0.9")
    db.execute("UPDATE stored_file SET status = 'PROCESSING' WHERE id = %s", ids.file_id)
    return ids


@pytest.mark.req("S4.1")
@pytest.mark.parametrize("status", ["done", "needs_check"])
async def test_a_result_finishes_the_job_and_registers_its_file(
    clock: FrozenClock, db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records, status: str
) -> None:
    await clock.advance(4)
    before = db.file(job)
    envelope = envelopes.done(job, status=status, metrics={"rows": 17})
    answers = await exchange.deliver(service, (envelope, f"result:{job.id}:1"))
    assert answers == [{"outcome": "applied", "job_id": str(job.id), "reason": None}]
    row = db.job(job)
    assert (row["status"], row["finished_at"], row["result_msg_id"]) == (status, clock.at(4), f"result:{job.id}:1")
    assert (row["service_name"], row["service_version"], row["metrics"]) == ("tabular-parser", "2.1.0", {"rows": 17})
    assert (row["error_code"], row["error_message"], row["result_schema_version"]) == (None, None, "3.2")
    assert row["raw_s3_object_id"] is None
    stored = db.object(row["result_s3_object_id"])
    assert (stored["bucket"], stored["key"]) == ("arm-ka", f"results/{job.file_id}/{job.id}/result.json")
    assert (stored["bucket_role"], stored["created_by"], stored["created_at"]) == ("results", "tabular-parser", clock.at(4))
    assert db.file(job) == before, "the file stays PROCESSING, for the mapping cycle"
    assert before["status"] == "PROCESSING"
    assert db.fact(job) is None
    assert log.one("inbox.applied", status=status)["job_ids"] == [str(job.id)]


@pytest.mark.req("S4.2", "B42")
async def test_the_same_message_once_more_changes_no_row(
    clock: FrozenClock, db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    said = (envelopes.done(job, raw_s3_key=job.raw_key), envelopes.result_id(job))
    await exchange.deliver(service, said)
    before = db.snapshot()
    await clock.advance(1)
    assert await exchange.deliver(service, said, said) == [{"outcome": "duplicate", "job_id": str(job.id), "reason": None}] * 2
    assert db.snapshot() == before, "down to xmin"
    assert len(log.named("inbox.duplicate", job_id=str(job.id), log_level="info")) == 2


@pytest.mark.req("S4.2")
async def test_a_message_and_its_copy_in_one_batch_are_one(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient
) -> None:
    said = (envelopes.done(job, raw_s3_key=job.raw_key), envelopes.result_id(job))
    assert await exchange.outcomes(service, said, said) == ["applied", "duplicate"]
    assert len(db.rows("s3_object", "bucket_role <> 'source'")) == 2


@pytest.mark.req("S4.3", "S4.6", "D4.10")
async def test_an_error_ends_job_and_file_and_leaves_a_fact(
    clock: FrozenClock, db: Database, job: JobIds, exchange: Exchange, service: ServiceClient
) -> None:
    await clock.advance(4)
    await exchange.deliver(service, (envelopes.error(job), envelopes.result_id(job)))
    row, file, fact = db.job(job), db.file(job), db.fact(job)
    assert (row["status"], row["finished_at"]) == ("error", clock.at(4))
    assert (row["error_code"], row["error_message"]) == ("UNSUPPORTED_FORMAT", "not a spreadsheet")
    assert (row["result_s3_object_id"], row["result_schema_version"]) == (None, None)
    assert (file["status"], file["error_code"], file["error_message"]) == ("ERROR", "UNSUPPORTED_FORMAT", "not a spreadsheet")
    assert fact is not None
    assert (fact["failure_kind"], fact["error_code"]) == ("SERVICE_ERROR", "UNSUPPORTED_FORMAT")
    assert (fact["file_id"], fact["pipeline"], fact["service_name"]) == (job.file_id, "tabular", "tabular-parser")
    assert fact["occurred_at"] == clock.at(4)
    assert row["xmin"] == file["xmin"] == fact["xmin"], "one transaction"


@pytest.mark.req("R4", "D4.10")
async def test_the_fact_names_the_service_that_failed_though_it_never_acknowledged(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job(status="published")
    await exchange.deliver(service, (envelopes.error(job), envelopes.result_id(job)))
    fact = db.fact(job)
    assert fact is not None
    assert (fact["service_name"], db.job(job)["started_at"]) == ("tabular-parser", None)


@pytest.mark.req("S4.4", "D4.8")
@pytest.mark.parametrize("status", FINAL)
async def test_a_result_for_a_finished_job_is_late(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records, status: str
) -> None:
    job = db.insert_job(status=status, result_msg_id="an earlier one")
    before = db.snapshot()
    answers = await exchange.deliver(
        service,
        (envelopes.done(job, raw_s3_key=job.raw_key), "r1"),
        (envelopes.needs_check(job), "r2"),
        (envelopes.error(job), None),
    )
    assert answers == [{"outcome": "late", "job_id": str(job.id), "reason": status}] * 3
    assert db.snapshot() == before
    records = log.named("inbox.late", job_id=str(job.id), log_level="warning")
    assert [record["msg_id"] for record in records] == ["r1", "r2", None]


@pytest.mark.req("S4.5")
@pytest.mark.environment(OPENBAO__S3__S3_BUCKET="kept-answers")
@pytest.mark.parametrize("build", [envelopes.done, envelopes.needs_check, envelopes.error])
async def test_a_raw_answer_is_registered_whatever_the_status(
    clock: FrozenClock, db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, build: Any
) -> None:
    await exchange.deliver(service, (build(job, raw_s3_key=f"raw/{job.id}.json"), envelopes.result_id(job)))
    stored = db.object(db.job(job)["raw_s3_object_id"])
    assert (stored["bucket"], stored["key"]) == ("kept-answers", f"raw/{job.id}.json")
    assert (stored["bucket_role"], stored["created_by"], stored["created_at"]) == ("raw", "tabular-parser", clock.start)


@pytest.mark.req("R4", "S4.3")
async def test_an_error_may_bring_a_result_file_too(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient
) -> None:
    envelope = envelopes.error(job, result_s3=envelopes.result_s3(job))
    await exchange.deliver(service, (envelope, envelopes.result_id(job)))
    assert db.object(db.job(job)["result_s3_object_id"])["key"] == job.result_key


@pytest.mark.req("D4.1")
@pytest.mark.parametrize("before", ["queued", "published", "processing"])
@pytest.mark.parametrize("status", ["done", "needs_check", "error"])
async def test_any_job_that_is_not_final_takes_a_result(
    db: Database, exchange: Exchange, service: ServiceClient, before: str, status: str
) -> None:
    job = db.insert_job(status=before)
    build = {"done": envelopes.done, "needs_check": envelopes.needs_check, "error": envelopes.error}[status]
    assert await exchange.outcomes(service, (build(job), envelopes.result_id(job))) == ["applied"]
    row = db.job(job)
    assert (row["status"], row["started_at"]) == (status, None)
    expected = "ERROR" if status == "error" else "UPLOADED" if before == "processing" else "PROCESSING"
    assert db.file(job)["status"] == expected, "an acknowledged job's file is PROCESSING already"
    await exchange.publish()
    assert service.heard() == [], "a finished job is not requested"


@pytest.mark.req("D4.2")
async def test_metrics_are_merged_and_the_cores_own_count_stays(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    counted = db.insert_job(status="published", metrics={"republish_count": 2, "queue": 1, "pages": 1})
    uncounted = db.insert_job(status="published")
    metrics = {"pages": 12, "republish_count": 99, "timing": {"ocr": 0.5, "tables": [1, None, "x"]}}
    for job in (counted, uncounted):
        await exchange.deliver(service, (envelopes.done(job, metrics=metrics), envelopes.result_id(job)))
    timing = {"ocr": 0.5, "tables": [1, None, "x"]}
    assert db.job(counted)["metrics"] == {"republish_count": 2, "queue": 1, "pages": 12, "timing": timing}
    assert db.job(uncounted)["metrics"] == {"pages": 12, "timing": timing}


@pytest.mark.req("D4.2")
@pytest.mark.parametrize("metrics", ["null", "[1]", '"text"'])
async def test_metrics_that_are_no_object_are_replaced(
    db: Database, exchange: Exchange, service: ServiceClient, metrics: str
) -> None:
    job = db.insert_job(status="published", metrics=metrics)
    await exchange.deliver(service, (envelopes.done(job, metrics={"pages": 1}), envelopes.result_id(job)))
    assert db.job(job)["metrics"] == {"pages": 1}


@pytest.mark.req("D4.3")
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.42"])
async def test_every_1_x_is_accepted_and_extra_fields_are_allowed(
    job: JobIds, exchange: Exchange, service: ServiceClient, version: str
) -> None:
    envelope = envelopes.done(
        job,
        schema_version=version,
        confidence=0.7,
        service=envelopes.SERVICE | {"host": "n1"},
        result_s3=envelopes.result_s3(job) | {"etag": "x"},
    )
    assert await exchange.outcomes(service, (envelope, envelopes.result_id(job))) == ["applied"]


@pytest.mark.req("D4.4")
async def test_a_result_may_lie_in_any_bucket_and_below_its_directory(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient
) -> None:
    place = {"bucket": "elsewhere", "key": f"results/{job.file_id}/{job.id}/pages/1/таблица.json"}
    assert await exchange.outcomes(service, (envelopes.done(job, result_s3=place), "r")) == ["applied"]
    stored = db.object(db.job(job)["result_s3_object_id"])
    assert {"bucket": stored["bucket"], "key": stored["key"]} == place


@pytest.mark.req("D4.5", "B42")
async def test_a_result_without_message_id_is_applied_with_a_warning(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    said = (envelopes.done(job), None)
    assert await exchange.outcomes(service, said) == ["applied"]
    row = db.job(job)
    assert (row["status"], row["result_msg_id"]) == ("done", None)
    assert log.one("inbox.missing_msg_id", log_level="warning")["job_id"] == str(job.id)
    before = db.snapshot()
    assert await exchange.outcomes(service, said) == ["late"], "only the final status keeps it out"
    assert db.snapshot() == before


@pytest.mark.req("R4", "D4.8")
async def test_a_job_nobody_knows_is_logged(db: Database, exchange: Exchange, service: ServiceClient, log: Records) -> None:
    stranger = JobIds(uuid4(), uuid4())
    before = db.snapshot()
    answers = await exchange.deliver(service, (envelopes.done(stranger), "r"), (envelopes.ack(stranger), None))
    assert answers == [{"outcome": "unknown_job", "job_id": str(stranger.id), "reason": None}] * 2
    assert db.snapshot() == before
    records = log.named("inbox.unknown_job", job_id=str(stranger.id), log_level="warning")
    assert [record["msg_id"] for record in records] == ["r", None]


@pytest.mark.req("B47", "R8")
async def test_late_answers_of_an_old_attempt_touch_nothing(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    old = db.insert_job(status="timeout")
    new = db.insert_attempt(old)
    await exchange.publish()
    before = db.snapshot()
    assert await exchange.outcomes(service, (envelopes.done(old), "r1"), (envelopes.error(old), "r2")) == ["late", "late"]
    assert db.snapshot() == before
    assert await exchange.outcomes(service, (envelopes.ack(new), None), (envelopes.done(new), "r3")) == ["applied", "applied"]
    assert (db.job(old)["status"], db.job(new)["status"], db.file(new)["status"]) == ("timeout", "done", "PROCESSING")


@pytest.mark.req("B47", "R4")
@pytest.mark.parametrize("build", [envelopes.done, envelopes.error])
async def test_the_file_follows_only_its_current_job(
    db: Database, exchange: Exchange, service: ServiceClient, build: Any
) -> None:
    old = db.insert_job(status="published")
    db.insert_attempt(old, status="queued")
    nobodys = db.insert_job(status="published", current=False)
    before = db.rows("stored_file")
    assert await exchange.outcomes(service, (build(old), "r1"), (build(nobodys), "r2")) == ["applied", "applied"]
    assert db.rows("stored_file") == before


@pytest.mark.req("B48", "D4.6")
async def test_facts_the_database_refuses_are_all_or_nothing_and_hold_up_nobody(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(50, status="published")
    guilty = jobs[6::7]
    refuse(db, "quality_failure_fact", guilty)
    before = db.jobs(guilty), [db.file(job) for job in guilty]
    answers = await exchange.deliver(service, *((envelopes.error(job), envelopes.result_id(job)) for job in jobs))
    refused = {"outcome": "invalid", "reason": "refused_by_database"}
    applied = {"outcome": "applied", "reason": None}
    assert answers == [(refused if job in guilty else applied) | {"job_id": str(job.id)} for job in jobs]
    assert db.statuses(jobs) == ["published" if job in guilty else "error" for job in jobs]
    assert (db.jobs(guilty), [db.file(job) for job in guilty]) == before
    assert len(db.rows("quality_failure_fact")) == len(jobs) - len(guilty)
    refusals = log.named("inbox.invalid", reason="refused_by_database", log_level="warning")
    assert [record["job_id"] for record in refusals] == [str(job.id) for job in guilty]

    relent(db)
    again = [(envelopes.error(job), envelopes.result_id(job)) for job in guilty]
    assert set(await exchange.outcomes(service, *again)) == {"applied"}, "the service may say it again"
