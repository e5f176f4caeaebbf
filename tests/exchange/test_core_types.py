"""Tables of a core that chose other types for the same words and numbers: all works on them (N01)."""

import json
from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest

from armcore_trio.borders.migrate import migrate
from armcore_trio.demo.embedded import Postgres
from armcore_trio.settings import DSN
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.commands import run
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange
from tests.support.servers import fresh_database
from tests.support.service import ServiceClient

pytestmark = pytest.mark.req("N01")

_TABLES = """
CREATE TABLE s3_object (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), bucket {text} NOT NULL, key {text} NOT NULL,
    bucket_role {bucket_role} NOT NULL, created_by {text}, created_at {instant} NOT NULL DEFAULT now(), UNIQUE (bucket, key)
    {more}
);
CREATE TABLE stored_file (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), file_name {text} NOT NULL, content_type {text},
    s3_object_id uuid REFERENCES s3_object, status {file_status} NOT NULL DEFAULT 'UPLOADED', error_code {text},
    error_message text, current_recognition_job_id uuid, created_at {instant} NOT NULL DEFAULT now(),
    updated_at {instant} NOT NULL DEFAULT now()
    {more}
);
CREATE TABLE recognition_job (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), file_id uuid NOT NULL REFERENCES stored_file, pipeline {pipeline} NOT NULL,
    status {status} NOT NULL DEFAULT 'queued', attempt {attempt} NOT NULL DEFAULT 1, reply_deadline {instant},
    request_subject {text}, request_msg_id {text}, published_at {instant}, started_at {instant}, finished_at {instant},
    service_name {text}, service_version {text}, metrics {metrics} DEFAULT '{{}}', error_code {text}, error_message text,
    result_schema_version {text}, result_s3_object_id uuid REFERENCES s3_object, raw_s3_object_id uuid REFERENCES s3_object,
    result_msg_id {text}, created_at {instant} NOT NULL DEFAULT now(), UNIQUE (file_id, attempt)
    {more}
);
CREATE TABLE quality_failure_fact (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), job_id uuid NOT NULL UNIQUE REFERENCES recognition_job, file_id uuid NOT NULL,
    pipeline {pipeline} NOT NULL, failure_kind {failure_kind} NOT NULL, error_code {text}, service_name {text},
    occurred_at {instant} NOT NULL DEFAULT now()
    {more}
);
"""
_OURS = {
    "text": "text", "instant": "timestamptz", "attempt": "integer", "metrics": "jsonb", "more": "",
    **dict.fromkeys(["bucket_role", "file_status", "status", "pipeline", "failure_kind"], "text"),
}  # fmt: skip
_WORDS = ("bucket_role", "file_status", "status", "pipeline", "failure_kind")
_ENUMS = """
CREATE TYPE bucket_role AS ENUM ('source', 'results', 'raw', 'archive');
CREATE TYPE file_status AS ENUM ('UPLOADED', 'PROCESSING', 'PROCESSED', 'ERROR', 'QUARANTINE');
CREATE TYPE status AS ENUM
    ('draft', 'queued', 'published', 'processing', 'done', 'needs_check', 'error', 'timeout', 'dlq', 'cancelled');
CREATE TYPE pipeline AS ENUM ('tabular', 'image', 'audio');
CREATE TYPE failure_kind AS ENUM ('SERVICE_ERROR', 'TIMEOUT', 'NO_ACK', 'MANUAL');
"""
_DOMAINS = "".join(f"CREATE DOMAIN {name} AS text NOT NULL CHECK (value <> '');" for name in _WORDS)
_MORE = """, version bigint NOT NULL DEFAULT 0, label text GENERATED ALWAYS AS ('row ' || id::text) STORED,
    number bigint GENERATED ALWAYS AS IDENTITY, tags text[], place point"""

CORES: dict[str, tuple[str, dict[str, str]]] = {
    "enums": (_ENUMS, {name: name for name in _WORDS}),
    "varchar": ("", {"text": "varchar(200)", **dict.fromkeys(_WORDS, "varchar(20)")}),
    "padded": ("", {"text": "char(200)", **dict.fromkeys(_WORDS, "char(20)")}),
    "domains": (_DOMAINS, {name: name for name in _WORDS}),
    "bigint, json, timestamp": ("", {"attempt": "bigint", "metrics": "json", "instant": "timestamp"}),
    "smallint": ("", {"attempt": "smallint"}),
    "numeric": ("", {"attempt": "numeric(9)", "metrics": "text"}),
    "more columns": ("", {"more": _MORE}),
}


@pytest.fixture(params=CORES)
def dsn(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """This test's own database, with the tables of such a core, migrated."""
    types, columns = CORES[request.param]
    with fresh_database(postgres, "template1") as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute((types + _TABLES.format(**_OURS | columns)).encode())
        migrate(dsn)
        yield dsn


def words(db: Database, job: JobIds) -> tuple[str, str, str | None]:
    """Status of job and file and the kind of failure, as text."""
    (row,) = db.execute(
        """SELECT job.status::text, file.status::text AS file, fact.failure_kind::text AS fact
        FROM recognition_job AS job JOIN stored_file AS file ON file.id = job.file_id
        LEFT JOIN quality_failure_fact AS fact ON fact.job_id = job.id WHERE job.id = %s""",
        job.id,
    )
    return row["status"], row["file"], row["fact"]


@pytest.mark.environment(OUTBOX_MAX_REPUBLISH=1)
async def test_every_way_of_a_job_works(clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient) -> None:
    done, failed, broken, repeated, dead, overdue, doubtful = jobs = db.insert_jobs(7)
    db.execute("UPDATE recognition_job SET pipeline = 'audio' WHERE id = %s", broken.id)
    await exchange.publish()
    requests = {request.msg_id: request for request in service.heard()}
    assert set(requests) == {job.msg_id for job in jobs if job is not broken}
    document = requests[done.msg_id].document
    assert (document["pipeline"], document["s3"]["key"], document["attempt"]) == ("tabular", done.key, 1)
    assert words(db, broken) == ("error", "ERROR", None)
    assert db.job(done)["request_msg_id"].rstrip() == done.msg_id

    said = [
        (envelopes.ack(done), None),
        (envelopes.done(done, raw_s3_key=done.raw_key, metrics={"rows": 3}), envelopes.result_id(done)),
        (envelopes.done(done), envelopes.result_id(done)),
        (envelopes.error(failed), envelopes.result_id(failed)),
        (envelopes.ack(overdue), None),
        (envelopes.needs_check(doubtful), envelopes.result_id(doubtful)),
    ]
    assert await exchange.outcomes(service, *said[:2]) == ["applied", "applied"]
    assert await exchange.outcomes(service, *said[2:]) == ["duplicate", "applied", "applied", "applied"]
    assert words(db, done) == ("done", "PROCESSING", None)
    assert words(db, failed) == ("error", "ERROR", "SERVICE_ERROR")
    assert words(db, overdue) == ("processing", "PROCESSING", None)
    assert words(db, doubtful) == ("needs_check", "PROCESSING", None)
    roles = db.execute("SELECT bucket_role::text AS role FROM s3_object WHERE bucket_role <> 'source' ORDER BY 1")
    assert [row["role"] for row in roles] == ["raw", "results", "results"]

    db.execute("""UPDATE recognition_job SET metrics = '{"republish_count": 1}' WHERE id = %s""", dead.id)
    await clock.advance(30)
    await exchange.publish()
    assert [request.msg_id for request in service.heard()][6:] == [repeated.msg_id]
    metrics = db.job(repeated)["metrics"]
    assert (json.loads(metrics) if isinstance(metrics, str) else metrics) == {"republish_count": 1}
    assert words(db, dead) == ("dlq", "ERROR", "NO_ACK")
    await clock.advance(871)
    await exchange.expire()
    assert words(db, overdue) == ("timeout", "ERROR", "TIMEOUT")


def test_the_commands_work(dsn: str, db: Database) -> None:
    job = db.insert_job(status="error")
    result = run("retry", "--json", str(job.id), str(job.id), **{DSN: dsn})
    first, second = json.loads(result.stdout)
    assert (first["attempt"], second["refusal"]) == (2, "attempt 2 of its file exists")
    retried = JobIds(UUID(first["new_job_id"]), job.file_id)
    assert words(db, retried) == ("queued", "UPLOADED", None)
    result = run("submit", "--bucket", "b", "--key", "k", "--name", "n", "--pipeline", "tabular", "--json", **{DSN: dsn})
    submitted = json.loads(result.stdout)
    assert words(db, JobIds(UUID(submitted["job_id"]), UUID(submitted["file_id"]))) == ("queued", "UPLOADED", None)
