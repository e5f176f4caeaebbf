"""Several instances over one database and one NATS: they share the work, and nothing is done twice."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.database import Database, JobIds
from tests.support.sabotage import contradictions, record_changes
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

INSTANCES, JOBS, BATCH = 3, 600, 20
QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "OUTBOX_BATCH_SIZE": str(BATCH), "INBOX_BATCH_SIZE": str(BATCH)}
_PUBLISHERS_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'armcore-trio publisher' AND wait_event_type = 'Lock'
"""


def _queue_before_all_at_once(db: Database) -> list[JobIds]:
    """Jobs that become queued at the instant at which the publishers of all instances look."""
    jobs = db.insert_jobs(JOBS, status="published")  # never sent, so nobody's business yet
    with db.transaction() as barrier:
        barrier.execute("LOCK TABLE recognition_job IN EXCLUSIVE MODE")
        barrier.execute("UPDATE recognition_job SET status = 'queued'")
        wait_until(lambda: db.value(_PUBLISHERS_WAITING) == INSTANCES, what="every publisher at the barrier")
    return jobs


def _send_results(service: ServiceClient, jobs: Iterable[JobIds], *, copies: int) -> str:
    """Copies of each result back to back, so that two instances often hold one at the same time; returns where answers go."""
    reply = service.new_reply()
    for job in jobs:
        for _ in range(copies):
            service.send(envelopes.done(job), envelopes.result_id(job), reply=reply)
    return reply


def _outcomes(service: ServiceClient, reply: str, count: int) -> dict[str, Counter[str]]:
    """Job id → how its results were answered, once so many answers are there."""
    found: dict[str, Counter[str]] = {}
    for answer in service.wait_heard(count, reply, seconds=30):
        found.setdefault(answer.document["job_id"], Counter()).update([answer.document["outcome"]])
    return found


def _totals(daemons: list[DaemonProcess], task: str, entry: str) -> list[int]:
    """What each instance says it has done, in its last words."""
    return [daemon.one("shutdown.complete")["totals"][task].get(entry, 0) for daemon in daemons]


@pytest.mark.req("R1", "R4", "S4.2", "S6.2", "D1.1")
def test_instances_share_the_work_and_do_nothing_twice(start_daemon: StartDaemon, db: Database, service: ServiceClient) -> None:
    starting = [start_daemon(ACK_TIMEOUT_SECONDS="600", **QUICK) for _ in range(INSTANCES)]
    daemons = [daemon.wait_ok() for daemon in starting]
    record_changes(db)
    jobs = _queue_before_all_at_once(db)
    requests = service.wait_heard(JOBS, seconds=30)
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})

    reply = _send_results(service, jobs, copies=2)
    once_each = {str(job.id): {"applied": 1, "duplicate": 1} for job in jobs}
    assert _outcomes(service, reply, 2 * JOBS) == once_each
    assert set(db.statuses(jobs)) == {"done"}
    before = db.snapshot()
    reply = _send_results(service, jobs, copies=1)
    assert _outcomes(service, reply, JOBS) == {str(job.id): {"duplicate": 1} for job in jobs}
    assert db.snapshot() == before, "down to its xmin"

    assert Counter(request.msg_id for request in requests) == {job.msg_id: 1 for job in jobs}
    assert service.heard() == requests
    changes = db.execute("SELECT array_agg(status ORDER BY n) AS statuses FROM changes GROUP BY job_id")
    assert [row["statuses"] for row in changes] == [["queued", "published", "done"]] * JOBS
    assert contradictions(db) == []
    assert [daemon.stop() for daemon in daemons] == [0] * INSTANCES
    published, applied, duplicates, received = (
        _totals(daemons, *entry)
        for entry in (
            ("publisher", "published"),
            ("subscriber", "applied"),
            ("subscriber", "duplicate"),
            ("subscriber", "received"),
        )
    )
    assert (sum(published), sum(applied), sum(duplicates), sum(received)) == (JOBS, JOBS, 2 * JOBS, 3 * JOBS)
    assert min(published) > 0
    assert min(received) > 0
    assert all(not daemon.named("task.restarting") for daemon in daemons)
