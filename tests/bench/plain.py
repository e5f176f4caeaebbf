"""The program one would write without this project: asyncio, nats-py, psycopg and jsonschema, one transaction a message.

Written in good faith: one connection, statements prepared by psycopg, a validator built once. It leaves out what the
daemon also does (log, counters, strict JSON, validation of its own requests, answers, repeats, failures), which only makes
it faster. Messages of services are handed to it, as to the daemon's inbox here, without the way over NATS.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from jsonschema import Draft202012Validator
from nats.aio.client import Client
from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from armcore_trio.borders.bus import Received
from armcore_trio.resources import SCHEMAS

SUBJECT = "files.tabular_uploaded"

_ENVELOPE = json.loads((SCHEMAS / "recognition-result-message.schema.json").read_text("utf-8"))
_VALIDATOR = Draft202012Validator(_ENVELOPE, format_checker=Draft202012Validator.FORMAT_CHECKER)

_CLAIM = """
SELECT job.id, job.file_id, job.attempt, job.pipeline, job.reply_deadline,
       file.file_name, file.content_type, source.bucket, source.key
FROM recognition_job AS job
JOIN stored_file AS file ON file.id = job.file_id
JOIN s3_object AS source ON source.id = file.s3_object_id
WHERE job.status = 'queued'
ORDER BY job.created_at, job.id
LIMIT 1
FOR UPDATE OF job SKIP LOCKED
"""
_PUBLISHED = """
UPDATE recognition_job
SET status = 'published', published_at = now(), request_subject = %s, request_msg_id = %s
WHERE id = %s
"""
_LOCK = "SELECT file_id, status FROM recognition_job WHERE id = %s FOR UPDATE"
_ACKED = """
UPDATE recognition_job
SET status = 'processing', started_at = now(), service_name = %s, service_version = %s
WHERE id = %s
"""
_OBJECT = """
INSERT INTO s3_object (bucket, key, bucket_role, created_by) VALUES (%s, %s, 'results', %s) RETURNING id
"""
_DONE = """
UPDATE recognition_job
SET status = 'done', finished_at = now(), service_name = %s, service_version = %s, metrics = metrics || %s,
    result_msg_id = %s, result_s3_object_id = %s
WHERE id = %s
"""
_FILE = """
UPDATE stored_file SET status = 'PROCESSING', updated_at = now() WHERE id = %s AND current_recognition_job_id = %s
"""


async def drain(connection: AsyncConnection, nats: Client) -> int:
    """Publish queued jobs until none is left, each in a transaction of its own; returns how many."""
    published = 0
    while await _publish_one(connection, nats):
        published += 1
    return published


async def _publish_one(connection: AsyncConnection, nats: Client) -> bool:
    async with connection.transaction():
        row = await (await connection.execute(_CLAIM)).fetchone()
        if row is None:
            return False
        job_id, file_id, attempt, pipeline, deadline, name, content_type, bucket, key = row
        msg_id = f"{job_id}:{attempt}"
        request = {
            "schema_version": "1.0",
            "job_id": str(job_id),
            "file_id": str(file_id),
            "attempt": attempt,
            "pipeline": pipeline,
            "s3": {"bucket": bucket, "key": key},
            "file": {"name": name} | ({"content_type": content_type} if content_type else {}),
            "reply_deadline": _rfc3339(deadline),
        }
        await nats.publish(SUBJECT, json.dumps(request).encode(), headers={"Nats-Msg-Id": msg_id})
        await nats.flush()
        await connection.execute(_PUBLISHED, [SUBJECT, msg_id, job_id])
    return True


def _rfc3339(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def inbox(connection: AsyncConnection, messages: Iterable[Received]) -> int:
    """Apply each message, an ack or a result `done`, in a transaction of its own; returns how many changed their job."""
    applied = 0
    for message in messages:
        envelope = json.loads(message.data)
        _VALIDATOR.validate(envelope)
        async with connection.transaction():
            applied += await _apply(connection, envelope, message.msg_id)
    return applied


async def _apply(connection: AsyncConnection, envelope: dict[str, Any], msg_id: str | None) -> bool:
    job_id, service = UUID(envelope["job_id"]), envelope["service"]
    row = await (await connection.execute(_LOCK, [job_id])).fetchone()
    if row is None:
        return False
    file_id, status = row
    if envelope["status"] == "processing":
        if status != "published":
            return False
        await connection.execute(_ACKED, [service["name"], service["version"], job_id])
        await connection.execute(_FILE, [file_id, job_id])
        return True
    place = envelope["result_s3"]
    if status not in {"queued", "published", "processing"} or not place["key"].startswith(f"results/{file_id}/{job_id}/"):
        return False
    new = await connection.execute(_OBJECT, [place["bucket"], place["key"], service["name"]])
    [(object_id,)] = await new.fetchall()
    metrics = Jsonb(envelope.get("metrics", {}))
    await connection.execute(_DONE, [service["name"], service["version"], metrics, msg_id, object_id, job_id])
    if status != "processing":  # no ack came before it
        await connection.execute(_FILE, [file_id, job_id])
    return True
