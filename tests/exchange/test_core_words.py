"""The tables are the core's: words and types that this version does not know cost nobody else anything (N01)."""

import pytest

from armcore_trio.settings import DSN, Settings
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.commands import run
from tests.support.database import Database
from tests.support.exchange import Exchange, open_exchange
from tests.support.records import Records
from tests.support.service import ServiceClient


@pytest.mark.req("N01")
@pytest.mark.parametrize("word", ["cancelled", "PUBLISHED", "queued ", "", "отменено"])
async def test_a_job_in_a_status_of_the_core_s_own_is_left_alone(
    dsn: str, db: Database, exchange: Exchange, service: ServiceClient, log: Records, word: str
) -> None:
    db.execute("ALTER TABLE recognition_job DROP CONSTRAINT recognition_job_status_check")
    strange, other = db.insert_jobs(2, status="published")
    db.execute("UPDATE recognition_job SET status = %s, reply_deadline = '-infinity' WHERE id = %s", word, strange.id)
    before = db.job(strange)
    said = [
        (envelopes.ack(strange), None),
        (envelopes.done(strange), envelopes.result_id(strange)),
        (envelopes.error(strange), "another"),
        (envelopes.done(other), envelopes.result_id(other)),
    ]
    assert await exchange.outcomes(service, *said) == ["ignored", "late", "late", "applied"]
    await exchange.publish()
    await exchange.expire()
    assert db.job(strange) == before
    assert db.job(other)["status"] == "done"
    assert {record["reason"] for event in ("inbox.late", "inbox.ignored") for record in log.named(event)} == {word}
    retried = run("retry", str(strange.id), **{DSN: dsn})
    assert (retried.returncode, retried.stderr) == (
        1,
        f"{strange.id}: it is {word}; only error, timeout and dlq can be retried\n",
    )


@pytest.mark.req("N01")
async def test_a_job_without_any_status_is_left_alone(db: Database, exchange: Exchange, service: ServiceClient) -> None:
    db.execute("ALTER TABLE recognition_job ALTER status DROP NOT NULL")
    job = db.insert_job()
    db.execute("UPDATE recognition_job SET status = NULL WHERE id = %s", job.id)
    assert await exchange.outcomes(service, (envelopes.ack(job), None), (envelopes.done(job), "x")) == ["ignored", "late"]


_TYPES = [
    "ALTER TABLE recognition_job ALTER status TYPE char(20)",
    "ALTER TABLE recognition_job ALTER status TYPE varchar(40), ALTER pipeline TYPE varchar(9)",
    "ALTER TABLE recognition_job ALTER pipeline TYPE char(30)",
    "CREATE TYPE kind AS ENUM ('tabular', 'image'); ALTER TABLE recognition_job ALTER pipeline TYPE kind USING pipeline::kind",
    "CREATE DOMAIN word AS text CHECK (value <> ''); ALTER TABLE recognition_job ALTER status TYPE word",
    "ALTER TABLE recognition_job ALTER attempt TYPE bigint",
    "ALTER TABLE recognition_job ALTER attempt TYPE numeric",
    "ALTER TABLE recognition_job ALTER metrics DROP DEFAULT, ALTER metrics TYPE json, ALTER metrics SET DEFAULT '{}'",
    "ALTER TABLE recognition_job ALTER metrics DROP NOT NULL, ALTER metrics SET DEFAULT NULL",
    "ALTER TABLE recognition_job ALTER reply_deadline TYPE timestamp, ALTER published_at TYPE timestamp",
    "ALTER TABLE s3_object ALTER bucket TYPE char(63)",
    "ALTER TABLE recognition_job ADD tenant text NOT NULL DEFAULT 'x'",
    "ALTER TABLE recognition_job ADD twice integer GENERATED ALWAYS AS (attempt * 2) STORED",
]


@pytest.mark.req("N01")
@pytest.mark.parametrize("change", _TYPES)
async def test_types_of_the_core_s_own_do_not_end_the_exchange(
    clock: FrozenClock, db: Database, settings: Settings, service: ServiceClient, log: Records, change: str
) -> None:
    """A request, a repeat, an ack, a result, a failure and a dead letter."""
    for statement in change.split("; "):
        db.execute(statement)
    async with open_exchange(settings) as exchange:
        jobs = db.insert_jobs(4)
        await exchange.publish()
        service.wait_heard(4)
        said = [
            (envelopes.ack(jobs[0]), None),
            (envelopes.done(jobs[0], metrics={"pages": 3}), "1"),
            (envelopes.error(jobs[1]), "2"),
        ]
        assert await exchange.outcomes(service, *said) == ["applied"] * 3
        await clock.advance(31)
        await exchange.publish()
        service.wait_heard(6)
        await clock.advance(900)
        await exchange.expire()
    assert not log.named("outbox.refused")
    assert [status.strip() for status in db.statuses(jobs)] == ["done", "error", "timeout", "timeout"]
