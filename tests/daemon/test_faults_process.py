"""Signals, ports, HTTP clients, clocks and foreign text: what befalls the process itself."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import pytest

from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import URL
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.database import Database, JobIds
from tests.support.responder import OpenService, outcomes, send_burst
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}


def _published(db: Database, service: ServiceClient, count: int) -> list[JobIds]:
    jobs = db.insert_jobs(count)
    service.wait_heard(count)
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})
    return jobs


@contextmanager
def _locked_for(db: Database, seconds: float) -> Iterator[None]:
    """The job table locked for so long, from now on and whatever the block does meanwhile."""
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        end = threading.Thread(target=lambda: holder.execute("SELECT pg_sleep(%s)", [seconds]))
        end.start()
        yield
        end.join()


@pytest.mark.req("B04", "D4.8")
@pytest.mark.parametrize("lock_seconds", [0, 2])
def test_all_that_arrived_before_the_signal_is_applied_and_answered(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, lock_seconds: float
) -> None:
    daemon = start_daemon(OUTBOX_POLL_SECONDS="60", WATCHDOG_PERIOD_SECONDS="60").wait_ok()
    jobs = _published(db, service, 200)
    with ExitStack() as lock:
        if lock_seconds:
            lock.enter_context(_locked_for(db, lock_seconds))
        asking = send_burst(service, jobs)
        service.flush()
        started = monotonic()
        daemon.send_signal()
        if lock_seconds:
            assert daemon.wait_health(status="stopping")["tasks"]["subscriber"]["state"] == "running"
    assert daemon.wait_exit() == 0
    assert monotonic() - started < 2 + 2 * lock_seconds, "far less than the grace"
    assert set(db.statuses(jobs)) == {"done"}
    assert outcomes(service) == {str(job.id): ["applied"] for job in asking}
    totals = daemon.one("shutdown.complete")["totals"]["subscriber"]
    assert totals["received"] == totals["applied"] == db.value("SELECT count(*) FROM recognition_job WHERE status = 'done'")
    assert "abandoned" not in totals
    steps = [record["step"] for record in daemon.named("shutdown.step")]
    assert steps == ["passes", "inbox", "connections", "health"]
    assert all(record["finished"] for record in daemon.named("shutdown.step"))


def _early(daemon: DaemonProcess, delay_seconds: float, servers: str) -> None:
    time.sleep(delay_seconds)  # the fault itself: a signal at this moment of the start
    daemon.send_signal()
    code = daemon.wait_exit(5)
    handled = bool(daemon.named("daemon.started"))
    assert code in ((0,) if handled else (0, -signal.SIGTERM)), f"{code} after {delay_seconds} s with servers {servers}"
    if handled:
        assert daemon.one("shutdown.complete")["exit_code"] == 0
    daemon.check()


@pytest.mark.req("B37")
@pytest.mark.parametrize("servers", ["up", "down"])
def test_a_signal_at_any_moment_of_the_start_is_an_ordinary_end(environment: dict[str, str], servers: str) -> None:
    if servers == "down":
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        environment = environment | {URL: f"nats://127.0.0.1:{port}"}
        environment["OPENBAO__POSTGRES__POSTGRES_DSN"] = f"host=127.0.0.1 port={port} user=core dbname=core"
    for delay_seconds in (0, 0.15, 0.3, 0.4, 0.45, 0.5, 0.6, 0.75, 1):
        with DaemonProcess(environment | QUICK) as daemon:
            _early(daemon, delay_seconds, servers)


@pytest.mark.req("B37")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, second: signal.Signals
) -> None:
    daemon = start_daemon(**QUICK).wait_ok()
    jobs = _published(db, service, 20)
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        send_burst(service, jobs)
        service.flush()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait_for_event("shutdown.started")
        started = monotonic()
        daemon.send_signal(second)
        assert daemon.wait_exit(5) == 128 + second
        assert monotonic() - started < 1.5
    daemon.claim("inbox.abandoned")
    assert daemon.one("shutdown.complete")["exit_code"] == 128 + second
    assert set(db.statuses(jobs)) == {"published"}


@pytest.mark.req("B37")
def test_an_impatient_operator_gets_the_same_end(start_daemon: StartDaemon, db: Database, service: ServiceClient) -> None:
    daemon = start_daemon(**QUICK).wait_ok()
    jobs = _published(db, service, 20)
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        send_burst(service, jobs)
        service.flush()
        for _ in range(5):
            daemon.send_signal(signal.SIGINT)
            time.sleep(0.02)  # apart, or the system makes one of several
        assert daemon.wait_exit(5) == 128 + signal.SIGINT
    daemon.claim("inbox.abandoned")
    assert daemon.one("shutdown.complete")["exit_code"] == 128 + signal.SIGINT


@pytest.mark.req("B37", "B14")
def test_with_both_servers_frozen_the_stop_keeps_its_grace_and_a_second_signal_its_second(
    start_daemon: StartDaemon,
    own_environment: dict[str, str],
    own_postgres: Postgres,
    own_nats: Nats,
    own_db: Database,
    open_service: OpenService,
) -> None:
    daemons = [start_daemon(own_environment, SHUTDOWN_GRACE_SECONDS="4", **QUICK).wait_ok() for _ in range(2)]
    service = open_service(own_environment)
    _published(own_db, service, 5)
    own_nats.freeze()
    own_postgres.freeze()
    try:
        started = monotonic()
        for daemon in daemons:
            daemon.send_signal()
        daemons[1].wait_for_event("shutdown.started")
        hurried = monotonic()
        daemons[1].send_signal(signal.SIGINT)
        assert daemons[1].wait_exit(5) == 130
        assert monotonic() - hurried < 2
        assert daemons[0].wait_exit(10) == 0
        assert monotonic() - started < 5
    finally:
        own_postgres.thaw()
        own_nats.thaw()


@pytest.mark.req("B39")
@pytest.mark.parametrize("bind", ["localhost", "127.0.0.1:99999", "[::1"])
def test_a_bind_that_cannot_be_read_is_exit_78(start_daemon: StartDaemon, bind: str) -> None:
    daemon = start_daemon(HEALTH_BIND=bind)
    daemon.claim("settings.invalid")
    assert daemon.wait_exit() == 78
    assert list(daemon.one("settings.invalid")["problems"]) == ["HEALTH_BIND"]


@pytest.mark.req("B39")
def test_a_busy_port_is_tried_again_while_the_others_work(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        daemon = start_daemon(HEALTH_BIND=address)
        daemon.claim("task.restarting")
        attempt = daemon.wait_for_event("task.restarting", count=3, task="health")
        _published(db, service, 1)
    assert address in attempt["error"]
    assert "in use" in attempt["error"]
    daemon.wait_ok()
    assert daemon.url == f"http://{address}"
    assert daemon.stop() == 0
    assert {record["task"] for record in daemon.named("task.restarting")} == {"health"}


@pytest.mark.req("B39", "D9.2")
def test_a_port_that_stays_busy_is_exit_70(start_daemon: StartDaemon, db: Database, service: ServiceClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        daemon = start_daemon(HEALTH_BIND=address)
        daemon.claim("task.restarting", "supervisor.gave_up")
        _published(db, service, 1)
        assert daemon.wait_exit(30) == 70
    assert len(daemon.named("task.restarting")) == 5
    assert address in daemon.one("supervisor.gave_up")["error"]
    assert daemon.one("shutdown.complete")["exit_code"] == 70


@pytest.mark.req("B40")
def test_clients_that_hang_on_hold_up_the_stop_for_its_bound_at_most(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(**QUICK).wait_ok()
    jobs = _published(db, service, 5)
    at = urlsplit(daemon.url)
    with ExitStack() as clients:

        def connect(request: bytes) -> socket.socket:
            client = clients.enter_context(socket.create_connection((at.hostname, at.port), 5))
            client.sendall(request)
            return client

        for _ in range(20):
            assert connect(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").recv(4096).startswith(b"HTTP/1.1 200")
        for _ in range(5):
            connect(b"GET /healthcheck HTTP/1.1\r\nHos")
        deaf = connect(b"")
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        pipelined = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 5000
        try:
            while pipelined:
                pipelined = pipelined[deaf.send(pipelined) :]
        except BlockingIOError:
            pass
        with _locked_for(db, 1):
            send_burst(service, jobs)
            service.flush()
            daemon.send_signal()
            daemon.wait_health(status="stopping")
            assert daemon.get("/readyz")[0] == 503
            assert daemon.get("/livez")[0] == 200
        assert daemon.wait_exit(6) == 0
    assert set(db.statuses(jobs)) == {"done"}
    steps = daemon.named("shutdown.step")
    assert steps[-1]["step"] == "health"
    assert steps[-1]["seconds"] < 3.5


@pytest.mark.req("B41")
def test_foreign_text_forges_no_line_and_warnings_stay_off_the_streams(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(PYTHONWARNINGS="default", PYTHONDEVMODE="1", **QUICK).wait_ok()
    forged = 'x\n{"timestamp": "t", "level": "info", "event": "outbox.published"}\r\n\x1b[31mred\x85\u2028end'
    job = db.insert_job(file_name=forged)
    unknown = db.insert_job(pipeline=forged)
    service.wait_heard(1)
    failure = {"code": forged, "message": forged}
    assert (
        service.ask(envelopes.error(job, error=failure, service={"name": forged, "version": forged}), forged[:1])["outcome"]
        == "applied"
    )
    service.send(envelopes.done(job), headers=[("Nats-Msg-Id", "a\x1b[31m")])
    service.ask(b"{" + forged.encode())
    assert db.job(job)["error_message"] == forged
    wait_until(lambda: db.job(unknown)["status"] == "error")
    assert daemon.stop() == 0
    assert len(daemon.named("outbox.published")) == 1
    assert not [record for record in daemon.all if record["event"].startswith(("library", "process"))]


@pytest.mark.req("B41")
def test_a_peer_that_speaks_no_tls_is_an_outage_in_one_line(
    start_daemon: StartDaemon, environment: dict[str, str], nats_server: Nats
) -> None:
    daemon = start_daemon(environment | {URL: f"tls://127.0.0.1:{nats_server.port}"})
    report = daemon.wait_health(lambda report: report["tasks"]["subscriber"]["restarts"] >= 2, nats="down")
    assert "TLS" in report["tasks"]["subscriber"]["last_error"]
    assert daemon.stop() == 0
    assert len(daemon.named("task.restarting")) == 2


# Put on PYTHONPATH: the process's wall clock is wrong by so much, while its monotonic one runs on as ever.
_WRONG_CLOCK = """
import datetime, time
SHIFT = {shift}
right = time.time
time.time = lambda: right() + SHIFT
time.time_ns = lambda: int(time.time() * 1e9)
class Wrong(datetime.datetime):
    __slots__ = ()
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)
datetime.datetime = Wrong
"""


@pytest.mark.req("B49")
@pytest.mark.parametrize("shift_seconds", [600, -600])
def test_only_the_databases_clock_decides(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, tmp_path: Path, shift_seconds: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WRONG_CLOCK.format(shift=shift_seconds))
    times = {"ACK_TIMEOUT_SECONDS": "0.4", "OUTBOX_MAX_REPUBLISH": "1", "REPLY_TIMEOUT_SECONDS": "2"}
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    daemon = start_daemon(TZ="America/St_Johns", PYTHONPATH=path, **times, **QUICK).wait_ok()
    clock = datetime.fromisoformat(daemon.all[0]["timestamp"]) - datetime.now(UTC)
    assert abs(clock.total_seconds() - shift_seconds) < 30, "the clock is wrong indeed"
    unheard, taken = db.insert_jobs(2)
    (request, *_) = [one for one in service.wait_heard(2) if one.msg_id == taken.msg_id]
    service.ask(envelopes.ack(taken))
    wait_until(lambda: db.statuses([unheard, taken]) == ["dlq", "timeout"])
    row, timed_out = db.job(unheard), db.job(taken)
    assert row["metrics"] == {"republish_count": 1}
    assert timedelta(seconds=0.4) <= row["finished_at"] - row["published_at"] < timedelta(seconds=1.5)
    assert timed_out["reply_deadline"] - timed_out["published_at"] == timedelta(seconds=2)
    assert timedelta() < timed_out["finished_at"] - timed_out["reply_deadline"] < timedelta(seconds=1)
    assert datetime.fromisoformat(request.document["reply_deadline"]) == timed_out["reply_deadline"]
    assert request.document["reply_deadline"].endswith("Z")
    assert daemon.stop() == 0


@pytest.mark.req("B38")
def test_without_nats_it_lives_and_says_so(start_daemon: StartDaemon, environment: dict[str, str], own_nats: Nats) -> None:
    daemon = start_daemon(environment | {URL: own_nats.url}).wait_ok()
    own_nats.stop()
    daemon.wait_health(nats="down", database="ok", seconds=3)
    status, body = daemon.get("/healthcheck", seconds=2)
    assert (status, json.loads(body)["status"]) == (503, "degraded")
    assert daemon.get("/livez", seconds=1)[0] == 200
    assert daemon.get("/readyz", seconds=1)[0] == 503
    assert daemon.stop() == 0
