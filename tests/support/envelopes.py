"""What a recognition service answers for a job: valid envelopes, to be sent as they are or spoilt first."""

from typing import Any

from tests.support.database import JobIds

Envelope = dict[str, Any]

SERVICE = {"name": "tabular-parser", "version": "2.1.0"}


def _envelope(job: JobIds, status: str, /, **fields: Any) -> Envelope:
    return {"schema_version": "1.0", "job_id": str(job.id), "status": status, "service": SERVICE, **fields}


def ack(job: JobIds, **fields: Any) -> Envelope:
    """The service has taken the job. `fields` replace or extend what stands in the envelope, here and below."""
    return _envelope(job, "processing", **fields)


def done(job: JobIds, **fields: Any) -> Envelope:
    """The job is done; its result lies where it should."""
    return _envelope(job, "done", **{"result_s3": result_s3(job), "result_schema_version": "3.2", **fields})


def needs_check(job: JobIds, **fields: Any) -> Envelope:
    """There is a result that a person should look at."""
    return _envelope(job, "needs_check", **{"result_s3": result_s3(job), "result_schema_version": "3.2", **fields})


def error(job: JobIds, **fields: Any) -> Envelope:
    """The service could not do the job."""
    failure = {"code": "UNSUPPORTED_FORMAT", "message": "not a spreadsheet"}
    return _envelope(job, "error", **{"error": failure, **fields})


def result_s3(job: JobIds) -> dict[str, str]:
    """The place of the job's result."""
    return {"bucket": "arm-ka", "key": job.result_key}


def result_id(job: JobIds) -> str:
    """`Nats-Msg-Id` of the job's result."""
    return f"result:{job.id}:{job.attempt}"
