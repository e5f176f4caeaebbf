"""More than fits, and everything at once: floods of results, deadlines that pass while results arrive."""

import json

import pytest

from armcore_trio.demo.embedded import Postgres
from armcore_trio.settings import DSN
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.database import Database, JobIds
from tests.support.responder import OpenService
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

FLOOD = 20_000


def _resident_megabytes(pid: int, entry: str = "VmRSS") -> float:
    with open(f"/proc/{pid}/status") as status:  # noqa: PTH123 - as short as can be
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(entry))


def _insert_published(db: Database, count: int) -> list[JobIds]:
    """So many jobs that only wait for their result, made by the database in one go."""
    rows = db.execute(
        """
        WITH file AS (
            INSERT INTO stored_file (file_name) SELECT 'n' || n FROM generate_series(1, %s) AS n RETURNING id
        ), job AS (
            INSERT INTO recognition_job (file_id, pipeline, status, published_at, reply_deadline)
            SELECT id, 'tabular', 'published', now(), now() + interval '1 hour' FROM file RETURNING id, file_id
        )
        SELECT id, file_id FROM job""",
        count,
    )
    db.execute(
        "UPDATE stored_file SET current_recognition_job_id = j.id FROM recognition_job AS j WHERE j.file_id = stored_file.id"
    )
    return [JobIds(row["id"], row["file_id"]) for row in rows]


def _flood(service: ServiceClient, jobs: list[JobIds]) -> None:
    """A result of 2 kB for each."""
    padding = "x" * 1500
    for job in jobs:
        service.send(envelopes.done(job, metrics={"padding": padding}), envelopes.result_id(job))
    service.flush()


@pytest.mark.req("B44", "D4.7")
def test_a_flood_while_the_database_is_away_is_kept_and_applied(
    start_daemon: StartDaemon, environment: dict[str, str], own_postgres: Postgres, own_db: Database, open_service: OpenService
) -> None:
    own = environment | {DSN: own_postgres.dsn()}
    service = open_service(own)
    daemon = start_daemon(own).wait_ok()
    jobs = _insert_published(own_db, FLOOD)
    own_db.close()
    own_postgres.stop()
    daemon.wait_health(database="down")
    before = _resident_megabytes(daemon.pid)
    _flood(service, jobs)
    assert _resident_megabytes(daemon.pid) - before < 150
    own_postgres.start()
    daemon.wait_ok()
    wait_until(lambda: own_db.value("SELECT count(*) FROM recognition_job WHERE status = 'done'") == FLOOD, 30)
    assert _resident_megabytes(daemon.pid) - before < 250
    assert daemon.stop() == 0
    totals = daemon.one("shutdown.complete")["totals"]["subscriber"]
    assert (totals["received"], totals["applied"], totals.get("abandoned", 0)) == (FLOOD, FLOOD, 0)
    assert not daemon.named("task.restarting", task="subscriber.intake")


@pytest.mark.req("B44", "D4.7")
def test_what_a_locked_table_leaves_no_room_for_is_named_and_the_rest_applied(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(INBOX_BUFFER_MESSAGES="2000").wait_ok()
    daemon.claim("inbox.abandoned")
    jobs = _insert_published(db, 5_000)
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        _flood(service, jobs)
        wait_until(lambda: len(daemon.named("inbox.abandoned")) >= 3_000)
    abandoned = {(record["job_id"], record["msg_id"]) for record in daemon.named("inbox.abandoned")}
    wait_until(lambda: db.value("SELECT count(*) FROM recognition_job WHERE status = 'done'") == 2_000)
    kept = {str(job.id) for job, status in zip(jobs, db.statuses(jobs), strict=True) if status == "done"}
    assert kept == {str(job.id) for job in jobs[:2000]}, "the first come"
    assert abandoned == {(str(job.id), envelopes.result_id(job)) for job in jobs[2000:]}
    late = jobs[-1]
    assert service.ask(envelopes.done(late), envelopes.result_id(late))["outcome"] == "applied"
    assert daemon.stop() == 0
    totals = daemon.one("shutdown.complete")["totals"]["subscriber"]
    assert (totals["received"], totals["applied"], totals["abandoned"]) == (5_001, 2_001, 3_000)


@pytest.mark.req("N22", "D4.7")
def test_what_is_small_on_the_wire_and_large_in_memory_is_kept_as_it_came(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon().wait_ok()
    jobs = _insert_published(db, 60)
    metrics: dict[str, list[list[int]]] = {"x": [[]] * 84_800}
    before = _resident_megabytes(daemon.pid)
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        for job in jobs:
            body = json.dumps(envelopes.done(job, metrics=metrics), separators=(",", ":")).encode()
            assert 254_000 < len(body) < 262_144
            service.send(body, envelopes.result_id(job))
        received = 'armcore_events_total{event="received",task="subscriber"} 60.0'
        wait_until(lambda: received in daemon.get("/metrics")[1], what="all results in the inbox")
        assert _resident_megabytes(daemon.pid) - before < 75, "15 MB, and one batch of it as objects"
    wait_until(lambda: set(db.statuses(jobs)) == {"done"}, 30)
    assert _resident_megabytes(daemon.pid, "VmHWM") - before < 100
    assert db.value("SELECT jsonb_array_length(metrics -> 'x') FROM recognition_job WHERE id = %s", jobs[-1].id) == 84_800
    assert daemon.stop() == 0
