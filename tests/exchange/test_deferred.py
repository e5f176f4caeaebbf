"""What a commit may still refuse is known before the first byte leaves, and one refused row holds up nobody (N05)."""

import pytest

from armcore_trio.errors import DependencyDown
from armcore_trio.settings import DSN
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.commands import run
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange
from tests.support.failing import failing
from tests.support.records import Records
from tests.support.refusals import refuse, relent
from tests.support.service import ServiceClient

pytestmark = pytest.mark.req("N05")

# Constraints that are looked at when the transaction commits. The guilty job's message id is in the table `taken`.
CONSTRAINTS = {
    "trigger": ["refuse"],
    "foreign key": [
        "CREATE TABLE allowed (id text PRIMARY KEY)",
        "INSERT INTO allowed SELECT id || ':1' FROM recognition_job WHERE id || ':1' NOT IN (SELECT id FROM taken)",
        "ALTER TABLE recognition_job ADD FOREIGN KEY (request_msg_id) REFERENCES allowed DEFERRABLE INITIALLY DEFERRED",
    ],
    "unique": [
        "ALTER TABLE recognition_job ADD UNIQUE (request_msg_id) DEFERRABLE INITIALLY DEFERRED",
        "UPDATE recognition_job SET request_msg_id = (SELECT id FROM taken) WHERE status = 'done'",
    ],
    "exclusion": [
        "ALTER TABLE recognition_job ADD EXCLUDE USING btree (request_msg_id WITH =) DEFERRABLE INITIALLY DEFERRED",
        "UPDATE recognition_job SET request_msg_id = (SELECT id FROM taken) WHERE status = 'done'",
    ],
}
SQLSTATES = {"trigger": "P0001", "foreign key": "23503", "unique": "23505", "exclusion": "23P01"}


def sent(service: ServiceClient) -> list[str | None]:
    return [request.msg_id for request in service.heard()]


def msg_ids(jobs: list[JobIds]) -> list[str]:
    return sorted(job.msg_id for job in jobs)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
async def test_six_of_seven_go_out_once_and_nothing_for_the_seventh(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records, constraint: str
) -> None:
    db.insert_job(status="done")
    jobs = db.insert_jobs(7)
    guilty = jobs[4]
    db.execute("CREATE TABLE taken AS SELECT %s AS id", guilty.msg_id)
    if constraint == "trigger":
        refuse(db, "recognition_job", [guilty], at_commit=True)
    else:
        for statement in CONSTRAINTS[constraint]:
            db.execute(statement)
    log.claim("outbox.write_refused")
    for tries in (1, 2, 3):
        await exchange.publish()
        assert sorted(map(str, sent(service))) == msg_ids([job for job in jobs if job is not guilty])
        refusals = log.named("outbox.write_refused", job_id=str(guilty.id), sqlstate=SQLSTATES[constraint])
        assert len(refusals) == len(log.named("outbox.write_refused")) == tries, "once a pass"
    assert db.job(guilty)["status"] == "queued"


async def test_the_seventh_goes_out_once_the_constraint_relents(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(7)
    refuse(db, "recognition_job", [jobs[0]], at_commit=True)
    log.claim("outbox.write_refused")
    await exchange.publish()
    relent(db)
    await exchange.publish()
    assert sorted(map(str, sent(service))) == msg_ids(jobs)


@pytest.mark.environment(OUTBOX_MAX_REPUBLISH=1)
async def test_repeats_dead_letters_and_jobs_without_a_request_are_checked_before_the_repeats_leave(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    repeated = db.insert_jobs(4, status="published", published_at=clock.start)
    hopeless = db.insert_jobs(3, status="published", published_at=clock.start, metrics={"republish_count": 1})
    unbuildable = db.insert_jobs(2, status="published", published_at=clock.start, pipeline="audio")
    queued, broken = db.insert_jobs(3, created_at=clock.at(1)), db.insert_jobs(2, pipeline="audio", created_at=clock.start)
    guilty = [repeated[1], hopeless[0], unbuildable[0], broken[1]]
    refuse(db, "recognition_job", guilty, at_commit=True)
    log.claim("outbox.write_refused")
    await clock.advance(30)
    await exchange.publish()
    assert sorted(map(str, sent(service))) == msg_ids([*queued, *repeated[:1], *repeated[2:]])
    assert {record["job_id"] for record in log.named("outbox.write_refused")} == {str(job.id) for job in guilty}
    assert db.statuses(hopeless) == ["published", "dlq", "dlq"]
    assert db.statuses(unbuildable + broken) == ["published", "error", "error", "queued"]


async def test_a_serialization_failure_at_commit_is_an_outage_before_anything_is_sent(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    jobs = db.insert_jobs(2)
    refuse(db, "recognition_job", jobs[:1], at_commit=True, sqlstate="40001")
    with failing(DependencyDown, "40001"):
        await exchange.publish()
    assert sent(service) == []
    relent(db)
    await exchange.publish()
    assert sorted(map(str, sent(service))) == msg_ids(jobs)


async def test_what_holds_at_commit_is_not_refused_for_the_order_of_a_triggers_writes(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    """Such constraints are deferred for a reason: here a trigger writes the child before its parent."""
    db.execute("CREATE TABLE parent (id uuid PRIMARY KEY)")
    db.execute("CREATE TABLE child (id uuid REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    db.execute("""
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO child VALUES (NEW.id); INSERT INTO parent VALUES (NEW.id); RETURN NULL; END $$""")
    db.execute("CREATE TRIGGER note AFTER UPDATE ON recognition_job FOR EACH ROW EXECUTE FUNCTION note()")
    jobs = db.insert_jobs(3)
    broken = db.insert_job(pipeline="audio")
    await exchange.publish()
    assert sorted(map(str, sent(service))) == msg_ids(jobs)
    assert db.job(broken)["status"] == "error"


@pytest.mark.req("D4.6")
async def test_a_message_refused_at_commit_is_found_and_answered_and_its_neighbours_are_applied(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    jobs = db.insert_jobs(5, status="processing")
    refuse(db, "recognition_job", jobs[3:4], at_commit=True)
    said = [(envelopes.done(job), envelopes.result_id(job)) for job in jobs]
    answers = await exchange.deliver(service, *said)
    assert [answer["outcome"] for answer in answers] == ["applied", "applied", "applied", "invalid", "applied"]
    assert answers[3]["reason"] == log.one("inbox.invalid")["reason"] == "refused_by_database"
    assert db.statuses(jobs) == ["done", "done", "done", "processing", "done"]


async def test_an_object_key_that_only_the_commit_finds_taken_is_a_taken_key(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    job = db.insert_job(status="processing")
    db.execute("ALTER TABLE s3_object DROP CONSTRAINT s3_object_bucket_key_key")
    db.execute("ALTER TABLE s3_object ADD UNIQUE (bucket, key) DEFERRABLE INITIALLY DEFERRED")
    db.execute("INSERT INTO s3_object (bucket, key, bucket_role) VALUES ('arm-ka', %s, 'results')", job.result_key)
    (answer,) = await exchange.deliver(service, (envelopes.done(job), "r"))
    assert (answer["outcome"], answer["reason"]) == ("invalid", "key_taken")


async def test_an_overdue_job_refused_at_commit_is_told_and_the_others_end(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    jobs = db.insert_jobs(5, status="processing", reply_deadline=clock.at(-1))
    refuse(db, "quality_failure_fact", jobs[2:3], at_commit=True)
    log.claim("watchdog.write_refused")
    await exchange.expire()
    assert db.statuses(jobs) == ["timeout", "timeout", "processing", "timeout", "timeout"]
    assert log.one("watchdog.write_refused")["job_id"] == str(jobs[2].id)


def test_commands_tell_what_the_commit_refused_in_one_line(dsn: str, db: Database) -> None:
    job = db.insert_job(status="dlq")
    db.execute("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'closed today'; END $$")
    db.execute("""
    CREATE CONSTRAINT TRIGGER no AFTER INSERT ON recognition_job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION no()""")
    result = run("retry", str(job.id), **{DSN: dsn})
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"{job.id}: closed today\n")
    result = run("submit", "--bucket", "b", "--key", "k", "--name", "n", "--pipeline", "tabular", **{DSN: dsn})
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "WriteRefused: closed today\n")
    assert len(db.rows("recognition_job")) == 1
