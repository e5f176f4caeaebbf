"""Every statement the exchange runs, each in its file under `sql/`, and the functions that run them.

All take a connection whose caller has opened a transaction and wrapped it in `database.bounded`. A change is written
only onto the status it was decided on, and the rows are counted: `WriteRefused` if the database kept any of them back.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, LiteralString
from uuid import UUID

from attrs import frozen

from armcore_trio.borders.database import PING_SECONDS, Connection, bounded, connect
from armcore_trio.errors import Dependency, DependencyDown, SchemaOutdated, WriteRefused
from armcore_trio.protocol.lifecycle import FINAL, Change, Job, Status
from armcore_trio.protocol.messages import Source
from armcore_trio.resources import SQL

SCHEMA_VERSION = "0003"
"""The migration this version needs; revisions sort as text."""

CHANNEL: LiteralString = "recognition_job_queued"


def _load(name: LiteralString) -> LiteralString:
    return (SQL / f"{name}.sql").read_text("utf-8")


_FALL_ASLEEP = _load("fall_asleep")
_CLAIM_QUEUED = _load("claim_queued")
_CLAIM_UNACKED = _load("claim_unacked")
_ANY_UNACKED = _load("any_unacked")
_SET_DEADLINES = _load("set_deadlines")
_READ_CLOCK = _load("read_clock")
_CLAIM_EXPIRED = _load("claim_expired")
_MARK_PUBLISHED = _load("mark_published")
_MARK_REPUBLISHED = _load("mark_republished")
_LOCK_JOBS = _load("lock_jobs")
_APPLY_CHANGES = _load("apply_changes")
_APPLY_CHANGES_18 = _APPLY_CHANGES.replace("gen_random_uuid()", "uuidv7()")
"""The same with ids that grow with time, as only PostgreSQL 18 makes them: random ones cost a page of every index each."""
_RETRY = _load("retry")
_SUBMIT = _load("submit")
_LOCK_FOR_RETRY = _load("lock_for_retry")
_LATEST_ATTEMPT = _load("latest_attempt")


def _array(values: Iterable[UUID | int]) -> str:
    """An array, for which psycopg takes a dozen times as long."""
    return "{" + ",".join(map(str, values)) + "}"


async def check_schema(connection: Connection) -> None:
    """Raises `SchemaOutdated` if the database lacks what this version needs (D9.1), `DependencyDown` if it is read-only."""
    async with bounded("the schema check"):
        cursor = await connection.execute(
            "SELECT to_regclass('public.armcore_trio_version'), current_setting('transaction_read_only')"
        )
        table, read_only = (await cursor.fetchall())[0]
        version = ""
        if table is not None:
            cursor = await connection.execute("SELECT coalesce(max(version_num), '') FROM public.armcore_trio_version")
            version = (await cursor.fetchall())[0][0]
    if version < SCHEMA_VERSION:
        found = f"is at revision {version}" if version else "is missing"
        raise SchemaOutdated(f"the schema {found}, this version needs {SCHEMA_VERSION}: run `armcore-trio migrate`")
    if read_only == "on":
        raise DependencyDown(Dependency.DATABASE, "the server is read-only")


@frozen
class Store:
    """Where the exchange keeps its state: how to get a connection to it that is fit for use.

    `upgrade` is called if the schema is missing or too old (`run --migrate`); without it that is `SchemaOutdated`.
    """

    dsn: str
    upgrade: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def open(self, task: str) -> AsyncIterator[Connection]:
        """A connection to a checked, writable schema for the length of the block. Raises `DependencyDown`, `SchemaOutdated`."""
        async with connect(self.dsn, f"armcore-trio {task}") as connection:
            try:
                await check_schema(connection)
            except SchemaOutdated:
                if self.upgrade is None:
                    raise
                await self.upgrade()
                await check_schema(connection)
            yield connection


async def listen(connection: Connection) -> None:
    """From now on inserts wake `connection.wait_notified` (D1.6)."""
    async with bounded("LISTEN"):
        await connection.execute(f"LISTEN {CHANNEL}")


async def fall_asleep(connection: Connection) -> bool:
    """Have inserts notify from now on. False if some are under way that will not: then look again soon (D1.6).

    After True, what was committed before is still to be looked for. Who is asleep already may call it again, and should now
    and then: it may have been another's lock that was relied on. It is as good as a ping, and bounded like one.
    """
    async with bounded("the sleeper's lock", PING_SECONDS):
        return bool((await (await connection.execute(_FALL_ASLEEP)).fetchall())[0][0])


async def wake_up(connection: Connection) -> None:
    """Spare inserts the notification from now on: its owner looks without."""
    async with bounded("the sleeper's lock"):
        await connection.execute("SELECT pg_advisory_unlock_all()")


async def claim_queued(
    connection: Connection, *, limit: int, reply_timeout_seconds: float, skip: Collection[UUID]
) -> list[Source]:
    """The oldest queued jobs that nobody holds, locked until the transaction ends (D1.2, D1.3)."""
    params = {"limit": limit, "reply_timeout": reply_timeout_seconds, "skip": list(skip)}
    cursor = await connection.execute(_CLAIM_QUEUED, params)
    return [Source(*row) for row in await cursor.fetchall()]


async def claim_unacked(
    connection: Connection,
    *,
    instant: str,
    limit: int,
    ack_timeout_seconds: float,
    reply_timeout_seconds: float,
    below_repeats: int,
    skip: Collection[UUID],
) -> list[Source]:
    """Published jobs without an ack for that long at the instant, locked; those past their deadline are the watchdog's (D3.2).

    Only those repeated less often than `below_repeats`.
    """
    params = {
        "instant": instant,
        "below": below_repeats,
        "limit": limit,
        "ack_timeout": ack_timeout_seconds,
        "reply_timeout": reply_timeout_seconds,
        "skip": list(skip),
    }
    cursor = await connection.execute(_CLAIM_UNACKED, params)
    return [Source(*row) for row in await cursor.fetchall()]


async def any_unacked(connection: Connection, *, ack_timeout_seconds: float) -> bool:
    """Whether `claim_unacked` has something to look at. Locks nothing."""
    cursor = await connection.execute(_ANY_UNACKED, {"ack_timeout": ack_timeout_seconds})
    return bool((await cursor.fetchall())[0][0])


async def set_deadlines(connection: Connection, *, limit: int, reply_timeout_seconds: float) -> list[UUID]:
    """Give awaited jobs that have no deadline one from now on; returns their ids. Other programs write this table too."""
    cursor = await connection.execute(_SET_DEADLINES, {"limit": limit, "reply_timeout": reply_timeout_seconds})
    return [row[0] for row in await cursor.fetchall()]


async def read_clock(connection: Connection) -> tuple[str, float]:
    """The database's instant, as it takes it back in any session, and for how many seconds the server has been up."""
    instant, server_seconds = (await (await connection.execute(_READ_CLOCK)).fetchall())[0]
    return instant, server_seconds


async def claim_expired(
    connection: Connection, *, instant: str, spared_seconds: float | None, limit: int, skip: Collection[UUID]
) -> list[Job]:
    """Jobs whose reply was overdue at that instant, locked (R5); if given, only those created within so long before it."""
    params = {"instant": instant, "spared": spared_seconds, "limit": limit, "skip": list(skip)}
    cursor = await connection.execute(_CLAIM_EXPIRED, params)
    return [Job(job_id, file_id, Status(status)) for job_id, file_id, status in await cursor.fetchall()]


async def mark_published(
    connection: Connection, ids: Sequence[UUID], *, subjects: Mapping[str, str], reply_timeout_seconds: float
) -> None:
    """Queued jobs become published, each on its pipeline's subject (R1)."""
    params = {"ids": _array(ids), "subjects": json.dumps(subjects), "reply_timeout": reply_timeout_seconds}
    _expect(len(ids), (await connection.execute(_MARK_PUBLISHED, params)).rowcount)


async def mark_republished(connection: Connection, counts: Mapping[UUID, int], *, reply_timeout_seconds: float) -> None:
    """Published jobs were sent once more; `counts` tells how often by now (R3)."""
    params = {"ids": _array(counts), "counts": _array(counts.values()), "reply_timeout": reply_timeout_seconds}
    _expect(len(counts), (await connection.execute(_MARK_REPUBLISHED, params)).rowcount)


async def lock_jobs(connection: Connection, ids: Iterable[UUID]) -> dict[UUID, Job]:
    """The jobs of these ids that exist, locked; waits for whoever holds them, such as a publisher about to commit (D1.2)."""
    cursor = await connection.execute(_LOCK_JOBS, {"ids": _array(ids)})
    rows = await cursor.fetchall()
    return {row[0]: Job(row[0], row[1], Status(row[2]), row[3]) for row in rows}


async def apply_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """Write changes with their objects, files and facts; one change per job. One statement, all or nothing."""
    if not changes:
        return
    effects: dict[tuple[Any, ...], int] = {}
    rows = [_row(change, effects.setdefault(_effect(change), len(effects))) for change in changes]
    numbered = [{"number": number, "final": effect[0] in FINAL, **_named(effect)} for effect, number in effects.items()]
    query = _APPLY_CHANGES_18 if connection.info.server_version >= 180000 else _APPLY_CHANGES
    cursor = await connection.execute(query, {"changes": json.dumps(rows), "effects": json.dumps(numbered)})
    _expect(len(changes), (await cursor.fetchall())[0][0])


# What changes have in common: a batch of hundreds has a few of these, so each is written once and referred to by number.
_EFFECT = (
    "status", "expected", "file", "fact", "acked", "service_name", "service_version", "error_code", "error_message",
    "result_schema_version",
)  # fmt: skip
_effect = attrgetter(*_EFFECT)


def _named(effect: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(_EFFECT, effect, strict=True))


def _row(change: Change, effect: int) -> dict[str, Any]:
    """What is a change's own, as `apply_changes.sql` reads it; what is absent is NULL there."""
    row: dict[str, Any] = {"job_id": str(change.job.id), "effect": effect}
    if change.metrics is not None:
        row["metrics"] = change.metrics
    if change.result_msg_id is not None:
        row["result_msg_id"] = change.result_msg_id
    if change.result is not None:
        row |= {"result_bucket": change.result.bucket, "result_key": change.result.key}
    if change.raw is not None:
        row |= {"raw_bucket": change.raw.bucket, "raw_key": change.raw.key}
    return row


def _expect(expected: int, written: int) -> None:
    if written != expected:
        raise WriteRefused(None, f"{expected} rows were to be written, {written} were: a trigger or rule keeps the others")


@frozen
class RetryCandidate:
    """A locked job as a retry sees it. `current` tells whether it is its file's current job."""

    status: Status
    attempt: int
    current: bool
    latest_attempt: int


async def lock_for_retry(connection: Connection, job_id: UUID) -> RetryCandidate | None:
    """The job, locked together with its file (R8); None if there is none."""
    rows = await (await connection.execute(_LOCK_FOR_RETRY, {"id": job_id})).fetchall()
    if not rows:
        return None
    status, attempt, current = rows[0]
    latest = await (await connection.execute(_LATEST_ATTEMPT, {"id": job_id})).fetchall()
    return RetryCandidate(Status(status), attempt, current, latest[0][0])


async def retry(connection: Connection, job_id: UUID) -> tuple[UUID, int]:
    """A new attempt for a locked job's file, which becomes its current one. Returns the new job's id and attempt."""
    new_job_id, attempt = (await (await connection.execute(_RETRY, {"id": job_id})).fetchall())[0]
    return new_job_id, attempt


async def submit(connection: Connection, **values: str | UUID | None) -> None:
    """A source object, its file and a queued job. `values` are the parameters of `submit.sql`."""
    await connection.execute(_SUBMIT, {"created_by": "armcore-trio submit", **values})
