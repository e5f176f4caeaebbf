"""Rows and databases as other programs leave them: without the instants we would have set, or in another encoding."""

from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from armcore_trio.borders.migrate import migrate
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import load
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange, open_exchange
from tests.support.records import Records
from tests.support.responder import OpenService
from tests.support.servers import administration, new_environment
from tests.support.service import ServiceClient

# --- instants that are missing ----------------------------------------------------------------------------------------


@pytest.mark.req("R3", "R5")
async def test_a_published_job_that_does_not_say_since_when_is_not_repeated_and_ends_by_its_deadline(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    """There is no time to count from, and nobody shall wait for it for ever."""
    job, other = db.insert_jobs(2, status="published", created_at=clock.at(-100_000))
    db.execute("UPDATE recognition_job SET published_at = %s WHERE id = %s", clock.at(-30), other.id)
    await exchange.expire()
    assert {row["reply_deadline"] for row in db.jobs([job, other])} == {clock.at(900)}
    assert sorted(log.one("watchdog.deadline_was_missing")["job_ids"]) == sorted([str(job.id), str(other.id)])
    row = db.job(job)
    for _ in range(5):
        await exchange.publish()
        await clock.advance(30)
    assert [request.msg_id for request in service.heard()] == [other.msg_id] * 3
    assert (db.job(job), db.job(other)["status"]) == (row, "dlq")

    await clock.advance_to(900.000001)
    await exchange.expire()
    assert (db.job(job)["status"], db.job(job)["error_code"]) == ("timeout", "TIMEOUT")


@pytest.mark.req("R2", "R4")
async def test_an_ack_or_a_result_for_it_counts_as_for_any_other(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    acked, answered = db.insert_jobs(2, status="published")
    said = (envelopes.ack(acked), None), (envelopes.done(answered), envelopes.result_id(answered))
    assert await exchange.outcomes(service, *said) == ["applied", "applied"]
    assert db.statuses([acked, answered]) == ["processing", "done"]


@pytest.mark.req("R5", "S5.1", "D1.4")
@pytest.mark.parametrize("status", ["published", "processing"])
async def test_an_awaited_job_without_a_deadline_gets_one_and_ends_by_it(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records, status: str
) -> None:
    job = db.insert_job(status=status, published_at=clock.at(-5), created_at=clock.at(-100_000))
    await exchange.expire()
    row = db.job(job)
    assert (row["status"], row["reply_deadline"]) == (status, clock.at(900)), "from now on, not from its insert"
    record = log.one("watchdog.deadline_was_missing")
    assert (record["job_ids"], record["count"], record["log_level"]) == ([str(job.id)], 1, "warning")

    await clock.advance(900)
    await exchange.expire()
    assert db.job(job) == row, "the deadline stands, and is still in time"
    assert len(log.named("watchdog.deadline_was_missing")) == 1
    await clock.advance(0.000001)
    await exchange.expire()
    assert (db.job(job)["status"], db.job(job)["error_code"]) == ("timeout", "TIMEOUT")
    assert db.file(job)["status"] == "ERROR"


@pytest.mark.req("R5")
async def test_only_awaited_jobs_get_one_and_a_row_somebody_holds_gets_it_later(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    others = [db.insert_job(status=status) for status in ("queued", "done", "needs_check", "error", "timeout", "dlq")]
    deadline = db.insert_job(status="processing", reply_deadline=clock.at(1))
    held, free = db.insert_jobs(2, status="processing")
    before = db.jobs([*others, deadline])
    with db.transaction() as holder:
        holder.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE", [held.id])
        await exchange.expire()
        assert [row["reply_deadline"] for row in db.jobs([held, free])] == [None, clock.at(900)]
    assert db.jobs([*others, deadline]) == before
    await exchange.expire()
    assert db.job(held)["reply_deadline"] == clock.at(900)
    assert [record["job_ids"] for record in log.named("watchdog.deadline_was_missing")] == [[str(free.id)], [str(held.id)]]


# --- a database that cannot write every letter ------------------------------------------------------------------------


@pytest.fixture
def latin_dsn(postgres: Postgres) -> Iterator[str]:
    """A migrated database in LATIN1."""
    name = f"test_{uuid4().hex}"
    with administration(postgres) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        migrate(postgres.dsn(name))
        yield postgres.dsn(name)
    finally:
        with administration(postgres) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def latin_environment(latin_dsn: str, nats_server: Nats) -> dict[str, str]:
    """The variables of a daemon on it."""
    return new_environment(latin_dsn, nats_server.url)


@pytest.fixture
def latin_db(latin_dsn: str) -> Iterator[Database]:
    """A look at it from outside."""
    database = Database(f"{latin_dsn} client_encoding=UTF8")
    yield database
    database.close()


@pytest.fixture
async def latin(latin_environment: dict[str, str], log: Records) -> AsyncIterator[Exchange]:
    """An exchange on it."""
    assert log is not None
    async with open_exchange(load(latin_environment)) as exchange:
        yield exchange


def foreign(job: JobIds) -> dict[str, envelopes.Envelope]:
    """Results with a letter that LATIN1 has not, each in another place: among the changes, the objects and the keys."""
    result = {"bucket": "arm-ka", "key": f"{job.result_key}.ж"}
    return {
        "message": envelopes.error(job, error={"code": "X", "message": "защищён паролем"}),
        "code": envelopes.error(job, error={"code": "ж", "message": "x"}),
        "service": envelopes.done(job, service={"name": "разбор", "version": "1"}),
        "key": envelopes.done(job, result_s3=result),
        "metric": envelopes.done(job, metrics={"имя": "значение"}),
    }


@pytest.mark.req("D4.6", "B22")
async def test_what_the_database_cannot_write_is_refused_and_its_neighbours_are_applied(
    latin_db: Database, latin: Exchange, latin_environment: dict[str, str], open_service: OpenService, log: Records
) -> None:
    service = open_service(latin_environment)
    job, *good = latin_db.insert_jobs(7, status="published")
    spoilt = foreign(job)
    before = latin_db.job(job), latin_db.file(job)
    said = [(envelopes.done(good[0]), "good")]
    for envelope, neighbour in zip(spoilt.values(), good[1:], strict=True):
        said += [(envelope, "spoilt"), (envelopes.error(neighbour, error={"code": "X", "message": "protégé, ÿ"}), "good")]
    answers = await latin.deliver(service, *said)
    assert [answer["outcome"] for answer in answers] == ["applied", *["invalid", "applied"] * 5]
    assert {answer["reason"] for answer in answers[1::2]} == {"refused_by_database"}
    assert (latin_db.job(job), latin_db.file(job)) == before
    assert latin_db.statuses(good) == ["done", *["error"] * 5]
    assert {row["error_message"] for row in latin_db.jobs(good[1:])} == {"protégé, ÿ"}
    assert len(log.named("inbox.invalid", reason="refused_by_database")) == 5


@pytest.mark.req("R1", "S1.1")
async def test_requests_from_it_are_utf_8(
    latin_db: Database, latin: Exchange, latin_environment: dict[str, str], open_service: OpenService
) -> None:
    service = open_service(latin_environment)
    latin_db.insert_job(file_name="Müller-prix.xlsx", key="dépôt/ÿ.xlsx")
    await latin.publish()
    (request,) = service.heard()
    assert request.document["file"]["name"] == "Müller-prix.xlsx"
    assert request.document["s3"]["key"] == "dépôt/ÿ.xlsx"


# --- rows that are there already --------------------------------------------------------------------------------------


@pytest.mark.req("D4.4", "D4.6")
async def test_a_row_in_the_way_is_a_taken_key_only_if_it_is_an_object(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    """A fact of the same job can only be there by another program's hand."""
    job, neighbour = db.insert_jobs(2, status="published")
    db.execute(
        "INSERT INTO quality_failure_fact (job_id, file_id, pipeline, failure_kind) VALUES (%s, %s, 'tabular', 'NO_ACK')",
        job.id,
        job.file_id,
    )
    before = db.job(job), db.file(job)
    answers = await exchange.deliver(
        service, (envelopes.error(job), "spoilt"), (envelopes.error(neighbour), envelopes.result_id(neighbour))
    )
    assert [(answer["outcome"], answer["reason"]) for answer in answers] == [
        ("invalid", "refused_by_database"),
        ("applied", None),
    ]
    assert (db.job(job), db.file(job)) == before
    assert log.one("inbox.invalid")["reason"] == "refused_by_database"
    assert await exchange.outcomes(service, (envelopes.done(job), envelopes.result_id(job))) == ["applied"]


@pytest.mark.req("D4.4")
async def test_an_object_that_another_session_registers_meanwhile_is_a_taken_key(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    """It is not seen by the look-up, only by the unique index, once the other has committed."""
    job = db.insert_job(status="published")
    db.execute(f"""
    CREATE FUNCTION rival() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.bucket_role = 'results' AND NEW.created_by IS DISTINCT FROM 'rival' THEN
            INSERT INTO s3_object (bucket, key, bucket_role, created_by)
            VALUES (NEW.bucket, '{job.result_key}', 'results', 'rival');
        END IF;
        RETURN NEW;
    END $$""")
    db.execute("CREATE TRIGGER rival BEFORE INSERT ON s3_object FOR EACH ROW EXECUTE FUNCTION rival()")
    (answer,) = await exchange.deliver(service, (envelopes.done(job), envelopes.result_id(job)))
    assert (answer["outcome"], answer["reason"]) == ("invalid", "key_taken")
