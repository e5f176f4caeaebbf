"""R5: overdue jobs end in `timeout`, with their file and their fact, in passes at exact intervals."""

import pytest
import trio

from armcore_trio.exchange.watchdog import Watchdog
from armcore_trio.settings import Settings
from tests.support.clock import FrozenClock
from tests.support.database import Database, Row
from tests.support.exchange import Exchange, open_exchange, record_passes
from tests.support.records import Records
from tests.support.refusals import refuse, relent
from tests.support.waiting import until

ACKED: Row = {"status": "processing", "service_name": "tabular-parser", "service_version": "2.1.0"}


@pytest.mark.req("S5.1", "S5.2", "D4.10")
async def test_a_job_past_its_deadline_is_timeout_within_one_period(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record_passes(monkeypatch, Watchdog)
    job = db.insert_job(reply_deadline=clock.at(10), **ACKED)
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.watchdog.run, exchange.parts.stop)
        await until(lambda: passes == [0])
        await clock.advance_to(29.999)
        assert (passes, db.job(job)["status"]) == ([0], "processing")
        await clock.advance_to(30)
        await until(lambda: passes == [0, 30])
        nursery.cancel_scope.cancel()

    row, file, fact = db.job(job), db.file(job), db.fact(job)
    assert (row["status"], row["error_code"], row["finished_at"]) == ("timeout", "TIMEOUT", clock.at(30))
    assert (file["status"], file["error_code"], file["error_message"]) == ("ERROR", "TIMEOUT", row["error_message"])
    assert fact is not None
    assert (fact["failure_kind"], fact["error_code"], fact["pipeline"]) == ("TIMEOUT", "TIMEOUT", "tabular")
    assert (fact["file_id"], fact["service_name"], fact["occurred_at"]) == (job.file_id, "tabular-parser", clock.at(30))
    assert row["xmin"] == file["xmin"] == fact["xmin"], "one transaction"
    record = log.one("watchdog.timed_out")
    assert (record["job_ids"], record["log_level"]) == ([str(job.id)], "warning")


@pytest.mark.req("R5", "R9")
@pytest.mark.environment(WATCHDOG_PERIOD_SECONDS=7.5)
async def test_it_looks_at_once_and_then_every_period(
    clock: FrozenClock, exchange: Exchange, monkeypatch: pytest.MonkeyPatch, log: Records
) -> None:
    passes = record_passes(monkeypatch, Watchdog)
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange.parts.watchdog.run, exchange.parts.stop)
        for count in range(1, 6):
            await until(lambda expected=count: len(passes) == expected)  # type: ignore[misc]
            await clock.advance(7.5)
        nursery.cancel_scope.cancel()
    assert passes[:5] == [0, 7.5, 15, 22.5, 30]
    assert log.all == [], "a pass with nothing to do is silent"


@pytest.mark.req("R5")
async def test_only_published_and_processing_jobs_expire(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    statuses = ["queued", "published", "processing", "done", "needs_check", "error", "timeout", "dlq"]
    jobs = [db.insert_job(status=status, reply_deadline=clock.at(-1)) for status in statuses]
    untouched = [job for job, status in zip(jobs, statuses, strict=True) if status not in ("published", "processing")]
    before = db.jobs(untouched), [db.file(job) for job in untouched]
    await exchange.expire()
    assert db.statuses(jobs) == ["queued", "timeout", "timeout", "done", "needs_check", "error", "timeout", "dlq"]
    assert (db.jobs(untouched), [db.file(job) for job in untouched]) == before
    assert [fact["failure_kind"] for fact in db.rows("quality_failure_fact")] == ["TIMEOUT"] * 2


@pytest.mark.req("R5")
async def test_the_deadline_itself_is_still_in_time(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    job = db.insert_job(reply_deadline=clock.at(10), **ACKED)
    await clock.advance(10)
    await exchange.expire()
    assert db.job(job)["status"] == "processing"
    await clock.advance(0.000001)
    await exchange.expire()
    assert db.job(job)["status"] == "timeout"


@pytest.mark.req("R5")
async def test_a_backlog_of_overdue_jobs_ends_in_one_pass(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    jobs = db.insert_jobs(1100, reply_deadline=clock.at(-1), **ACKED)
    await exchange.expire()
    assert set(db.statuses(jobs)) == {"timeout"}
    assert [record["count"] for record in log.named("watchdog.timed_out")] == [500, 500, 100]
    assert exchange.parts.watching.totals["timed_out"] == len(db.rows("quality_failure_fact")) == 1100


@pytest.mark.req("R5")
async def test_two_watchdogs_end_each_job_once(clock: FrozenClock, db: Database, settings: Settings, log: Records) -> None:
    jobs = db.insert_jobs(600, reply_deadline=clock.at(-1), **ACKED)
    async with open_exchange(settings) as one, open_exchange(settings) as other, trio.open_nursery() as nursery:
        nursery.start_soon(one.expire)
        nursery.start_soon(other.expire)
    assert sum(record["count"] for record in log.named("watchdog.timed_out")) == 600
    assert len(db.rows("quality_failure_fact")) == 600
    assert set(db.statuses(jobs)) == {"timeout"}


@pytest.mark.req("R5")
async def test_a_job_somebody_holds_is_left_to_the_next_pass(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    held, free = db.insert_jobs(2, reply_deadline=clock.at(-1), **ACKED)
    with db.transaction() as session:
        session.execute("SELECT 1 FROM recognition_job WHERE id = %s FOR UPDATE", [held.id])
        await exchange.expire()
        assert db.statuses([held, free]) == ["processing", "timeout"]
    await exchange.expire()
    assert db.statuses([held]) == ["timeout"]


@pytest.mark.req("R5", "R8")
async def test_the_file_follows_only_its_current_job(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    old = db.insert_job(reply_deadline=clock.at(-1), **ACKED)
    db.insert_attempt(old, status="processing", reply_deadline=clock.at(900))
    nobodys = db.insert_job(reply_deadline=clock.at(-1), current=False, **ACKED)
    before = db.rows("stored_file")
    await exchange.expire()
    assert db.statuses([old, nobodys]) == ["timeout", "timeout"]
    assert db.rows("stored_file") == before
    assert db.fact(old) is not None


@pytest.mark.req("B48", "R5")
async def test_what_the_database_refuses_is_tried_again_and_holds_up_nobody(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    jobs = db.insert_jobs(200, reply_deadline=clock.at(-1), **ACKED)
    guilty = jobs[6::7]
    refuse(db, "quality_failure_fact", guilty)
    log.claim("watchdog.write_refused")
    before = db.jobs(guilty), [db.file(job) for job in guilty]
    await exchange.expire()
    assert db.statuses(jobs) == ["processing" if job in guilty else "timeout" for job in jobs]
    assert (db.jobs(guilty), [db.file(job) for job in guilty]) == before, "state, file and fact together or not at all"
    assert len(db.rows("quality_failure_fact")) == len(jobs) - len(guilty)
    refusals = log.named("watchdog.write_refused", sqlstate="P0001")
    assert sorted(record["job_id"] for record in refusals) == sorted(str(job.id) for job in guilty)

    relent(db)
    await clock.advance(30)
    await exchange.expire()
    assert set(db.statuses(jobs)) == {"timeout"}
    assert {row["finished_at"] for row in db.jobs(guilty)} == {clock.at(30)}
