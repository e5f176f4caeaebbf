"""The health child's look at the database, against real servers: how soon it sees what, and what it says of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
import trio

from armcore_trio.demo.embedded import Postgres
from armcore_trio.observation.probe import PROBE_SECONDS, DatabaseProbe
from armcore_trio.settings import DSN
from armcore_trio.supervision.status import Status
from tests.conftest import StartDaemon
from tests.support.database import Database
from tests.support.listener import Listener
from tests.support.waiting import in_thread, until

LIMIT_SECONDS = 15


@asynccontextmanager
async def probing(dsn: str) -> AsyncIterator[DatabaseProbe]:
    """A probe at work."""
    probe = DatabaseProbe(dsn, Status({}, "", enabled=True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.run)
        yield probe
        nursery.cancel_scope.cancel()


async def look(probe: DatabaseProbe) -> bool:
    """A look that does not repeat what was seen before; it keeps its limit."""
    probe._looked_at = float("-inf")
    began = trio.current_time()
    found = await probe.answers()
    assert trio.current_time() - began < PROBE_SECONDS + 0.3
    return found


@pytest.mark.req("N04", "B14")
async def test_a_frozen_server_is_seen_within_a_second_and_so_is_its_thaw(own_postgres: Postgres) -> None:
    async with probing(own_postgres.dsn()) as probe:
        assert await look(probe)
        own_postgres.freeze()
        for _ in range(3):
            assert not await look(probe)
        assert probe.failure == "database: no answer to a probe within 1 s"
        own_postgres.thaw()
        with trio.fail_after(LIMIT_SECONDS):
            while not await look(probe):
                pass


@pytest.mark.req("N04", "B14")
async def test_a_server_that_was_restarted_answers_at_the_next_look(own_postgres: Postgres) -> None:
    async with probing(own_postgres.dsn()) as probe:
        assert await look(probe)
        await in_thread(own_postgres.stop)
        assert not await look(probe)
        assert "Connection refused" in (probe.failure or "")
        await in_thread(own_postgres.start)
        assert await look(probe)
        await in_thread(own_postgres.stop, "immediate")
        await in_thread(own_postgres.start)
        assert await look(probe)


@pytest.mark.req("N04")
async def test_a_mute_host_is_passed_whether_anybody_asks_or_not(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armcore_trio.borders.database.CONNECT_SECONDS", 1.5 * PROBE_SECONDS)
    with Listener() as mute:
        several = f"host=127.0.0.1,127.0.0.1 port={mute.port},{postgres.port} user=postgres dbname=postgres"
        async with probing(several) as probe:
            assert not await look(probe)
            assert probe.failure is None
            await until(lambda: probe._answers)
            assert await look(probe)


@pytest.mark.req("N04")
async def test_many_callers_cost_one_query(dsn: str, db: Database) -> None:
    found = []

    async def ask(probe: DatabaseProbe) -> None:
        found.append(await probe.answers())

    async with probing(dsn) as probe:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(ask, probe)
        assert found == [True] * 50
        ours = "datname = current_database() AND application_name = 'armcore-trio health'"
        assert db.value(f"SELECT count(*) FROM pg_stat_activity WHERE {ours}") == 1


@pytest.mark.req("N04")
def test_where_connections_are_few_they_are_the_tasks_and_the_probe_says_that_it_is_not_let_in(
    start_daemon: StartDaemon, own_environment: dict[str, str], own_postgres: Postgres
) -> None:
    with psycopg.connect(own_postgres.dsn(), autocommit=True) as session:
        session.execute("CREATE ROLE core LOGIN CONNECTION LIMIT 3")
        session.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO core")
    daemon = start_daemon(own_environment | {DSN: own_postgres.dsn(user="core")})
    report = daemon.wait_health(lambda report: "too many connections" in str(report["tasks"]["health"]["last_error"]))
    report = daemon.wait_health(lambda report: all(task["state"] == "running" for task in report["tasks"].values()))
    assert (report["status"], report["database"]) == ("degraded", "down")
    with psycopg.connect(own_postgres.dsn(), autocommit=True) as session:
        session.execute("ALTER ROLE core CONNECTION LIMIT 4")
    daemon.wait_ok()
