"""Equal work for every contender: the same rows, the same messages, on the same embedded servers."""

import json
from collections.abc import Iterator
from uuid import UUID

import psycopg
from attrs import frozen

from armcore_trio.bus import Received

_INSERT = """
WITH source AS (
    INSERT INTO s3_object (bucket, key, bucket_role)
    SELECT 'arm-ka', 'source/' || gen_random_uuid(), 'source' FROM generate_series(1, %(count)s) RETURNING id
), file AS (
    INSERT INTO stored_file (file_name, content_type, s3_object_id) SELECT 'sheet.xlsx', 'text/csv', id FROM source RETURNING id
)
INSERT INTO recognition_job (file_id, pipeline, status, published_at, reply_deadline)
SELECT id, 'tabular', %(status)s, now(), now() + interval '1 hour' FROM file RETURNING id, file_id
"""


@frozen
class Row:
    """A job that has been inserted."""

    job_id: UUID
    file_id: UUID


def insert_jobs(connection: psycopg.Connection, count: int, status: str) -> list[Row]:
    """Fresh jobs in this status, each its file's current one, in vacuumed tables."""
    rows = [Row(*row) for row in connection.execute(_INSERT, {"count": count, "status": status}).fetchall()]
    connection.execute(
        "UPDATE stored_file AS file SET current_recognition_job_id = job.id"
        " FROM recognition_job AS job WHERE job.file_id = file.id"
    )
    connection.commit()
    connection.autocommit = True
    connection.execute("VACUUM ANALYZE")
    connection.autocommit = False
    return rows


def clear(connection: psycopg.Connection) -> None:
    """Empty tables."""
    connection.execute("TRUNCATE recognition_job, stored_file, s3_object, quality_failure_fact")
    connection.commit()


def answers(rows: list[Row]) -> Iterator[Received]:
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
