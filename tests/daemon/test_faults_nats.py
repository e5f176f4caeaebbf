"""nats-server killed, frozen, deaf, leaving, refusing: the daemon as a process, and what it makes of each."""

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

import psycopg
import pytest

from armcore_trio.demo.embedded import Nats
from armcore_trio.settings import JWT, SEED, URL
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.credentials import user_credentials
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.responder import OpenService, acknowledge, complete, outcomes, send_done, wait_busy
from tests.support.stand_in import StandInNats
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}
NATS_TASKS = {"publisher", "subscriber.intake"}


@pytest.fixture
def half_own(own_nats: Nats, environment: dict[str, str]) -> dict[str, str]:
    """A nats-server of this test's own, and the PostgreSQL all share."""
    return environment | {URL: own_nats.url}


def _restarted(daemon: DaemonProcess) -> Counter[str]:
    return Counter(record["task"] for record in daemon.named("task.restarting"))


@pytest.mark.req("B07")
def test_a_server_killed_amid_requests_ends_its_owners_and_nobody_else(
    start_daemon: StartDaemon, half_own: dict[str, str], own_nats: Nats, db: Database, open_service: OpenService
) -> None:
    daemon = start_daemon(half_own, ACK_TIMEOUT_SECONDS="20", **QUICK).wait_ok()
    lost = []
    for n in range(1, 3):
        service = open_service(half_own, on_message=complete)
        lost += db.insert_jobs(100)
        wait_busy(service)
        own_nats.kill()
        daemon.wait_health(nats="down")
        own_nats.start()
        daemon.wait_ok()
        assert _restarted(daemon) == dict.fromkeys(NATS_TASKS, n), "each owner once, no sibling"
    service = open_service(half_own)
    job = db.insert_job()
    service.wait_heard(1)
    for one in [*lost, job]:
        send_done(service, one, ask=True)
    wait_until(lambda: set(db.statuses([*lost, job])) == {"done"})
    assert daemon.stop() == 0
    assert {record["event"] for record in daemon.all if record["level"] == "warning"} <= {
        "task.restarting",
        "inbox.late",
        "inbox.answers_unsent",
    }


@pytest.mark.req("B09", "D9.2")
def test_a_server_that_comes_late_is_used_one_back_off_later(
    start_daemon: StartDaemon, half_own: dict[str, str], own_nats: Nats
) -> None:
    own_nats.stop()
    daemon = start_daemon(half_own)
    daemon.wait_health(lambda report: report["tasks"]["subscriber"]["restarts"] >= 3, nats="down")
    lines = len(daemon.all)
    assert lines < 10
    own_nats.start()
    started = monotonic()
    daemon.wait_ok()
    assert monotonic() - started < 4 * 1.2 + 1
    assert {record["attempts"] for record in daemon.named("task.recovered")} <= {2, 3, 4}


@pytest.mark.req("B20")
def test_a_user_that_is_removed_is_out_at_once_and_in_again_when_let_in(
    start_daemon: StartDaemon, half_own: dict[str, str], own_nats: Nats, db: Database, open_service: OpenService
) -> None:
    others = "{user: service, password: s}"
    allowed = f"authorization {{ users: [{{user: core, password: canary-4812}}, {others}] }}"
    own_nats.stop()
    own_nats.config = allowed
    own_nats.start()
    service = open_service(half_own, user="service", **{"pass": "s"})
    url = f"nats://core:canary-4812@127.0.0.1:{own_nats.port}"
    daemon = start_daemon(half_own | {URL: url}, **QUICK).wait_ok()
    own_nats.reload(f"authorization {{ users: [{others}] }}")
    report = daemon.wait_health(nats="down", seconds=3)
    assert report["status"] == "degraded"
    job = db.insert_job()
    report = daemon.wait_health(lambda report: report["tasks"]["subscriber"]["restarts"] >= 3, nats="down")
    assert "authorization" in report["tasks"]["subscriber"]["last_error"].lower()
    assert db.job(job)["status"] == "queued"
    own_nats.reload(allowed)
    daemon.wait_ok()
    assert service.wait_heard(1)[0].msg_id == job.msg_id
    assert service.ask(envelopes.ack(job))["outcome"] == "applied"
    assert daemon.stop() == 0
    assert len(daemon.named("task.restarting")) <= 6
    assert "canary-4812" not in str(daemon)


@pytest.mark.req("B20")
def test_credentials_that_expire_are_told_with_the_servers_reason(start_daemon: StartDaemon, environment: dict[str, str]) -> None:
    seed, jwt = user_credentials()
    with StandInNats() as server:
        daemon = start_daemon(environment | {URL: server.url, SEED: seed, JWT: jwt}, DEBUG="true", **QUICK).wait_ok()
        assert jwt in server.connects[0]
        server.refusal = "Authorization Violation"
        server.expel("User Authentication Expired")
        for task in NATS_TASKS:
            first = daemon.wait_for_event("task.restarting", task=task, seconds=2)
            assert "user authentication expired" in first["error"].lower()
        daemon.wait_health(lambda report: report["tasks"]["subscriber"]["restarts"] >= 3, nats="down")
        attempts = len(server.connects)
        assert attempts <= 2 + 2 * 4
        server.refusal = None
        daemon.wait_ok()
        assert daemon.stop() == 0
    assert seed not in str(daemon)
    assert jwt not in str(daemon)


@pytest.mark.req("B30", "D3.1")
def test_an_outage_is_no_unanswered_request(
    start_daemon: StartDaemon, half_own: dict[str, str], own_nats: Nats, db: Database, open_service: OpenService
) -> None:
    listener = open_service(half_own)
    daemon = start_daemon(half_own, ACK_TIMEOUT_SECONDS="0.6", **QUICK).wait_ok()
    jobs = db.insert_jobs(5)
    listener.wait_heard(5)
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})
    own_nats.stop()
    daemon.wait_health(nats="down")
    before = {row["id"]: row["metrics"].get("republish_count", 0) for row in db.jobs(jobs)}
    outlasting = "SELECT min(published_at) < now() - interval '3 s' FROM recognition_job"  # all four waits, were they counted
    wait_until(lambda: db.value(outlasting))
    assert {row["id"]: row["metrics"].get("republish_count", 0) for row in db.jobs(jobs)} == before
    assert set(db.statuses(jobs)) == {"published"}
    own_nats.start()
    service = open_service(half_own, on_message=acknowledge)
    wait_until(lambda: set(db.statuses(jobs)) == {"processing"})
    assert all(row["metrics"].get("republish_count", 0) <= before[row["id"]] + 1 for row in db.jobs(jobs))
    assert len(service.heard()) == 5, "no burst of copies"
    assert daemon.stop() == 0


@pytest.mark.req("B31")
def test_a_frozen_server_holds_no_rows_for_long(
    start_daemon: StartDaemon,
    half_own: dict[str, str],
    environment: dict[str, str],
    own_nats: Nats,
    db: Database,
    open_service: OpenService,
) -> None:
    service = open_service(environment)
    daemon = start_daemon(half_own, **QUICK).wait_ok()
    received = db.insert_job(status="published", published_at="now", reply_deadline="infinity", metrics={"republish_count": 0})
    own_nats.freeze()
    try:
        jobs = db.insert_jobs(20)
        free = "SELECT count(*) FROM (SELECT FROM recognition_job WHERE status = 'queued' FOR UPDATE SKIP LOCKED) AS free"
        wait_until(lambda: db.value(free) == 0)
        other = start_daemon(environment, OUTBOX_POLL_SECONDS="3600", WATCHDOG_PERIOD_SECONDS="0.2").wait_ok()
        overdue = db.insert_job(status="processing", started_at="now", reply_deadline="2020-01-01T00:00:00Z")
        wait_until(lambda: db.job(overdue)["status"] == "timeout", 2)
        assert service.ask(envelopes.done(received), envelopes.result_id(received), seconds=2)["outcome"] == "applied"
        assert db.value(free) == 0, "all this while the rows are locked"
        with psycopg.connect(db.dsn, autocommit=True, options="-c lock_timeout=10s") as another:
            another.execute("UPDATE recognition_job SET pipeline = pipeline WHERE id = %s", [jobs[0].id])
        assert set(db.statuses(jobs)) <= {"queued", "published"}
        record = daemon.wait_for_event("task.restarting", task="publisher")
        assert "did not confirm" in record["error"] or "did not answer" in record["error"]
        assert other.stop() == 0
    finally:
        own_nats.thaw()
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})
    assert daemon.stop() == 0


@pytest.mark.req("B32", "D1.1")
def test_a_link_that_swallows_every_byte_is_noticed_and_replaced(
    start_daemon: StartDaemon,
    environment: dict[str, str],
    nats_server: Nats,
    db: Database,
    open_service: OpenService,
    link: Callable[[int], Proxy],
) -> None:
    service = open_service(environment)
    proxy = link(nats_server.port)
    daemon = start_daemon(environment | {URL: f"nats://127.0.0.1:{proxy.port}"}, ACK_TIMEOUT_SECONDS="60", **QUICK).wait_ok()
    first = db.insert_job()
    service.wait_heard(1)
    wait_until(lambda: db.job(first)["status"] == "published")
    proxy.stall()
    started = monotonic()
    job = db.insert_job()
    daemon.wait_health(lambda report: report["tasks"]["subscriber"]["restarts"] >= 1, nats="down", seconds=20)
    assert monotonic() - started < 12
    assert db.job(job)["status"] == "queued"
    proxy.resume()
    proxy.cut()
    daemon.wait_ok()
    wait_until(lambda: db.job(job)["status"] == "published")
    assert [request.msg_id for request in service.heard()] == [first.msg_id, job.msg_id]
    assert db.job(first)["metrics"] == {}
    assert daemon.stop() == 0


@pytest.mark.req("B34", "B57")
def test_a_server_that_announces_its_end_is_left_for_another(
    start_daemon: StartDaemon,
    half_own: dict[str, str],
    own_nats: Nats,
    nats_server: Nats,
    db: Database,
    open_service: OpenService,
    environment: dict[str, str],
) -> None:
    service = open_service(environment)
    early = open_service(half_own)
    daemon = start_daemon(half_own | {URL: f"{own_nats.url},{nats_server.url}"}, **QUICK).wait_ok()
    jobs = db.insert_jobs(50)
    early.wait_heard(50)
    for job in jobs:
        send_done(early, job)
    early.flush()
    own_nats.signal("ldm")
    for task in NATS_TASKS:
        assert "lame duck" in daemon.wait_for_event("task.restarting", task=task)["error"]
    daemon.wait_ok()
    wait_until(lambda: set(db.statuses(jobs)) == {"done"})
    job = db.insert_job()
    service.wait_heard(1)
    assert service.ask(envelopes.done(job), envelopes.result_id(job))["outcome"] == "applied"
    assert daemon.health()["nats"] == "ok"
    assert daemon.stop() == 0
    assert _restarted(daemon) == dict.fromkeys(NATS_TASKS, 1)


@pytest.mark.req("B34")
def test_a_server_that_leaves_in_an_orderly_way_is_an_outage(
    start_daemon: StartDaemon, half_own: dict[str, str], own_nats: Nats
) -> None:
    daemon = start_daemon(half_own, **QUICK).wait_ok()
    own_nats.stop()
    assert daemon.wait_health(nats="down", seconds=3)["tasks"]["subscriber"]["state"] in ("backoff", "starting")
    own_nats.start()
    daemon.wait_ok()
    assert daemon.stop() == 0


@pytest.mark.req("B43", "D4.8")
def test_answers_that_nobody_may_have_change_nothing(
    start_daemon: StartDaemon, half_own: dict[str, str], own_nats: Nats, db: Database, open_service: OpenService
) -> None:
    own_nats.stop()
    own_nats.config = """authorization { users: [
        {user: core, password: c, permissions: {publish: {deny: "_INBOX.>"}}}, {user: service, password: s} ] }"""
    own_nats.start()
    login = {"user": "service", "pass": "s"}
    service = open_service(half_own, **login)
    daemon = start_daemon(half_own | {URL: f"nats://core:c@127.0.0.1:{own_nats.port}"}, **QUICK).wait_ok()
    jobs = db.insert_jobs(3)
    service.wait_heard(3)
    with ExitStack() as gone:
        leaving = gone.enter_context(open_service(half_own, **login))
        send_done(leaving, jobs[0], ask=True)
        leaving.flush()
    send_done(service, jobs[1], ask=True)
    service._write(f"HPUB {service.result_subject} {service.new_reply()} 16 16\r\nNATS/1.0 503\r\n\r\n\r\n".encode())
    service.flush()
    send_done(service, jobs[2])
    wait_until(lambda: set(db.statuses(jobs)) == {"done"})
    warning = daemon.wait_for_event("inbox.answers_unsent")
    assert "permissions violation" in warning["error"].lower()
    assert daemon.wait_for_event("inbox.invalid")["reason"] == "empty"
    assert daemon.health()["status"] == "ok"
    assert daemon.stop() == 0
    assert _restarted(daemon) == {}
    totals = daemon.one("shutdown.complete")["totals"]["subscriber"]
    assert (totals["received"], totals["applied"], totals["invalid"]) == (4, 3, 1)
    assert outcomes(service) == {}


@pytest.mark.req("B58")
def test_a_first_server_that_never_greets_costs_a_few_seconds(
    start_daemon: StartDaemon, environment: dict[str, str], nats_server: Nats
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        urls = f"nats://127.0.0.1:{deaf.getsockname()[1]},{nats_server.url}"
        started = monotonic()
        daemon = start_daemon(environment | {URL: urls}).wait_ok()
        assert monotonic() - started < 6
        assert daemon.stop() == 0
    assert not daemon.named("task.restarting")
