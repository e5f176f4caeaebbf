"""R1: queued jobs go out once, oldest first, and count as published only when the server has confirmed them."""

from datetime import timedelta
from random import Random
from typing import Any

import pytest
import trio

from armcore_trio.exchange.publisher import Publisher
from armcore_trio.protocol.messages import validator
from armcore_trio.settings import Settings
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.exchange import Exchange, open_exchange, record_passes
from tests.support.records import Records
from tests.support.refusals import refuse, relent
from tests.support.service import ServiceClient
from tests.support.waiting import until


@pytest.mark.req("S1.1", "D1.4")
async def test_a_queued_job_goes_out_as_a_valid_request(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job(file_name="prices.xlsx", content_type="application/vnd.ms-excel")
    await exchange.publish()

    (request,) = service.heard()
    assert request.subject == exchange.parts.settings.tabular_request_subject
    assert request.headers == (("Nats-Msg-Id", f"{job.id}:1"),)
    assert request.document == {
        "schema_version": "1.0",
        "job_id": str(job.id),
        "file_id": str(job.file_id),
        "attempt": 1,
        "pipeline": "tabular",
        "s3": {"bucket": "arm-ka", "key": job.key},
        "file": {"name": "prices.xlsx", "content_type": "application/vnd.ms-excel"},
        "reply_deadline": "2031-05-06T07:23:09.000000Z",
    }
    validator("recognition-request").validate(request.document)
    row = db.job(job)
    assert row["status"] == "published"
    assert row["published_at"] == clock.start
    assert row["reply_deadline"] == clock.at(900)
    assert row["request_msg_id"] == f"{job.id}:1"
    assert row["request_subject"] == request.subject
    assert row["metrics"] == {}
    assert (row["started_at"], row["finished_at"], row["error_code"]) == (None, None, None)
    assert db.file(job)["status"] == "UPLOADED"
    assert log.one("outbox.published")["job_ids"] == [str(job.id)]


@pytest.mark.req("S1.1")
async def test_a_published_job_does_not_go_out_again(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job()
    await exchange.publish()
    before, records = db.job(job), list(log.all)
    await clock.advance(5)
    await exchange.publish()
    assert len(service.heard()) == 1
    assert db.job(job) == before
    assert log.all == records, "a pass with nothing to do is silent"


@pytest.mark.req("R1", "S7.1")
async def test_each_pipeline_has_its_subject(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    table, image = db.insert_job(pipeline="tabular"), db.insert_job(pipeline="image", file_name="scan.png")
    await exchange.publish()
    heard = {request.subject: request.msg_id for request in service.heard()}
    settings = exchange.parts.settings
    assert heard == {settings.tabular_request_subject: table.msg_id, settings.image_request_subject: image.msg_id}


@pytest.mark.req("R1", "R8")
async def test_a_later_attempt_says_so_in_its_message_and_id(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    job = db.insert_attempt(db.insert_job(status="timeout"))
    await exchange.publish()
    (request,) = service.heard()
    assert request.msg_id == f"{job.id}:2"
    assert request.document["attempt"] == 2
    assert db.job(job)["request_msg_id"] == f"{job.id}:2"


@pytest.mark.req("D1.3")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=3)
async def test_a_backlog_goes_out_oldest_first_and_in_one_go(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    ages = [5, 1, 3, 3, 3, 8, 2, 5, 13, 0]
    jobs = [(age, db.insert_job(created_at=clock.at(-age))) for age in Random(4).sample(ages, len(ages))]
    await exchange.publish()
    expected = [job.msg_id for age, job in sorted(jobs, key=lambda pair: (-pair[0], pair[1].id))]
    assert [request.msg_id for request in service.heard()] == expected
    assert [record["count"] for record in log.named("outbox.published")] == [3, 3, 3, 1]


@pytest.mark.req("R1")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=7)
async def test_two_publishers_share_the_work_and_send_nothing_twice(
    settings: Settings, db: Database, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(120)
    async with open_exchange(settings) as one, open_exchange(settings) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.publish)
            nursery.start_soon(other.publish)
        assert one.parts.publishing.totals["published"] + other.parts.publishing.totals["published"] == 120
    assert sorted(str(request.msg_id) for request in service.heard()) == sorted(job.msg_id for job in jobs)
    assert set(db.statuses(jobs)) == {"published"}
    assert sum(record["count"] for record in log.named("outbox.published")) == 120


@pytest.mark.req("R1", "D1.2")
async def test_a_job_somebody_holds_is_skipped_and_goes_out_later(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    held, free = db.insert_jobs(2)
    with db.transaction() as session:
        session.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE", [held.id])
        await exchange.publish()
        assert db.statuses([held, free]) == ["queued", "published"]
    await exchange.publish()
    assert [request.msg_id for request in service.heard()] == [free.msg_id, held.msg_id]


@pytest.mark.req("B58")
async def test_a_row_committed_late_is_not_passed_over(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    file_of = db.insert_job(status="timeout")
    with db.transaction() as session:
        session.execute(
            "INSERT INTO recognition_job (file_id, attempt, pipeline, created_at) VALUES (%s, 2, 'tabular', %s)",
            [file_of.file_id, clock.at(-20)],
        )
        later = db.insert_job()
        await exchange.publish()
        assert [request.msg_id for request in service.heard()] == [later.msg_id]
    await exchange.publish()
    assert [request.document["file_id"] for request in service.heard()][1:] == [str(file_of.file_id)]


@pytest.mark.req("D1.5")
async def test_a_file_without_content_type_is_fine(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    db.insert_job(content_type=None)
    await exchange.publish()
    (request,) = service.heard()
    assert request.document["file"] == {"name": "prices.xlsx"}
    validator("recognition-request").validate(request.document)


POISON: dict[str, tuple[dict[str, Any], str]] = {
    "no source object": ({"source": False}, "the file has no source object"),
    "unknown pipeline": ({"pipeline": "audio"}, "unknown pipeline 'audio'"),
    "empty file name": ({"file_name": ""}, "file.name: must not be empty"),
    "empty content type": ({"content_type": ""}, "file.content_type: must not be empty"),
    "empty bucket": ({"bucket": ""}, "s3.bucket: must not be empty"),
    "endless deadline": ({"reply_deadline": "infinity"}, "reply_deadline"),
    "deadline in the year 12026": ({"reply_deadline": "12026-01-01"}, "reply_deadline"),
    "attempt 0": ({"attempt": 0}, "attempt"),
    "more than NATS takes": ({"file_name": "x" * 1_100_000}, "the NATS server takes 1048576"),
}


@pytest.mark.req("D1.5", "D4.10", "B35")
@pytest.mark.parametrize("poison", POISON)
async def test_a_job_without_a_valid_request_ends_at_once(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records, poison: str
) -> None:
    columns, cause = POISON[poison]
    job = db.insert_job(**columns)
    await exchange.publish()
    await exchange.publish()

    row, file = db.job(job), db.file(job)
    assert (row["status"], row["error_code"], row["finished_at"]) == ("error", "INVALID_REQUEST", clock.start)
    assert cause in row["error_message"]
    assert (row["published_at"], row["request_msg_id"]) == (None, None)
    assert (file["status"], file["error_code"], file["error_message"]) == ("ERROR", "INVALID_REQUEST", row["error_message"])
    assert db.fact(job) is None, "no service is at fault"
    assert service.heard() == []
    record = log.one("outbox.refused")
    assert (record["job_id"], record["error"], record["log_level"]) == (str(job.id), row["error_message"], "warning")
    assert len(log.all) == 1


@pytest.mark.req("D1.5", "B35")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=50)
async def test_poison_in_front_does_not_hold_up_the_others(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    broken = [db.insert_job(created_at=clock.at(-60 + n), **columns) for n, (columns, _) in enumerate(POISON.values())]
    broken += db.insert_jobs(60 - len(broken), source=False, created_at=clock.at(-30))
    good = db.insert_jobs(10)
    await exchange.publish()
    assert set(db.statuses(broken)) == {"error"}
    assert set(db.statuses(good)) == {"published"}
    assert {request.msg_id for request in service.heard()} == {job.msg_id for job in good}
    assert len(log.named("outbox.refused")) == 60
    assert db.rows("quality_failure_fact") == []


@pytest.mark.req("D1.5", "R8")
async def test_poison_leaves_a_file_alone_that_has_moved_on(db: Database, exchange: Exchange) -> None:
    old = db.insert_job(pipeline="audio")
    db.insert_attempt(old, status="processing")
    before = db.file(old)
    await exchange.publish()
    assert db.job(old)["error_code"] == "INVALID_REQUEST"
    assert db.file(old) == before


@pytest.mark.req("D1.5", "B48")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=4)
async def test_a_job_the_database_refuses_to_update_stays_queued_and_the_others_go_out(
    db: Database, exchange: Exchange, log: Records
) -> None:
    jobs = db.insert_jobs(10)
    guilty = jobs[2::5]
    refuse(db, "recognition_job", guilty)
    log.claim("outbox.write_refused")
    await exchange.publish()
    assert db.statuses(jobs) == ["queued" if job in guilty else "published" for job in jobs]
    refusals = log.named("outbox.write_refused", sqlstate="P0001")
    assert sorted(record["job_id"] for record in refusals) == sorted(str(job.id) for job in guilty)

    relent(db)
    await exchange.publish()
    assert set(db.statuses(jobs)) == {"published"}


@pytest.mark.req("D1.6")
async def test_an_insert_wakes_the_publisher_without_a_poll(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record_passes(monkeypatch, Publisher)
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.publisher.run, exchange.parts.stop)
        await until(lambda: passes == [0])
        job = db.insert_job()
        await until(lambda: db.job(job)["status"] == "published")
        assert db.job(job)["published_at"] == clock.start, "no time has passed"
        nursery.cancel_scope.cancel()
    assert [request.msg_id for request in service.heard()] == [job.msg_id]


@pytest.mark.req("D1.6", "B36")
async def test_a_lost_notification_costs_one_poll_period(
    clock: FrozenClock, db: Database, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record_passes(monkeypatch, Publisher)
    db.execute("ALTER TABLE recognition_job DISABLE TRIGGER recognition_job_notify")
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.publisher.run, exchange.parts.stop)
        await until(lambda: passes == [0])
        job = db.insert_job()
        await clock.advance_to(4.999)
        assert (passes, db.job(job)["status"]) == ([0], "queued")
        await clock.advance_to(5)
        await until(lambda: passes == [0, 5])
        assert db.job(job)["published_at"] == clock.at(5)
        nursery.cancel_scope.cancel()


@pytest.mark.req("D1.4")
async def test_a_deadline_is_written_in_utc_whatever_zone_the_session_has(
    clock: FrozenClock, db: Database, settings: Settings, service: ServiceClient
) -> None:
    db.execute(f"ALTER DATABASE {db.value('SELECT current_database()')} SET timezone = 'America/St_Johns'")
    job = db.insert_job(reply_deadline=clock.at(60) + timedelta(microseconds=1))
    async with open_exchange(settings) as exchange:
        await exchange.publish()
    (request,) = service.heard()
    assert request.document["reply_deadline"] == "2031-05-06T07:09:09.000001Z"
    assert db.job(job)["reply_deadline"] == clock.at(60) + timedelta(microseconds=1)


@pytest.mark.req("R1")
async def test_names_travel_as_they_are(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    name, key = 'Прайс «лист» 📈 "q" \\ \n.xlsx', "каталог/прайс \t лист.xlsx"
    db.insert_job(file_name=name, key=key)
    await exchange.publish()
    (request,) = service.heard()
    assert (request.document["file"]["name"], request.document["s3"]["key"]) == (name, key)
