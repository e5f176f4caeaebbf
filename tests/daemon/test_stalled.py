"""A task that hangs shows as stalled and `/livez` says so; one that merely waits, however long, never does (R9, B34)."""

import json
from collections import Counter

import pytest
import trio

from armcore_trio.borders.store import Store
from armcore_trio.demo.embedded import Nats
from armcore_trio.exchange.publisher import Publisher
from armcore_trio.observation.health import HealthServer
from armcore_trio.settings import URL, Settings, load
from armcore_trio.supervision.status import State, Status
from armcore_trio.supervision.supervisor import Stop
from armcore_trio.values import Endpoint
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.records import Records
from tests.support.responder import send_done
from tests.support.service import ServiceClient
from tests.support.supervised import CHILDREN, supervise
from tests.support.waiting import until


async def _get(port: int, path: str) -> tuple[int, str]:
    """Status and body of one request, while the clock stands still."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        response = b"".join([chunk async for chunk in stream]).decode()
    head, _, body = response.partition("\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.req("R9", "B34")
async def test_a_publisher_that_hangs_is_stalled_until_it_gives_a_sign_again(
    clock: FrozenClock, settings: Settings, db: Database, log: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, released = Publisher.run_once, trio.Event()

    async def hang(self: Publisher, *args: object) -> None:
        if trio.current_time() >= 5:
            await released.wait()
        await original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Publisher, "run_once", hang)
    status, stop = Status({}, "1", enabled=True), Stop()
    async with supervise(clock, settings, 7) as world, trio.open_nursery() as nursery:
        world.start("publisher")
        await world.wait_running()
        status.tasks["publisher"] = world.statuses["publisher"]
        await nursery.start(HealthServer(Endpoint("127.0.0.1", 0), status, None).run, stop)
        port = int(log.one("health.listening")["url"].rpartition(":")[2])
        bound = world.parts.publisher.heartbeat_seconds
        await world.pass_time(bound)
        assert await _get(port, "/livez") == (200, "ok\n"), "it gave a sign when it began"
        await world.pass_time(bound + 0.001)
        assert await _get(port, "/livez") == (503, "stalled: publisher\n")
        code, body = await _get(port, "/healthcheck")
        assert (code, json.loads(body)["tasks"]["publisher"]["state"]) == (503, "stalled")
        assert world.statuses["publisher"].restarts == 0, "the supervisor does not cut what hangs"

        job = db.insert_job()
        released.set()
        await until(lambda: db.job(job)["status"] == "published")
        assert await _get(port, "/livez") == (200, "ok\n")
        assert world.statuses["publisher"].state is State.RUNNING
        stop.request()


@pytest.mark.req("R9", "B52")
@pytest.mark.parametrize("child", ["publisher", "subscriber.apply", "watchdog"])
async def test_a_child_that_waits_for_the_schema_to_be_migrated_is_not_stalled(
    clock: FrozenClock, dsn: str, settings: Settings, db: Database, log: Records, child: str
) -> None:
    """`run --migrate` waits a minute for other sessions' locks, and an index on a large table takes its time."""
    version = db.value("SELECT version_num FROM armcore_trio_version")
    db.execute("UPDATE armcore_trio_version SET version_num = '0000'")
    began = trio.Event()

    async def upgrade() -> None:
        began.set()
        await trio.sleep(58)
        db.execute("UPDATE armcore_trio_version SET version_num = %s", version)

    async with supervise(clock, settings, 7) as world:
        world.parts.store = Store(dsn, upgrade)
        world.start(child)
        await until(began.is_set, what="the migration")
        states = []
        for _ in range(57):
            await clock.advance(1)
            states.append(world.statuses[child].state)
        assert set(states) == {State.STARTING}, Counter(states)
        await clock.advance(1)
        await world.wait_running()
    assert not log.all


@pytest.mark.req("R9", "B34")
async def test_an_intake_that_waits_for_the_last_message_to_be_applied_is_not_stalled(
    clock: FrozenClock, settings: Settings, db: Database, service: ServiceClient, log: Records
) -> None:
    """With a grace of minutes, whoever watches `/livez` would else kill it amid an orderly stop."""
    async with supervise(clock, settings, 7) as world:
        world.start("subscriber.intake")
        await world.wait_running()
        send_done(service, db.insert_job())
        await until(lambda: len(world.parts.inbox) == 1)
        world.supervisor.request_stop("subscriber.intake")
        states = []
        for _ in range(60):
            await world.pass_time(clock.seconds + 1)
            states.append(world.statuses["subscriber.intake"].state)
        assert set(states) == {State.RUNNING}, Counter(states)
    assert not log.all


@pytest.mark.req("R9", "B34")
@pytest.mark.parametrize(
    "variables", [{}, {"OUTBOX_POLL_SECONDS": "300", "WATCHDOG_PERIOD_SECONDS": "600"}], ids=["usual", "rare"]
)
async def test_an_idle_exchange_is_never_stalled(
    clock: FrozenClock, environment: dict[str, str], log: Records, variables: dict[str, str]
) -> None:
    async with supervise(clock, load(environment | variables), 7) as world:
        world.start()
        await world.wait_running()
        while clock.seconds < 700:
            await world.pass_time(clock.seconds + 4.9)
            assert {status.state for status in world.statuses.values()} == {State.RUNNING}
        assert world.attempts == {child: [0] for child in CHILDREN}
    assert not log.all


@pytest.mark.req("R9", "B34", "B38")
async def test_a_task_that_backs_off_is_not_stalled_however_long_the_outage(
    clock: FrozenClock, environment: dict[str, str], own_nats: Nats, log: Records
) -> None:
    own_nats.stop()
    async with supervise(clock, load(environment | {URL: own_nats.url}), 7) as world:
        world.start("subscriber.intake")
        await world.wait_failed("subscriber.intake")
        while clock.seconds < 300:
            await world.pass_time(clock.seconds + 3.3)
            assert world.statuses["subscriber.intake"].state is State.BACKOFF
        assert world.attempts["subscriber.intake"][-1] > 288
    assert len(log.all) == 1, "told once"
