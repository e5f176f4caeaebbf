"""Kills, restarts and races under load: afterwards job, file and fact agree, nothing is lost and nothing is sent in floods."""

import re
import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic

import pytest

from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, URL
from tests.conftest import StartDaemon
from tests.support.database import Database, JobIds
from tests.support.proxy import Direction, Proxy
from tests.support.responder import OpenService, acknowledge, complete, outcomes, reply_of, send_done, wait_busy
from tests.support.sabotage import commit_to_disk, contradictions, record_changes, terminate_backends
from tests.support.service import Heard, ServiceClient
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}


def _requests_sent(proxy: Proxy) -> Counter[str]:
    """`Nats-Msg-Id` of each request that left the daemon, over all its connections, and how often."""
    return Counter(found.decode() for found in re.findall(rb"\r\nNats-Msg-Id: ?([^\r]+)\r\n", proxy.recorded(Direction.UP)))


def _wait_finished(db: Database, count: int) -> None:
    wait_until(lambda: db.value("SELECT count(*) FROM recognition_job WHERE finished_at IS NOT NULL") >= count)


def _wait_begun(db: Database, jobs: list[JobIds]) -> None:
    wait_until(lambda: set(db.statuses(jobs)) - {"queued"}, what="a first request published")


def _send_spread(service: ServiceClient, jobs: list[JobIds], seconds: float) -> None:
    """A result for each job, evenly over so many seconds."""
    started = monotonic()
    for n, job in enumerate(jobs):
        due = started + seconds * n / len(jobs)
        while monotonic() < due:
            service.flush()
        send_done(service, job, ask=True)


@pytest.mark.req("B50")
def test_a_database_that_keeps_restarting_loses_no_result_that_was_answered(
    start_daemon: StartDaemon, environment: dict[str, str], own_postgres: Postgres, own_db: Database, open_service: OpenService
) -> None:
    commit_to_disk(own_db)
    half_own = environment | {DSN: own_postgres.dsn()}
    service = open_service(half_own, on_message=complete)
    daemon = start_daemon(half_own, ACK_TIMEOUT_SECONDS="20", **QUICK).wait_ok()
    jobs = []
    for n, mode in enumerate(("fast", "immediate", "fast")):
        jobs += own_db.insert_jobs(40)
        wait_busy(service)
        own_db.close()
        own_postgres.stop(mode)  # type: ignore[arg-type]
        own_postgres.start()
        started = monotonic()
        daemon.wait_ok()
        assert monotonic() - started < 1.2 * 0.5 * 2**n + 2, "one back-off, and what a start takes"
    wait_until(lambda: set(own_db.statuses(jobs)) <= {"done"}, what=lambda: own_db.statuses(jobs))
    answers = outcomes(service)
    assert set(answers) == {str(job.id) for job in jobs}
    assert all(set(said) <= {"applied", "duplicate", "late"} for said in answers.values())
    assert contradictions(own_db) == []
    assert own_db.value("SELECT max(attempt) FROM recognition_job") == 1
    assert {request.msg_id for request in service.heard()} == {job.msg_id for job in jobs}
    assert daemon.stop() == 0


@pytest.mark.req("B48")
def test_a_fact_that_the_database_refuses_holds_up_its_own_job_only(start_daemon: StartDaemon, db: Database) -> None:
    db.execute("""
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT key LIKE 'refused/%' FROM s3_object o JOIN stored_file f ON f.s3_object_id = o.id WHERE f.id = NEW.file_id)
        THEN RAISE EXCEPTION 'refused by a trigger'; END IF;
        RETURN NEW;
    END $$""")
    db.execute("CREATE TRIGGER refuse BEFORE INSERT ON quality_failure_fact FOR EACH ROW EXECUTE FUNCTION refuse()")
    good: list[JobIds] = []
    refused: list[JobIds] = []
    for n in range(35):
        job = db.insert_job(**({"key": f"refused/{n}"} if n % 7 == 0 else {}))
        (refused if n % 7 == 0 else good).append(job)
    daemon = start_daemon(ACK_TIMEOUT_SECONDS="0.2", OUTBOX_MAX_REPUBLISH="1", **QUICK)
    daemon.claim("outbox.write_refused")
    wait_until(lambda: set(db.statuses(good)) == {"dlq"})
    assert set(db.statuses(refused)) == {"published"}
    assert contradictions(db) == []
    for job in refused:
        daemon.wait_for_event("outbox.write_refused", job_id=str(job.id), count=2)  # it is tried again
    db.execute("DROP TRIGGER refuse ON quality_failure_fact")
    wait_until(lambda: set(db.statuses(refused)) == {"dlq"})
    assert contradictions(db) == []
    assert daemon.stop() == 0
    assert not daemon.named("task.restarting")


@pytest.mark.req("B48")
def test_killed_while_jobs_fail_it_leaves_job_file_and_fact_together(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, open_service: OpenService
) -> None:
    def acknowledge_half(client: ServiceClient, request: Heard) -> None:
        if int(request.document["job_id"][0], 16) % 2:
            acknowledge(client, request)

    open_service(environment, on_message=acknowledge_half)
    jobs = db.insert_jobs(200)
    short = {"ACK_TIMEOUT_SECONDS": "0.3", "OUTBOX_MAX_REPUBLISH": "1", "REPLY_TIMEOUT_SECONDS": "1.5"}
    batches = {
        "OUTBOX_BATCH_SIZE": "7",
        "INBOX_BATCH_SIZE": "7",
        "OUTBOX_POLL_SECONDS": "0.02",
        "WATCHDOG_PERIOD_SECONDS": "0.02",
    }
    for failed in (1, 40, 80, 120, 160):
        daemon = start_daemon(**short, **batches)
        _wait_finished(db, failed)
        daemon.kill()
        assert contradictions(db) == []
    start_daemon(**short, **batches)
    wait_until(lambda: set(db.statuses(jobs)) <= {"dlq", "timeout"})
    assert contradictions(db) == []
    assert db.value("SELECT count(*) FROM quality_failure_fact") == 200


@pytest.mark.req("B50", "B16")
def test_backends_terminated_with_results_in_flight_lose_none(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(INBOX_BATCH_SIZE="10", **QUICK).wait_ok()
    jobs = db.insert_jobs(200)
    service.wait_heard(200)
    wait_until(lambda: set(db.statuses(jobs)) == {"published"})

    def send() -> None:
        for job in jobs:
            send_done(service, job, ask=True)

    sender = threading.Thread(target=send)
    sender.start()
    for n in range(1, 5):
        terminate_backends(db)
        daemon.wait_for_event("task.recovered", count=n, task="watchdog")
    sender.join()
    wait_until(lambda: set(db.statuses(jobs)) == {"done"})
    service.flush()
    assert all(service.answer(reply_of(service, job))["outcome"] in ("applied", "duplicate") for job in jobs)
    assert daemon.stop() == 0
    totals = daemon.one("shutdown.complete")["totals"]["subscriber"]
    assert totals["applied"] + totals.get("duplicate", 0) == totals["received"] == 200


@pytest.mark.req("B16")
def test_both_servers_killed_at_once_under_load_is_an_outage_like_any(
    start_daemon: StartDaemon,
    own_environment: dict[str, str],
    own_postgres: Postgres,
    own_nats: Nats,
    own_db: Database,
    open_service: OpenService,
) -> None:
    commit_to_disk(own_db)
    daemon = start_daemon(
        own_environment, ACK_TIMEOUT_SECONDS="1", OUTBOX_MAX_REPUBLISH="20", SHUTDOWN_GRACE_SECONDS="4", **QUICK
    ).wait_ok()
    jobs, applied = [], set()
    for _ in range(3):
        service = open_service(own_environment, on_message=complete)
        jobs += own_db.insert_jobs(60)
        wait_busy(service)
        own_db.close()
        own_postgres.kill()
        own_nats.kill()
        applied |= {
            one.document["job_id"]
            for one in service._heard
            if one.subject.startswith(service.inbox) and one.document["outcome"] == "applied"
        }
        daemon.wait_health(nats="down", database="down")
        own_postgres.start()
        own_nats.start()
        daemon.wait_ok()
    done = {str(row["id"]) for row in own_db.rows("recognition_job", "status = 'done'")}
    assert applied <= done, "what was answered applied is applied"
    service = open_service(own_environment)
    for job in jobs:
        send_done(service, job, ask=True)
    wait_until(lambda: set(own_db.statuses(jobs)) == {"done"})
    assert contradictions(own_db) == []
    own_db.close()
    own_postgres.kill()
    own_nats.kill()
    started = monotonic()
    assert daemon.stop() == 0
    assert monotonic() - started < 5, "answers that came twice may still have waited, which the stop gives their time"
    daemon.claim("inbox.abandoned")
    outages = daemon.named("task.restarting")
    assert all("nats: " in record["error"] or "database: " in record["error"] for record in outages)
    assert {record["level"] for record in outages} == {"warning"}


@pytest.mark.req("B16", "B30", "B50")
def test_kills_of_the_daemon_and_restarts_of_nats_leave_no_job_behind_and_no_flood(
    start_daemon: StartDaemon,
    environment: dict[str, str],
    own_nats: Nats,
    db: Database,
    link: Callable[[int], Proxy],
    open_service: OpenService,
) -> None:
    own = environment | {URL: own_nats.url}
    proxy = link(own_nats.port)
    core = own | {URL: f"nats://127.0.0.1:{proxy.port}"}
    rules = {"ACK_TIMEOUT_SECONDS": "1", "OUTBOX_MAX_REPUBLISH": "10", **QUICK}
    jobs: list[JobIds] = []
    interruptions = 0
    service = open_service(own, on_message=complete)
    for _ in range(3):
        daemon = start_daemon(core, **rules).wait_ok()
        for broken in ("nats", "daemon"):
            latest = db.insert_jobs(60) + db.insert_jobs(20, pipeline="image")
            _wait_begun(db, latest)
            jobs += latest
            interruptions += 1
            if broken == "nats":
                own_nats.kill()
                own_nats.start()
                service = open_service(own, on_message=complete)
                daemon.wait_ok()
            else:
                daemon.kill()
        assert contradictions(db) == []
    daemon = start_daemon(core, **rules).wait_ok()
    wait_until(lambda: set(db.statuses(jobs)) <= {"done", "processing"}, what=lambda: Counter(db.statuses(jobs)))
    for job in jobs:  # as services do with a result that nobody answered
        send_done(service, job, ask=True)
    wait_until(lambda: set(db.statuses(jobs)) == {"done"}, what=lambda: Counter(db.statuses(jobs)))
    assert contradictions(db) == []
    sent = _requests_sent(proxy)
    repeats = {f"{row['id']}:1": row["metrics"].get("republish_count", 0) for row in db.jobs(jobs)}
    assert sent.keys() == repeats.keys()
    assert all(sent[msg_id] <= 1 + repeats[msg_id] + interruptions for msg_id in sent)
    assert sum(sent.values()) <= len(jobs) + sum(repeats.values()) + 80 * interruptions, "an interruption repeats its own batch"
    assert daemon.stop() == 0


@pytest.mark.req("B46", "S4.4")
def test_deadlines_that_pass_while_results_arrive_leave_one_end_for_each_job(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, open_service: OpenService
) -> None:
    service = open_service(environment, on_message=acknowledge)
    quick = {"OUTBOX_POLL_SECONDS": "0.1", "WATCHDOG_PERIOD_SECONDS": "0.05", "INBOX_BATCH_SIZE": "20"}
    daemons = [start_daemon(REPLY_TIMEOUT_SECONDS="3600", **quick).wait_ok() for _ in range(2)]
    jobs = db.insert_jobs(500)
    wait_until(lambda: set(db.statuses(jobs)) == {"processing"})
    record_changes(db)
    db.execute("UPDATE recognition_job SET reply_deadline = now() + random() * interval '1 s'")
    db.execute("TRUNCATE changes")
    _send_spread(service, jobs, 1)
    wait_until(lambda: set(db.statuses(jobs)) <= {"done", "timeout"}, what=lambda: Counter(db.statuses(jobs)))
    answers = {job.id: service.answer(f"{service.inbox}.{job.id}")["outcome"] for job in jobs}
    statuses = {row["id"]: row["status"] for row in db.jobs(jobs)}
    assert {"done", "timeout"} == set(statuses.values()), "a race with one runner proves nothing"
    expected = {"done": "applied", "timeout": "late"}
    assert answers == {job_id: expected[status] for job_id, status in statuses.items()}
    changes = db.execute("SELECT job_id, count(*) AS n FROM changes GROUP BY job_id")
    assert {row["n"] for row in changes} == {1}, "no final status changes"
    facts = {row["job_id"] for row in db.rows("quality_failure_fact")}
    assert facts == {job_id for job_id, status in statuses.items() if status == "timeout"}
    assert contradictions(db) == []
    assert [daemon.stop() for daemon in daemons] == [0, 0]
    late = {record["job_id"] for daemon in daemons for record in daemon.named("inbox.late")}
    assert late == {str(job_id) for job_id in facts}
