"""R2: an ack moves a published job to processing, once; in any other status it changes nothing and is logged."""

import pytest

from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.exchange import Exchange
from tests.support.records import Records
from tests.support.service import ServiceClient


@pytest.mark.req("S2.1")
async def test_an_ack_of_a_published_job_moves_it_to_processing(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await clock.advance(3)
    answers = await exchange.deliver(service, (envelopes.ack(job), None))
    assert answers == [{"outcome": "applied", "job_id": str(job.id), "reason": None}]
    row, file = db.job(job), db.file(job)
    assert (row["status"], row["started_at"]) == ("processing", clock.at(3))
    assert (row["service_name"], row["service_version"]) == ("tabular-parser", "2.1.0")
    assert (row["finished_at"], row["result_msg_id"], row["metrics"]) == (None, None, {})
    assert (file["status"], file["updated_at"]) == ("PROCESSING", clock.at(3))
    assert log.one("inbox.applied", status="processing")["job_ids"] == [str(job.id)]
    assert log.named("inbox.missing_msg_id") == [], "an ack needs no message id"


@pytest.mark.req("R2", "D4.8")
async def test_another_ack_is_ignored(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job()
    await exchange.publish()
    await exchange.deliver(service, (envelopes.ack(job), None))
    before = db.snapshot()
    await clock.advance(1)
    other = {"name": "another-parser", "version": "9"}
    answers = await exchange.deliver(service, (envelopes.ack(job, service=other), None))
    assert answers == [{"outcome": "ignored", "job_id": str(job.id), "reason": "processing"}]
    assert db.snapshot() == before
    assert log.one("inbox.ignored")["job_id"] == str(job.id)


@pytest.mark.req("D2.1", "D4.8")
async def test_an_ack_of_a_queued_job_is_ignored_and_the_request_goes_out_again(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job()
    before = db.snapshot()
    answers = await exchange.deliver(service, (envelopes.ack(job), None))
    assert answers == [{"outcome": "ignored", "job_id": str(job.id), "reason": "queued"}]
    assert db.snapshot() == before
    assert log.one("inbox.ignored", job_id=str(job.id))["reason"] == "queued"
    await exchange.publish()
    assert [request.msg_id for request in service.heard()] == [job.msg_id]
    assert await exchange.outcomes(service, (envelopes.ack(job), None)) == ["applied"], "the repeated ack counts"


@pytest.mark.req("R2", "D4.8")
@pytest.mark.parametrize("status", ["done", "needs_check", "error", "timeout", "dlq"])
async def test_an_ack_of_a_finished_job_is_ignored(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records, status: str
) -> None:
    job = db.insert_job(status=status)
    before = db.snapshot()
    answers = await exchange.deliver(service, (envelopes.ack(job), None))
    assert answers == [{"outcome": "ignored", "job_id": str(job.id), "reason": status}]
    assert db.snapshot() == before
    assert log.one("inbox.ignored", job_id=str(job.id))["reason"] == status


@pytest.mark.req("R2")
async def test_an_ack_and_its_result_in_one_batch_count_both(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job()
    await exchange.publish()
    outcomes = await exchange.outcomes(
        service, (envelopes.ack(job), None), (envelopes.ack(job), None), (envelopes.done(job), "r"), (envelopes.ack(job), None)
    )
    assert outcomes == ["applied", "ignored", "applied", "ignored"]
    row = db.job(job)
    assert (row["status"], row["started_at"], row["finished_at"]) == ("done", clock.start, clock.start)
    assert db.file(job)["status"] == "PROCESSING"


@pytest.mark.req("R2", "B47")
async def test_an_ack_of_an_old_attempt_leaves_the_file_alone(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    old = db.insert_job(status="published")
    new = db.insert_attempt(old, status="published")
    before = db.file(old)
    assert await exchange.outcomes(service, (envelopes.ack(old), None)) == ["applied"]
    assert (db.job(old)["status"], db.file(old)) == ("processing", before)
    assert await exchange.outcomes(service, (envelopes.ack(new), None)) == ["applied"]
    assert db.file(new)["status"] == "PROCESSING"
