"""The database as another program sees it: jobs inserted as the core inserts them, and whole rows to compare."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID, uuid4

import psycopg
from attrs import frozen
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.json import Jsonb

from armcore_trio.borders.store import CHANNEL
from armcore_trio.resources import SQL

Row = dict[str, Any]

XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
INFINITY = datetime.max.replace(tzinfo=UTC)
TABLES = ("s3_object", "stored_file", "recognition_job", "quality_failure_fact")


@frozen
class JobIds:
    """What a test inserted: the job, its file, and the key of the source object (None without one)."""

    id: UUID
    file_id: UUID
    key: str | None = None
    attempt: int = 1

    @property
    def msg_id(self) -> str:
        """`Nats-Msg-Id` of the job's requests."""
        return f"{self.id}:{self.attempt}"

    @property
    def result_key(self) -> str:
        """Where the job's result lies."""
        return f"results/{self.file_id}/{self.id}/result.json"

    @property
    def raw_key(self) -> str:
        """Where the job's raw answer lies."""
        return f"raw/{self.id}.json"


class _Loader(TimestamptzLoader):
    def load(self, data: Any) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:  # infinity, and years past 9999
            return INFINITY


class Database:
    """A test's own session, in autocommit mode. It connects again by itself after the server was gone.

    Calls block. No statement waits longer than 5 s for a lock, so a test that blocks itself fails instead of hanging.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._connection: psycopg.Connection[Row] | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def connect(self, **options: Any) -> psycopg.Connection[Row]:
        """A new session; the caller closes it."""
        parameters = {"connect_timeout": 5, "options": "-c lock_timeout=5s -c statement_timeout=30s", **options}
        connection = psycopg.connect(self.dsn, row_factory=dict_row, application_name="test", **parameters)
        connection.adapters.register_loader("timestamptz", _Loader)
        return connection

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Row]]:
        """A session of its own in a transaction, which holds what it locks until the block ends."""
        connection = self.connect()
        try:
            with connection.transaction():
                yield connection
        finally:
            connection.close()

    def execute(self, query: str, *params: Any) -> list[Row]:
        """Run one statement (`%s` for parameters); the rows it returns, if any."""
        try:
            cursor = self._session().execute(query.encode(), params or None)
        except psycopg.OperationalError:
            if not self._session(connect=False).closed:
                raise
            cursor = self._session().execute(query.encode(), params or None)
        return cursor.fetchall() if cursor.description is not None else []

    def value(self, query: str, *params: Any) -> Any:
        """The single value a query returns."""
        (row,) = self.execute(query, *params)
        (value,) = row.values()
        return value

    def insert_job(self, **columns: Any) -> JobIds:
        """A queued job as the core inserts it; see `insert_jobs` for what can be different."""
        return self.insert_jobs(1, **columns)[0]

    def insert_jobs(
        self,
        count: int,
        *,
        file_name: str = "prices.xlsx",
        content_type: str | None = XLSX,
        file: Row | None = None,
        bucket: str = "arm-ka",
        key: str | None = None,
        source: bool = True,
        current: bool = True,
        **columns: Any,
    ) -> list[JobIds]:
        """So many jobs in one transaction, each with a file and a source object of its own.

        `source=False` leaves the object out, `current=False` leaves the file without a current job. `file` holds more
        columns of `stored_file`; everything else is a column of `recognition_job`, by default `pipeline = tabular`.
        """
        jobs = []
        connection = self._session()
        with connection.transaction(), connection.pipeline():
            for _ in range(count):
                ids = JobIds(uuid4(), uuid4(), (key or f"source/{uuid4()}.xlsx") if source else None, columns.get("attempt", 1))
                source_id = uuid4() if source else None
                if source:
                    _insert(connection, "s3_object", id=source_id, bucket=bucket, key=ids.key, bucket_role="source")
                row = {"file_name": file_name, "content_type": content_type, "s3_object_id": source_id, **(file or {})}
                _insert(connection, "stored_file", id=ids.file_id, **row)
                _insert(connection, "recognition_job", **{"id": ids.id, "file_id": ids.file_id, "pipeline": "tabular", **columns})
                if current:
                    connection.execute(
                        "UPDATE stored_file SET current_recognition_job_id = %s WHERE id = %s", (ids.id, ids.file_id)
                    )
                jobs.append(ids)
        return jobs

    def insert_attempt(self, job: JobIds, *, current: bool = True, **columns: Any) -> JobIds:
        """Another job for the same file, which becomes its current one."""
        ids = JobIds(uuid4(), job.file_id, job.key, job.attempt + 1)
        row = {"id": ids.id, "file_id": ids.file_id, "attempt": ids.attempt, "pipeline": "tabular", **columns}
        _insert(self._session(), "recognition_job", **row)
        if current:
            self.execute("UPDATE stored_file SET current_recognition_job_id = %s WHERE id = %s", ids.id, ids.file_id)
        return ids

    def rows(self, table: str, where: str = "true", *params: Any) -> list[Row]:
        """Whole rows, `xmin` included, in the order of their ids."""
        return self.execute(f"SELECT xmin::text::bigint AS xmin, * FROM {table} WHERE {where} ORDER BY id", *params)

    def snapshot(self) -> dict[str, list[Row]]:
        """All rows of all tables, to show that something changed nothing."""
        return {table: self.rows(table) for table in TABLES}

    def job(self, job: JobIds) -> Row:
        """The job's row."""
        return self.rows("recognition_job", "id = %s", job.id)[0]

    def jobs(self, jobs: Sequence[JobIds]) -> list[Row]:
        """The jobs' rows, in the order given."""
        found = {row["id"]: row for row in self.rows("recognition_job", "id = ANY(%s)", [job.id for job in jobs])}
        return [found[job.id] for job in jobs]

    def statuses(self, jobs: Sequence[JobIds]) -> list[str]:
        """The jobs' statuses, in the order given."""
        return [row["status"] for row in self.jobs(jobs)]

    def file(self, job: JobIds) -> Row:
        """The row of the job's file."""
        return self.rows("stored_file", "id = %s", job.file_id)[0]

    def fact(self, job: JobIds) -> Row | None:
        """The job's failure fact, if it has one."""
        return next(iter(self.rows("quality_failure_fact", "job_id = %s", job.id)), None)

    def object(self, object_id: UUID) -> Row:
        """A row of `s3_object`."""
        return self.rows("s3_object", "id = %s", object_id)[0]

    def is_locked(self, job: JobIds) -> bool:
        """Whether somebody holds the job's row."""
        return not self.execute("SELECT 1 AS free FROM recognition_job WHERE id = %s FOR UPDATE SKIP LOCKED", job.id)

    def lock_waiters(self) -> int:
        """How many sessions of this database wait for a lock."""
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return int(self.value(waiting))

    def _session(self, *, connect: bool = True) -> psycopg.Connection[Row]:
        if self._connection is None or (connect and self._connection.closed):
            self._connection = self.connect(autocommit=True)
        return self._connection


class Sleeper:
    """A session that listens as a publisher does, and falls asleep and wakes up by the same SQL when told to."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True, connect_timeout=5, application_name="test sleeper")
        self.connection.execute(f"LISTEN {CHANNEL}".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def fall_asleep(self) -> bool:
        """Whether inserts notify from now on."""
        ((asleep,),) = self.connection.execute((SQL / "fall_asleep.sql").read_bytes()).fetchall()
        return bool(asleep)

    def wake_up(self) -> None:
        self.connection.execute("SELECT pg_advisory_unlock_all()")

    def notified(self) -> int:
        """How many notifications came since the last time. All of what was committed before are here: they precede an answer."""
        self.connection.execute("SELECT 1")
        found = list(self.connection.notifies(timeout=0))
        assert {(one.channel, one.payload) for one in found} <= {(CHANNEL, "")}
        return len(found)


def _insert(connection: psycopg.Connection[Row], table: str, **values: Any) -> None:
    query = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(sql.Placeholder() * len(values)),
    )
    connection.execute(query, [Jsonb(value) if isinstance(value, dict) else value for value in values.values()])
