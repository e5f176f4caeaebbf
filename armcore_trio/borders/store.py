"""Every statement the exchange runs, each in its file under `sql/`, and the functions that run them.

All take a connection whose caller has opened a transaction and wrapped it in `database.bounded`. A change is written
only onto the status it was decided on, and the rows are counted: `WriteRefused` if the database kept any of them back.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import attrgetter
from typing import Any, LiteralString
from uuid import UUID

from attrs import frozen

from armcore_trio.borders.database import PING_SECONDS, Connection, bounded, connect
from armcore_trio.borders.fitness import check_schema, prove
from armcore_trio.errors import SchemaOutdated, WriteRefused
from armcore_trio.protocol.lifecycle import FINAL, Change, Job
from armcore_trio.protocol.messages import Source
from armcore_trio.resources import SQL

CHANNEL: LiteralString = "recognition_job_queued"

CHECK_DEFERRED: LiteralString = "SET CONSTRAINTS ALL IMMEDIATE"


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


_TEXTS = ("job.pipeline::text", "file.file_name::text", "file.content_type::text", "source.bucket::text", "source.key::text")
"""The columns of the claims that hold whatever the core wrote."""

_LIMITS = {"limit": 0, "skip": [], "reply_timeout": 0}
_ON_NO_ROWS = (
    (_CLAIM_QUEUED, _LIMITS),
    (_CLAIM_UNACKED, _LIMITS | {"instant": "epoch", "ack_timeout": 0, "below": 0}),
    (_SET_DEADLINES, _LIMITS),
    (_CLAIM_EXPIRED, _LIMITS | {"instant": "epoch", "spared": None}),
    (_MARK_PUBLISHED, {"ids": "{}", "subjects": "{}", "reply_timeout": 0}),
    (_MARK_REPUBLISHED, {"ids": "{}", "counts": "{}", "reply_timeout": 0}),
    (_LOCK_JOBS, {"ids": "{}"}),
    (_APPLY_CHANGES, {"changes": "[]", "effects": "[]"}),
)
"""All that the exchange does, with nothing to do it to."""


_json = partial(json.dumps, ensure_ascii=False)
"""Plain characters: an escape is translated by the server, which a database without an encoding refuses (N06)."""


def _array(values: Iterable[UUID | int]) -> str:
    """An array, for which psycopg takes a dozen times as long."""
    return "{" + ",".join(map(str, values)) + "}"


@frozen
class Store:
    """Where the exchange keeps its state: how to get a connection to it that is fit for use.

    `upgrade` is called if the schema is missing or too old (`run --migrate`); without it that is `SchemaOutdated`.
    """

    dsn: str
    upgrade: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def open(self, task: str) -> AsyncIterator[Connection]:
        """A connection that was seen to do the work, for the length of the block. Raises `DependencyDown`, `SchemaUnfit`."""
        async with connect(self.dsn, f"armcore-trio {task}") as connection:
            try:
                await check_schema(connection)
            except SchemaOutdated:
                if self.upgrade is None:
                    raise
                await self.upgrade()
                await check_schema(connection)
            await prove(connection, _ON_NO_ROWS)
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
    return await _sources(connection, _CLAIM_QUEUED, params)


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
    return await _sources(connection, _CLAIM_UNACKED, params)


async def _sources(connection: Connection, query: LiteralString, params: Mapping[str, Any]) -> list[Source]:
    """Only a database in UTF-8 holds nothing else. Any other's texts come as bytes, or one would fail them all (N06)."""
    codec = connection.codec
    if codec is None:
        return [Source(*row) for row in await (await connection.execute(query, params)).fetchall()]
    as_bytes = ", ".join(f"convert_to({column}, getdatabaseencoding())" for column in _TEXTS)
    cursor = await connection.execute(query.replace(", ".join(_TEXTS), as_bytes).encode(), params)
    return [_decoded(row, codec) for row in await cursor.fetchall()]


def _decoded(row: tuple[Any, ...], codec: str) -> Source:
    first, texts, last = row[:3], list(row[3 : 3 + len(_TEXTS)]), row[3 + len(_TEXTS) :]
    unreadable = None
    for number, text in enumerate(texts):
        try:
            texts[number] = text if text is None else text.decode(codec)
        except UnicodeDecodeError:
            texts[number], unreadable = (
                text.decode(codec, "backslashreplace"),
                _TEXTS[number].split(".")[1].removesuffix("::text"),
            )
    return Source(*[*first, *texts, *last, unreadable])


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
    return [Job(*row) for row in await cursor.fetchall()]


async def mark_published(
    connection: Connection, ids: Sequence[UUID], *, subjects: Mapping[str, str], reply_timeout_seconds: float
) -> None:
    """Queued jobs become published, each on its pipeline's subject (R1). The last write before they are sent."""
    params = {"ids": _array(ids), "subjects": _json(subjects), "reply_timeout": reply_timeout_seconds}
    await _write_last(connection, _MARK_PUBLISHED, params, len(ids))


async def mark_republished(connection: Connection, counts: Mapping[UUID, int], *, reply_timeout_seconds: float) -> None:
    """Published jobs were sent once more; `counts` tells how often by now (R3). The last write before they are sent."""
    params = {"ids": _array(counts), "counts": _array(counts.values()), "reply_timeout": reply_timeout_seconds}
    await _write_last(connection, _MARK_REPUBLISHED, params, len(counts))


async def _write_last(connection: Connection, query: LiteralString, params: Mapping[str, Any], count: int) -> None:
    """Write so many rows; what the commit could still refuse of the transaction is refused now, on the same way to the server.

    Not sooner: a core may have deferred its constraints because they do not hold between its triggers' writes.
    """
    async with connection.pipeline():
        cursor = await connection.execute(query, params)
        await connection.execute(CHECK_DEFERRED)
    _expect(count, cursor.rowcount)


async def lock_jobs(connection: Connection, ids: Iterable[UUID]) -> dict[UUID, Job]:
    """The jobs of these ids that exist, locked; waits for whoever holds them, such as a publisher about to commit (D1.2)."""
    cursor = await connection.execute(_LOCK_JOBS, {"ids": _array(ids)})
    rows = await cursor.fetchall()
    return {row[0]: Job(*row) for row in rows}


async def apply_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """Write changes with their objects, files and facts; one change per job. One statement, all or nothing."""
    if not changes:
        return
    effects: dict[tuple[Any, ...], int] = {}
    rows = [_row(change, effects.setdefault(_effect(change), len(effects))) for change in changes]
    numbered = [{"number": number, "final": effect[0] in FINAL, **_named(effect)} for effect, number in effects.items()]
    query = _APPLY_CHANGES_18 if connection.info.server_version >= 180000 else _APPLY_CHANGES
    cursor = await connection.execute(query, {"changes": _json(rows), "effects": _json(numbered)})
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
    """A locked job as a retry sees it: whether its file's row is there, and whether it is that file's current job."""

    status: str | None
    attempt: int
    has_file: bool
    current: bool
    latest_attempt: int


async def lock_for_retry(connection: Connection, job_id: UUID) -> RetryCandidate | None:
    """The job, locked together with its file (R8); None if there is none."""
    rows = await (await connection.execute(_LOCK_FOR_RETRY, {"id": job_id})).fetchall()
    if not rows:
        return None
    status, attempt, has_file, current = rows[0]
    latest = await (await connection.execute(_LATEST_ATTEMPT, {"id": job_id})).fetchall()
    return RetryCandidate(status, attempt, has_file, current, latest[0][0])


async def retry(connection: Connection, job_id: UUID) -> tuple[UUID, int]:
    """A new attempt for a locked job's file, which becomes its current one. Returns the new job's id and attempt."""
    new_job_id, attempt = (await (await connection.execute(_RETRY, {"id": job_id})).fetchall())[0]
    return new_job_id, attempt


async def submit(connection: Connection, **values: str | UUID | None) -> None:
    """A source object, its file and a queued job. `values` are the parameters of `submit.sql`."""
    await connection.execute(_SUBMIT, {"created_by": "armcore-trio submit", **values})
