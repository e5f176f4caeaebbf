"""R9: servers die and come back, and each child works again at the very instant its policy computed, never before."""

from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.settings import DSN, URL, Settings, load
from armcore_trio.supervision.status import State, TaskStatus
from armcore_trio.supervision.supervisor import ChildSpec, Supervisor
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database, JobIds
from tests.support.records import Records
from tests.support.responder import OpenService, reply_of, send_done
from tests.support.sabotage import commit_to_disk
from tests.support.service import ServiceClient
from tests.support.supervised import CHILDREN, Supervised, missed, restarts_after, supervise
from tests.support.waiting import in_thread, until

SEED = 7
NEEDS = {
    "nats": {"publisher", "subscriber.intake"},
    "postgres": {"publisher", "subscriber.apply", "watchdog"},
}
NAMED = {"nats": "nats", "postgres": "database"}
LOST = [(child, server) for server, children in NEEDS.items() for child in sorted(children)]


@pytest.fixture
def own_settings(own_environment: dict[str, str]) -> Settings:
    """Both servers are this test's own; their PostgreSQL has the right time."""
    return load(own_environment)


@pytest.fixture
def half_own(environment: dict[str, str], own_nats: Nats) -> dict[str, str]:
    """A nats-server of this test's own, and the database whose clock is frozen."""
    return environment | {URL: own_nats.url}


@pytest.fixture
def servers(own_postgres: Postgres, own_nats: Nats, own_db: Database) -> dict[str, Any]:
    """To kill and start; what has been committed outlives it."""
    commit_to_disk(own_db)
    own_db.execute("CHECKPOINT")
    return {"postgres": own_postgres, "nats": own_nats}


async def travel(db: Database, service: ServiceClient) -> None:
    """A job from its row to its result."""
    job = db.insert_job()
    await until(lambda: job.msg_id in {request.msg_id for request in service.heard()}, what="the request")
    assert (await in_thread(service.ask, envelopes.ack(job)))["outcome"] == "applied"
    assert (await in_thread(service.ask, envelopes.done(job), envelopes.result_id(job)))["outcome"] == "applied"
    assert db.job(job)["status"] == "done"


def is_subscribed(service: ServiceClient) -> bool:
    """Whether anybody would get a result; if not, the server itself answers at once, with nothing."""
    reply = service.new_reply()
    service.send(b"", reply=reply)
    return [heard.data for heard in service.heard(reply)] != [b""]


# --- exact instants ---------------------------------------------------------------------------------------------------


@pytest.mark.req("R9", "D9.2")
@pytest.mark.parametrize(("child", "server"), LOST)
async def test_a_server_that_died_is_in_use_again_at_the_instant_computed_and_not_before(
    clock: FrozenClock, own_settings: Settings, servers: dict[str, Any], log: Records, child: str, server: str
) -> None:
    async with supervise(clock, own_settings, SEED) as world:
        world.start(child)
        await world.wait_running()
        await world.pass_time(4)
        servers[server].kill()
        computed = restarts_after(4, SEED, 5)
        for failures, instant in enumerate(computed, 1):
            await world.wait_failed(child, failures)
            if instant == computed[-1]:
                servers[server].start()
            await clock.advance_to(missed(instant))
            await world.wait_at_rest()
            assert (len(world.attempts[child]), world.statuses[child].state) == (failures, State.BACKOFF)
            await clock.advance_to(instant)
        await world.wait_running()
        assert world.attempts[child] == [0, *computed]
        assert world.statuses[child].running_seconds() == 0
    told = log.named("task.restarting", task=child)
    assert len(told) == 2, "it ended, and then it could not be reached: each cause once"
    assert {(record["log_level"], record["error"].split(":")[0]) for record in told} == {("warning", NAMED[server])}
    recovered = log.one("task.recovered", task=child)
    assert recovered["attempts"] == 5
    assert recovered["outage_seconds"] == pytest.approx(computed[-1] - 4, abs=0.001)


@pytest.mark.req("R9", "B09")
async def test_the_subscription_stands_at_that_instant_and_not_before(
    clock: FrozenClock, own_nats: Nats, half_own: dict[str, str], open_service: OpenService, log: Records
) -> None:
    async with supervise(clock, load(half_own), SEED) as world:
        world.start("subscriber.intake")
        await world.wait_running()
        own_nats.kill()
        await until(lambda: world.statuses["subscriber.intake"].restarts == 1)
        own_nats.start()
        service = open_service(half_own, no_responders=True)
        (instant,) = restarts_after(0, SEED, 1)
        await clock.advance_to(missed(instant))
        await world.wait_at_rest()
        assert not is_subscribed(service)
        await clock.advance_to(instant)
        await world.wait_running()
        assert is_subscribed(service)
        await until(lambda: len(world.parts.inbox) == 1, what="the message in the inbox")
    assert log.one("task.recovered")["attempts"] == 1


@pytest.mark.req("R9", "D9.2")
async def test_the_same_seed_gives_the_same_instants(
    clock: FrozenClock, own_settings: Settings, servers: dict[str, Any], log: Records
) -> None:
    for server in servers.values():
        server.stop()

    async def instants(seed: int) -> list[float]:
        """Of all children's attempts in a minute; which of those that fail in one instant draws first is left open."""
        began = clock.seconds
        async with supervise(clock, own_settings, seed) as world:
            world.start()
            await world.pass_time(began + 60)
            return sorted(round(at - began, 4) for times in world.attempts.values() for at in times)

    first, again, other = await instants(SEED), await instants(SEED), await instants(SEED + 1)
    assert again == pytest.approx(first, abs=2e-4)
    assert other != pytest.approx(first, abs=2e-4)
    assert len(first) > 4 * 8
    assert {record["log_level"] for record in log.named("task.restarting")} == {"warning"}


@pytest.mark.req("R9", "D9.2")
def test_the_same_seed_gives_each_child_its_instants_in_whatever_order_they_fail() -> None:
    def attempts() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {child: [] for child in CHILDREN}

        async def fail(name: str, *_: object, **__: object) -> None:
            found[name].append(round(trio.current_time(), 6))
            raise DependencyDown(Dependency.NATS, "refused")

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                supervisor = Supervisor(nursery, Random(SEED))
                for name in CHILDREN:
                    supervisor.start(ChildSpec(name, partial(fail, name)), TaskStatus())
                await trio.sleep(60)
                nursery.cancel_scope.cancel()

        with capture_logs():
            trio.run(main, clock=MockClock(autojump_threshold=0))
        return found

    first = attempts()
    assert all(attempts() == first for _ in range(12)), "Trio itself runs tasks that are ready at once in either order"


# --- outages of minutes -----------------------------------------------------------------------------------------------


@pytest.mark.req("R9", "D9.2", "B16")
@pytest.mark.parametrize("down", [("nats",), ("postgres",), ("nats", "postgres")], ids="+".join)
async def test_five_minutes_of_outage_are_waited_out_and_all_is_well_afterwards(
    clock: FrozenClock,
    own_settings: Settings,
    own_environment: dict[str, str],
    servers: dict[str, Any],
    own_db: Database,
    open_service: OpenService,
    log: Records,
    down: tuple[str, ...],
) -> None:
    hit = set().union(*(NEEDS[server] for server in down))
    async with supervise(clock, own_settings, SEED) as world:
        world.start()
        await world.wait_running()
        await travel(own_db, open_service(own_environment))
        await world.pass_time(20)
        own_db.close()
        for server in down:
            servers[server].kill()
        await until(lambda: all(world.statuses[child].restarts for child in hit), what="failures")
        await world.pass_time(320)
        assert {child for child in CHILDREN if world.statuses[child].state is State.BACKOFF} == hit
        assert not world.supervisor.gave_up.is_set()
        for server in down:
            servers[server].start()
        await world.pass_time(332)
        await world.wait_running()
        await travel(own_db, open_service(own_environment))
        assert not world.supervisor.gave_up.is_set()
    for child in CHILDREN:
        began, *attempts = world.attempts[child]
        assert began == 0
        if child in hit:
            waits = [later - earlier for earlier, later in pairwise([20, *attempts])]
            assert all(0.4 - 1e-4 <= wait <= 12 + 1e-4 for wait in waits)
            assert all(wait >= 8 - 1e-4 for wait in waits[5:]), "capped"
            assert 300 / 12 <= len(waits) <= 5 + 312 / 8
            assert 300 <= log.one("task.recovered", task=child)["outage_seconds"] <= 312
            assert 1 <= len(log.named("task.restarting", task=child)) <= 3, "a line for each change of the cause"
        else:
            assert attempts == []


# --- the wait for an ack across a reconnect ---------------------------------------------------------------------------


async def _publish_one(world: Supervised, db: Database) -> JobIds:
    world.start("publisher", "subscriber.apply", "subscriber.intake")
    await world.wait_running()
    job = db.insert_job()
    await until(lambda: db.job(job)["status"] == "published", what="the publication")
    return job


async def _outage(world: Supervised, nats: Nats, began: float, ended: float) -> float:
    """NATS is away from one instant to another; returns the one at which both of its children have it again."""
    hit = NEEDS["nats"]
    await world.pass_time(began)
    before = {child: world.statuses[child].restarts for child in hit}
    nats.kill()
    await until(lambda: all(world.statuses[child].restarts > before[child] for child in hit), what="failures")
    await world.pass_time(ended)
    nats.start()
    while not all(world.statuses[child].state is State.RUNNING for child in hit):
        await world.pass_time(world.clock.seconds + 0.01)
    back = max(world.attempts[child][-1] for child in hit)
    assert ended < back <= ended + 12
    return back


@pytest.mark.req("D3.1", "R3", "B30")
async def test_an_outage_longer_than_the_wait_is_followed_by_exactly_one_repeat(
    clock: FrozenClock, db: Database, half_own: dict[str, str], own_nats: Nats, open_service: OpenService, log: Records
) -> None:
    async with supervise(clock, load(half_own), SEED) as world:
        job = await _publish_one(world, db)
        before = db.snapshot()
        back = await _outage(world, own_nats, 10, 100)
        service = open_service(half_own)
        after = db.job(job)
        assert len(world.attempts["publisher"]) > 5
        if after["metrics"]:
            assert after["published_at"] >= clock.at(100), "nothing was counted during the outage"
        else:
            assert db.snapshot() == before
        await world.pass_time(back + 5)  # a poll
        assert db.job(job)["metrics"] == {"republish_count": 1}
        repeated = (db.job(job)["published_at"] - clock.start).total_seconds()
        assert 100 <= repeated <= back + 5
        await world.pass_time(missed(repeated + 30))
        assert db.job(job)["metrics"] == {"republish_count": 1}, "a full wait follows"
        await world.pass_time(repeated + 35)
        assert db.job(job)["metrics"] == {"republish_count": 2}
        assert [request.msg_id for request in service.heard()][-1:] == [job.msg_id]
        assert (await in_thread(service.ask, envelopes.ack(job)))["outcome"] == "applied"
        heard = len(service.heard())
        await world.pass_time(clock.seconds + 100)
        assert (len(service.heard()), db.job(job)["status"]) == (heard, "processing")
    assert sum(record["count"] for record in log.named("outbox.republished")) == 2
    assert not log.named("outbox.dead_lettered")


@pytest.mark.req("D3.1", "D3.2")
@pytest.mark.environment(OUTBOX_MAX_REPUBLISH=0, OUTBOX_POLL_SECONDS=1)
@pytest.mark.parametrize(("began", "ended"), [(10, 100), (29, 29.1)], ids=["long", "at the last moment"])
async def test_a_dead_letter_comes_only_after_a_full_wait_connected(
    clock: FrozenClock,
    db: Database,
    half_own: dict[str, str],
    own_nats: Nats,
    log: Records,
    began: float,
    ended: float,
) -> None:
    async with supervise(clock, load(half_own), SEED) as world:
        job = await _publish_one(world, db)
        before = db.snapshot()
        back = await _outage(world, own_nats, began, ended)
        await world.pass_time(missed(back + 30))
        assert db.snapshot() == before
        await world.pass_time(back + 31)
        row = db.job(job)
        assert (row["status"], row["error_code"]) == ("dlq", "NO_ACK")
        ended_at = (row["finished_at"] - clock.start).total_seconds()
        assert back + 30 - 1e-4 <= ended_at <= back + 31 + 1e-4
    assert log.one("outbox.dead_lettered")["job_ids"] == [str(job.id)]
    assert not log.named("outbox.republished")


# --- what had been received -------------------------------------------------------------------------------------------


@pytest.mark.req("D4.7", "R9")
async def test_results_received_before_the_database_died_are_applied_once_after_it(
    clock: FrozenClock,
    environment: dict[str, str],
    own_postgres: Postgres,
    own_db: Database,
    service: ServiceClient,
    log: Records,
) -> None:
    commit_to_disk(own_db)
    settings = load(environment | {DSN: own_postgres.dsn()})
    async with supervise(clock, settings, SEED) as world:
        world.start("subscriber.apply", "subscriber.intake")
        await world.wait_running()
        amid, waiting = own_db.insert_jobs(2, status="published")
        own_db.execute("CHECKPOINT")
        with own_db.connect() as holder:
            holder.execute("SELECT FROM recognition_job WHERE id = %s FOR UPDATE", [amid.id])
            send_done(service, amid, ask=True)
            await until(lambda: own_db.lock_waiters() == 1, what="the batch amid its transaction")
            send_done(service, waiting, ask=True)
            await until(lambda: len(world.parts.inbox) == 2)
            own_db.close()
            own_postgres.kill()
            holder.close()
        await until(lambda: world.statuses["subscriber.apply"].restarts == 1)
        await world.pass_time(300)
        assert len(world.parts.inbox) == 2
        assert world.attempts["subscriber.intake"] == [0], "which does not notice"
        own_postgres.start()
        await world.pass_time(312)
        await until(lambda: not len(world.parts.inbox), what="an empty inbox")
        assert own_db.statuses([amid, waiting]) == ["done", "done"]
        answers = [(await in_thread(service.answer, reply_of(service, job)))["outcome"] for job in (amid, waiting)]
        assert answers == ["applied", "applied"]
        assert world.parts.applying.totals == {"applied": 2}
    assert len(log.named("inbox.applied")) == 1, "as one batch"
