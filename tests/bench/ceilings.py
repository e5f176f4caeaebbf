"""The bare loops: the least that PostgreSQL and NATS must do for the same jobs, without schema, log or lifecycle."""

import json
from collections.abc import Sequence
from uuid import uuid4

from armcore_trio.borders.bus import Bus, Message
from armcore_trio.borders.database import Connection
from tests.bench.workload import Row


async def drain(connection: Connection, bus: Bus, batch_size: int) -> None:
    """Claim queued rows, publish them, mark them."""
    while True:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT job.id, job.file_id, source.key FROM recognition_job job JOIN stored_file file ON file.id = job.file_id"
                " JOIN s3_object source ON source.id = file.s3_object_id WHERE job.status = 'queued'"
                " ORDER BY job.created_at, job.id LIMIT %s FOR UPDATE OF job SKIP LOCKED",
                [batch_size],
            )
            rows = await cursor.fetchall()
            if not rows:
                return
            messages = [
                Message(
                    "files.tabular_uploaded",
                    json.dumps({"job_id": str(job), "file_id": str(file), "key": key}).encode(),
                    f"{job}:1",
                )
                for job, file, key in rows
            ]
            await bus.publish_batch(messages)
            await connection.execute(
                "UPDATE recognition_job SET status = 'published', published_at = now(), request_msg_id = id || ':1'"
                " WHERE id = ANY (%s)",
                [[row[0] for row in rows]],
            )


async def inbox(connection: Connection, rows: Sequence[Row], batch_size: int) -> None:
    """Ack and result of each job as set-based updates, in as many transactions as the inbox needs for two messages a job."""
    for first in range(0, len(rows), batch_size):
        ids = [row.job_id for row in rows[first : first + batch_size]]
        async with connection.transaction():
            await connection.execute("SELECT id FROM recognition_job WHERE id = ANY (%s) ORDER BY id FOR UPDATE", [ids])
            await connection.execute(
                "WITH job AS (UPDATE recognition_job SET status = 'processing', started_at = now(), service_name = 's'"
                " WHERE id = ANY (%s) RETURNING id, file_id)"
                " UPDATE stored_file file SET status = 'PROCESSING', updated_at = now() FROM job"
                " WHERE file.id = job.file_id AND file.current_recognition_job_id = job.id",
                [ids],
            )
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        ids = [row.job_id for row in batch]
        objects = [uuid4() for _ in batch]
        keys = [f"results/{row.file_id}/{row.job_id}/result.json" for row in batch]
        async with connection.transaction():
            await connection.execute("SELECT id FROM recognition_job WHERE id = ANY (%s) ORDER BY id FOR UPDATE", [ids])
            await connection.execute(
                "INSERT INTO s3_object (id, bucket, key, bucket_role)"
                " SELECT id, 'arm-ka', key, 'results' FROM unnest(%s::uuid[], %s::text[]) AS new (id, key)",
                [objects, keys],
            )
            await connection.execute(
                "UPDATE recognition_job job SET status = 'done', finished_at = now(), result_s3_object_id = new.object_id,"
                " result_msg_id = 'result:' || job.id FROM unnest(%s::uuid[], %s::uuid[]) AS new (id, object_id)"
                " WHERE job.id = new.id",
                [ids, objects],
            )
