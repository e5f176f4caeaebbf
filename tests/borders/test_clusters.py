"""Several servers where one would do: a NATS cluster that loses nodes, and two databases of which one may be written to."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from time import monotonic

import pytest

from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, URL
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.cluster import Cluster, ReconnectingService
from tests.support.daemon import DaemonProcess
from tests.support.database import Database, JobIds
from tests.support.proxy import Direction, Proxy
from tests.support.sabotage import backends, contradictions, slow_updates
from tests.support.servers import RESULT_SUBJECT, TABULAR_SUBJECT, start_postgres
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}
NATS_TASKS = ("publisher", "subscriber.intake")
BATCH = 20
MOVED_SECONDS = 5

Link = Callable[[int], Proxy]


def _core(environment: dict[str, str], links: Sequence[Proxy]) -> dict[str, str]:
    return environment | QUICK | {"OUTBOX_BATCH_SIZE": str(BATCH), URL: ",".join(f"nats://127.0.0.1:{one.port}" for one in links)}


def _service(environment: dict[str, str], *nodes: Nats) -> ReconnectingService:
    return ReconnectingService(nodes, environment[TABULAR_SUBJECT], environment[RESULT_SUBJECT])


def _sent(links: Sequence[Proxy]) -> Counter[str]:
    """`Nats-Msg-Id` of each request that left the daemon, and how often."""
    streams = [link.recorded(Direction.UP, number) for link in links for number in range(link.connections)]
    return Counter(found.decode() for stream in streams for found in re.findall(rb"\r\nNats-Msg-Id: ?([^\r]+)\r\n", stream))


def _wait_midst(service: ReconnectingService, count: int) -> None:
    wait_until(lambda: len(service.requests) >= count, what="the midst of the load")


def _wait_moved(daemon: DaemonProcess, links: Sequence[Proxy], to: int, times: int) -> None:
    """Both tasks leave their node and have another, within seconds."""
    started = monotonic()
    for task in NATS_TASKS:
        daemon.wait_for_event("task.recovered", task=task, count=times)
    assert monotonic() - started < MOVED_SECONDS
    assert links[to].connections >= len(NATS_TASKS)
    assert daemon.wait_ok().health()["nats"] == "ok"


def _assert_all_done(db: Database, jobs: list[JobIds], service: ReconnectingService) -> None:
    """Every job is done, and once only; what the service was told is what the tables hold."""
    wait_until(lambda: set(db.statuses(jobs)) == {"done"}, 30, lambda: Counter(db.statuses(jobs)))
    wait_until(lambda: len(service.outcomes) == len(jobs), what="an answer for each job")
    assert {outcome for outcomes in service.outcomes.values() for outcome in outcomes} <= {"applied", "duplicate"}
    assert contradictions(db) == []
    assert db.value("SELECT count(*) FROM s3_object WHERE bucket_role = 'results'") == len(jobs)


@pytest.mark.req("R6", "D1.1", "D3.1", "B16", "B30")
def test_nodes_killed_under_load_are_left_for_others_and_nothing_confirmed_is_lost(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, link: Link
) -> None:
    with Cluster() as cluster, _service(environment, *cluster.nodes[1:]) as service:
        links = [link(node.port) for node in cluster.nodes]
        daemon = start_daemon(_core(environment, links), ACK_TIMEOUT_SECONDS="2", OUTBOX_MAX_REPUBLISH="10").wait_ok()
        slow_updates(db, 0.01)
        jobs: list[JobIds] = []
        for n, node in enumerate(cluster.nodes[:2]):  # the daemon's own, then the one where both have met
            jobs += db.insert_jobs(200)
            _wait_midst(service, len(jobs) - 150)
            node.kill()
            applied = {job_id for job_id, outcomes in list(service.outcomes.items()) if "applied" in outcomes}
            jobs += db.insert_jobs(50)
            _wait_moved(daemon, links, n + 1, n + 1)
            assert applied <= {str(job.id) for job, status in zip(jobs, db.statuses(jobs), strict=True) if status == "done"}
        assert service.port == cluster.nodes[2].port
        _assert_all_done(db, jobs, service)
        assert daemon.stop() == 0
    sent, kills = _sent(links), 2
    repeats = {job.msg_id: row["metrics"].get("republish_count", 0) for job, row in zip(jobs, db.jobs(jobs), strict=True)}
    assert sent.keys() == repeats.keys()
    assert all(sent[msg_id] <= 1 + repeats[msg_id] + kills for msg_id in sent)
    assert sum(sent.values()) <= len(jobs) + sum(repeats.values()) + 2 * BATCH * kills, "a kill repeats what was under way"
    assert {record["task"] for record in daemon.named("task.restarting")} == set(NATS_TASKS)


@pytest.mark.req("R6", "D1.1", "B34", "B57")
def test_a_node_in_lame_duck_mode_is_left_without_loss(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, link: Link
) -> None:
    with Cluster() as cluster, _service(environment, *cluster.nodes[1:]) as service:
        links = [link(node.port) for node in cluster.nodes]
        daemon = start_daemon(_core(environment, links), ACK_TIMEOUT_SECONDS="60").wait_ok()
        slow_updates(db, 0.01)
        jobs = db.insert_jobs(300)
        _wait_midst(service, 40)
        cluster.nodes[0].signal("ldm")
        _wait_moved(daemon, links, 1, 1)
        _assert_all_done(db, jobs, service)
        assert daemon.stop() == 0
    assert all("lame duck" in daemon.one("task.restarting", task=task)["error"] for task in NATS_TASKS)
    assert len(daemon.named("task.restarting")) == len(NATS_TASKS)
    assert {row["metrics"].get("republish_count", 0) for row in db.jobs(jobs)} == {0}
    sent = _sent(links)
    assert sent.keys() == {job.msg_id for job in jobs} == service.requests.keys()
    assert sum(sent.values()) <= len(jobs) + BATCH, "at most the batch under way went out again"


def _set_read_only(db: Database, mode: str) -> None:
    with db.connect(options="-c default_transaction_read_only=off", autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {mode}".encode())
        connection.execute("SELECT pg_reload_conf()")
    wait_until(lambda: db.value("SHOW default_transaction_read_only") == mode)


@pytest.mark.req("B12", "B50", "D4.7")
def test_of_two_databases_the_one_that_can_be_written_to_is_used(
    start_daemon: StartDaemon, environment: dict[str, str], own_postgres: Postgres, own_db: Database, service: ServiceClient
) -> None:
    _set_read_only(own_db, "on")
    with start_postgres() as standby, closing(Database(standby.dsn())) as other_db:
        hosts = f"host=127.0.0.1,127.0.0.1 port={own_postgres.port},{standby.port} target_session_attrs=read-write"
        own = environment | {DSN: f"{hosts} user=postgres dbname=postgres"}
        daemon = start_daemon(own, "run", "--migrate", **QUICK).wait_ok()
        assert daemon.named("migrate.done")
        assert (len(backends(own_db)), len(backends(other_db))) == (0, 4)
        job = other_db.insert_job()
        service.wait_heard(1)
        assert service.ask(envelopes.done(job), envelopes.result_id(job))["outcome"] == "applied"

        _set_read_only(own_db, "off")
        _set_read_only(other_db, "on")
        job = own_db.insert_job()
        service.wait_heard(2)
        assert service.ask(envelopes.done(job), envelopes.result_id(job))["outcome"] == "applied"
        assert own_db.job(job)["status"] == "done"
        other_db.close()
        standby.stop()
        daemon.wait_health(lambda report: report["database"] == "ok" and len(backends(own_db)) == 4)
        daemon.wait_ok()
        own_db.close()
        own_postgres.stop()
        daemon.wait_health(database="down")
        own_postgres.start()
        daemon.wait_ok()
        assert daemon.stop() == 0
    assert "read-only" in str(daemon.named("task.restarting"))
