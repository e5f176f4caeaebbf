"""A second signal ends the stop at once, and what was received and not applied is still listed (R9, D4.7)."""

from signal import SIGINT, SIGTERM
from time import monotonic

import pytest

from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.database import Database
from tests.support.responder import outcomes, send_done
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until


@pytest.mark.req("R9", "D4.7", "B37")
@pytest.mark.parametrize(("first", "second"), [(SIGTERM, SIGINT), (SIGINT, SIGTERM)])
def test_a_second_signal_lists_what_is_left_in_the_inbox(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, first: int, second: int
) -> None:
    daemon = start_daemon(SHUTDOWN_GRACE_SECONDS="60").wait_ok()
    daemon.claim("inbox.abandoned")
    jobs = db.insert_jobs(20)
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        for job in jobs:
            send_done(service, job, ask=True)
        service.flush()
        received = 'armcore_events_total{event="received",task="subscriber"} 20.0'
        wait_until(lambda: received in daemon.get("/metrics")[1], what="all results in the inbox")
        daemon.send_signal(first)
        daemon.wait_for_event("shutdown.started")
        started = monotonic()
        daemon.send_signal(second)
        assert daemon.wait_exit() == 128 + second
        assert monotonic() - started < 2
    abandoned = [(record["job_id"], record["msg_id"]) for record in daemon.named("inbox.abandoned")]
    assert abandoned == [(str(job.id), envelopes.result_id(job)) for job in jobs]
    complete = daemon.one("shutdown.complete")
    assert daemon.all[-1] is complete
    assert complete["exit_code"] == 128 + second
    book = complete["books"]["subscriber"]
    assert (book["received"], book["abandoned"], book["waiting"], book["difference"]) == (20, 20, 0, 0)
    assert daemon.one("shutdown.hurried")
    assert outcomes(service) == {}
    assert set(db.statuses(jobs)) == {"published"}
