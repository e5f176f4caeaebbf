"""Services that answer by themselves, in the client's reader thread: for bursts and faults, where no test can by hand.

Each is an `on_message` of `ServiceClient`: `open_service(environment, on_message=acknowledge)`.
"""

import random
from collections.abc import Callable, Iterable
from uuid import UUID

from tests.support import envelopes
from tests.support.database import JobIds
from tests.support.service import Heard, ServiceClient
from tests.support.waiting import wait_until

OpenService = Callable[..., ServiceClient]
"""The fixture `open_service`."""


def job_of(request: Heard) -> JobIds:
    """The job a request is about."""
    document = request.document
    return JobIds(UUID(document["job_id"]), UUID(document["file_id"]), document["s3"]["key"], document["attempt"])


def acknowledge(client: ServiceClient, request: Heard) -> None:
    """The ack and nothing else."""
    client.send(envelopes.ack(job_of(request)))


def complete(client: ServiceClient, request: Heard) -> None:
    """The ack, and at once the result, whose answer is wanted."""
    acknowledge(client, request)
    send_done(client, job_of(request), ask=True)


def send_done(client: ServiceClient, job: JobIds, *, ask: bool = False) -> None:
    """The result `done`; `ask` for an answer on the subject of `reply_of`."""
    client.send(envelopes.done(job), envelopes.result_id(job), reply=reply_of(client, job) if ask else "")


def send_burst(client: ServiceClient, jobs: Iterable[JobIds], *, share_asking: float = 0.3) -> list[JobIds]:
    """A result for each job as fast as the socket takes them; returns those that want an answer."""
    asking = []
    for job in jobs:
        if random.random() < share_asking:
            asking.append(job)
        send_done(client, job, ask=job in asking[-1:])
    return asking


def wait_busy(client: ServiceClient) -> None:
    """Wait until the first message has reached the service: the exchange is in the midst of its work."""
    wait_until(lambda: client._heard, what="a first message")


def reply_of(client: ServiceClient, job: JobIds) -> str:
    """Where the answer to the job's result is expected."""
    return f"{client.inbox}.{job.id}"


def outcomes(client: ServiceClient) -> dict[str, list[str]]:
    """Job id → the outcomes it was answered with so far."""
    found: dict[str, list[str]] = {}
    client.flush()
    for one in list(client._heard):
        if one.subject.startswith(f"{client.inbox}."):
            document = one.document
            found.setdefault(str(document["job_id"]), []).append(document["outcome"])
    return found
