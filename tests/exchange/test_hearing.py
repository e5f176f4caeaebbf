"""N11: who may not have been heard is not judged yet; how long that lasts, and for whom."""

# ruff: noqa: ARG001 - pytest-trio looks for a clock only among the test's own arguments, used or not

import pytest
import trio
from trio.testing import MockClock

from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.exchange.hearing import LONGEST_HOLD_SECONDS, SETTLE_SECONDS, Hold, undisturbed_seconds
from armcore_trio.supervision.status import TaskStatus
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database, Row
from tests.support.exchange import Exchange
from tests.support.service import ServiceClient

LOST = DependencyDown(Dependency.DATABASE, "the server closed the connection")
ACKED: Row = {"status": "processing", "service_name": "tabular-parser", "service_version": "2.1.0"}


def fail(*tasks: TaskStatus) -> None:
    """An outage that is over: they work again from now on."""
    for task in tasks:
        task.failed(LOST)
        task.running()


# --- for how long -----------------------------------------------------------------------------------------------------


@pytest.mark.req("N11")
def test_the_longest_back_off_a_start_and_a_batch() -> None:
    assert (SETTLE_SECONDS, LONGEST_HOLD_SECONDS) == (27, 300)


@pytest.mark.req("N11")
async def test_a_start_is_no_outage_and_a_failure_is_one_until_all_have_worked_for_long(
    autojump_clock: MockClock,
) -> None:
    one, other = TaskStatus(), TaskStatus()
    assert undisturbed_seconds([one, other]) == float("inf")
    one.running()
    assert undisturbed_seconds([one, other]) == float("inf"), "the other is only starting"
    other.failed(LOST)
    await trio.sleep(100)
    assert undisturbed_seconds([one, other]) == 0
    other.running()
    await trio.sleep(7)
    assert undisturbed_seconds([one, other]) == 7
    fail(one)
    await trio.sleep(2)
    assert undisturbed_seconds([one, other]) == 2


@pytest.mark.req("N11")
async def test_a_hold_ends_with_peace(autojump_clock: MockClock) -> None:
    hold = Hold()
    assert not hold.goes_on(float("inf"))
    for undisturbed in (0, 10, 26.9):
        assert hold.goes_on(undisturbed)
    assert not hold.goes_on(27)


@pytest.mark.req("N11")
async def test_a_link_that_flaps_puts_it_off_for_five_minutes_at_most(autojump_clock: MockClock) -> None:
    hold, held = Hold(), 0
    while hold.goes_on(0):
        held += 1
        await trio.sleep(10)
    assert 270 <= 10 * held <= 300
    for _ in range(10):
        await trio.sleep(10)
        assert not hold.goes_on(5), "nor is it renewed"
    assert not hold.goes_on(27)
    assert hold.goes_on(0), "after peace it is"


@pytest.mark.req("N11")
async def test_hours_without_the_database_are_not_counted(autojump_clock: MockClock) -> None:
    hold = Hold()
    for _ in range(5):
        assert hold.goes_on(0)
        await trio.sleep(3600)


# --- for whom ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("N11", "R5")
@pytest.mark.parametrize("task", ["watching", "receiving", "applying"])
async def test_after_an_outage_of_any_task_the_jobs_it_concerned_are_given_time(
    clock: FrozenClock, db: Database, exchange: Exchange, task: str
) -> None:
    await clock.advance(100)
    concerned = db.insert_job(reply_deadline=clock.at(101), **ACKED)
    fail(getattr(exchange.parts, task))
    await clock.advance(2)
    later = db.insert_job(reply_deadline=clock.at(101), **ACKED)
    await exchange.expire()
    assert db.statuses([concerned, later]) == ["processing", "timeout"]
    await clock.advance_to(126.999)
    await exchange.expire()
    assert db.job(concerned)["status"] == "processing"
    await clock.advance_to(127)
    await exchange.expire()
    assert db.job(concerned)["status"] == "timeout"


@pytest.mark.req("N11", "R5")
@pytest.mark.environment(WATCHDOG_PERIOD_SECONDS=3600)
async def test_the_next_look_is_when_the_time_is_up(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    look = exchange.parts.watchdog.run_once
    assert await look(exchange.connection, exchange.parts.stop) == 3600
    fail(exchange.parts.applying)
    await clock.advance(2)
    assert await look(exchange.connection, exchange.parts.stop) == 25
    await clock.advance(25)
    assert await look(exchange.connection, exchange.parts.stop) == 3600


@pytest.mark.req("N11", "D4.7")
async def test_what_waits_in_the_inbox_came_in_time(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    waiting, forgotten = db.insert_jobs(2, reply_deadline=clock.at(10), **ACKED)
    service.send(envelopes.done(waiting), envelopes.result_id(waiting))
    await exchange.received(1)
    await clock.advance(11)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.expire)
        await exchange_rests(exchange)
        await clock.advance(2)  # the longest it waits for the inbox, which nobody applies
    assert db.statuses([waiting, forgotten]) == ["processing", "processing"]
    await exchange.apply(1)
    await exchange.expire()
    assert db.statuses([waiting, forgotten]) == ["done", "timeout"]


async def exchange_rests(exchange: Exchange) -> None:
    """Wait until the pass waits for the inbox."""
    inbox = exchange.parts.inbox
    while inbox._changed is None:
        await trio.lowlevel.checkpoint()


@pytest.mark.req("N11", "R5")
async def test_a_deadline_that_passes_during_the_look_is_the_next_ones(
    clock: FrozenClock, db: Database, exchange: Exchange
) -> None:
    job = db.insert_job(reply_deadline=clock.at(10), **ACKED)
    hear = exchange.parts.inbox.hear
    assert hear is not None
    await clock.advance(10)

    async def slowly() -> None:
        await hear()
        await clock.advance(1)

    exchange.parts.inbox.hear = slowly
    await exchange.expire()
    assert db.job(job)["status"] == "processing"
    await exchange.expire()
    assert db.job(job)["status"] == "timeout"


@pytest.mark.req("N11", "R5")
async def test_an_instance_that_has_just_started_goes_by_the_servers_age(
    clock: FrozenClock, db: Database, exchange: Exchange
) -> None:
    db.execute(f"""
    CREATE FUNCTION clock.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql STABLE
    AS $$ SELECT '{clock.at(50).isoformat()}'::timestamptz $$""")
    concerned = db.insert_job(reply_deadline=clock.at(40), **ACKED)
    await clock.advance(60)
    later = db.insert_job(reply_deadline=clock.at(59), **ACKED)
    await exchange.expire()
    assert db.statuses([concerned, later]) == ["processing", "timeout"]
    await clock.advance_to(77)
    await exchange.expire()
    assert db.job(concerned)["status"] == "timeout"


@pytest.mark.req("N11", "R5")
async def test_without_nats_deadlines_wait_for_five_minutes_at_most(clock: FrozenClock, db: Database, exchange: Exchange) -> None:
    job = db.insert_job(reply_deadline=clock.at(1), **ACKED)
    exchange.parts.receiving.failed(LOST)
    while db.job(job)["status"] == "processing":
        assert clock.seconds < 300
        await clock.advance(20)
        await exchange.expire()
    assert clock.seconds >= 270


@pytest.mark.req("N11", "R3", "D3.2")
@pytest.mark.environment(ACK_TIMEOUT_SECONDS=1, OUTBOX_MAX_REPUBLISH=1)
@pytest.mark.parametrize("task", ["publishing", "receiving"])
async def test_after_an_outage_there_are_repeats_and_no_dead_letters_yet(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, task: str
) -> None:
    job = db.insert_job()
    await exchange.publish()
    fail(getattr(exchange.parts, task))
    for seconds in (1, 2, 26.999):
        await clock.advance_to(seconds)
        await exchange.publish()
        assert (db.job(job)["status"], len(service.heard())) == ("published", 2)
    await clock.advance_to(27)
    await exchange.publish()
    assert (db.job(job)["status"], len(service.heard())) == ("dlq", 2)


@pytest.mark.req("N11", "R3")
@pytest.mark.environment(ACK_TIMEOUT_SECONDS=10)
async def test_a_wait_for_an_ack_that_ends_during_the_look_is_the_next_ones(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    early, late = db.insert_job(status="published", published_at=clock.at(0)), db.insert_job()
    await clock.advance(1)
    await exchange.publish()
    hear = exchange.parts.inbox.hear
    assert hear is not None
    await clock.advance_to(10.5)

    async def slowly() -> None:
        await hear()
        await clock.advance(1)

    exchange.parts.inbox.hear = slowly
    await exchange.publish()
    assert [job["metrics"] for job in db.jobs([early, late])] == [{"republish_count": 1}, {}]
