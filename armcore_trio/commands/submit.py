"""`armcore-trio submit`: a job by hand, as the core would insert it."""

import json
from uuid import UUID, uuid4

import click
from attrs import frozen

from armcore_trio.borders import store
from armcore_trio.borders.database import bounded
from armcore_trio.borders.store import Store
from armcore_trio.commands.common import as_json
from armcore_trio.commands.reaching import with_store


@click.command("submit")
@click.option("--bucket", required=True, help="Bucket of the source object.")
@click.option("--key", required=True, help="Key of the source object.")
@click.option("--name", required=True, help="The file's name.")
@click.option("--pipeline", required=True, help="tabular or image.")
@click.option("--content-type", help="The file's media type.")
@as_json
def command(bucket: str, key: str, name: str, pipeline: str, content_type: str | None, as_json: bool) -> None:
    """Register a source object, its file and a queued job, as the core would."""
    job = with_store(
        lambda database: submit(database, bucket=bucket, key=key, file_name=name, pipeline=pipeline, content_type=content_type)
    )
    click.echo(json.dumps({"job_id": str(job.job_id), "file_id": str(job.file_id)}) if as_json else job.job_id)


@frozen
class Submitted:
    """A job that has been queued."""

    job_id: UUID
    file_id: UUID


async def submit(database: Store, *, bucket: str, key: str, file_name: str, pipeline: str, content_type: str | None) -> Submitted:
    """Register source object, file and job in one transaction. Raises `WriteRefused` if the object is registered already."""
    submitted = Submitted(uuid4(), uuid4())
    async with database.open("submit") as connection, bounded("submit"), connection.transaction():
        await store.submit(
            connection,
            job_id=submitted.job_id,
            file_id=submitted.file_id,
            bucket=bucket,
            key=key,
            file_name=file_name,
            content_type=content_type,
            pipeline=pipeline,
        )
    return submitted
