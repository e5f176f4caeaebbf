"""D4.3, D4.4, D4.6: what is no valid envelope is refused with a reason, changes nothing, and harms no neighbour."""

import json
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import uuid4

import pytest
import trio

from tests.support import envelopes
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange, Said
from tests.support.records import Records
from tests.support.refusals import refuse
from tests.support.service import ServiceClient
from tests.support.waiting import until


def raw(job: JobIds, old: str = "", new: str = "") -> bytes:
    """A `done` as text, with something replaced in it."""
    return json.dumps(envelopes.done(job, metrics={"x": 1})).replace(old, new).encode("utf-8", "surrogatepass")


def without(envelope: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in envelope.items() if name not in names}


async def reasons(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records, job: JobIds, spoilt: Mapping[str, Any]
) -> dict[str, str]:
    """Send each spoilt message between good ones, in one batch; the reason for which each was refused.

    On the way, what holds of all of them: the good are applied, the spoilt change nothing, are logged and counted.
    """
    good = db.insert_jobs(len(spoilt) + 1, status="published")
    before = db.job(job), db.file(job)
    said: list[Said] = [(envelopes.done(good[0]), "good")]
    for body, neighbour in zip(spoilt.values(), good[1:], strict=True):
        said += [(body, "spoilt"), (envelopes.done(neighbour), "good")]
    answers = await exchange.deliver(service, *said)
    assert {answer["outcome"] for answer in answers[::2]} == {"applied"}
    assert {answer["outcome"] for answer in answers[1::2]} == {"invalid"}
    assert set(db.statuses(good)) == {"done"}
    assert (db.job(job), db.file(job)) == before
    assert len(db.rows("s3_object", "bucket_role <> 'source'")) == len(good)
    assert exchange.applied["invalid"] == len(spoilt)
    records = log.named("inbox.invalid", log_level="warning")
    found = [str(answer["reason"]) for answer in answers[1::2]]
    assert [record["reason"] for record in records] == found
    assert [record["job_id"] for record in records] == [answer["job_id"] for answer in answers[1::2]]
    return dict(zip(spoilt, found, strict=True))


@pytest.fixture
def job(db: Database) -> JobIds:
    """The job that the spoilt messages are about."""
    return db.insert_job(status="published")


@pytest.mark.req("D4.6", "B22", "B23", "B24")
@pytest.mark.environment(INBOX_MAX_BYTES=300_000)
async def test_what_cannot_be_read_is_told_apart_by_reason(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    number = '"x": 1'
    spoilt = {
        "nothing": (b"", "empty"),
        "no JSON": (b"Hello", "not_json"),
        "half a message": (raw(job)[:-1], "not_json"),
        "two messages": (raw(job) * 2, "not_json"),
        "not UTF-8": (raw(job, "tabular", "tab\udcfflar").replace(b"\xed\xb3\xbf", b"\xff"), "not_utf8"),
        "UTF-16 with its mark": (raw(job).decode().encode("utf-16"), "not_utf8"),
        "UTF-16 without": (raw(job).decode().encode("utf-16-le"), "not_json"),
        "byte order mark": (b"\xef\xbb\xbf" + raw(job), "byte_order_mark"),
        "surrogate as bytes": (raw(job, "tabular", "tab\ud800lar"), "not_utf8"),
        "NaN": (raw(job, number, '"x": NaN'), "not_finite"),
        "Infinity": (raw(job, number, '"x": Infinity'), "not_finite"),
        "-Infinity": (raw(job, number, '"x": [-Infinity]'), "not_finite"),
        "1e400": (raw(job, number, '"x": 1e400'), "number_range"),
        "5000 digits": (raw(job, number, f'"x": {"7" * 5000}'), "number_range"),
        "twenty times 5000 digits": (raw(job, number, f'"x": [{", ".join(["7" * 5000] * 20)}]'), "number_range"),
        "a key twice": (raw(job, number, '"x": 1, "x": 1'), "duplicate_key"),
        "a job id twice": (raw(job, '"job_id"', f'"job_id": "{uuid4()}", "job_id"'), "duplicate_key"),
        "a key twice by escape": (raw(job, number, r'"x": 1, "\u0078": 1'), "duplicate_key"),
        "U+0000 in a value": (raw(job, number, r'"x": "\u0000"'), "bad_text"),
        "U+0000 in a key": (raw(job, number, r'"a\u0000": 1'), "bad_text"),
        "U+0000 in the service": (raw(job, "tabular", r"tab\u0000lar"), "bad_text"),
        "U+0000 as a byte": (raw(job, "tabular", "tab\0lar"), "not_json"),
        "half a pair in a value": (raw(job, number, r'"x": ["\ud83d"]'), "bad_text"),
        "half a pair in a key": (raw(job, number, r'"\udc00": 1'), "bad_text"),
        "300 levels": (raw(job, number, '"x": ' + "[" * 300 + "]" * 300), "too_deep"),
        "100000 levels": (raw(job, number, '"x": ' + "[" * 100_000 + "]" * 100_000), "too_deep"),
        "100000 levels left open": (b'{"x":' * 50_000, "too_deep"),
        "a list": (b"[" + raw(job) + b"]", "schema"),
        "a text": (b'"done"', "schema"),
        "null": (b"null", "schema"),
    }
    found = await reasons(db, exchange, service, log, job, {name: body for name, (body, _) in spoilt.items()})
    assert found == {name: reason for name, (_, reason) in spoilt.items()}


@pytest.mark.req("D4.6")
@pytest.mark.environment(INBOX_MAX_BYTES=2048)
async def test_the_size_limit_is_exact(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    most = raw(job).ljust(2048)
    found = await reasons(db, exchange, service, log, job, {"one more": most + b" ", "a megabyte": most.ljust(1_000_000)})
    assert set(found.values()) == {"too_large"}
    assert await exchange.outcomes(service, (most, "r")) == ["applied"]


@pytest.mark.req("D4.3", "D4.6", "B29")
async def test_what_violates_the_schema_is_refused(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    done, service_ = envelopes.done(job), envelopes.SERVICE
    spoilt: dict[str, Any] = {
        f"without {name}": without(done, name) for name in ("schema_version", "job_id", "status", "service")
    }
    spoilt |= {f"version {version}": done | {"schema_version": version} for version in ("1", "1.01", "2.0", "1.0\n", 1.0, None)}
    spoilt |= {f"status {status}": done | {"status": status} for status in ("queued", "Done", "timeout", None)}
    spoilt |= {
        "service without name": done | {"service": {"version": "1"}},
        "service without version": done | {"service": {"name": "x"}},
        "name null": done | {"service": service_ | {"name": None}},
        "name empty": done | {"service": service_ | {"name": ""}},
        "version numeric": done | {"service": service_ | {"version": 2}},
        "done without result": without(done, "result_s3"),
        "needs_check without result": without(envelopes.needs_check(job), "result_s3"),
        "result null": done | {"result_s3": None},
        "result without bucket": done | {"result_s3": {"key": job.result_key}},
        "key null": done | {"result_s3": {"bucket": "arm-ka", "key": None}},
        "error without error": without(envelopes.error(job), "error"),
        "error null": envelopes.error(job) | {"error": None},
        "error without code": envelopes.error(job) | {"error": {"message": "m"}},
        "error code empty": envelopes.error(job) | {"error": {"code": "", "message": "m"}},
        "error without message": envelopes.error(job) | {"error": {"code": "C"}},
        "metrics a list": done | {"metrics": []},
        "metrics null": done | {"metrics": None},
        "raw key numeric": done | {"raw_s3_key": 7},
        "result version numeric": done | {"result_schema_version": 3.2},
    }
    found = await reasons(db, exchange, service, log, job, spoilt)
    assert set(found.values()) == {"schema"}
    assert "None" not in str(db.rows("recognition_job", "service_name = 'None'"))


@pytest.mark.req("B54", "D4.6")
async def test_only_canonical_job_ids_get_through(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    canonical = str(job.id)
    ids = ["abc", "", f"{{{canonical}}}", f"urn:uuid:{canonical}", job.id.hex, canonical + "\n", " " + canonical, canonical[:-1]]
    ids += [canonical.replace("-", "\N{HYPHEN}"), canonical[:-1] + "\N{ARABIC-INDIC DIGIT THREE}"]
    spoilt = {text: envelopes.done(job, job_id=text) for text in ids}
    spoilt["a number"] = envelopes.done(job, job_id=job.id.int)
    found = await reasons(db, exchange, service, log, job, spoilt)
    assert set(found.values()) == {"schema"}
    answers = await exchange.deliver(service, (envelopes.done(job, job_id=canonical.upper()), "r"))
    assert answers == [{"outcome": "applied", "job_id": canonical, "reason": None}]


@pytest.mark.req("D4.4")
async def test_a_service_cannot_claim_an_object_of_another_job(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    other = db.insert_job(status="published")
    base = f"results/{job.file_id}/{job.id}"

    def at(key: str) -> dict[str, Any]:
        return envelopes.done(job, result_s3={"bucket": "arm-ka", "key": key})

    raw_keys = [other.raw_key, f"raw/{job.id}", f"raw/{job.id}.json/", f"/raw/{job.id}.json", f"raw/{str(job.id).upper()}.json"]
    result_keys = [
        other.result_key,
        f"results/{job.file_id}/{other.id}/result.json",
        f"results/{other.file_id}/{job.id}/result.json",
        f"/{base}/result.json",
        base,
        f"{base}/",
        f"{base}x/result.json",
        f"{base}/../{other.id}/result.json",
        f"{base}/./result.json",
        f"{base}//result.json",
        f"{base}/pages/..",
        str(job.key),
        job.raw_key,
    ]
    spoilt: dict[str, Any] = {f"raw {key}": envelopes.done(job, raw_s3_key=key) for key in raw_keys}
    spoilt |= {f"error with raw {key}": envelopes.error(job, raw_s3_key=key) for key in raw_keys}
    spoilt |= {f"result {key}": at(key) for key in result_keys}
    spoilt["error with a result"] = envelopes.error(job, result_s3=envelopes.result_s3(other))
    found = await reasons(db, exchange, service, log, job, spoilt)
    assert {reason for name, reason in found.items() if " raw " in f" {name}"} == {"raw_key"}
    assert {reason for name, reason in found.items() if " raw " not in f" {name}"} == {"result_key"}


@pytest.mark.req("D4.4")
async def test_a_key_that_is_registered_already_is_taken(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    job = db.insert_job(status="published")
    for bucket, key in (("arm-ka", job.raw_key), ("taken", job.result_key)):
        db.execute("INSERT INTO s3_object (bucket, key, bucket_role) VALUES (%s, %s, 'source')", bucket, key)
    before = db.snapshot()
    place = {"bucket": "taken", "key": job.result_key}
    answers = await exchange.deliver(
        service,
        (envelopes.done(job, raw_s3_key=job.raw_key), "r1"),
        (envelopes.error(job, raw_s3_key=job.raw_key), "r2"),
        (envelopes.done(job, result_s3=place), "r3"),
    )
    assert answers == [{"outcome": "invalid", "job_id": str(job.id), "reason": "key_taken"}] * 3
    assert db.snapshot() == before, "no part of it is applied"
    assert await exchange.outcomes(service, (envelopes.done(job), "r4")) == ["applied"], "free in this bucket"
    assert len(log.named("inbox.invalid", reason="key_taken")) == 3


@pytest.mark.req("D4.4", "D4.6")
async def test_a_key_that_somebody_registers_meanwhile_is_taken_and_the_neighbours_are_applied(
    db: Database, job: JobIds, exchange: Exchange, service: ServiceClient
) -> None:
    neighbours = db.insert_jobs(2, status="published")
    said = [(envelopes.done(one), "r") for one in (neighbours[0], job, neighbours[1])]
    answers: list[str] = []

    async def deliver() -> None:
        answers.extend(await exchange.outcomes(service, *said))

    async with trio.open_nursery() as nursery:
        with db.transaction() as rival:
            rival.execute("INSERT INTO s3_object (bucket, key, bucket_role) VALUES ('arm-ka', %s, 'raw')", [job.result_key])
            nursery.start_soon(deliver)
            await until(lambda: db.lock_waiters() == 1)
    assert answers == ["applied", "invalid", "applied"]
    assert db.statuses([job, *neighbours]) == ["published", "done", "done"]


@pytest.mark.req("D4.6", "D4.9", "B48")
async def test_a_message_the_database_refuses_is_isolated_and_order_is_kept(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    db.execute("CREATE TABLE applied (n serial, commit xid8 DEFAULT pg_current_xact_id(), job_id uuid, status text)")
    db.execute("""
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO applied (job_id, status) VALUES (NEW.id, NEW.status); RETURN NULL; END $$""")
    db.execute("CREATE TRIGGER note AFTER UPDATE ON recognition_job FOR EACH ROW EXECUTE FUNCTION note()")
    first, guilty, third, fourth = db.insert_jobs(4, status="published")
    refuse(db, "recognition_job", [guilty])
    outcomes = await exchange.outcomes(
        service,
        (envelopes.ack(fourth), None),
        (envelopes.done(third), "r"),
        (envelopes.ack(guilty), None),
        (envelopes.error(guilty), "r"),
        (envelopes.done(fourth), "r"),
        (envelopes.done(first), "r"),
    )
    assert outcomes == ["applied", "applied", "invalid", "invalid", "applied", "applied"]
    rows = db.execute("SELECT commit, job_id, status FROM applied ORDER BY n")
    commits = [{(row["job_id"], row["status"]) for row in commit} for _, commit in groupby(rows, itemgetter("commit"))]
    assert commits == [{(fourth.id, "processing")}, {(third.id, "done")}, {(fourth.id, "done"), (first.id, "done")}]
    assert db.job(guilty)["status"] == "published"
    assert len(log.named("inbox.invalid", reason="refused_by_database", job_id=str(guilty.id))) == 2
