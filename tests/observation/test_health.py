"""The health server over real sockets: its words and codes, a busy port, and a stop that waits for nobody."""

import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog
import trio
from attrs import Factory, define

from armcore_trio.errors import Dependency, DependencyDown, leaves
from armcore_trio.exchange.books import books
from armcore_trio.exchange.inbox import Inbox
from armcore_trio.observation import health
from armcore_trio.observation.health import CannotListen, HealthServer
from armcore_trio.observation.probe import DatabaseProbe
from armcore_trio.supervision.status import Status
from armcore_trio.supervision.supervisor import Stop
from armcore_trio.values import Endpoint

SUBJECTS = {"tabular_request": "files.tabular_uploaded", "image_request": "files.img_uploaded", "result": "files.tabular_parsed"}
LIMIT_SECONDS = 10
GRACE_SECONDS = 0.2


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request under way is given at the stop, made a tenth of what it is."""
    assert health._GRACE_SECONDS == 10 * GRACE_SECONDS
    monkeypatch.setattr(health, "_GRACE_SECONDS", GRACE_SECONDS)


@define
class Answering(DatabaseProbe):
    """A database that answers or not, as told; `delay_seconds` of infinity is one that is frozen."""

    says: bool = True
    delay_seconds: float = 0
    closed: bool = False

    async def answers(self) -> bool:
        await trio.sleep(self.delay_seconds)
        return self.says

    async def run(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.closed = True


@define
class Answer:
    """One HTTP response."""

    code: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


@define
class Served:
    """A running server."""

    host: str
    port: int
    status: Status
    probe: Answering
    stop: Stop
    streams: list[trio.SocketStream] = Factory(list)

    async def connect(self) -> trio.SocketStream:
        """A connection that stays open until the server has ended."""
        self.streams.append(await trio.open_tcp_stream(self.host, self.port))
        return self.streams[-1]

    def close(self) -> None:
        """Drop what `connect` opened."""
        for stream in self.streams:
            stream.socket.close()

    async def get(self, path: str, method: str = "GET") -> Answer:
        with trio.fail_after(LIMIT_SECONDS):
            async with await trio.open_tcp_stream(self.host, self.port) as stream:
                await stream.send_all(f"{method} {path} HTTP/1.1\r\nHost: health\r\nConnection: close\r\n\r\n".encode())
                response = b"".join([chunk async for chunk in stream])
        head, _, body = response.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Answer(int(first.split()[1]), headers, body)


def working(*, enabled: bool = True) -> Status:
    """A daemon whose tasks all run. Must be called within trio."""
    status = Status(SUBJECTS, "1.2.3", enabled, kept=books(Inbox(1)))
    status.add("health").running()
    if enabled:
        status.add("publisher", Dependency).running()
        status.add("subscriber.apply", [Dependency.DATABASE]).running()
        status.add("subscriber.intake", [Dependency.NATS]).running()
        status.add("watchdog", [Dependency.DATABASE]).running()
    return status


@asynccontextmanager
async def serving(status: Status | None = None, *, host: str = "127.0.0.1", database: bool = True) -> AsyncIterator[Served]:
    """A server on a port of the system's choice; on the way out it is stopped and must end by itself."""
    status = status or working()
    stop, probe = Stop(), Answering("", status)
    server = HealthServer(Endpoint(host, 0), status, probe if database else None)
    with structlog.testing.capture_logs() as records:
        served = Served(host, 0, status, probe, stop)
        async with trio.open_nursery() as nursery:
            with trio.fail_after(LIMIT_SECONDS):
                await nursery.start(server.run, stop)
            (url,) = [record["url"] for record in records if record["event"] == "health.listening"]
            served.port = urlsplit(url).port or 0
            try:
                yield served
            except BaseException:
                served.close()
                raise
            stop.request()
            nursery.cancel_scope.deadline = trio.current_time() + LIMIT_SECONDS
        served.close()
        assert not nursery.cancel_scope.cancelled_caught
    assert probe.closed == database


# --- /healthcheck, /readyz --------------------------------------------------------------------------------------------


@pytest.mark.req("S7.1", "R9")
async def test_all_is_well() -> None:
    async with serving() as served:
        answer = await served.get("/healthcheck")
        assert answer.code == 200
        well = {"state": "running", "restarts": 0, "last_error": None}
        assert answer.json() == {
            "status": "ok",
            "nats": "ok",
            "database": "ok",
            "subjects": SUBJECTS,
            "tasks": dict.fromkeys(["health", "publisher", "subscriber", "watchdog"], well),
            "version": "1.2.3",
        }
        ready = await served.get("/readyz")
        assert (ready.code, ready.body) == (200, b"")


@pytest.mark.req("B38", "B09")
async def test_a_lost_dependency_is_told_and_is_no_reason_to_be_killed() -> None:
    async with serving() as served:
        served.status.tasks["subscriber.intake"].failed(DependencyDown(Dependency.NATS, "refused\nby \u001b[31m"))
        answer = await served.get("/healthcheck")
        report = answer.json()
        assert answer.code == 503
        assert (report["status"], report["nats"], report["database"]) == ("degraded", "down", "ok")
        assert report["tasks"]["subscriber"] == {"state": "backoff", "restarts": 1, "last_error": "nats: refused by \u001b[31m"}
        ready = await served.get("/readyz")
        assert (ready.code, ready.body) == (503, b"")
        alive = await served.get("/livez")
        assert (alive.code, alive.body) == (200, b"ok\n")


@pytest.mark.req("B14", "B38")
async def test_a_database_that_does_not_answer_now_is_down() -> None:
    async with serving() as served:
        served.probe.says = False
        answer = await served.get("/healthcheck")
        assert (answer.code, answer.json()["status"], answer.json()["database"]) == (503, "degraded", "down")
        assert (await served.get("/readyz")).code == 503
        assert (await served.get("/livez")).code == 200


@pytest.mark.req("S6.3")
async def test_with_the_exchange_disabled_both_are_off() -> None:
    async with serving(working(enabled=False), database=False) as served:
        answer = await served.get("/healthcheck")
        report = answer.json()
        assert answer.code == 200
        assert (report["status"], report["nats"], report["database"]) == ("ok", "off", "off")
        assert report["subjects"] == SUBJECTS
        assert list(report["tasks"]) == ["health"]
        assert (await served.get("/readyz")).code == 200


@pytest.mark.req("B40", "R9")
async def test_stopping() -> None:
    async with serving() as served:
        served.status.stopping = True
        answer = await served.get("/healthcheck")
        assert (answer.code, answer.json()["status"]) == (503, "stopping")
        assert (await served.get("/readyz")).code == 503
        assert (await served.get("/livez")).code == 200


@pytest.mark.req("R7")
async def test_a_report_can_carry_any_text() -> None:
    async with serving() as served:
        served.status.tasks["watchdog"].failed(ValueError('é€😀 "\\ \0'))
        answer = await served.get("/healthcheck")
        assert answer.json()["tasks"]["watchdog"]["last_error"] == 'ValueError: é€😀 "\\ \0'


# --- /livez, /metrics, the rest ---------------------------------------------------------------------------------------


@pytest.mark.req("B34", "R9")
async def test_a_stalled_task_is_named_by_livez() -> None:
    async with serving() as served:
        for name in ("watchdog", "publisher"):
            served.status.tasks[name].starting(-1)  # any sign of life is too old
            served.status.tasks[name].running()
        answer = await served.get("/livez")
        assert (answer.code, answer.body) == (503, b"stalled: publisher, watchdog\n")
        assert (await served.get("/healthcheck")).json()["tasks"]["watchdog"]["state"] == "stalled"
        for name in ("watchdog", "publisher"):
            served.status.tasks[name].starting(60)
        assert (await served.get("/livez")).code == 200


@pytest.mark.req("B38", "B14")
async def test_livez_and_metrics_answer_while_the_database_is_frozen() -> None:
    async with serving() as served, trio.open_nursery() as nursery:
        served.probe.delay_seconds = float("inf")
        for _ in range(50):
            nursery.start_soon(served.get, "/healthcheck")
        assert (await served.get("/livez")).code == 200
        assert (await served.get("/metrics")).code == 200
        nursery.cancel_scope.cancel()


@pytest.mark.req("R9")
async def test_metrics() -> None:
    async with serving() as served:
        served.status.tasks["publisher"].totals.update({"confirmed": 3, "taken": 4})
        served.status.tasks["subscriber.intake"].totals.update({"received": 2})
        served.status.tasks["watchdog"].failed(ValueError())
        answer = await served.get("/metrics")
        assert answer.code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        samples = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
        assert samples == [
            'armcore_events_total{event="restarts",task="health"} 0.0',
            'armcore_events_total{event="confirmed",task="publisher"} 3.0',
            'armcore_events_total{event="taken",task="publisher"} 4.0',
            'armcore_events_total{event="restarts",task="publisher"} 0.0',
            'armcore_events_total{event="received",task="subscriber"} 2.0',
            'armcore_events_total{event="restarts",task="subscriber"} 0.0',
            'armcore_events_total{event="restarts",task="watchdog"} 1.0',
            'armcore_task_running{task="health"} 1.0',
            'armcore_task_running{task="publisher"} 1.0',
            'armcore_task_running{task="subscriber.apply"} 1.0',
            'armcore_task_running{task="subscriber.intake"} 1.0',
            'armcore_task_running{task="watchdog"} 0.0',
            'armcore_books_difference{task="publisher"} 1.0',
            'armcore_books_difference{task="subscriber"} 2.0',
            "armcore_log_lines_lost_total 0.0",
        ]


@pytest.mark.req("R9")
async def test_other_paths_and_methods() -> None:
    async with serving() as served:
        assert (await served.get("/")).code == 404
        assert (await served.get("/healthcheck/")).code in {307, 404}
        assert (await served.get("/healthcheck", "POST")).code == 405
        head = await served.get("/healthcheck", "HEAD")
        assert (head.code, head.body) == (200, b"")
        assert "server" not in head.headers


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.req("B39")
async def test_an_ipv6_address() -> None:
    async with serving(host="::1") as served:
        assert served.host == "::1"
        assert (await served.get("/livez")).code == 200


async def refusal(server: HealthServer) -> str:
    """Why a server cannot listen."""
    with pytest.raises(BaseExceptionGroup) as caught, trio.fail_after(LIMIT_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, Stop())
    (leaf,) = leaves(caught.value)
    assert isinstance(leaf, CannotListen)
    return str(leaf)


@pytest.mark.req("B39")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # hypercorn's, which it could not bind
async def test_a_busy_port_is_named_with_its_cause() -> None:
    stop = Stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = HealthServer(Endpoint("127.0.0.1", port), working(), None)
        assert await refusal(server) == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    with trio.fail_after(LIMIT_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, stop)
            stop.request()
    gc.collect()


@pytest.mark.req("B39")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_an_address_that_is_not_ours() -> None:
    server = HealthServer(Endpoint("192.0.2.1", 1), working(), None)
    assert (await refusal(server)).startswith("cannot listen on 192.0.2.1:1: ")
    gc.collect()


# --- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.req("B40", "R9")
async def test_idle_connections_do_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_GRACE_SECONDS", LIMIT_SECONDS)
    async with serving() as served:
        for _ in range(20):
            await served.connect()
        for stream in served.streams[:15]:
            await stream.send_all(b"GET /livez HTTP/1.1\r\nHost: health\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        stopped_at = trio.current_time()
    assert trio.current_time() - stopped_at < LIMIT_SECONDS / 2


@pytest.mark.req("B40")
async def test_half_sent_requests_and_a_client_that_never_reads_hold_up_the_stop_no_longer_than_its_bound() -> None:
    async with trio.open_nursery() as nursery:
        async with serving() as served:
            for _ in range(5):
                await (await served.connect()).send_all(b"GET /healthcheck HTTP/1.1\r\nHost: hea")
            greedy = await served.connect()
            nursery.start_soon(greedy.send_all, b"GET /metrics HTTP/1.1\r\nHost: health\r\n\r\n" * 5_000)
            assert (await served.get("/livez")).code == 200
            stopped_at = trio.current_time()
            nursery.cancel_scope.deadline = stopped_at + LIMIT_SECONDS
            served.stop.request()
        assert GRACE_SECONDS <= trio.current_time() - stopped_at < 1
        nursery.cancel_scope.cancel()


@pytest.mark.req("B40", "B14")
async def test_a_request_that_waits_for_a_frozen_database_holds_up_the_stop_no_longer_than_its_bound() -> None:
    async with serving() as served:
        served.probe.delay_seconds = float("inf")
        await (await served.connect()).send_all(b"GET /healthcheck HTTP/1.1\r\nHost: health\r\n\r\n")
        assert (await served.get("/livez")).code == 200
        stopped_at = trio.current_time()
    assert GRACE_SECONDS <= trio.current_time() - stopped_at < 1
