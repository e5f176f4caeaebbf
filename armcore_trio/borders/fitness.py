"""Whether a connection that was just opened can do the work: asked of the server by doing it, on no rows.

What keeps a role from its rows (a right, a policy, a view, a column of another type) is found by the statements
themselves, so nothing that a catalogue query might overlook passes here and fails later.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

import psycopg

from armcore_trio.borders.database import Connection, bounded
from armcore_trio.errors import Dependency, DependencyDown, SchemaOutdated, SchemaUnfit

SCHEMA_VERSION = "0003"
"""The migration this version needs; revisions sort as text."""

OLDEST_SERVER = 14
_REVISION = re.compile(r"\d{4}")

Statement = tuple[LiteralString, Mapping[str, Any]]

# What the server says to a statement that it will never run as things stand: class 42 and these two.
_NEVER = frozenset({"55000", "0A000"})


async def check_schema(connection: Connection) -> None:
    """Raises `SchemaOutdated` if the database lacks what this version needs (D9.1), `DependencyDown` if it is read-only.

    `SchemaUnfit` if the server is too old or the record of the revision damaged.
    """
    if connection.info.server_version < OLDEST_SERVER * 10000:
        raise SchemaUnfit(
            f"the server is PostgreSQL {connection.info.server_version // 10000}, {OLDEST_SERVER} is the oldest that will do"
        )
    async with bounded("the schema check"):
        cursor = await connection.execute(
            "SELECT to_regclass('public.armcore_trio_version'), current_setting('transaction_read_only')"
        )
        table, read_only = (await cursor.fetchall())[0]
        try:
            version = await _revision(connection) if table is not None else ""
        except psycopg.ProgrammingError as error:
            raise _unfit("the table armcore_trio_version cannot be read", error) from None
    if version < SCHEMA_VERSION:
        found = f"is at revision {version}" if version else "is missing"
        raise SchemaOutdated(f"the schema {found}, this version needs {SCHEMA_VERSION}: run `armcore-trio migrate`")
    if read_only == "on":
        raise DependencyDown(Dependency.DATABASE, "the server is read-only")


async def _revision(connection: Connection) -> str:
    cursor = await connection.execute("SELECT version_num::text FROM public.armcore_trio_version LIMIT 2")
    revisions = [str(row[0]) for row in await cursor.fetchall()]
    if damage := damaged(revisions):
        raise SchemaUnfit(damage)
    return revisions[0] if revisions else ""


def damaged(revisions: Sequence[str]) -> str | None:
    """What is wrong with what the version table holds; None for one revision, whoever's, or none at all."""
    if len(revisions) <= 1 and all(map(_REVISION.fullmatch, revisions)):
        return None
    return f"the table armcore_trio_version is damaged: it holds {list(revisions)}, not one revision such as {SCHEMA_VERSION}"


async def prove(connection: Connection, statements: Sequence[Statement]) -> None:
    """Run the exchange's statements on no rows and roll back, in one round trip. Raises `SchemaUnfit` for what must be mended."""
    try:
        async with bounded("the fitness check"), connection.transaction(force_rollback=True), connection.pipeline():
            for statement, params in statements:
                await connection.execute(statement, params)
    except (psycopg.Error, DependencyDown) as error:
        cause = error.__cause__ if isinstance(error, DependencyDown) else error
        if not isinstance(cause, psycopg.Error) or not _never(cause.sqlstate):
            raise
        raise _unfit("the tables cannot be used", cause) from None


def _never(state: str | None) -> bool:
    return state is not None and (state.startswith("42") or state in _NEVER)


def _unfit(what: str, error: psycopg.Error) -> SchemaUnfit:
    reason = " ".join((error.diag.message_primary or str(error)).split())
    if "row-level security" in reason:
        mend = "let the role see every row: `ALTER ROLE … BYPASSRLS`"
    elif error.sqlstate == "42501":
        mend = "`GRANT SELECT, INSERT, UPDATE ON s3_object, stored_file, recognition_job, quality_failure_fact TO …`"
    else:
        mend = "compare them with `armcore-trio migrate --sql`"
    return SchemaUnfit(f"{what}: {reason} ({error.sqlstate}); {mend}")
