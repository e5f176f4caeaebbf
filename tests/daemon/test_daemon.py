"""The exchange end to end: the daemon as a process, real servers, and a service that speaks plain NATS."""

import json
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from armcore_trio.demo.embedded import Nats
from armcore_trio.settings import URL
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.database import Database
from tests.support.responder import OpenService, acknowledge
from tests.support.sabotage import contradictions, record_changes, slow_updates
from tests.support.servers import IMAGE_SUBJECT, RESULT_SUBJECT, TABULAR_SUBJECT
from tests.support.service import Heard, ServiceClient
from tests.support.waiting import wait_until

REQUEST_SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "recognition-request.schema.json").read_text())
QUICK = {"OUTBOX_POLL_SECONDS": "0.05", "WATCHDOG_PERIOD_SECONDS": "0.1"}


def _totals(daemon: Any) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = daemon.one("shutdown.complete")["totals"]
    return totals


@pytest.mark.req("S1.1", "S2.1", "S4.1", "S4.2")
def test_a_job_travels_from_its_row_to_a_result_and_back(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon().wait_ok()

    job = db.insert_job()
    (request,) = service.wait_heard(1, seconds=10)
    assert request.subject == environment[TABULAR_SUBJECT]
    assert request.headers == (("Nats-Msg-Id", f"{job.id}:1"),)
    body = request.document
    jsonschema.Draft202012Validator(REQUEST_SCHEMA).validate(body)
    assert (body["job_id"], body["file_id"], body["s3"]["key"], body["attempt"]) == (str(job.id), str(job.file_id), job.key, 1)
    wait_until(lambda: db.job(job)["status"] == "published")
    row = db.job(job)
    assert (row["request_msg_id"], row["request_subject"]) == (f"{job.id}:1", request.subject)
    assert row["reply_deadline"] - row["published_at"] == timedelta(seconds=900)
    assert datetime.fromisoformat(body["reply_deadline"]) == row["reply_deadline"]

    assert service.ask(envelopes.ack(job)) == {"outcome": "applied", "job_id": str(job.id), "reason": None}
    row = db.job(job)
    assert (row["status"], row["service_name"], row["service_version"]) == ("processing", "tabular-parser", "2.1.0")
    assert row["started_at"] is not None
    assert db.file(job)["status"] == "PROCESSING"

    assert service.ask(envelopes.done(job), f"result:{job.id}:1")["outcome"] == "applied"
    row = db.job(job)
    assert (row["status"], row["result_msg_id"]) == ("done", f"result:{job.id}:1")
    assert row["finished_at"] is not None
    assert db.object(row["result_s3_object_id"])["key"] == f"results/{job.file_id}/{job.id}/result.json"
    assert db.file(job)["status"] == "PROCESSING"

    before = db.snapshot()
    assert service.ask(envelopes.done(job), f"result:{job.id}:1")["outcome"] == "duplicate"
    assert db.snapshot() == before
    assert daemon.stop() == 0
    assert _totals(daemon)["subscriber"] == {"received": 3, "applied": 2, "duplicate": 1, "restarts": 0}
    assert len(service.heard()) == 1


@pytest.mark.req("S4.3", "S4.5", "S4.6", "D4.10")
def test_a_service_error_ends_the_job_the_file_and_leaves_a_fact(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    start_daemon().wait_ok()
    job = db.insert_job(pipeline="image")
    service.wait_heard(1)
    service.ask(envelopes.ack(job))
    assert service.ask(envelopes.error(job, raw_s3_key=job.raw_key), envelopes.result_id(job))["outcome"] == "applied"
    row = db.job(job)
    assert (row["status"], row["error_code"], row["error_message"]) == ("error", "UNSUPPORTED_FORMAT", "not a spreadsheet")
    assert row["result_s3_object_id"] is None
    raw = db.object(row["raw_s3_object_id"])
    assert (raw["bucket"], raw["key"], raw["bucket_role"]) == ("arm-ka", f"raw/{job.id}.json", "raw")
    file, fact = db.file(job), db.fact(job)
    assert (file["status"], file["error_code"]) == ("ERROR", "UNSUPPORTED_FORMAT")
    assert fact is not None
    assert (fact["failure_kind"], fact["error_code"], fact["pipeline"]) == ("SERVICE_ERROR", "UNSUPPORTED_FORMAT", "image")


@pytest.mark.req("S3.1", "D3.2")
def test_a_request_nobody_acknowledges_is_repeated_three_times_and_then_a_dead_letter(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(ACK_TIMEOUT_SECONDS="0.5", **QUICK).wait_ok()
    heard_at: list[float] = []
    service.on_message = lambda *_: heard_at.append(monotonic())
    job = db.insert_job()
    wait_until(lambda: db.job(job)["status"] == "dlq")
    row, file, fact = db.job(job), db.file(job), db.fact(job)
    requests = service.heard()
    assert [request.msg_id for request in requests] == [f"{job.id}:1"] * 4
    assert len({request.data for request in requests}) == 1
    assert all(0.45 < later - earlier < 2 for earlier, later in pairwise(heard_at))
    assert (row["error_code"], row["request_msg_id"], row["metrics"]) == ("NO_ACK", f"{job.id}:1", {"republish_count": 3})
    assert row["finished_at"] - row["published_at"] >= timedelta(seconds=0.5)
    assert (file["status"], file["error_code"]) == ("ERROR", "NO_ACK")
    assert fact is not None
    assert fact["failure_kind"] == "NO_ACK"
    assert daemon.stop() == 0
    totals = _totals(daemon)["publisher"]
    assert (totals["published"], totals["republished"], totals["dead_lettered"]) == (1, 3, 1)


@pytest.mark.req("S3.2")
def test_a_service_that_comes_late_stops_the_repeats(start_daemon: StartDaemon, db: Database, service: ServiceClient) -> None:
    start_daemon(ACK_TIMEOUT_SECONDS="0.4", **QUICK).wait_ok()
    job = db.insert_job()

    def acknowledge_the_repeat(client: ServiceClient, request: Heard) -> None:
        if [one.msg_id for one in client._heard].count(request.msg_id) > 1:
            acknowledge(client, request)

    service.on_message = acknowledge_the_repeat
    wait_until(lambda: db.job(job)["status"] == "processing")
    other = db.insert_job()
    wait_until(lambda: db.job(other)["status"] == "processing")  # which took a wait, and no repeat of the first came in it
    assert [request.msg_id for request in service.heard()].count(job.msg_id) == 2
    assert db.job(job)["metrics"] == {"republish_count": 1}


@pytest.mark.req("S5.1", "S5.2", "S4.4")
def test_a_job_past_its_deadline_times_out_and_takes_no_result_any_more(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(REPLY_TIMEOUT_SECONDS="0.6", **QUICK).wait_ok()
    job = db.insert_job()
    service.wait_heard(1)
    service.ask(envelopes.ack(job))
    wait_until(lambda: db.job(job)["status"] == "timeout")
    row, file, fact = db.job(job), db.file(job), db.fact(job)
    assert row["error_code"] == "TIMEOUT"
    assert row["finished_at"] > row["reply_deadline"]
    assert (file["status"], file["error_code"]) == ("ERROR", "TIMEOUT")
    assert fact is not None
    assert (fact["failure_kind"], fact["service_name"]) == ("TIMEOUT", "tabular-parser")

    before = db.snapshot()
    answer = service.ask(envelopes.done(job), envelopes.result_id(job))
    assert answer == {"outcome": "late", "job_id": str(job.id), "reason": "timeout"}
    assert db.snapshot() == before
    assert daemon.one("inbox.late", job_id=str(job.id))["level"] == "warning"


@pytest.mark.req("S1.2", "D9.2")
def test_a_job_waits_for_a_nats_that_is_away(
    start_daemon: StartDaemon, environment: dict[str, str], own_nats: Nats, db: Database
) -> None:
    own_nats.stop()
    daemon = start_daemon(environment, **{URL: own_nats.url})
    job = db.insert_job()
    report = daemon.wait_health(lambda report: report["tasks"]["publisher"]["restarts"] >= 3)
    assert (report["status"], report["nats"], report["database"]) == ("degraded", "down", "ok")
    assert "nats" in report["tasks"]["publisher"]["last_error"]
    assert db.job(job)["status"] == "queued"
    error = daemon.wait_for_event("task.restarting", task="publisher")
    assert f"127.0.0.1:{own_nats.port}" in error["error"]
    own_nats.start()
    wait_until(lambda: db.job(job)["status"] == "published")
    daemon.wait_ok()
    assert len(daemon.named("task.restarting", task="publisher")) == 1, "one line a change of the cause, not one an attempt"
    assert daemon.stop() == 0


@pytest.mark.req("S6.1", "S7.1")
def test_with_nothing_but_servers_the_default_subjects_are_used_and_the_log_is_quiet(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, open_service: OpenService
) -> None:
    defaults = {
        "tabular_request": "files.tabular_uploaded",
        "image_request": "files.img_uploaded",
        "result": "files.tabular_parsed",
    }
    bare = {key: value for key, value in environment.items() if not key.endswith("_SUBJECT")}
    daemon = start_daemon(bare, DEBUG="true", NATS_ENABLED="true").wait_ok()
    report = daemon.health()
    assert (report["nats"], report["database"], report["subjects"]) == ("ok", "ok", defaults)
    assert daemon.one("daemon.started")["subjects"] == defaults
    assert set(report["tasks"]) == {"publisher", "subscriber", "watchdog", "health"}

    names = {TABULAR_SUBJECT: defaults["tabular_request"], IMAGE_SUBJECT: defaults["image_request"]}
    service = open_service(environment | names | {RESULT_SUBJECT: defaults["result"]})
    job = db.insert_job()
    assert service.wait_heard(1)[0].subject == "files.tabular_uploaded"
    assert service.ask(envelopes.ack(job))["outcome"] == "applied"
    assert daemon.stop() == 0
    assert {record["level"] for record in daemon.all} <= {"debug", "info"}


@pytest.mark.req("S6.2")
def test_of_two_instances_one_applies_a_result(start_daemon: StartDaemon, db: Database, service: ServiceClient) -> None:
    daemons = [start_daemon().wait_ok() for _ in range(2)]
    jobs = db.insert_jobs(20)
    service.wait_heard(20)
    record_changes(db)
    for job in jobs:
        assert service.ask(envelopes.done(job), envelopes.result_id(job))["outcome"] == "applied"
    assert [daemon.stop() for daemon in daemons] == [0, 0]
    changes = db.execute("SELECT count(*) AS n FROM changes GROUP BY job_id")
    assert [row["n"] for row in changes] == [1] * 20
    applied = [_totals(daemon)["subscriber"].get("applied", 0) for daemon in daemons]
    assert sum(applied) == 20
    assert all(applied), "the queue group shares the work"


@pytest.mark.req("S6.3")
def test_disabled_it_serves_health_and_nothing_else(start_daemon: StartDaemon) -> None:
    daemon = start_daemon({}, NATS_ENABLED="false")
    status, body = daemon.get("/healthcheck")
    report = json.loads(body)
    assert status == 200
    assert (report["status"], report["nats"], report["database"]) == ("ok", "off", "off")
    assert list(report["tasks"]) == ["health"]
    assert daemon.get("/readyz")[0] == daemon.get("/livez")[0] == 200
    assert daemon.stop() == 0
    assert {record["level"] for record in daemon.all} == {"info"}


@pytest.mark.req("S7.2")
def test_the_subjects_of_the_environment_are_used_and_shown(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, open_service: OpenService
) -> None:
    listener = open_service(environment, subjects=["files.>"])
    service = open_service(environment)
    daemon = start_daemon().wait_ok()
    names = (environment[TABULAR_SUBJECT], environment[IMAGE_SUBJECT], environment[RESULT_SUBJECT])
    assert tuple(daemon.health()["subjects"].values()) == names
    jobs = [db.insert_job(pipeline=pipeline) for pipeline in ("tabular", "image")]
    assert sorted(request.subject for request in service.wait_heard(2)) == sorted(names[:2])
    for job in jobs:
        assert service.ask(envelopes.done(job), envelopes.result_id(job))["outcome"] == "applied"
    service.publish("files.tabular_parsed", envelopes.done(jobs[0]))
    service.flush()
    assert daemon.stop() == 0
    assert listener.heard("files.tabular_uploaded") == listener.heard("files.img_uploaded") == []
    assert _totals(daemon)["subscriber"]["received"] == 2


@pytest.mark.req("B45", "D1.2", "D1.3")
@pytest.mark.parametrize(("count", "instances"), [(500, 1), (1000, 2)])
def test_an_ack_within_a_millisecond_is_never_lost(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, open_service: OpenService, count: int, instances: int
) -> None:
    service = open_service(environment, on_message=acknowledge)
    slow_updates(db, 0.2)
    daemons = [start_daemon(**QUICK).wait_ok() for _ in range(instances)]
    jobs = db.insert_jobs(count)
    wait_until(lambda: set(db.statuses(jobs)) == {"processing"}, what="all jobs processing")
    assert all("republish_count" not in row["metrics"] for row in db.jobs(jobs))
    assert contradictions(db) == []
    assert [daemon.stop() for daemon in daemons] == [0] * instances
    totals = [_totals(daemon) for daemon in daemons]
    assert sum(total["subscriber"].get("applied", 0) for total in totals) == count
    assert sum(total["publisher"].get("published", 0) for total in totals) == count
    assert len(service.heard()) == count


@pytest.mark.req("D1.6")
def test_an_insert_is_on_the_wire_long_before_the_next_poll(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    start_daemon(OUTBOX_POLL_SECONDS="60").wait_ok()
    heard_at: list[float] = []
    service.on_message = lambda *_: heard_at.append(monotonic())

    def publish_one() -> float:
        heard_at.clear()
        started = monotonic()
        db.insert_job()
        wait_until(lambda: heard_at, 5)
        return heard_at[0] - started

    assert median(publish_one() for _ in range(20)) < 0.1


def test_metrics_are_prometheus_text(start_daemon: StartDaemon, db: Database, service: ServiceClient) -> None:
    daemon = start_daemon().wait_ok()
    job = db.insert_job()
    service.wait_heard(1)
    service.ask(envelopes.ack(job))
    service.ask(b"no envelope")

    def sample(name: str, **labels: str) -> float | None:
        families = text_string_to_metric_families(daemon.get("/metrics")[1])
        samples = [one for family in families for one in family.samples if one.name == name and one.labels == labels]
        return samples[0].value if samples else None

    assert wait_until(lambda: sample("armcore_events_total", task="publisher", event="published")) == 1
    assert sample("armcore_events_total", task="subscriber", event="applied") == 1
    assert sample("armcore_events_total", task="subscriber", event="invalid") == 1
    assert all(sample("armcore_task_running", task=task) == 1 for task in ("publisher", "watchdog", "health"))
