"""The statements of every pass touch what they are about and not the history, whatever the planner knows (B51)."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, LiteralString, cast
from uuid import UUID, uuid4

import psycopg
import pytest
import trio
from attrs import define, field
from psycopg import sql

from armcore_trio.borders import store
from armcore_trio.borders.database import Connection, connect
from armcore_trio.demo.embedded import Postgres
from armcore_trio.protocol.lifecycle import Event, Job, Outcome, Status, advance, receive
from armcore_trio.protocol.messages import Envelope, decode
from tests.support import envelopes
from tests.support.database import JobIds
from tests.support.servers import fresh_database

HISTORY = 100_000
ACTIVE = 50
"""Jobs of each kind that a pass has to find: queued, unacknowledged, overdue; and as many that are not yet due."""

BACKLOG = 8_000

LARGE_TABLES = {"recognition_job", "stored_file", "s3_object", "quality_failure_fact"}

pytestmark = pytest.mark.req("B51")

_HISTORY: LiteralString = """
WITH numbered AS (
    SELECT n, gen_random_uuid() AS file_id, gen_random_uuid() AS job_id, gen_random_uuid() AS source_id
    FROM generate_series(%(first)s::int, %(last)s) n
), source AS (
    INSERT INTO s3_object (id, bucket, key, bucket_role) SELECT source_id, 'arm-ka', 'source/' || n, 'source' FROM numbered
), file AS (
    INSERT INTO stored_file (id, file_name, s3_object_id, status, current_recognition_job_id)
    SELECT file_id, n || '.xlsx', source_id, 'PROCESSING', job_id FROM numbered
)
INSERT INTO recognition_job (id, file_id, pipeline, status, created_at, published_at, started_at, finished_at, reply_deadline)
SELECT job_id, file_id, 'tabular', (ARRAY['done', 'done', 'needs_check', 'error', 'timeout', 'dlq'])[n %% 6 + 1],
       at, at, at, at + interval '1 minute', at + interval '15 minutes'
FROM numbered, LATERAL (SELECT now() - interval '30 days' + n * interval '1 second') AS t (at)
"""

_ACTIVE: LiteralString = """
WITH numbered AS (
    SELECT n, gen_random_uuid() AS file_id, gen_random_uuid() AS job_id, gen_random_uuid() AS source_id, status, published, due
    FROM generate_series(1, %(count)s::int) n, (VALUES
        ('queued', NULL, NULL), ('published', '-1 hour', '1 hour'), ('published', '-1 hour', '-1 minute'),
        ('processing', '-1 hour', '-1 minute'), ('processing', '-1 minute', '1 hour'), ('published', '-1 second', '1 hour')
    ) AS kind (status, published, due)
), source AS (
    INSERT INTO s3_object (id, bucket, key, bucket_role) SELECT source_id, 'arm-ka', source_id::text, 'source' FROM numbered
), file AS (
    INSERT INTO stored_file (id, file_name, s3_object_id, current_recognition_job_id)
    SELECT file_id, 'active.xlsx', source_id, job_id FROM numbered
)
INSERT INTO recognition_job (id, file_id, pipeline, status, created_at, published_at, reply_deadline)
SELECT job_id, file_id, 'tabular', status, now() - interval '1 hour', now() + published::interval, now() + due::interval
FROM numbered
"""


def _fill(dsn: str, statistics: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in ("s3_object", "stored_file", "recognition_job", "quality_failure_fact"):
            connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
        connection.execute("SET session_replication_role = replica")  # the rows are sound; checking them costs seconds
        known = 1_000 if statistics == "stale" else HISTORY
        connection.execute(_HISTORY, {"first": 1, "last": known})
        if statistics != "absent":
            connection.execute("ANALYZE")
        if known < HISTORY:
            connection.execute(_HISTORY, {"first": known + 1, "last": HISTORY})
        connection.execute(_ACTIVE, {"count": ACTIVE})


@pytest.fixture(scope="module", params=["absent", "stale", "of the history"])
def history(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """A database with much history; the planner knows nothing of it, little, or all but the active jobs."""
    with fresh_database(postgres) as dsn:
        _fill(dsn, request.param)
        yield dsn


@pytest.fixture(scope="module", params=["absent", "stale", "complete"])
def backlog(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """As `history`, with very many queued and as many unacknowledged jobs; `complete` statistics know of them."""
    with fresh_database(postgres) as dsn:
        _fill(dsn, request.param)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(_ACTIVE, {"count": BACKLOG})
            connection.execute(
                "DELETE FROM recognition_job WHERE status = 'processing' OR published_at > now() - interval '1 minute'"
            )
            connection.execute("DELETE FROM recognition_job WHERE status = 'published' AND reply_deadline < now()")
            if request.param == "complete":
                connection.execute("ANALYZE")
        yield dsn


@define
class Plan:
    """How one statement was executed."""

    statement: str
    nodes: list[dict[str, Any]]

    @property
    def scanned(self) -> set[str]:
        """Tables read from end to end."""
        return {node["Relation Name"] for node in self.nodes if node["Node Type"] == "Seq Scan"}

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def buffers(self) -> int:
        return int(self.nodes[0]["Shared Hit Blocks"] + self.nodes[0]["Shared Read Blocks"])

    @property
    def discarded(self) -> int:
        """Rows that were read from a table and then found not to belong."""
        return sum(int(node.get("Rows Removed by Filter", 0) * node["Actual Loops"]) for node in self.nodes)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", []):
        yield from _nodes(inner)


@define
class Explaining:
    """A connection as `store` uses it, which executes each statement as prepared, and keeps how."""

    codec = None

    connection: Connection
    plans: list[Plan] = field(factory=list)

    @property
    def info(self) -> psycopg.ConnectionInfo:
        return self.connection.info

    def pipeline(self) -> nullcontext[None]:
        """None: each statement is to be explained by itself."""
        return nullcontext()

    async def execute(self, query: LiteralString, params: dict[str, Any] | None = None) -> psycopg.AsyncCursor[tuple[Any, ...]]:
        if params is None:
            return await self.connection.execute(query)
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", query)))
        text = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", query)
        await self.connection.execute(f"PREPARE probe AS {text}".encode())
        await self.connection.execute("SAVEPOINT before")
        arguments = sql.SQL(", ").join(sql.Literal(params[one]) for one in names)
        explain = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON, TIMING off) EXECUTE probe ({})").format(arguments)
        ((document,),) = await (await self.connection.execute(explain)).fetchall()
        self.plans.append(Plan(query, list(_nodes(document[0]["Plan"]))))
        await self.connection.execute("ROLLBACK TO before")
        await self.connection.execute("DEALLOCATE probe")
        return await self.connection.execute(query, params)


@asynccontextmanager
async def explaining(dsn: str, mode: str) -> AsyncIterator[tuple[Connection, list[Plan]]]:
    """A transaction, rolled back, whose statements are planned for their parameters (`custom`) or for any (`generic`).

    The server goes over to the second by itself once a statement has run often enough.
    """
    with trio.fail_after(30):
        async with connect(dsn, "armcore-trio test") as connection:
            connection.prepare_threshold = None
            await connection.execute(f"SET plan_cache_mode = force_{mode}_plan".encode())
            async with connection.transaction(force_rollback=True):
                spy = Explaining(connection)
                yield cast("Connection", spy), spy.plans


def check(plan: Plan, *indexes: str, rows: int, buffers_each: int) -> None:
    """The plan uses these indexes, scans no large table, and touches so many pages for each row and a few more."""
    assert plan.scanned & LARGE_TABLES == set(), plan.statement
    assert set(indexes) <= plan.indexes, plan.indexes
    assert plan.buffers <= 60 + rows * buffers_each, plan.buffers


modes = pytest.mark.parametrize("mode", ["custom", "generic"])


async def active(connection: Connection, status: str, due: str = "true") -> list[tuple[UUID, UUID]]:
    real = cast("Explaining", connection).connection
    query = f"SELECT id, file_id FROM recognition_job WHERE status = '{status}' AND {due} ORDER BY id"
    return cast("list[tuple[UUID, UUID]]", await (await real.execute(query.encode())).fetchall())


Claim = Callable[[Connection, int, list[UUID]], Awaitable[list[Any]]]


def _queued(connection: Connection, limit: int, skip: list[UUID]) -> Awaitable[list[Any]]:
    return store.claim_queued(connection, limit=limit, reply_timeout_seconds=900.0, skip=skip)


def _unacked(connection: Connection, limit: int, skip: list[UUID]) -> Awaitable[list[Any]]:
    return store.claim_unacked(
        connection,
        instant="now",
        limit=limit,
        ack_timeout_seconds=30.0,
        reply_timeout_seconds=900.0,
        below_repeats=10**9,
        skip=skip,
    )


def _expired(connection: Connection, limit: int, skip: list[UUID]) -> Awaitable[list[Any]]:
    return store.claim_expired(connection, instant="now", spared_seconds=None, limit=limit, skip=skip)


CLAIMS: list[tuple[Claim, str, int]] = [
    (_queued, "recognition_job_queued_idx", ACTIVE),
    (_unacked, "recognition_job_unacked_idx", ACTIVE),
    (_expired, "recognition_job_awaited_idx", 2 * ACTIVE),
]
claims = pytest.mark.parametrize(("claim", "index", "expected"), CLAIMS, ids=["queued", "unacked", "expired"])


@pytest.mark.req("D1.3", "R1", "R3", "R5")
@modes
@claims
@pytest.mark.parametrize(("limit", "skipped"), [(1, 0), (20, 10), (500, 0)])
async def test_a_claim_reads_its_partial_index(
    history: str, mode: str, claim: Claim, index: str, expected: int, limit: int, skipped: int
) -> None:
    async with explaining(history, mode) as (connection, plans):
        found = await claim(connection, limit, [uuid4() for _ in range(skipped)])
        assert len(found) == min(limit, expected)
        (plan,) = plans
        check(plan, index, rows=3 * ACTIVE, buffers_each=14)


@modes
@claims
async def test_a_claim_beside_an_old_snapshot_reads_its_partial_index(
    history: str, mode: str, claim: Claim, index: str, expected: int
) -> None:
    """The dead versions of rows cannot be cleared away then; each is looked at, and nothing else."""
    churn = 300
    with psycopg.connect(history) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM recognition_job WHERE status = 'queued'")
        with psycopg.connect(history, autocommit=True) as busy:
            busy.execute("SET session_replication_role = replica")
            busy.execute(
                "INSERT INTO stored_file (id, file_name) SELECT gen_random_uuid(), 'churn' FROM generate_series(1, %s)", (churn,)
            )
            busy.execute(
                "INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'tabular' FROM stored_file WHERE file_name = 'churn'"
            )
            for status in ("published", "processing", "done"):
                busy.execute(
                    "UPDATE recognition_job SET status = %s, published_at = now() - interval '1 hour', reply_deadline = now()"
                    " FROM stored_file WHERE stored_file.id = file_id AND file_name = 'churn'",
                    (status,),
                )
            busy.execute("DELETE FROM recognition_job USING stored_file WHERE stored_file.id = file_id AND file_name = 'churn'")
            busy.execute("DELETE FROM stored_file WHERE file_name = 'churn'")
        async with explaining(history, mode) as (connection, plans):
            assert len(await claim(connection, 500, [])) == expected
            (plan,) = plans
            check(plan, index, rows=3 * ACTIVE + 6 * churn, buffers_each=14)


async def _mark_published(connection: Connection, ids: list[UUID]) -> None:
    subjects = {"tabular": "files.tabular_uploaded", "image": "files.image_uploaded"}
    await store.mark_published(connection, ids, subjects=subjects, reply_timeout_seconds=900.0)


async def _mark_republished(connection: Connection, ids: list[UUID]) -> None:
    await store.mark_republished(connection, dict.fromkeys(ids, 1), reply_timeout_seconds=900.0)


@pytest.mark.req("R1", "R3")
@modes
@pytest.mark.parametrize("status", ["queued", "published"])
@pytest.mark.parametrize("count", [1, ACTIVE])
async def test_marking_what_was_sent_finds_it_by_its_key(history: str, mode: str, status: str, count: int) -> None:
    async with explaining(history, mode) as (connection, plans):
        ids = [job_id for job_id, _ in await active(connection, status)][:count]
        await (_mark_published if status == "queued" else _mark_republished)(connection, ids)
        (plan,) = plans
        check(plan, rows=count, buffers_each=60)


@pytest.mark.req("R4", "D1.2")
@modes
@pytest.mark.parametrize("unknown", [0, 500])
@pytest.mark.parametrize("count", [1, ACTIVE])
async def test_a_batch_locks_its_jobs_by_their_keys(history: str, mode: str, count: int, unknown: int) -> None:
    async with explaining(history, mode) as (connection, plans):
        ids = [job_id for job_id, _ in await active(connection, "processing")][:count]
        assert set(await store.lock_jobs(connection, ids + [uuid4() for _ in range(unknown)])) == set(ids)
        (plan,) = plans
        check(plan, "recognition_job_pkey", rows=count + unknown, buffers_each=8)


def _done(job_id: UUID, file_id: UUID) -> Any:
    ids = JobIds(job_id, file_id)
    envelope = decode(json.dumps(envelopes.done(ids, raw_s3_key=ids.raw_key)).encode(), 262_144)
    assert isinstance(envelope, Envelope)
    verdict = receive(Job(job_id, file_id, Status.PROCESSING), envelope, envelopes.result_id(ids), raw_bucket="arm-ka")
    assert verdict.outcome is Outcome.APPLIED
    return verdict.change


def _timeout(job_id: UUID, file_id: UUID) -> Any:
    return advance(Job(job_id, file_id, Status.PROCESSING), Event.EXPIRED, "no answer")


@pytest.mark.req("R4", "R5")
@modes
@pytest.mark.parametrize("change", [_done, _timeout])
@pytest.mark.parametrize("count", [1, ACTIVE])
async def test_a_batch_of_changes_finds_its_rows_by_their_keys(
    history: str, mode: str, change: Callable[[UUID, UUID], Any], count: int
) -> None:
    async with explaining(history, mode) as (connection, plans):
        jobs = (await active(connection, "processing"))[:count]
        await store.apply_changes(connection, [change(*job) for job in jobs])
        (plan,) = plans
        check(plan, "recognition_job_pkey", "stored_file_pkey", rows=count, buffers_each=120)


@pytest.mark.req("D1.3", "R1", "R3")
@modes
@pytest.mark.parametrize(
    ("claim", "index", "mark"),
    [
        (_queued, "recognition_job_queued_idx", _mark_published),
        (_unacked, "recognition_job_unacked_idx", _mark_republished),
    ],
    ids=["queued", "unacked"],
)
async def test_a_batch_of_a_long_backlog_costs_no_more_than_itself(
    backlog: str, mode: str, claim: Claim, index: str, mark: Callable[[Connection, list[UUID]], Awaitable[None]]
) -> None:
    """Else a backlog would take time by its square."""
    batch = 500
    async with explaining(backlog, mode) as (connection, plans):
        sources = await claim(connection, batch, [])
        assert len(sources) == batch
        await mark(connection, [source.job_id for source in sources])
        claimed, marked = plans
        check(claimed, index, rows=batch, buffers_each=14)
        check(marked, rows=batch, buffers_each=30)
