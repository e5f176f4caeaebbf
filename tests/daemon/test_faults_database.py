"""PostgreSQL read-only, frozen, deaf, killed, restarted, locked: the daemon as a process, and what it makes of each."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg
import pytest

from armcore_trio.demo.embedded import Postgres
from armcore_trio.settings import DSN, URL
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.database import Database, JobIds
from tests.support.proxy import Proxy
from tests.support.responder import OpenService, acknowledge, outcomes, send_done
from tests.support.sabotage import backends, terminate_backends
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}
TASKS = ("publisher", "subscriber", "watchdog")


@pytest.fixture
def half_own(own_postgres: Postgres, environment: dict[str, str]) -> dict[str, str]:
    """A PostgreSQL of this test's own, and the NATS all share."""
    return environment | {DSN: own_postgres.dsn()}


@contextmanager
def _frozen(server: Postgres) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@pytest.mark.req("B12", "D4.7")
def test_a_role_that_turns_read_only_is_waited_out(
    start_daemon: StartDaemon, half_own: dict[str, str], own_postgres: Postgres, own_db: Database, service: ServiceClient
) -> None:
    own_db.execute("CREATE ROLE core LOGIN SUPERUSER")
    daemon = start_daemon(half_own | {DSN: own_postgres.dsn(user="core")}, **QUICK).wait_ok()
    jobs = own_db.insert_jobs(30)
    service.wait_heard(30)
    own_db.execute("ALTER ROLE core SET default_transaction_read_only = on")
    terminate_backends(own_db)
    before = daemon.wait_health(database="down")
    for job in jobs:
        send_done(service, job, ask=True)
    daemon.wait_health(lambda report: all(report["tasks"][task]["restarts"] >= 3 for task in TASKS), database="down")
    assert before["nats"] == "ok" or before["tasks"]["publisher"]["state"] != "running"
    assert set(own_db.statuses(jobs)) == {"published"}
    assert len(daemon.named("task.restarting")) <= 3 * len(TASKS), "a line for each change of the cause, not for each attempt"
    own_db.execute("ALTER ROLE core SET default_transaction_read_only = off")
    daemon.wait_ok()
    wait_until(lambda: set(own_db.statuses(jobs)) == {"done"})
    assert outcomes(service) == {str(job.id): ["applied"] for job in jobs}
    assert daemon.stop() == 0


@pytest.mark.req("B12")
def test_a_whole_server_that_turns_read_only_under_live_connections_is_noticed(
    start_daemon: StartDaemon, half_own: dict[str, str], own_db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(half_own, **QUICK).wait_ok()
    job = own_db.insert_job()
    service.wait_heard(1)
    own_db.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    own_db.execute("SELECT pg_reload_conf()")
    send_done(service, job)
    daemon.wait_health(database="down")
    with own_db.connect(options="-c default_transaction_read_only=off", autocommit=True) as connection:
        connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        connection.execute("SELECT pg_reload_conf()")
    daemon.wait_ok()
    wait_until(lambda: own_db.job(job)["status"] == "done")
    assert daemon.stop() == 0


@pytest.mark.req("B14", "B38")
def test_a_frozen_database_is_reported_at_once_and_the_stop_keeps_its_grace(
    start_daemon: StartDaemon, half_own: dict[str, str], own_postgres: Postgres, own_db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(half_own, SHUTDOWN_GRACE_SECONDS="5", **QUICK).wait_ok()
    jobs = own_db.insert_jobs(3)
    service.wait_heard(3)
    wait_until(lambda: set(own_db.statuses(jobs)) == {"published"})
    with _frozen(own_postgres):
        for job in jobs:
            send_done(service, job)
        daemon.wait_health(database="down", seconds=2.5)
        assert daemon.get("/healthcheck")[0] == 503
        assert daemon.get("/livez", seconds=1)[0] == 200
        started = monotonic()
        assert daemon.stop() == 0
        assert monotonic() - started < 6
    abandoned = {(record["job_id"], record["msg_id"]) for record in daemon.named("inbox.abandoned")}
    daemon.claim("inbox.abandoned")
    assert abandoned == {(str(job.id), envelopes.result_id(job)) for job in jobs}
    assert daemon.one("shutdown.complete")["totals"]["subscriber"]["abandoned"] == 3


@pytest.mark.req("B14", "D4.7")
def test_a_database_frozen_past_every_limit_is_given_up_and_work_resumes_when_it_thaws(
    start_daemon: StartDaemon, half_own: dict[str, str], own_postgres: Postgres, own_db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(half_own, **QUICK).wait_ok()
    jobs = own_db.insert_jobs(50)
    service.wait_heard(50)
    wait_until(lambda: set(own_db.statuses(jobs)) == {"published"})
    with _frozen(own_postgres):
        for job in jobs:
            send_done(service, job, ask=True)
        record = daemon.wait_for_event("task.restarting", task="subscriber.apply", seconds=20)
        assert "no answer" in record["error"]
        assert daemon.get("/livez", seconds=1)[0] == 200
    started = monotonic()
    wait_until(lambda: set(own_db.statuses(jobs)) == {"done"})
    assert monotonic() - started < 3
    daemon.wait_ok()
    assert outcomes(service) == {str(job.id): ["applied"] for job in jobs}
    assert daemon.stop() == 0


@pytest.mark.req("B14")
def test_a_listener_that_never_speaks_in_place_of_the_database(start_daemon: StartDaemon, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        dsn = f"host=127.0.0.1 port={deaf.getsockname()[1]} user=core dbname=core"
        daemon = start_daemon(environment | {DSN: dsn}, SHUTDOWN_GRACE_SECONDS="5")
        for _ in range(3):
            started = monotonic()
            report = daemon.health()
            assert (report["status"], report["database"]) == ("degraded", "down")
            assert daemon.get("/livez")[0] == 200
            assert monotonic() - started < 2.5
        daemon.wait_for_event("task.restarting", task="watchdog", seconds=10)
        started = monotonic()
        assert daemon.stop() == 0
        assert monotonic() - started < 2


@pytest.mark.req("B36")
def test_without_its_listening_connection_the_publisher_comes_back_and_sends_nothing_twice(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(OUTBOX_POLL_SECONDS="60").wait_ok()
    jobs: list[JobIds] = []

    def all_published() -> bool:
        return set(db.statuses(jobs)) == {"published"}

    for n in range(1, 4):
        terminate_backends(db, "publisher")
        jobs += [db.insert_job() for _ in range(10)]
        wait_until(all_published, 5)  # a back-off and its first pass, not a poll
        wait_until(lambda: daemon.health()["status"] == "ok")
        assert daemon.health()["tasks"]["publisher"]["restarts"] == n
    jobs.append(db.insert_job())
    wait_until(lambda: db.job(jobs[-1])["status"] == "published", 2)  # it listens again
    assert sorted(str(request.msg_id) for request in service.heard()) == sorted(job.msg_id for job in jobs)
    assert {record["task"] for record in daemon.named("task.restarting")} == {"publisher"}
    assert daemon.stop() == 0


@pytest.mark.req("B36")
def test_a_listening_connection_that_falls_silent_is_replaced(
    start_daemon: StartDaemon, half_own: dict[str, str], own_db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(half_own, OUTBOX_POLL_SECONDS="1").wait_ok()
    (backend,) = backends(own_db, "publisher")
    os.kill(backend, signal.SIGSTOP)
    try:
        jobs = own_db.insert_jobs(10)
        daemon.wait_for_event("task.restarting", task="publisher", seconds=20)
        wait_until(lambda: set(own_db.statuses(jobs)) == {"published"}, 5)
    finally:
        os.kill(backend, signal.SIGCONT)
    wait_until(lambda: len(backends(own_db, "publisher")) == 1)
    assert sorted(str(request.msg_id) for request in service.heard()) == sorted(job.msg_id for job in jobs)
    assert daemon.stop() == 0


def _ask_many(daemon: Any, path: str) -> list[tuple[int, float]]:
    """Status and seconds of 50 requests at once."""

    def ask(_: int) -> tuple[int, float]:
        started = monotonic()
        return daemon.get(path, seconds=10)[0], monotonic() - started

    with ThreadPoolExecutor(50) as pool:
        return list(pool.map(ask, range(50)))


@pytest.mark.req("D3.1", "D4.7")
def test_an_ack_that_has_been_received_and_waits_to_be_applied_is_no_missing_ack(
    start_daemon: StartDaemon, half_own: dict[str, str], own_db: Database, open_service: OpenService
) -> None:
    service = open_service(half_own, on_message=acknowledge)
    daemon = start_daemon(half_own, ACK_TIMEOUT_SECONDS="0.5", OUTBOX_MAX_REPUBLISH="1", **QUICK).wait_ok()
    (backend,) = backends(own_db, "subscriber")
    os.kill(backend, signal.SIGSTOP)  # what applies the acks is held up; what counts the missing ones is not
    try:
        job = own_db.insert_job()
        service.wait_heard(1)
        outwaited = "SELECT created_at < now() - interval '3 s' OR status = 'dlq' FROM recognition_job"
        wait_until(lambda: own_db.value(outwaited))
    finally:
        os.kill(backend, signal.SIGCONT)
    wait_until(lambda: own_db.job(job)["status"] != "published")
    assert own_db.job(job)["status"] == "processing"
    assert daemon.stop() == 0


@pytest.mark.req("B38")
@pytest.mark.parametrize("fault", ["frozen", "down"])
def test_fifty_health_checks_at_once_while_the_database_is_away_cost_no_heap_of_connections(
    start_daemon: StartDaemon,
    half_own: dict[str, str],
    own_postgres: Postgres,
    own_db: Database,
    link: Callable[[int], Proxy],
    fault: str,
) -> None:
    proxy = link(own_postgres.port)
    daemon = start_daemon(half_own | {DSN: f"{own_postgres.dsn()} port={proxy.port}"}).wait_ok()
    assert len(backends(own_db)) == 4
    own_db.close()
    before = proxy.connections
    own_postgres.freeze() if fault == "frozen" else own_postgres.stop()
    daemon.wait_health(database="down", seconds=2.5)
    health, live = _ask_many(daemon, "/healthcheck"), _ask_many(daemon, "/livez")
    assert {status for status, _ in health} == {503}
    assert {status for status, _ in live} == {200}
    assert max(seconds for _, seconds in health + live) < 3
    assert proxy.connections - before <= 12
    own_postgres.thaw() if fault == "frozen" else own_postgres.start()
    daemon.wait_ok()
    wait_until(lambda: {status for status, _ in _ask_many(daemon, "/healthcheck")} == {200} and len(backends(own_db)) == 4)
    assert daemon.stop() == 0


@pytest.mark.req("B38")
def test_a_look_at_the_database_over_a_connection_lost_meanwhile_is_no_outage(start_daemon: StartDaemon, db: Database) -> None:
    daemon = start_daemon().wait_ok()
    for _ in range(2):
        terminate_backends(db, "health")
        give_up = monotonic() + 1.5  # longer than an answer is good for
        while monotonic() < give_up:
            assert daemon.health()["database"] == "ok"


@pytest.mark.req("B56")
def test_an_idle_daemon_is_never_idle_in_transaction(
    start_daemon: StartDaemon, half_own: dict[str, str], own_db: Database
) -> None:
    own_db.execute("ALTER DATABASE postgres SET idle_in_transaction_session_timeout = '1s'")
    daemon = start_daemon(half_own, **QUICK).wait_ok()
    samples = 0
    give_up = monotonic() + 3
    while monotonic() < give_up:
        idle = own_db.execute("""
            SELECT application_name, clock_timestamp() - state_change AS age FROM pg_stat_activity
            WHERE application_name LIKE 'armcore-trio%' AND state LIKE 'idle in transaction%'
              AND clock_timestamp() - state_change > interval '50 ms'""")
        assert idle == []
        samples += 1
    assert samples > 100
    assert daemon.stop() == 0
    assert not daemon.named("task.restarting")


@pytest.mark.req("B58")
def test_a_row_that_was_inserted_earlier_and_committed_later_goes_out(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    start_daemon(OUTBOX_POLL_SECONDS="1").wait_ok()
    early = db.insert_job()
    service.wait_heard(1)
    with db.transaction() as slow:
        slow.execute("INSERT INTO recognition_job (file_id, pipeline, attempt) VALUES (%s, 'tabular', 2)", (early.file_id,))
        later = db.insert_job()
        service.wait_heard(2)
        wait_until(lambda: db.job(later)["status"] == "published")
    requests = service.wait_heard(3, seconds=3)
    assert [request.document["attempt"] for request in requests] == [1, 1, 2]


def test_the_dsn_of_a_database_that_does_not_exist_is_an_outage_not_an_end(
    start_daemon: StartDaemon, environment: dict[str, str], postgres: Postgres
) -> None:
    daemon = start_daemon(environment | {DSN: postgres.dsn("nowhere"), URL: environment[URL]})
    record = daemon.wait_for_event("task.restarting", task="watchdog")
    assert "does not exist" in record["error"]
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(postgres.dsn("nowhere"))
    assert daemon.stop() == 0
