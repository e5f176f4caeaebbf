"""psycopg on Trio against real servers: every failure is one of two kinds, every wait ends, nothing is left behind."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from typing import Any, LiteralString
from unittest.mock import ANY

import psycopg
import pytest
import trio
from psycopg import pq

from armcore_trio.borders import database
from armcore_trio.borders.database import Connection, bounded, connect
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.dsn import check, passwords
from armcore_trio.errors import Dependency, DependencyDown, WriteRefused
from tests.support.database import Database
from tests.support.failing import failing
from tests.support.listener import Listener
from tests.support.proxy import Direction, Mode, Proxy
from tests.support.servers import POSTGRES
from tests.support.waiting import in_thread, until

IDLE = pq.TransactionStatus.IDLE
APPLICATION = "armcore-trio test"


@pytest.fixture(scope="module")
def _spare_postgres() -> Iterator[Postgres]:
    with Postgres(settings=POSTGRES) as server:
        yield server


@pytest.fixture
def spare(_spare_postgres: Postgres) -> Iterator[Postgres]:
    """A server of this module's own, empty, to freeze and kill; the next test finds it running."""
    if not _spare_postgres.running:
        _spare_postgres.start()
    yield _spare_postgres
    if _spare_postgres.running:
        _spare_postgres.thaw()


@contextmanager
def taking(least: float, most: float) -> Iterator[None]:
    """The block lasts that long, in seconds of real time."""
    start = time.monotonic()
    yield
    taken = time.monotonic() - start
    assert least <= taken <= most, f"{taken:.3f} s"


async def value(connection: Connection, query: LiteralString, *params: object) -> Any:
    (row,) = await (await connection.execute(query, params or None)).fetchall()
    return row[0]


def port_of(dsn: str) -> int:
    return int(str(psycopg.conninfo.conninfo_to_dict(dsn)["port"]))


async def usable(connection: Connection) -> bool:
    """The connection answers, and with the answer to this question."""
    token = random.randrange(10**9)
    with trio.fail_after(5):
        return (await value(connection, "SELECT %s::bigint", token), connection.info.transaction_status) == (token, IDLE)


async def check_left_clean(connection: Connection, db: Database, pid: int) -> None:
    """The connection is usable, or closed with all it held let go by the server."""
    if connection.closed:
        await until(lambda: state(db, pid) is None, 5, "the session's end")
    else:
        assert state(db, pid) == "idle"
        assert await usable(connection)


def state(db: Database, pid: int) -> str | None:
    """What the server says the backend is doing; None once it has ended."""
    return next((row["state"] for row in db.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", pid)), None)


async def state_becomes(db: Database, pid: int, wanted: str) -> None:
    await until(lambda: state(db, pid) == wanted, 5, f"backend {pid} {wanted}")


async def waits_for(db: Database, pid: int, event: str) -> None:
    query = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
    await until(lambda: db.value(query, pid) == event, 5, f"backend {pid} waiting for {event}")


# Connecting


async def test_a_connection_is_in_autocommit_with_limits_of_its_own(dsn: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        assert connection.autocommit
        assert await value(connection, "SHOW application_name") == APPLICATION
        assert await value(connection, "SHOW lock_timeout") == "4s"
        assert await value(connection, "SHOW idle_in_transaction_session_timeout") == "30s"
        assert connection.info.transaction_status == IDLE
    assert connection.closed


async def test_leaving_the_block_ends_the_session(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid
        assert state(db, pid) == "idle"
    await until(lambda: state(db, pid) is None, 5, "the session's end")


@pytest.mark.req("D9.1", "B14")
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid"),
        ({"host": "a" * 64 + ".invalid"}, "resolve"),
        ({"host": "/no/such/directory"}, "No such file or directory"),
        ({"port": "1"}, "Connection refused"),
        ({"dbname": "absent"}, 'database "absent" does not exist'),
        ({"user": "absent"}, 'role "absent" does not exist'),
        ({"sslmode": "require"}, "server does not support SSL"),
        ({"target_session_attrs": "standby"}, "standby"),
    ],
    ids=lambda param: "-".join(param) if isinstance(param, dict) else "",
)
async def test_a_server_that_does_not_let_us_in_is_down(postgres: Postgres, params: dict[str, str], reason: str) -> None:
    dsn = postgres.dsn(**{"password": "canary", "dbname": "postgres", **params})
    with taking(0, 4), pytest.raises(DependencyDown) as caught:
        async with connect(dsn, APPLICATION):
            pytest.fail("connected")
    assert caught.value.dependency is Dependency.DATABASE
    assert reason in caught.value.reason
    assert "canary" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.req("B14")
@pytest.mark.parametrize("kind", ["hangs up", "speaks another protocol", "is a nats-server"])
async def test_another_kind_of_server_is_a_database_that_is_down(nats_server: Nats, kind: str) -> None:
    with ExitStack() as stack:
        if kind == "is a nats-server":
            port = nats_server.port
        else:
            greeting = b"" if kind == "hangs up" else b"HTTP/1.1 400 Bad Request\r\n\r\n"
            port = stack.enter_context(Listener(greeting, hang_up=kind == "hangs up")).port
        with taking(0, 4), pytest.raises(DependencyDown):
            async with connect(f"host=127.0.0.1 port={port} user=postgres", APPLICATION):
                pytest.fail("connected")


@pytest.mark.req("B14", "B58")
async def test_a_listener_that_never_speaks_costs_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_SECONDS", 0.3)
    with Listener() as silent:
        with taking(0.3, 2), pytest.raises(DependencyDown) as caught:
            async with connect(f"host=127.0.0.1 port={silent.port} user=postgres", APPLICATION):
                pytest.fail("connected")
        assert caught.value.reason == "no answer to connect within 0.3 s"
        await until(lambda: silent.ended == silent.accepted == 1, 5, "the end of the attempt's socket")


@pytest.mark.req("B14", "N04")
async def test_a_host_that_falls_silent_after_the_login_costs_its_limit_and_the_next_is_used(
    dsn: str, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler lets everybody in and has no server to ask."""
    monkeypatch.setattr(database, "CONNECT_SECONDS", 0.3)
    original = database._session
    pooler: Proxy = link(port_of(dsn))

    def stall_then_set() -> str:
        pooler.stall()
        return original()

    monkeypatch.setattr(database, "_session", stall_then_set)
    with taking(0.3, 2.5), pytest.raises(DependencyDown, match=r"no answer to connect within 0\.3 s"):
        async with connect(psycopg.conninfo.make_conninfo(dsn, port=pooler.port), APPLICATION):
            pytest.fail("connected")
    several = {"host": "127.0.0.1,127.0.0.1", "port": f"{pooler.port},{port_of(dsn)}"}
    async with connect(psycopg.conninfo.make_conninfo(dsn, **several), APPLICATION) as connection:
        assert connection.info.port == port_of(dsn)
        assert await usable(connection)


@pytest.mark.req("B14", "B58")
async def test_hosts_are_tried_in_turn(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_SECONDS", 0.3)
    with Listener() as silent:
        ports = [silent.port, 1, postgres.port]
        several = f"host={','.join(['127.0.0.1'] * 3)} port={','.join(map(str, ports))} user=postgres dbname=postgres"
        with taking(0.3, 2):
            async with connect(several, APPLICATION) as connection:
                assert connection.info.port == postgres.port
                assert await usable(connection)
        nobody = f"host=127.0.0.1,127.0.0.1 port={silent.port},1 user=postgres dbname=postgres"
        with taking(0.3, 2), pytest.raises(DependencyDown):
            async with connect(nobody, APPLICATION):
                pytest.fail("connected")


async def test_a_host_without_an_address_does_not_hide_the_next_one(postgres: Postgres) -> None:
    several = f"host=no-such-host.invalid,127.0.0.1 port=1,{postgres.port} user=postgres dbname=postgres"
    async with connect(several, APPLICATION) as connection:
        assert await usable(connection)


@pytest.mark.req("B14")
@pytest.mark.parametrize("limited", [False, True], ids=["by our limit", "by a cancellation"])
async def test_a_name_server_that_never_answers_costs_the_limit(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    answered = threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        answered.wait(20)
        raise socket.gaierror("given up")

    monkeypatch.setattr(database, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    try:
        with taking(0.2, 1.5), trio.move_on_after(0.2 if limited else 10) as scope:
            with pytest.raises(trio.Cancelled if limited else DependencyDown):
                async with connect("host=database.example user=postgres", APPLICATION):
                    pytest.fail("connected")
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught == limited
    finally:
        answered.set()


@pytest.mark.req("B14")
async def test_a_cancelled_attempt_to_connect_closes_its_socket() -> None:
    with Listener() as silent:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect(f"host=127.0.0.1 port={silent.port}", APPLICATION).__aenter__)
            await until(lambda: silent.heard, 5, "the first bytes")
            nursery.cancel_scope.cancel()
        await until(lambda: silent.ended == 1, 5, "the end of the attempt's socket")


@pytest.mark.req("B14")
async def test_a_frozen_server_lets_nobody_in_and_costs_the_limit(spare: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_SECONDS", 0.3)
    spare.freeze()
    with taking(0.3, 2), pytest.raises(DependencyDown, match="no answer to connect"):
        async with connect(spare.dsn(), APPLICATION):
            pytest.fail("connected")


def test_a_connection_string_is_checked_and_hidden() -> None:
    assert passwords("host=a password='s p' sslpassword=k") == ["s p", "k"]
    assert passwords("postgresql://u:p%40ss@host/db") == ["p@ss"]
    assert passwords("host=a") == []
    with pytest.raises(ValueError, match="is not a PostgreSQL connection string") as caught:
        check("host=a passwort=canary")
    assert "canary" not in repr(caught.value)
    assert caught.value.__suppress_context__


# Transactions


async def test_a_transaction_commits_as_a_whole(dsn: str, db: Database) -> None:
    db.execute("CREATE TABLE t (n int)")
    async with connect(dsn, APPLICATION) as connection:
        async with bounded("work"), connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
            await connection.execute("INSERT INTO t VALUES (2)")
            assert db.value("SELECT count(*) FROM t") == 0
        assert connection.info.transaction_status == IDLE
        assert db.value("SELECT sum(n) FROM t") == 3


async def test_a_failure_rolls_the_transaction_back(dsn: str, db: Database) -> None:
    db.execute("CREATE TABLE t (n int PRIMARY KEY)")
    async with connect(dsn, APPLICATION) as connection:
        for failure in (WriteRefused, LookupError):
            with failing(failure):
                async with bounded("work"), connection.transaction():
                    await connection.execute("INSERT INTO t VALUES (1)")
                    if failure is LookupError:
                        raise LookupError
                    await connection.execute("INSERT INTO t VALUES (1)")
            assert await usable(connection)
            assert db.value("SELECT count(*) FROM t") == 0


async def test_transactions_nest_as_savepoints(dsn: str, db: Database) -> None:
    db.execute("CREATE TABLE t (n int PRIMARY KEY)")
    async with connect(dsn, APPLICATION) as connection:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
            with pytest.raises(WriteRefused):
                async with bounded("work"), connection.transaction():
                    await connection.execute("INSERT INTO t VALUES (2), (1)")
            await connection.execute("INSERT INTO t VALUES (3)")
        assert [row["n"] for row in db.execute("SELECT n FROM t ORDER BY n")] == [1, 3]


@pytest.mark.req("B56")
async def test_no_session_stays_in_a_transaction(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid
        await value(connection, "SELECT count(*) FROM recognition_job")
        assert state(db, pid) == "idle"
        with pytest.raises(WriteRefused):
            async with bounded("work"):
                await connection.execute("SELECT 1 / 0")
        assert state(db, pid) == "idle"
        with trio.move_on_after(0.1):
            await connection.execute("SELECT pg_sleep(30)")
        await state_becomes(db, pid, "idle")
        with trio.move_on_after(0.1):
            await connection.wait_notified()
        assert state(db, pid) == "idle"


@pytest.mark.req("B56")
@pytest.mark.parametrize("moment", ["mid-query", "between statements"])
async def test_a_cancelled_transaction_leaves_no_session_in_it(dsn: str, db: Database, moment: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid
        with taking(0.1, 2), trio.move_on_after(0.1):
            async with connection.transaction():
                await connection.execute("SELECT 1" if moment == "between statements" else "SELECT pg_sleep(30)")
                await trio.sleep_forever()
        await check_left_clean(connection, db, pid)


@pytest.mark.req("B31", "B56")
async def test_a_cancelled_transaction_frees_its_locks_on_the_server(dsn: str, db: Database) -> None:
    job = db.insert_job()
    before = db.job(job)
    locked = trio.Event()
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid

        async def hold() -> None:
            async with connection.transaction():
                await connection.execute("UPDATE recognition_job SET status = 'published' WHERE id = %s", (job.id,))
                locked.set()
                await trio.sleep_forever()

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold)
                await locked.wait()
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    db.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE NOWAIT", job.id)
                nursery.cancel_scope.cancel()
        await check_left_clean(connection, db, pid)
        db.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE NOWAIT", job.id)
        assert db.job(job) == before


async def test_tasks_that_share_a_connection_take_turns(dsn: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        found: list[int] = []

        async def ask(number: int) -> None:
            found.append(await value(connection, "SELECT %s + 0 * length(pg_sleep(0.01)::text)", number))

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(ask, number)
        assert sorted(found) == list(range(20))


# Pipeline mode


async def test_a_pipeline_runs_many_statements(dsn: str, db: Database) -> None:
    db.execute("CREATE TABLE t (n int PRIMARY KEY)")
    async with connect(dsn, APPLICATION) as connection:
        with trio.fail_after(10):
            async with bounded("work"), connection.transaction(), connection.pipeline():
                for number in range(1000):
                    await connection.execute("INSERT INTO t VALUES (%s)", (number,))
                assert await value(connection, "SELECT count(*) FROM t") == 1000
        assert await usable(connection)
        assert db.value("SELECT sum(n) FROM t") == 499_500


async def test_a_refused_statement_in_a_pipeline_undoes_the_transaction(dsn: str, db: Database) -> None:
    db.execute("CREATE TABLE t (n int PRIMARY KEY)")
    async with connect(dsn, APPLICATION) as connection:
        with trio.fail_after(10), failing(WriteRefused) as caught:
            async with bounded("work"), connection.transaction(), connection.pipeline():
                for number in (1, 2, 1, 3):
                    await connection.execute("INSERT INTO t VALUES (%s)", (number,))
        assert caught.error.sqlstate == "23505"
        assert await usable(connection)
        assert db.value("SELECT count(*) FROM t") == 0


@pytest.mark.parametrize("size", [10, 4_000_000], ids=["waiting", "with megabytes under way"])
async def test_a_pipeline_can_be_cancelled(dsn: str, db: Database, size: int) -> None:
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid
        with taking(0.2, 2), trio.move_on_after(0.2):
            async with connection.transaction(), connection.pipeline():
                await connection.execute("SELECT length(%s::text), pg_sleep(30)", ("x" * size,))
                await value(connection, "SELECT 1")
        await check_left_clean(connection, db, pid)


# Notifications


@pytest.mark.req("D1.6")
async def test_a_notification_wakes_the_one_who_waits(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        await connection.execute("LISTEN mine")
        woken = trio.Event()

        async def wait() -> None:
            await connection.wait_notified()
            woken.set()

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                db.execute("NOTIFY another")
                await trio.testing.wait_all_tasks_blocked()
                assert not woken.is_set()
                db.execute("NOTIFY mine")
                await woken.wait()
        assert await usable(connection)


@pytest.mark.req("D1.6")
async def test_a_notification_during_another_statement_is_kept(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        await connection.execute("LISTEN mine")
        db.execute("NOTIFY mine")
        with trio.fail_after(5):
            for _ in range(3):
                assert await usable(connection)
            async with connection.transaction():
                assert await value(connection, "SELECT 1") == 1
            await connection.wait_notified()


@pytest.mark.req("D1.6")
async def test_a_cancelled_wait_loses_no_notification(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        await connection.execute("LISTEN mine")
        with trio.fail_after(20):
            for number in range(50):
                notify = trio.Event()

                async def send(number: int = number, notify: trio.Event = notify) -> None:
                    await in_thread(db.execute, f"SELECT pg_notify('mine', '{number}')")
                    notify.set()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    with trio.move_on_after(random.random() * 0.002) as scope:
                        await connection.wait_notified()
                if scope.cancelled_caught:
                    await connection.wait_notified()


async def test_waiting_for_notifications_with_a_limit_ends(dsn: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with taking(0.1, 2):
            assert [one async for one in connection.notifies(timeout=0.1)] == []
        assert await usable(connection)


# Cancellation


async def test_a_cancelled_query_ends_on_the_server_and_leaves_the_connection_usable(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid
        for _ in range(3):
            with taking(0.1, 2), trio.move_on_after(0.1) as scope:
                await connection.execute("SELECT pg_sleep(30)")
            assert scope.cancelled_caught
            assert state(db, pid) == "idle"
            assert await usable(connection)


@pytest.mark.req("B31")
async def test_a_query_cancelled_while_it_waits_for_a_lock_leaves_the_queue(dsn: str, db: Database) -> None:
    job = db.insert_job()
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                with db.transaction() as other:
                    other.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE", (job.id,))
                    update = "UPDATE recognition_job SET status = 'done' WHERE id = %s"
                    nursery.start_soon(connection.execute, update, (job.id,))
                    await waits_for(db, pid, "transactionid")
                    nursery.cancel_scope.cancel()
                    with trio.CancelScope(shield=True):
                        await state_becomes(db, pid, "idle")
        assert db.job(job)["status"] == "queued"
        assert await usable(connection)


@pytest.mark.parametrize("kind", ["single statements", "a transaction", "a pipeline"])
async def test_cancelling_at_any_moment_leaves_the_connection_usable_or_closed(dsn: str, db: Database, kind: str) -> None:
    """Small and large, reading and writing: a later answer never belongs to an earlier query."""
    chance = random.Random(7)
    big = "x" * 2_000_000
    closed = 0

    async def statements(connection: Connection) -> None:
        for _ in range(10):
            await connection.execute("SELECT 1")
        await connection.execute("SELECT repeat('y', 3000000)")
        await connection.execute("SELECT length(%s)", (big,))
        await connection.execute("SELECT n FROM generate_series(1, 20000) n")

    async def work(connection: Connection) -> None:
        async with AsyncExitStack() as stack:
            if kind != "single statements":
                await stack.enter_async_context(connection.transaction())
            if kind == "a pipeline":
                await stack.enter_async_context(connection.pipeline())
            await statements(connection)

    with trio.fail_after(40):
        async with connect(dsn, APPLICATION) as timed:
            start = trio.current_time()
            await work(timed)
            duration = trio.current_time() - start
        for _ in range(10):
            async with connect(dsn, APPLICATION) as connection:
                pid = connection.info.backend_pid
                for _ in range(10):
                    with trio.move_on_after(chance.random() * duration):
                        await work(connection)
                    await check_left_clean(connection, db, pid)
                    if connection.closed:
                        closed += 1
                        break
    assert closed == 0 or kind != "single statements"


async def test_a_query_can_be_cancelled_before_it_starts(dsn: str, db: Database) -> None:
    db.execute("CREATE TABLE t (n int)")
    async with connect(dsn, APPLICATION) as connection:
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.execute("INSERT INTO t VALUES (1)")
        assert scope.cancelled_caught
        assert await usable(connection)


@pytest.mark.req("B14", "B37")
@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_query_on_a_frozen_server_can_be_cancelled(spare: Postgres, in_transaction: bool) -> None:
    async with connect(spare.dsn(), APPLICATION) as connection:
        if in_transaction:
            await connection.execute("BEGIN")
        spare.freeze()
        with taking(0.2, 2), trio.move_on_after(0.2):
            await connection.execute("SELECT 1")
        assert connection.closed
        start = time.monotonic()
    assert time.monotonic() - start < 0.5


@pytest.mark.req("B14", "B31", "B37")
async def test_a_transaction_on_a_frozen_server_ends_in_time(spare: Postgres) -> None:
    """Its roll-back cannot be said any more, and does not cost its limit a second time."""
    async with connect(spare.dsn(), APPLICATION) as connection:
        with taking(0.3, 2), failing(DependencyDown, r"no answer to work within 0\.3 s"):
            async with bounded("work", 0.3), connection.transaction():
                await connection.execute("SELECT 1")
                spare.freeze()
                await connection.execute("SELECT 1")
        assert connection.closed


@pytest.mark.req("B14", "B31")
async def test_a_transaction_idle_when_the_server_freezes_ends_in_time(spare: Postgres) -> None:
    async with connect(spare.dsn(), APPLICATION) as connection:
        with taking(0.2, 2), trio.move_on_after(0.2):
            async with connection.transaction():
                await connection.execute("SELECT 1")
                spare.freeze()
                await trio.sleep_forever()
        assert connection.closed


# Lost connections


@pytest.mark.req("B50", "B14")
async def test_a_backend_killed_amid_a_query_is_a_database_that_is_down(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        pid = connection.info.backend_pid

        async def kill() -> None:
            await waits_for(db, pid, "PgSleep")
            db.execute("SELECT pg_terminate_backend(%s)", pid)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(DependencyDown) as caught:
                    async with bounded("work"):
                        await connection.execute("SELECT pg_sleep(30)")
        assert caught.value.reason == "terminating connection due to administrator command (57P01)"
        assert connection.closed


@pytest.mark.req("B50", "B36")
async def test_a_backend_killed_while_idle_is_noticed_at_once(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:

        async def kill() -> None:
            await trio.testing.wait_all_tasks_blocked()
            db.execute("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)

        with taking(0, 2), trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(DependencyDown) as caught:
                    await connection.wait_notified()
        assert caught.value.dependency is Dependency.DATABASE
        assert connection.closed


@pytest.mark.req("B50")
@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_backend_killed_between_statements_shows_at_the_next(dsn: str, db: Database, in_transaction: bool) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with trio.fail_after(10), failing(DependencyDown):
            async with bounded("work"), connection.transaction() if in_transaction else nullcontext():
                await connection.execute("SELECT 1")
                db.execute("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
                await connection.execute("SELECT 1")


@pytest.mark.req("B50", "B16")
@pytest.mark.parametrize("end", ["kill", "immediate", "fast"])
async def test_a_server_that_goes_is_noticed_while_idle(spare: Postgres, end: str) -> None:
    async with connect(spare.dsn(), APPLICATION) as connection:

        async def stop() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await trio.to_thread.run_sync(spare.kill if end == "kill" else lambda: spare.stop(end))  # type: ignore[arg-type]

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop)
                with pytest.raises(DependencyDown):
                    await connection.wait_notified()
    with pytest.raises(DependencyDown):
        async with connect(spare.dsn(), APPLICATION):
            pytest.fail("connected")


@pytest.mark.req("B14", "B36")
@pytest.mark.parametrize("direction", list(Direction))
async def test_a_link_that_swallows_bytes_costs_the_limit(dsn: str, link: Any, direction: Direction) -> None:
    proxy: Proxy = link(port_of(dsn))
    async with connect(psycopg.conninfo.make_conninfo(dsn, port=proxy.port), APPLICATION) as connection:
        proxy.set(Mode.SWALLOW, [direction])
        with taking(0.3, 2.5), pytest.raises(DependencyDown, match=r"no answer to work within 0\.3 s"):
            async with bounded("work", 0.3), connection.transaction():
                await connection.execute("SELECT 1")
        assert connection.closed


async def test_a_link_cut_amid_a_large_result_is_a_database_that_is_down(dsn: str, link: Any) -> None:
    proxy: Proxy = link(port_of(dsn))
    async with connect(psycopg.conninfo.make_conninfo(dsn, port=proxy.port), APPLICATION) as connection:
        proxy.cut_after(1_000_000, Direction.DOWN)
        with trio.fail_after(10), pytest.raises(DependencyDown):
            async with bounded("work"):
                await connection.execute("SELECT repeat('x', 5000000)")
        assert connection.closed


# Limits


@pytest.mark.req("B14")
async def test_work_past_its_limit_is_a_database_that_is_down(dsn: str, db: Database) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with taking(0.2, 2), pytest.raises(DependencyDown) as caught:
            async with bounded("a long query", 0.2):
                await connection.execute("SELECT pg_sleep(30)")
        assert caught.value.reason == "no answer to a long query within 0.2 s"
        assert await usable(connection)
        assert state(db, connection.info.backend_pid) == "idle"


async def test_a_limit_further_out_is_not_taken_for_the_database(dsn: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.1):
            async with bounded("work", 10):
                await connection.execute("SELECT pg_sleep(30)")
        assert await usable(connection)


@pytest.mark.req("B31")
async def test_a_lock_that_is_not_freed_is_a_database_that_is_down(dsn: str, db: Database) -> None:
    job = db.insert_job()
    async with connect(dsn, APPLICATION) as connection:
        await connection.execute("SET lock_timeout = '100ms'")
        with db.transaction() as other:
            other.execute("LOCK TABLE recognition_job")
            with taking(0.1, 2), pytest.raises(DependencyDown) as caught:
                async with bounded("work"), connection.transaction():
                    await connection.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE", (job.id,))
        assert caught.value.reason == "canceling statement due to lock timeout (55P03)"
        assert await usable(connection)


# What a failure means

REFUSED, DOWN, RAW = "the data is refused", "the database is down", "a defect"


@pytest.mark.req("B12", "B22", "B48", "B51")
@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("22000", REFUSED),
        ("22P05", REFUSED),
        ("23502", REFUSED),
        ("23505", REFUSED),
        ("44000", REFUSED),
        ("54000", REFUSED),
        ("54001", REFUSED),
        ("P0001", REFUSED),
        ("P0004", REFUSED),
        ("08006", DOWN),
        ("0A000", DOWN),
        ("25006", DOWN),
        ("25P03", DOWN),
        ("26000", DOWN),
        ("28P01", DOWN),
        ("40001", DOWN),
        ("40P01", DOWN),
        ("42501", DOWN),
        ("42P01", DOWN),
        ("53100", DOWN),
        ("53200", DOWN),
        ("53300", DOWN),
        ("55P03", DOWN),
        ("57014", DOWN),
        ("57P01", DOWN),
        ("58030", DOWN),
        ("XX000", DOWN),
        ("XX001", DOWN),
        ("42601", RAW),
        ("42703", RAW),
        ("42804", RAW),
        ("42883", RAW),
        ("42P18", RAW),
    ],
)
async def test_sqlstate_tells_what_a_failure_means(dsn: str, code: str, meaning: str) -> None:
    expected = {REFUSED: WriteRefused, DOWN: DependencyDown, RAW: psycopg.Error}[meaning]
    async with connect(dsn, APPLICATION) as connection:
        with pytest.raises(expected) as caught:
            async with bounded("work"):
                await connection.execute(f"DO $$ BEGIN RAISE 'of a\nkind' USING ERRCODE = '{code}'; END $$".encode())
        error = caught.value
        if isinstance(error, WriteRefused):
            assert (error.sqlstate, error.reason) == (code, "of a kind")
        elif isinstance(error, DependencyDown):
            assert (error.dependency, error.reason) == (Dependency.DATABASE, f"of a kind ({code})")
        else:
            assert isinstance(error, psycopg.Error)
            assert error.sqlstate == code
        assert await usable(connection)


@pytest.mark.req("B12", "B22", "B48")
@pytest.mark.parametrize(
    ("statement", "code", "meaning"),
    [
        ("SELECT 1 / 0", "22012", WriteRefused),
        ("INSERT INTO recognition_job (file_id, pipeline) VALUES (gen_random_uuid(), 'tabular')", "23503", WriteRefused),
        ("INSERT INTO s3_object (bucket, key, bucket_role) VALUES ('a', 'b', 'other')", "23514", WriteRefused),
        ("INSERT INTO s3_object (bucket, bucket_role) VALUES ('a', 'raw')", "23502", WriteRefused),
        ("SELECT '\"\\u0000\"'::jsonb", "22P05", WriteRefused),
        ("SELECT repeat('[', 100000)::jsonb", "54001", WriteRefused),
        ("DO $$ BEGIN RAISE 'no'; END $$", "P0001", WriteRefused),
        ("SELECT FROM absent", "42P01", DependencyDown),
        ("SET ROLE pg_monitor; INSERT INTO s3_object DEFAULT VALUES", "42501", DependencyDown),
        ("SET default_transaction_read_only = on; CREATE TABLE t ()", "25006", DependencyDown),
        ("SET statement_timeout = 10; SELECT pg_sleep(10)", "57014", DependencyDown),
        ("SELEC 1", "42601", psycopg.errors.SyntaxError),
        ("SELECT absent FROM recognition_job", "42703", psycopg.errors.UndefinedColumn),
    ],
)
async def test_real_failures(dsn: str, statement: str, code: str, meaning: type[Exception]) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with failing(meaning) as caught:
            async with bounded("work"):
                for part in statement.split("; ") if statement.startswith("SET") else [statement]:
                    await connection.execute(part.encode())
        found = caught.error
        assert (f"({code})" in str(found)) if isinstance(found, DependencyDown) else (found.sqlstate == code)  # type: ignore[attr-defined]
        assert await usable(connection)


async def test_two_that_wait_for_each_other_in_a_circle(dsn: str, db: Database) -> None:
    jobs = db.insert_jobs(2)
    lock: LiteralString = "SELECT FROM recognition_job WHERE id = %s FOR UPDATE"
    async with connect(dsn, APPLICATION) as connection:
        with db.transaction() as other, trio.fail_after(15):
            await connection.execute("SET deadlock_timeout = '50ms'")
            other.execute("SET deadlock_timeout = '1min'")
            other.execute(lock, (jobs[0].id,))

            async def rival() -> None:
                await in_thread(other.execute, lock, (jobs[1].id,))

            async with trio.open_nursery() as nursery:
                with failing(DependencyDown, r"deadlock detected \(40P01\)"):
                    async with bounded("work"), connection.transaction():
                        await connection.execute(lock, (jobs[1].id,))
                        nursery.start_soon(rival)
                        await waits_for(db, other.info.backend_pid, "transactionid")
                        await connection.execute(lock, (jobs[0].id,))
        assert await usable(connection)


@pytest.mark.req("B22", "D4.6")
async def test_a_nul_in_a_text_is_refused_data(dsn: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with pytest.raises(WriteRefused) as caught:
            async with bounded("work"), connection.transaction():
                await connection.execute("SELECT %s::text", ("a\0b",))
        assert caught.value.sqlstate is None
        assert await usable(connection)


# Size


async def test_megabytes_go_both_ways_without_holding_others_up(dsn: str) -> None:
    big = "".join(random.choices("abcdef", k=1000)) * 12_000
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await trio.sleep(0.001)
            turns += 1

    async with connect(dsn, APPLICATION) as connection, trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        with trio.fail_after(20):
            async with bounded("work"):
                assert await value(connection, "SELECT %s::text", big) == big
        assert turns > 5
        nursery.cancel_scope.cancel()


async def test_many_rows_come_whole_and_in_order(dsn: str) -> None:
    async with connect(dsn, APPLICATION) as connection:
        with trio.fail_after(20):
            rows = await (await connection.execute("SELECT n, 'row ' || n FROM generate_series(1, 100000) n")).fetchall()
        assert rows == [(number, f"row {number}") for number in range(1, 100_001)]


async def test_many_parameters_and_statements_of_one_kind(dsn: str) -> None:
    """More repeats than psycopg needs to prepare the statement on the server."""
    async with connect(dsn, APPLICATION) as connection:
        with trio.fail_after(20):
            for number in range(30):
                assert await value(connection, "SELECT cardinality(%s::int[])", list(range(number))) == number
            assert await value(connection, "SELECT cardinality(%s::int[])", list(range(100_000))) == 100_000
        assert await value(connection, "SELECT count(*) FROM pg_prepared_statements") == ANY
