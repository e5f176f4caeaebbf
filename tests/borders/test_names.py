"""Names and name servers: a look-up that never ends costs its limit, one that has several answers is tried to the end."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from armcore_trio.borders import bus as bus_module
from armcore_trio.borders.bus import CONNECT_SECONDS, Message, open_bus
from armcore_trio.demo.embedded import Nats
from armcore_trio.settings import DSN, URL, Settings, load
from tests.conftest import StartDaemon
from tests.support.failing import nats_down
from tests.support.waiting import wait_until

SILENT = "silent.example"
NAMED = "named.example"

Answers = Callable[..., None]


def urls(*hosts: str, port: int = 4222) -> Settings:
    return load({DSN: "host=unused", URL: ",".join(f"nats://{host}:{port}" for host in hosts)})


@pytest.fixture
def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One that never answers for `SILENT` while the test lasts; all other names are looked up. The names it was asked."""
    original, end, asked = socket.getaddrinfo, threading.Event(), list[str]()

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if host == SILENT:
            asked.append(host)
            end.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return original(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield asked
    end.set()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Have `NAMED` stand for these addresses, in this order."""

    def install(*addresses: str) -> None:
        original = socket.getaddrinfo

        def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
            if host != NAMED:
                return original(host, *args, **options)
            return [one for address in addresses for one in original(address, *args, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return install


# --- a name server that is silent -------------------------------------------------------------------------------------


@pytest.mark.req("B09", "B58")
@pytest.mark.usefixtures("silent_name_server")
async def test_each_silent_look_up_ends_after_the_limit_of_a_connect(autojump_clock: MockClock) -> None:
    assert trio.lowlevel.current_clock() is autojump_clock
    with nats_down("no answer from the name server within 3 s") as caught:
        async with open_bus(urls(SILENT, SILENT), "armcore-trio test"):
            pytest.fail("it cannot be connected")
    assert trio.current_time() == pytest.approx(2 * CONNECT_SECONDS)
    assert caught.error.reason.count(f"nats://{SILENT}:4222: ") == 2


@pytest.mark.req("B58")
async def test_a_silent_look_up_costs_its_limit_and_the_next_server_is_used(
    nats_server: Nats, silent_name_server: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "CONNECT_SECONDS", 0.3)
    started = monotonic()
    settings = urls(SILENT, "127.0.0.1", port=nats_server.port)
    with trio.fail_after(10):
        async with open_bus(settings, "armcore-trio test") as bus:
            assert bus.server.host == "127.0.0.1"
            await bus.publish_batch([Message("nobody", b"")])
    assert 0.3 <= monotonic() - started < 3
    assert silent_name_server == [SILENT]


@pytest.mark.req("R9")
@pytest.mark.usefixtures("silent_name_server")
async def test_a_look_up_can_be_cancelled(autojump_clock: MockClock) -> None:
    assert trio.lowlevel.current_clock() is autojump_clock
    with trio.move_on_after(1) as scope:
        async with open_bus(urls(SILENT), "armcore-trio test"):
            pytest.fail("it cannot be connected")
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(1)


_PATCH = f"""
import pathlib, socket, threading
_original = socket.getaddrinfo
def getaddrinfo(host, *args, **options):
    if host == {SILENT!r}:
        pathlib.Path(__file__).with_name("asked").touch()
        threading.Event().wait()
    return _original(host, *args, **options)
socket.getaddrinfo = getaddrinfo
"""


@pytest.mark.req("R9", "B09", "B37")
def test_the_daemon_stops_at_once_amid_a_silent_look_up(
    start_daemon: StartDaemon, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_PATCH, "utf-8")
    daemon = start_daemon(environment | {"PYTHONPATH": str(tmp_path), URL: f"nats://{SILENT}:4222"})
    wait_until((tmp_path / "asked").exists, what="the look-up")
    daemon.wait_for_event("health.listening")
    started = monotonic()
    assert daemon.stop() == 0
    assert monotonic() - started < 2, "the thread that waits for the name server is left behind"
    assert all(record["finished"] for record in daemon.named("shutdown.step"))
    assert daemon.named("task.restarting") == [], "it was amid its first look-up"


# --- what a name stands for -------------------------------------------------------------------------------------------


@pytest.mark.req("B58")
@pytest.mark.parametrize(
    "addresses", [("127.0.0.1",), ("127.0.0.1", "127.0.0.9"), ("::1", "127.0.0.1"), ("127.0.0.9", "127.0.0.1")]
)
async def test_a_server_is_reached_at_whichever_of_its_addresses_it_listens(
    nats_server: Nats, answers: Answers, addresses: tuple[str, ...]
) -> None:
    answers(*addresses)
    with trio.fail_after(10):
        async with open_bus(urls(NAMED, port=nats_server.port), "armcore-trio test") as bus:
            await bus.publish_batch([Message("nobody", b"")])


@pytest.mark.req("B09")
async def test_a_name_nobody_knows_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with nats_down(f"nats://{NAMED}:4222: its name cannot be resolved: .*Name or service not known"):
        async with open_bus(urls(NAMED), "armcore-trio test"):
            pytest.fail("it cannot be connected")
