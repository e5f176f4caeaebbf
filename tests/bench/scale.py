"""Instances of the daemon, each a process, that share a backlog: how the rate grows, and a count that nothing was done twice."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import psycopg
from attrs import frozen

from tests.bench import workload
from tests.bench.context import Context
from tests.bench.exchange import NotOnce
from tests.bench.figures import Row
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.database import JobIds
from tests.support.servers import IMAGE_SUBJECT, RESULT_SUBJECT, TABULAR_SUBJECT, new_environment
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

INSTANCES = (1, 2, 4)
COPIES = 2
_RUNS = 2
_LIMIT_SECONDS = 300


@frozen
class Run:
    """One run. Rates are jobs a second; the rest are counts over all instances."""

    instances: int
    published_rate: float
    applied_rate: float
    on_the_wire: int
    sent_twice: int
    applied: int
    duplicates: int
    rewritten: int
    """Rows that a repeated result changed."""
    shares: list[int]
    """Jobs that each instance published."""


def measure(context: Context) -> list[Row]:
    """What several instances do beside what one does. All have the same two cores or however many there are."""
    runs: dict[int, list[Run]] = {instances: [] for instances in INSTANCES}
    for turn in range(_RUNS):
        for number, instances in enumerate(INSTANCES):
            runs[instances].append(once(context.dsn, context.nats.url, instances, context.jobs))
            context.progress((turn + (number + 1) / len(INSTANCES)) / _RUNS)
    rates = {
        "publish": {instances: [run.published_rate for run in of_it] for instances, of_it in runs.items()},
        "apply": {instances: [run.applied_rate for run in of_it] for instances, of_it in runs.items()},
    }
    return [
        Row(f"{instances} instances {what} a backlog", "jobs/s", figures[instances], "one", figures[1])
        for what, figures in rates.items()
        for instances in INSTANCES
        if instances > 1
    ]


def once(dsn: str, url: str, instances: int, jobs: int) -> Run:
    """In empty tables a backlog published, then each job's result applied, sent twice back to back, then once more for the
    rows' `xmin`. Raises `NotOnce` if a count is not what it must be."""
    environment = new_environment(dsn, url) | {"ACK_TIMEOUT_SECONDS": "3600"}
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(dsn))
        workload.clear(connection)
        daemons = [stack.enter_context(DaemonProcess(environment)) for _ in range(instances)]
        for daemon in daemons:
            daemon.wait_ok()
        subjects = [environment[TABULAR_SUBJECT], environment[IMAGE_SUBJECT]]
        service = stack.enter_context(ServiceClient(url, subjects=subjects, result_subject=environment[RESULT_SUBJECT]))

        rows = workload.insert_jobs(connection, jobs, "published")
        connection.execute("UPDATE recognition_job SET status = 'queued', published_at = NULL")
        connection.execute("NOTIFY recognition_job_queued")
        started = time.perf_counter()
        connection.commit()
        wait_until(lambda: len(service._heard) >= jobs, _LIMIT_SECONDS, "every request")
        published_seconds = time.perf_counter() - started
        published = "SELECT count(*) FROM recognition_job WHERE status = 'published'"
        wait_until(lambda: _value(connection, published) == jobs, what="every job published")

        started = time.perf_counter()
        _send_results(service, rows, COPIES)
        applied_seconds = time.perf_counter() - started
        before = _versions(connection)
        _send_results(service, rows, 1)
        rewritten = len(set(_versions(connection)) - set(before))
        for daemon in daemons:
            daemon.stop()
        sent = Counter(request.msg_id for request in service.heard())
    totals = [daemon.one("shutdown.complete")["totals"] for daemon in daemons]
    run = Run(
        instances,
        jobs / published_seconds,
        jobs / applied_seconds,
        len(sent),
        sum(count > 1 for count in sent.values()),
        sum(one["subscriber"].get("applied", 0) for one in totals),
        sum(one["subscriber"].get("duplicate", 0) for one in totals),
        rewritten,
        [one["publisher"].get("published", 0) for one in totals],
    )
    if (run.on_the_wire, run.sent_twice, run.applied, run.duplicates, run.rewritten) != (jobs, 0, jobs, COPIES * jobs, 0):
        raise NotOnce(f"of {jobs} jobs: {run}")
    return run


def _send_results(service: ServiceClient, rows: Sequence[workload.Row], copies: int) -> None:
    """Returns when every copy has been answered."""
    reply = service.new_reply()
    awaited = len(service._heard) + copies * len(rows)
    for row in rows:
        job = JobIds(row.job_id, row.file_id)
        for _ in range(copies):
            service.send(envelopes.done(job), envelopes.result_id(job), reply=reply)
    wait_until(lambda: len(service._heard) >= awaited, _LIMIT_SECONDS, "an answer to every result")


def _versions(connection: psycopg.Connection) -> list[tuple[object, ...]]:
    """What changes whenever a row does."""
    query = "SELECT '{0}', id, xmin::text FROM {0}"
    tables = ("recognition_job", "stored_file", "s3_object", "quality_failure_fact")
    with connection.transaction():
        return connection.execute(" UNION ALL ".join(query.format(table) for table in tables).encode()).fetchall()


def _value(connection: psycopg.Connection, query: str) -> object:
    with connection.transaction():
        return connection.execute(query.encode()).fetchall()[0][0]
