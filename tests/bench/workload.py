"""Equal work for every contender: the same rows, the same messages, on the same embedded servers."""

import json
from collections.abc import Iterator, Sequence
from typing import LiteralString
from uuid import UUID

import psycopg
from attrs import frozen

from armcore_trio.borders.bus import Received

ORDERED_ID, RANDOM_ID = "uuidv7", "gen_random_uuid"
"""What makes ids: the default of the tables on PostgreSQL 18, and what they have before it."""

_INSERT = """
WITH new AS MATERIALIZED (
    SELECT {new_id}() AS job_id, {new_id}() AS file_id, {new_id}() AS source_id
    FROM generate_series(1, %(count)s)
), source AS (
    INSERT INTO s3_object (id, bucket, key, bucket_role)
    SELECT source_id, 'arm-ka', 'source/' || source_id, 'source' FROM new
), file AS (
    INSERT INTO stored_file (id, file_name, content_type, s3_object_id, current_recognition_job_id)
    SELECT file_id, 'sheet.xlsx', 'text/csv', source_id, job_id FROM new
)
INSERT INTO recognition_job (id, file_id, pipeline, status, published_at, reply_deadline)
SELECT job_id, file_id, 'tabular', %(status)s, now(), now() + interval '1 hour' FROM new RETURNING id, file_id
"""

# Ids are hashes, as scattered as random ones, in the order in which indexes grow fastest.
_HISTORY: tuple[LiteralString, ...] = (
    # Rows that refer to each other from the first; nobody is to be woken either.
    "SET session_replication_role = replica",
    """
    CREATE TEMPORARY TABLE past AS
    SELECT (hash || '0')::uuid AS job_id, (hash || '1')::uuid AS file_id, (hash || '2')::uuid AS source_id,
           (hash || '3')::uuid AS result_id, now() - n * interval '30 seconds' AS at
    FROM (SELECT n, left(md5(n::text), 31) AS hash FROM generate_series(1, %(count)s) AS n) AS numbered
    ORDER BY hash""",
    """
    INSERT INTO s3_object (id, bucket, key, bucket_role, created_by, created_at)
    SELECT source_id, 'arm-ka', 'source/' || source_id || '.xlsx', 'source', 'core', at FROM past
    UNION ALL
    SELECT result_id, 'arm-ka', 'results/' || file_id || '/' || job_id || '/result.json', 'results', 'tabular-parser', at
    FROM past""",
    """
    INSERT INTO stored_file
        (id, file_name, content_type, s3_object_id, status, current_recognition_job_id, created_at, updated_at)
    SELECT file_id, 'sheet.xlsx', 'text/csv', source_id, 'PROCESSED', job_id, at, at FROM past""",
    """
    INSERT INTO recognition_job
        (id, file_id, pipeline, status, reply_deadline, request_subject, request_msg_id, published_at, started_at, finished_at,
         service_name, service_version, metrics, result_schema_version, result_s3_object_id, result_msg_id, created_at)
    SELECT job_id, file_id, 'tabular', 'done', at + interval '15 minutes', 'files.tabular_uploaded', job_id || ':1',
           at + interval '1 second', at + interval '2 seconds', at + interval '5 seconds',
           'tabular-parser', '1.0.0', '{"rows": 12, "seconds": 0.5}', '3.2', result_id, 'result:' || job_id || ':1', at
    FROM past""",
    "DROP TABLE past",
    "RESET session_replication_role",
    "CHECKPOINT",  # or it would run beside the first turns
)


@frozen
class Row:
    """A job that has been inserted."""

    job_id: UUID
    file_id: UUID


def insert(connection: psycopg.Connection, count: int, status: str, new_id: str = ORDERED_ID) -> list[Row]:
    """Fresh jobs in this status, each its file's current one, by one statement that is yet to be committed."""
    statement = _INSERT.format(new_id=new_id).encode()
    return [Row(*row) for row in connection.execute(statement, {"count": count, "status": status}).fetchall()]


def insert_jobs(
    connection: psycopg.Connection, count: int, status: str, new_id: str = ORDERED_ID, *, vacuum: bool = True
) -> list[Row]:
    """As `insert`, committed, in tables that are then vacuumed and analysed unless told otherwise."""
    rows = insert(connection, count, status, new_id)
    connection.commit()
    if vacuum:
        connection.autocommit = True
        connection.execute("VACUUM ANALYZE")
        connection.autocommit = False
    return rows


def insert_history(connection: psycopg.Connection, count: int) -> None:
    """Jobs done long ago, with their files and objects, in tables that nobody vacuums or analyses."""
    connection.autocommit = True
    for statement in _HISTORY:
        connection.execute(statement, {"count": count} if "%(count)s" in statement else None)
    connection.autocommit = False


def clear(connection: psycopg.Connection) -> None:
    """Empty tables."""
    connection.execute("TRUNCATE recognition_job, stored_file, s3_object, quality_failure_fact")
    connection.commit()


def answers(rows: Sequence[Row]) -> Iterator[Received]:
    """An ack and a result for each job, all acks of a batch first, as a service with many workers sends them."""
    for row in rows:
        yield _received(row, {"status": "processing"}, None)
    for row in rows:
        key = f"results/{row.file_id}/{row.job_id}/result.json"
        result: dict[str, object] = {
            "status": "done",
            "result_s3": {"bucket": "arm-ka", "key": key},
            "metrics": {"rows": 12, "seconds": 0.5},
        }
        yield _received(row, result, f"result:{row.job_id}:1")


def _received(row: Row, fields: dict[str, object], msg_id: str | None) -> Received:
    service = {"name": "tabular-parser", "version": "1.0.0"}
    envelope = {"schema_version": "1.0", "job_id": str(row.job_id), "service": service, **fields}
    return Received(json.dumps(envelope).encode(), msg_id)
