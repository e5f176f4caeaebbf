"""Instances of the daemon, each a process, that share a backlog: how the rate grows, and a count that nothing was done twice."""

import json
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack

import psycopg
from attrs import asdict, frozen

from tests.bench.workload import Row, clear, insert_jobs
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.database import JobIds
from tests.support.servers import IMAGE_SUBJECT, RESULT_SUBJECT, TABULAR_SUBJECT, new_environment
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

INSTANCES = (1, 2, 4)
COPIES = 2
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


def measure(dsn: str, url: str, instances: int, jobs: int) -> Run:
    """A backlog published, then each job's result applied, sent twice back to back, then once more for the rows' `xmin`."""
    environment = new_environment(dsn, url) | {"ACK_TIMEOUT_SECONDS": "3600"}
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(dsn))
        clear(connection)
        daemons = [stack.enter_context(DaemonProcess(environment)) for _ in range(instances)]
        for daemon in daemons:
            daemon.wait_ok()
        subjects = [environment[TABULAR_SUBJECT], environment[IMAGE_SUBJECT]]
        service = stack.enter_context(ServiceClient(url, subjects=subjects, result_subject=environment[RESULT_SUBJECT]))

        rows = insert_jobs(connection, jobs, "published")
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
    return Run(
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


def main(dsn: str, url: str, jobs: int, runs: int, *, as_json: bool) -> None:
    """Measure each number of instances several times and print medians; exit 1 if anything was done twice or not at all."""
    found: list[Run] = []
    for run in range(runs):
        found += [measure(dsn, url, instances, jobs) for instances in INSTANCES]
        print(f"\r{run + 1}/{runs}", end="\r", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps([asdict(run) for run in found]))
    else:
        print(f"{'instances':10}{'published/s':>12}{'applied/s':>12}   once each, of {jobs}")
        for instances in INSTANCES:
            of_it = [run for run in found if run.instances == instances]
            rates = (statistics.median(run.published_rate for run in of_it), statistics.median(run.applied_rate for run in of_it))
            wrong = [run for run in of_it if not _exact(run, jobs)]
            verdict = f"NO: {wrong[0]}" if wrong else f"yes; shares {of_it[-1].shares}"
            print(f"{instances:<10}{rates[0]:>12.0f}{rates[1]:>12.0f}   {verdict}")
    sys.exit(0 if all(_exact(run, jobs) for run in found) else 1)


def _exact(run: Run, jobs: int) -> bool:
    counts = (run.on_the_wire, run.sent_twice, run.applied, run.duplicates, run.rewritten)
    return counts == (jobs, 0, jobs, COPIES * jobs, 0)


def _send_results(service: ServiceClient, rows: list[Row], copies: int) -> None:
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
