"""Several hosts, the first of which accepts and says nothing: however they are given, it costs its own limit and no more."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from armcore_trio.borders import database
from armcore_trio.borders import migrate as migrations
from armcore_trio.borders.database import connect
from armcore_trio.demo.embedded import Postgres
from armcore_trio.dsn import hosts
from armcore_trio.settings import DSN
from tests.conftest import StartDaemon
from tests.support.listener import Listener
from tests.support.servers import fresh_database

LOGIN = "user=postgres dbname=postgres"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says nothing of hosts, unless the test does."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(database, "CONNECT_SECONDS", 0.4)


@pytest.fixture
def mute() -> Iterator[Listener]:
    with Listener() as listener:
        yield listener


FORMS = {
    "hosts": (f"host=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN}", {}),
    "addresses": (f"hostaddr=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN}", {}),
    "both": (f"host=one.invalid,two.invalid hostaddr=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN}", {}),
    "a URL": ("postgresql://postgres@127.0.0.1:{mute},127.0.0.1:{server}/postgres", {}),
    "a URL's parameters": ("postgresql:///postgres?user=postgres&host=127.0.0.1,127.0.0.1&port={ports}", {}),
    "PGHOST": (LOGIN, {"PGHOST": "127.0.0.1,127.0.0.1", "PGPORT": "{ports}"}),
    "PGHOSTADDR": (LOGIN, {"PGHOSTADDR": "127.0.0.1,127.0.0.1", "PGPORT": "{ports}"}),
    "PGPORT": (f"host=127.0.0.1,127.0.0.1 {LOGIN}", {"PGPORT": "{ports}"}),
    "a service": ("service=core", {"PGSERVICEFILE": "{file}"}),
    "PGSERVICE": (LOGIN, {"PGSERVICE": "core", "PGSERVICEFILE": "{file}"}),
    "a URL's service": ("postgresql:///postgres?user=postgres&service=core", {"PGSERVICEFILE": "{file}"}),
    "read-write": (f"host=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN} target_session_attrs=read-write", {}),
    "prefer-standby": (f"host=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN} target_session_attrs=prefer-standby", {}),
    "PGTARGETSESSIONATTRS": (
        f"host=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN}",
        {"PGTARGETSESSIONATTRS": "prefer-standby"},
    ),
    "any order": (f"host=127.0.0.1,127.0.0.1 port={{ports}} {LOGIN} load_balance_hosts=random", {}),
}


def written(form: str, mute: Listener, postgres: Postgres, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form's connection string, with the environment it needs."""
    file = directory / "services.conf"
    file.write_text(f"[core]\nhost=127.0.0.1,127.0.0.1\nport={mute.port},{postgres.port}\nuser=postgres\ndbname=postgres\n")
    known = {"ports": f"{mute.port},{postgres.port}", "mute": mute.port, "server": postgres.port, "file": file}
    text, variables = FORMS[form]
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(**known))
    return text.format(**known)


@pytest.mark.req("N04")
@pytest.mark.parametrize("form", FORMS)
async def test_a_mute_host_costs_its_own_limit(
    form: str, mute: Listener, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(written(form, mute, postgres, tmp_path, monkeypatch), "armcore-trio test") as connection:
        assert connection.info.port == postgres.port
    assert mute.accepted or form == "any order"


@pytest.mark.req("N04")
@pytest.mark.parametrize("form", ["hosts", "a service"])
def test_migrations_pass_a_mute_host(
    form: str, mute: Listener, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(migrations._LIMITS, "connect_timeout", 2)
    text = written(form, mute, postgres, tmp_path, monkeypatch)
    with fresh_database(postgres, "template1") as dsn:
        name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
        assert migrations.migrate(f"{text} dbname={name}") == ""
    assert mute.accepted


@pytest.mark.req("N04")
async def test_a_name_of_several_addresses(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is mute."""
    resolve = socket.getaddrinfo

    def both(_: str, port: str, **options: int) -> list[object]:
        return [*resolve("127.0.0.2", port, **options), *resolve("127.0.0.1", port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with socket.create_server(("127.0.0.2", postgres.port)):
        async with connect(f"host=core.example port={postgres.port} {LOGIN}", "armcore-trio test") as connection:
            assert connection.info.hostaddr == "127.0.0.1"


@pytest.mark.req("N04")
async def test_a_name_that_is_looked_up_in_vain_costs_its_own_limit(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first host not even the address is known; the second needs no name server."""
    given_up = threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        given_up.wait(20)
        raise socket.gaierror("given up")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    try:
        several = f"host=core.example,127.0.0.1 port={postgres.port} {LOGIN}"
        async with connect(several, "armcore-trio test") as connection:
            assert connection.info.port == postgres.port
    finally:
        given_up.set()


@pytest.mark.req("N04")
def test_hosts_that_prefer_a_standby_are_tried_twice() -> None:
    tried = hosts("host=a,b port=1,2 target_session_attrs=prefer-standby user=u")
    assert [(one["host"], one["port"], one["target_session_attrs"]) for one in tried] == [
        ("a", "1", "standby"),
        ("b", "2", "standby"),
        ("a", "1", "any"),
        ("b", "2", "any"),
    ]


@pytest.mark.req("N04")
def test_health_is_ok_as_soon_as_the_tasks_work(start_daemon: StartDaemon, mute: Listener, environment: dict[str, str]) -> None:
    """A probe has a second for the answer, and not for connecting too."""
    port = psycopg.conninfo.conninfo_to_dict(environment[DSN])["port"]
    several = psycopg.conninfo.make_conninfo(environment[DSN], host="127.0.0.1,127.0.0.1", port=f"{mute.port},{port}")
    daemon = start_daemon(environment | {DSN: several})
    daemon.wait_health(lambda report: all(task["state"] == "running" for task in report["tasks"].values()))
    daemon.wait_ok(2)
