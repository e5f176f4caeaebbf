"""N11: an outage of our own never counts against a job, in whatever order the tasks of eight instances come back."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from signal import SIGCONT, SIGSTOP

import pytest
import trio

from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, URL, load
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.records import Records
from tests.support.responder import OpenService, outcomes, send_done
from tests.support.sabotage import commit_to_disk
from tests.support.service import ServiceClient
from tests.support.supervised import Supervised, reached, supervise
from tests.support.waiting import in_thread, until, wait_until

LINKED = ("subscriber.apply", "watchdog")
NOBODY = ("127.0.0.1", 1)


async def pass_time(clock: FrozenClock, worlds: Sequence[Supervised], seconds: float) -> None:
    """As `Supervised.pass_time`, for several at once."""
    while True:
        for world in worlds:
            await world.wait_at_rest()
        if clock.seconds >= seconds:
            return
        due = clock.seconds + trio.lowlevel.current_statistics().seconds_to_next_deadline
        await clock.advance_to(min(seconds, reached(max(due, clock.seconds + 1e-6))))


@pytest.fixture
def database_link(link: Callable[[int], Proxy], postgres: Postgres) -> Proxy:
    """What leads to the database, whose clock is frozen."""
    return link(postgres.port)


@asynccontextmanager
async def instances(
    clock: FrozenClock, environment: dict[str, str], proxy: Proxy, count: int, seed: int
) -> AsyncIterator[list[Supervised]]:
    """So many daemons behind one link to the database."""
    settings = load(environment | {DSN: f"{environment[DSN]} host=127.0.0.1 port={proxy.port}"})
    async with AsyncExitStack() as stack:
        worlds = [await stack.enter_async_context(supervise(clock, settings, seed * count + n)) for n in range(count)]
        for world in worlds:
            world.start("subscriber.intake", *LINKED)
            await world.wait_running()
        yield worlds


async def lose_database(proxy: Proxy, worlds: Sequence[Supervised]) -> None:
    proxy.target = NOBODY
    proxy.cut()
    await until(lambda: all(world.statuses[name].restarts for world in worlds for name in LINKED), what="failures")


@pytest.mark.req("N11", "D4.7")
@pytest.mark.parametrize("seed", range(5))
async def test_a_result_received_in_time_counts_whoever_is_back_first(
    clock: FrozenClock,
    environment: dict[str, str],
    db: Database,
    service: ServiceClient,
    database_link: Proxy,
    log: Records,
    seed: int,
) -> None:
    there = database_link.target
    async with instances(clock, environment, database_link, 8, seed) as worlds:
        await pass_time(clock, worlds, 20)
        answered, forgotten = db.insert_jobs(2, status="processing", reply_deadline=clock.at(32))
        await lose_database(database_link, worlds)
        service.send(envelopes.done(answered), envelopes.result_id(answered))
        await until(lambda: sum(len(world.parts.inbox) for world in worlds) == 1, what="the result in an inbox")
        await pass_time(clock, worlds, 45)
        database_link.target = there
        await pass_time(clock, worlds, 45 + 12)
        assert all(world.statuses[name].running_seconds() is not None for world in worlds for name in LINKED)
        assert db.statuses([answered, forgotten]) == ["done", "processing"]
        since = db.insert_job(status="processing", reply_deadline=clock.at(58))
        await pass_time(clock, worlds, 45 + 12 + 27 + 1)
        assert db.statuses([answered, forgotten, since]) == ["done", "timeout", "timeout"]
    assert len(log.named("inbox.applied")) == 1


@pytest.mark.req("N11", "D4.8")
@pytest.mark.environment(WATCHDOG_PERIOD_SECONDS=5)
async def test_a_result_that_nats_could_not_bring_in_time_counts_when_it_is_said_again(
    clock: FrozenClock,
    environment: dict[str, str],
    own_nats: Nats,
    db: Database,
    open_service: OpenService,
    database_link: Proxy,
    log: Records,
) -> None:
    half_own = environment | {URL: own_nats.url}
    async with instances(clock, half_own, database_link, 2, 7) as worlds:
        await pass_time(clock, worlds, 20)
        answered, forgotten = db.insert_jobs(2, status="processing", reply_deadline=clock.at(32))
        own_nats.kill()
        await until(lambda: all(world.statuses["subscriber.intake"].restarts for world in worlds), what="failures")
        await pass_time(clock, worlds, 45)
        own_nats.start()
        await pass_time(clock, worlds, 45 + 12)
        service = open_service(half_own)
        answer = await in_thread(service.ask, envelopes.done(answered), envelopes.result_id(answered))
        assert answer["outcome"] == "applied"
        await pass_time(clock, worlds, 45 + 12 + 27 + 1)
        assert db.statuses([answered, forgotten]) == ["done", "timeout"]
    assert log.one("watchdog.timed_out")["job_ids"] == [str(forgotten.id)]


@pytest.mark.req("N11", "D4.7")
def test_eight_daemons_and_a_database_that_is_away_beyond_the_deadline(
    start_daemon: StartDaemon,
    environment: dict[str, str],
    own_postgres: Postgres,
    own_db: Database,
    service: ServiceClient,
) -> None:
    commit_to_disk(own_db)
    own = environment | {DSN: own_postgres.dsn()}
    daemons = [start_daemon(own, WATCHDOG_PERIOD_SECONDS="0.2") for _ in range(8)]
    for daemon in daemons:
        daemon.wait_ok()
    soon = own_db.value("SELECT now() + interval '4 s'")
    answered = own_db.insert_jobs(20, status="processing", published_at="now", reply_deadline=soon)
    overdue = "SELECT clock_timestamp() > max(reply_deadline) + interval '1 s' FROM recognition_job"
    own_db.execute("CHECKPOINT")
    own_db.close()
    own_postgres.stop()
    for daemon in daemons:
        daemon.wait_health(database="down")
    for job in answered:
        send_done(service, job, ask=True)
    for daemon in daemons:
        daemon.wait_for_event("task.restarting", task="watchdog")
    wait_until(lambda: sum(daemon.health()["tasks"]["watchdog"]["restarts"] for daemon in daemons) >= 8 * 5, 20)
    own_postgres.start()
    assert own_db.value(overdue)
    wait_until(lambda: "processing" not in own_db.statuses(answered), 20)
    assert set(own_db.statuses(answered)) == {"done"}
    assert outcomes(service) == {str(job.id): ["applied"] for job in answered}
    assert [daemon.stop() for daemon in daemons] == [0] * 8
    assert sum(bool(daemon.named("inbox.applied")) for daemon in daemons) > 1, "several held some"


@pytest.mark.req("N11", "R5")
def test_a_daemon_that_was_stopped_hears_first_and_judges_then(
    start_daemon: StartDaemon, db: Database, service: ServiceClient
) -> None:
    daemon = start_daemon(WATCHDOG_PERIOD_SECONDS="0.05").wait_ok()
    for _ in range(5):
        soon = db.value("SELECT now() + interval '0.5 s'")
        answered, forgotten = db.insert_jobs(2, status="processing", published_at="now", reply_deadline=soon)
        daemon.send_signal(SIGSTOP)
        send_done(service, answered)
        service.flush()
        wait_until(lambda end=soon: db.value("SELECT clock_timestamp() > %s + interval '0.2 s'", end))  # type: ignore[misc]
        daemon.send_signal(SIGCONT)
        wait_until(lambda jobs=(answered, forgotten): "processing" not in db.statuses(jobs))  # type: ignore[misc]
        assert db.statuses([answered, forgotten]) == ["done", "timeout"]
    assert daemon.stop() == 0
