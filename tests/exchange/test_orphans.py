"""Jobs whose file's row is gone, as a core without the foreign key may leave them: each ends, and holds up nobody (N26)."""

from collections.abc import Sequence

import pytest

from armcore_trio.settings import DSN
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.commands import run
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange
from tests.support.records import Records
from tests.support.service import ServiceClient

GONE = "the file's row is gone"

pytestmark = pytest.mark.req("N26")


def lose_files(db: Database, jobs: Sequence[JobIds]) -> None:
    """The rows of these jobs' files go; the core's tables do not forbid it."""
    db.execute("ALTER TABLE recognition_job DROP CONSTRAINT IF EXISTS recognition_job_file_id_fkey")
    db.execute("DELETE FROM stored_file WHERE id = ANY (%s)", [job.file_id for job in jobs])


@pytest.mark.environment(OUTBOX_BATCH_SIZE=50)
async def test_orphans_in_front_end_and_do_not_hold_up_the_others(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    orphans = db.insert_jobs(50, created_at=clock.at(-60))
    good = db.insert_jobs(120)
    lose_files(db, orphans)
    await exchange.publish()
    await exchange.publish()

    assert {request.msg_id for request in service.heard()} == {job.msg_id for job in good}
    assert len(service.heard()) == 120
    assert set(db.statuses(good)) == {"published"}
    rows = db.jobs(orphans)
    ends = {(row["status"], row["error_code"], row["error_message"], row["finished_at"]) for row in rows}
    assert ends == {("error", "INVALID_REQUEST", GONE, clock.start)}
    assert len({row["xmin"] for row in rows}) == 1, "one statement, not one each"
    assert {record["error"] for record in log.named("outbox.refused")} == {GONE}
    assert len(log.named("outbox.refused")) == 50
    assert db.rows("quality_failure_fact") == [], "no service is at fault"


@pytest.mark.environment(OUTBOX_BATCH_SIZE=5)
async def test_orphans_among_the_unacknowledged_end_and_the_others_are_repeated(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    orphans = db.insert_jobs(5, status="published", published_at=clock.at(-100))
    good = db.insert_jobs(7, status="published", published_at=clock.at(-50))
    lose_files(db, orphans)
    await exchange.publish()
    assert {request.msg_id for request in service.heard()} == {job.msg_id for job in good}
    assert {(row["status"], row["error_message"]) for row in db.jobs(orphans)} == {("error", GONE)}
    assert len(log.named("outbox.refused")) == 5


async def test_a_job_that_names_no_file_at_all_is_one(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job, good = db.insert_jobs(2)
    db.execute("ALTER TABLE recognition_job ALTER COLUMN file_id DROP NOT NULL")
    db.execute("UPDATE recognition_job SET file_id = NULL WHERE id = %s", job.id)
    await exchange.publish()
    assert [request.msg_id for request in service.heard()] == [good.msg_id]
    assert db.job(job)["error_message"] == log.one("outbox.refused")["error"] == GONE


@pytest.mark.environment(OUTBOX_MAX_REPUBLISH=0)
async def test_every_other_end_is_as_that_of_any_job(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    dead, acked, done, failed = db.insert_jobs(4, status="published", published_at=clock.start)
    overdue = db.insert_job(status="processing", reply_deadline=clock.at(20))
    lose_files(db, [dead, acked, done, failed, overdue])
    said = (envelopes.ack(acked), None), (envelopes.done(done), "r"), (envelopes.error(failed), "r")
    assert await exchange.outcomes(service, *said) == ["applied"] * 3
    await clock.advance(30)
    await exchange.publish()
    await exchange.expire()
    assert db.statuses([dead, acked, done, failed, overdue]) == ["dlq", "processing", "done", "error", "timeout"]
    assert [db.fact(job) is not None for job in (dead, acked, done, failed, overdue)] == [True, False, False, True, True]
    assert log.named("watchdog.timed_out")


async def test_a_fact_that_the_cores_own_key_refuses_is_told_once_a_pass_and_holds_up_nobody(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    orphans = db.insert_jobs(3, status="processing", reply_deadline=clock.at(-2))
    good = db.insert_jobs(3, status="processing", reply_deadline=clock.at(-1))
    db.execute("ALTER TABLE quality_failure_fact ADD FOREIGN KEY (file_id) REFERENCES stored_file")
    lose_files(db, orphans)
    log.claim("watchdog.write_refused")
    for passes in (1, 2):
        await exchange.expire()
        assert len(log.named("watchdog.write_refused", sqlstate="23503")) == 3 * passes
    assert db.statuses(orphans + good) == ["processing"] * 3 + ["timeout"] * 3


@pytest.mark.req("R8")
def test_a_retry_of_one_is_refused_in_one_line(dsn: str, db: Database) -> None:
    orphan, unnamed = db.insert_jobs(2, status="error", error_code="INVALID_REQUEST")
    lose_files(db, [orphan])
    db.execute("ALTER TABLE recognition_job ALTER COLUMN file_id DROP NOT NULL")
    db.execute("UPDATE recognition_job SET file_id = NULL WHERE id = %s", unnamed.id)
    result = run("retry", str(orphan.id), str(unnamed.id), **{DSN: dsn})
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [f"{orphan.id}: {GONE}", f"{unnamed.id}: {GONE}"]
    assert len(db.rows("recognition_job")) == 2
