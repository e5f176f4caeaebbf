"""A daemon of its own, with a service that answers each request by an ack and a result: to have worked, and to work hard."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg

from tests.bench.exchange import NotOnce
from tests.bench.workload import insert
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.responder import job_of
from tests.support.servers import IMAGE_SUBJECT, RESULT_SUBJECT, TABULAR_SUBJECT
from tests.support.service import Heard, ServiceClient

_LIMIT_SECONDS = 120
_LOOK_SECONDS = 0.05
_UNFINISHED = "SELECT FROM recognition_job WHERE status IN ('queued', 'published', 'processing') LIMIT 1"


@contextmanager
def loaded_daemon(environment: Mapping[str, str], url: str) -> Iterator[DaemonProcess]:
    """In working order and answered. It is stopped in the end, and raises `NotOnce` if its sums tell of more or less."""
    subjects = [environment[TABULAR_SUBJECT], environment[IMAGE_SUBJECT]]
    with DaemonProcess(environment) as daemon:
        daemon.wait_ok()
        with ServiceClient(url, subjects=subjects, result_subject=environment[RESULT_SUBJECT], on_message=_answer):
            yield daemon
        daemon.stop()
    totals = daemon.one("shutdown.complete")["totals"]
    counts = [totals["publisher"]["published"], totals["subscriber"]["received"] / 2, totals["subscriber"]["applied"] / 2]
    if len(set(counts)) > 1:
        raise NotOnce(f"jobs published, answered and applied: {counts}")


def work(connection: psycopg.Connection, jobs: int) -> None:
    """So many jobs, from one insert until the last is `done`. Wants autocommit."""
    insert(connection, jobs, "queued")
    give_up = time.monotonic() + _LIMIT_SECONDS
    while connection.execute(_UNFINISHED).fetchall():
        if time.monotonic() > give_up:
            raise NotOnce(f"{jobs} jobs are not all done after {_LIMIT_SECONDS} s")
        time.sleep(_LOOK_SECONDS)


def _answer(service: ServiceClient, request: Heard) -> None:
    job = job_of(request)
    service.send(envelopes.ack(job))
    service.send(envelopes.done(job), envelopes.result_id(job))
