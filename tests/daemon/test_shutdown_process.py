"""SIGTERM in every phase and under every fault: the daemon as a process, its grace, its books, and the story of its log."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import pytest
from attrs import frozen
from click.testing import CliRunner

from armcore_trio.cli import main
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, URL
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.daemon import DaemonProcess
from tests.support.database import Database, JobIds
from tests.support.proxy import Direction, Proxy
from tests.support.responder import OpenService, complete, outcomes, reply_of, send_done
from tests.support.sabotage import commit_to_disk, contradictions, terminate_backends
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}
GRACE_SECONDS = 5.0
GRACE = {"SHUTDOWN_GRACE_SECONDS": f"{GRACE_SECONDS:g}"}
STEPS = ["passes", "inbox", "connections", "health"]


def _stop(daemon: DaemonProcess, within_seconds: float = GRACE_SECONDS) -> None:
    """SIGTERM; it ends in time, in order and with exit 0, and its books balance."""
    started = monotonic()
    daemon.send_signal()
    assert daemon.wait_exit() == 0
    assert monotonic() - started <= within_seconds, str(daemon)
    complete = daemon.one("shutdown.complete")
    assert daemon.all[-1] is complete
    assert complete["exit_code"] == 0
    assert {task: book["difference"] for task, book in complete["books"].items()} == {"publisher": 0, "subscriber": 0}
    assert complete["books"]["subscriber"]["waiting"] == 0
    assert complete["books"]["subscriber"]["abandoned"] == len(daemon.named("inbox.abandoned"))
    assert daemon.one("shutdown.started")["signal"] == "SIGTERM"
    assert [record["step"] for record in daemon.named("shutdown.step")] == STEPS


def _story(daemon: DaemonProcess, directory: Path) -> str:
    """What `review-log` makes of it; its exit is 1 exactly if the stop had to give something up."""
    (directory / "daemon.log").write_text("".join(json.dumps(record) + "\n" for record in daemon.all), "utf-8")
    result = CliRunner().invoke(main, ["review-log", str(directory / "daemon.log")])
    given_up = daemon.named("inbox.abandoned") + daemon.named("shutdown.step", finished=False)
    assert result.exit_code == bool(given_up), result.output
    return result.output


def _published(db: Database, service: ServiceClient, count: int) -> list[JobIds]:
    jobs = db.insert_jobs(count)
    service.wait_heard(count)
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})
    return jobs


def _is_begun(db: Database, jobs: list[JobIds]) -> bool:
    return set(db.statuses(jobs)) != {"queued"}


# --- phases -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R9")
def test_when_idle_it_stops_at_once(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(**QUICK, **GRACE).wait_ok()
    _stop(daemon, 1.5)
    assert "everything adds up" in _story(daemon, tmp_path)
    assert all(record["finished"] for record in daemon.named("shutdown.step"))


@pytest.mark.req("R9", "D1.3", "B04")
def test_amid_a_backlog_of_5000_it_finishes_its_batch_and_leaves_the_rest(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, tmp_path: Path
) -> None:
    daemon = start_daemon(OUTBOX_BATCH_SIZE="100", OUTBOX_POLL_SECONDS="60", **GRACE).wait_ok()
    jobs = db.insert_jobs(5_000)
    wait_until(lambda: service._heard, what="a first request")
    _stop(daemon, 2)
    statuses = Counter(db.statuses(jobs))
    assert statuses.keys() == {"queued", "published"}
    published = {job.msg_id for job, status in zip(jobs, db.statuses(jobs), strict=True) if status == "published"}
    assert Counter(request.msg_id for request in service.heard()) == dict.fromkeys(published, 1), "what went out is marked"
    assert len(published) % 100 == 0
    book = daemon.one("shutdown.complete")["books"]["publisher"]
    assert (book["taken"], book["confirmed"]) == (len(published), len(published))
    assert f"books of publisher: {len(published)} taken = {len(published)} confirmed" in _story(daemon, tmp_path)


@pytest.mark.req("R9", "B04", "D4.8")
def test_500_results_sent_in_the_instant_before_are_all_applied_and_answered(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, tmp_path: Path
) -> None:
    daemon = start_daemon(INBOX_BATCH_SIZE="50", **QUICK, **GRACE).wait_ok()
    jobs = _published(db, service, 500)
    for job in jobs:
        send_done(service, job, ask=True)
    service.flush()
    _stop(daemon)
    assert set(db.statuses(jobs)) == {"done"}
    assert outcomes(service) == {str(job.id): ["applied"] for job in jobs}
    assert contradictions(db) == []
    assert "books of subscriber: 500 received = 500 applied" in _story(daemon, tmp_path)


@pytest.mark.req("R9", "B37")
def test_while_every_task_backs_off_it_stops_at_once_and_its_log_tells_the_outage(
    start_daemon: StartDaemon, own_environment: dict[str, str], own_postgres: Postgres, own_nats: Nats, tmp_path: Path
) -> None:
    own_postgres.stop()
    own_nats.stop()
    daemon = start_daemon(own_environment, **QUICK, **GRACE)
    tasks = ("publisher", "subscriber", "watchdog")
    daemon.wait_health(lambda report: all(report["tasks"][task]["restarts"] >= 3 for task in tasks))
    _stop(daemon, 1)
    story = _story(daemon, tmp_path)
    assert "subscriber.intake: nats: " in story
    assert "watchdog: database: " in story
    assert "everything adds up" in story


@pytest.mark.req("R9", "B09")
def test_an_outage_that_ended_is_told_with_its_length(
    start_daemon: StartDaemon, environment: dict[str, str], own_nats: Nats, tmp_path: Path
) -> None:
    daemon = start_daemon(environment | {URL: own_nats.url}, **QUICK, **GRACE).wait_ok()
    own_nats.stop()
    daemon.wait_health(nats="down")
    own_nats.start()
    daemon.wait_ok()
    _stop(daemon, 1.5)
    story = _story(daemon, tmp_path)
    for task in ("publisher", "subscriber.intake"):
        outage = daemon.one("task.recovered", task=task)
        assert f"{task}: nats: " in story
        assert f"{task}: back after {outage['outage_seconds']} s, {outage['attempts']} attempts" in story
    assert "everything adds up" in story


@pytest.mark.req("R9", "B04")
def test_a_table_locked_throughout_costs_what_was_received_and_not_the_grace(
    start_daemon: StartDaemon, db: Database, service: ServiceClient, tmp_path: Path
) -> None:
    daemon = start_daemon(**QUICK, **GRACE).wait_ok()
    daemon.claim("inbox.abandoned")
    jobs = _published(db, service, 10)
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        for job in jobs:
            send_done(service, job, ask=True)
        service.flush()
        _stop(daemon)
    abandoned = [(record["job_id"], record["msg_id"]) for record in daemon.named("inbox.abandoned")]
    assert abandoned == [(str(job.id), envelopes.result_id(job)) for job in jobs]
    assert set(db.statuses(jobs)) == {"published"}
    assert outcomes(service) == {}, "so a service that waits for its answer knows to send again"
    assert "10 received messages were abandoned" in _story(daemon, tmp_path)


# --- faults -----------------------------------------------------------------------------------------------------------


@frozen
class Servers:
    """Both servers, and what may befall them."""

    postgres: Postgres
    nats: Nats

    @contextmanager
    def befallen(self, fault: str) -> Iterator[None]:
        which, _, what = fault.partition(" ")
        hit = [self.postgres, self.nats] if which == "both" else [getattr(self, which)]
        for server in hit:
            server.freeze() if what == "frozen" else server.kill()
        try:
            yield
        finally:
            for server in hit:
                if what == "frozen":
                    server.thaw()


FAULTS = ["postgres frozen", "nats frozen", "both frozen", "postgres killed", "nats killed", "both killed"]


@pytest.mark.req("R9", "B14", "B16")
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_delays_the_stop_past_its_grace(
    start_daemon: StartDaemon,
    own_environment: dict[str, str],
    own_postgres: Postgres,
    own_nats: Nats,
    own_db: Database,
    open_service: OpenService,
    tmp_path: Path,
    fault: str,
) -> None:
    daemon = start_daemon(own_environment, **QUICK, **GRACE).wait_ok()
    daemon.claim("inbox.abandoned")
    service = open_service(own_environment)
    jobs = _published(own_db, service, 20)
    own_db.insert_jobs(200)
    with Servers(own_postgres, own_nats).befallen(fault):
        if fault.startswith("postgres"):
            for job in jobs:
                send_done(service, job, ask=True)
            service.flush()
        _stop(daemon)
    if fault.startswith("postgres"):
        abandoned = [(record["job_id"], record["msg_id"]) for record in daemon.named("inbox.abandoned")]
        assert abandoned == [(str(job.id), envelopes.result_id(job)) for job in jobs]
        assert "20 received messages were abandoned" in _story(daemon, tmp_path)
    else:
        assert not daemon.named("inbox.abandoned")
        _story(daemon, tmp_path)


@pytest.mark.req("R9", "B16")
@pytest.mark.parametrize("fault", ["both frozen", "both killed"])
def test_a_fault_that_strikes_amid_the_stop_does_not_delay_it_either(
    start_daemon: StartDaemon,
    own_environment: dict[str, str],
    own_postgres: Postgres,
    own_nats: Nats,
    own_db: Database,
    open_service: OpenService,
    tmp_path: Path,
    fault: str,
) -> None:
    daemon = start_daemon(own_environment, **QUICK, **GRACE).wait_ok()
    daemon.claim("inbox.abandoned")
    service = open_service(own_environment)
    jobs = _published(own_db, service, 50)
    with own_db.connect() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        for job in jobs:
            send_done(service, job)
        service.flush()
        started = monotonic()
        daemon.send_signal()
        daemon.wait_for_event("shutdown.started")
        with Servers(own_postgres, own_nats).befallen(fault):
            assert daemon.wait_exit() == 0
            assert monotonic() - started <= GRACE_SECONDS
        holder.close()
    assert {book["difference"] for book in daemon.one("shutdown.complete")["books"].values()} == {0}
    assert [record["job_id"] for record in daemon.named("inbox.abandoned")] == [str(job.id) for job in jobs]
    assert "50 received messages were abandoned" in _story(daemon, tmp_path)


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.req("R9", "B50", "D4.7")
def test_postgresql_killed_with_200_results_in_flight_loses_none(
    start_daemon: StartDaemon,
    environment: dict[str, str],
    own_postgres: Postgres,
    own_db: Database,
    open_service: OpenService,
    tmp_path: Path,
) -> None:
    commit_to_disk(own_db)
    half_own = environment | {DSN: own_postgres.dsn()}
    service = open_service(half_own)
    daemon = start_daemon(half_own, INBOX_BATCH_SIZE="7", **QUICK, **GRACE).wait_ok()
    jobs = _published(own_db, service, 200)

    def send() -> None:
        for job in jobs:
            send_done(service, job, ask=True)

    sender = threading.Thread(target=send)
    sender.start()
    wait_until(lambda: daemon.named("inbox.applied"), what="a first batch")
    own_db.close()
    own_postgres.kill()
    sender.join()
    service.flush()
    before = outcomes(service)
    assert len(before) < 200, "it struck in the midst"
    daemon.wait_health(database="down")
    own_postgres.start()
    daemon.wait_ok()
    wait_until(lambda: set(own_db.statuses(jobs)) == {"done"}, what=lambda: Counter(own_db.statuses(jobs)))
    wait_until(lambda: len(outcomes(service)) == 200, what="an answer to each")
    assert all(len(said) == 1 and said[0] in ("applied", "duplicate") for said in outcomes(service).values())
    assert contradictions(own_db) == []
    _stop(daemon, 1.5)
    story = _story(daemon, tmp_path)
    assert "subscriber.apply: database: " in story
    assert "everything adds up" in story


@pytest.mark.req("R9", "B16", "B48", "B50")
def test_under_load_no_round_of_kills_leaves_a_job_stuck_or_a_message_in_floods(
    start_daemon: StartDaemon,
    environment: dict[str, str],
    own_nats: Nats,
    db: Database,
    link: Callable[[int], Proxy],
    open_service: OpenService,
    tmp_path: Path,
) -> None:
    own = environment | {URL: own_nats.url}
    proxy = link(own_nats.port)
    core = own | {URL: f"nats://127.0.0.1:{proxy.port}"}
    max_republish = 3
    rules = {"ACK_TIMEOUT_SECONDS": "2", "OUTBOX_MAX_REPUBLISH": str(max_republish), "OUTBOX_BATCH_SIZE": "20", **QUICK, **GRACE}
    service = open_service(own, on_message=complete)
    daemon = start_daemon(core, **rules).wait_ok()
    jobs: list[JobIds] = []
    strikes = ["backends", "nats", "daemon"] * 3 + ["backends"] * 2
    for strike in strikes:
        latest = db.insert_jobs(60)
        jobs += latest
        wait_until(partial(_is_begun, db, latest), what="the load")
        if strike == "backends":
            terminate_backends(db)
        elif strike == "nats":
            own_nats.kill()
            own_nats.start()
            service = open_service(own, on_message=complete)
        else:
            daemon.kill()
            daemon = start_daemon(core, **rules)
        daemon.wait_ok()
        assert contradictions(db) == []
    wait_until(lambda: not {"queued", "published"} & set(db.statuses(jobs)), 30, lambda: Counter(db.statuses(jobs)))
    for job in jobs:  # as services do with a result that nobody answered
        send_done(service, job, ask=True)
    assert all(service.answer(reply_of(service, job)) for job in jobs)
    wait_until(lambda: set(db.statuses(jobs)) == {"done"}, what=lambda: Counter(db.statuses(jobs)))
    assert contradictions(db) == []
    told = [proxy.recorded(Direction.UP, connection) for connection in range(proxy.connections)]
    sent = Counter(sum(bytes_up.count(job.msg_id.encode()) for bytes_up in told) for job in jobs)
    assert 1 <= min(sent) <= max(sent) <= 1 + max_republish + len(strikes), sent
    assert sum(times * count for times, count in sent.items()) <= 2 * len(jobs), "most of them once"
    _stop(daemon, 2)
    assert "everything adds up" in _story(daemon, tmp_path)
