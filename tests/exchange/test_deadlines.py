"""D1.4, D3.2, S4.4: the reply deadline from the first publication to the end, and whose a job is at each instant."""

import pytest

from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.exchange import Exchange
from tests.support.records import Records
from tests.support.service import ServiceClient


@pytest.mark.req("D1.4")
@pytest.mark.environment(REPLY_TIMEOUT_SECONDS=600.5)
async def test_a_missing_deadline_is_set_when_the_job_is_first_published_and_never_moved(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    await clock.advance(7)
    job = db.insert_job()
    await exchange.publish()
    assert db.job(job)["reply_deadline"] == clock.at(607.5)
    for _ in range(3):
        await clock.advance(30)
        await exchange.publish()
        assert db.job(job)["reply_deadline"] == clock.at(607.5)
    assert [request.document["reply_deadline"] for request in service.heard()] == ["2031-05-06T07:18:16.500000Z"] * 4


@pytest.mark.req("D1.4")
async def test_a_deadline_given_by_the_producer_is_kept(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job(reply_deadline=clock.at(47))
    await exchange.publish()
    await clock.advance(30)
    await exchange.publish()
    assert db.job(job)["reply_deadline"] == clock.at(47)
    assert [request.document["reply_deadline"] for request in service.heard()] == ["2031-05-06T07:08:56.000000Z"] * 2


@pytest.mark.req("D1.4", "D3.2", "R5")
async def test_a_job_overdue_before_it_is_published_goes_out_once_and_is_then_the_watchdogs(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job(reply_deadline=clock.at(-60))
    await exchange.expire()
    assert db.job(job)["status"] == "queued", "the watchdog waits for the publication"
    await exchange.publish()
    (request,) = service.heard()
    assert request.document["reply_deadline"] == "2031-05-06T07:07:09.000000Z"
    assert db.job(job)["status"] == "published"
    await clock.advance(30)
    await exchange.publish()
    assert len(service.heard()) == 1
    await exchange.expire()
    row, fact = db.job(job), db.fact(job)
    assert (row["status"], row["finished_at"]) == ("timeout", clock.at(30))
    assert fact is not None
    assert (fact["failure_kind"], fact["service_name"]) == ("TIMEOUT", None)


@pytest.mark.req("D3.2")
@pytest.mark.parametrize(("late_microseconds", "owner"), [(0, "publisher"), (1, "watchdog")])
async def test_at_each_instant_a_job_is_either_the_publishers_or_the_watchdogs(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, late_microseconds: int, owner: str
) -> None:
    job = db.insert_job(reply_deadline=clock.at(30))
    await exchange.publish()
    await clock.advance(30 + late_microseconds / 1_000_000)
    await exchange.publish()
    await exchange.expire()
    expected = {"publisher": ("published", 2), "watchdog": ("timeout", 1)}
    assert (db.job(job)["status"], len(service.heard())) == expected[owner]


@pytest.mark.req("S4.4", "S5.1", "D1.4")
async def test_a_result_after_the_timeout_changes_nothing(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job(reply_deadline=clock.at(40))
    await exchange.publish()
    await exchange.deliver(service, (envelopes.ack(job), None))
    await clock.advance(40.001)
    await exchange.expire()
    before = db.snapshot()
    said = [(envelope, f"{n}") for n, envelope in enumerate([envelopes.done(job), envelopes.error(job, raw_s3_key=job.raw_key)])]
    assert await exchange.deliver(service, *said) == [{"outcome": "late", "job_id": str(job.id), "reason": "timeout"}] * 2
    assert db.snapshot() == before
    records = log.named("inbox.late", job_id=str(job.id), log_level="warning")
    assert [record["msg_id"] for record in records] == ["0", "1"]


@pytest.mark.req("R4", "R5", "B46")
async def test_a_result_that_comes_before_the_watchdog_counts_though_the_deadline_has_passed(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job(reply_deadline=clock.at(10))
    await exchange.publish()
    await clock.advance(20)
    assert await exchange.outcomes(service, (envelopes.done(job), envelopes.result_id(job))) == ["applied"]
    before = db.snapshot()
    await exchange.expire()
    assert db.snapshot() == before
    assert (db.job(job)["status"], db.fact(job)) == ("done", None)
