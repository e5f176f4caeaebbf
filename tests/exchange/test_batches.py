"""How much is done at once: batches bounded in bytes, smaller after a failure, and never held up by single rows."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from armcore_trio.borders import store
from armcore_trio.borders.bus import Received
from armcore_trio.errors import Dependency, DependencyDown, RowsLocked, WriteRefused
from armcore_trio.exchange.inbox import BATCH_BYTES, Inbox, Pending
from armcore_trio.exchange.passes import BatchSize, run_pass
from armcore_trio.supervision.supervisor import Stop
from tests.support import envelopes
from tests.support.clock import FrozenClock
from tests.support.database import Database, JobIds, Row
from tests.support.exchange import Exchange
from tests.support.failing import failing
from tests.support.records import Records
from tests.support.refusals import refuse
from tests.support.service import ServiceClient

FAILED, SUCCEEDED = False, True


def cancel_updates_of_more_than(db: Database, rows: int) -> None:
    """As a server does that is too slow for so many: it cancels the statement. Without the wait."""
    db.execute(f"""
    CREATE FUNCTION too_many() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT count(*) FROM written) > {rows} THEN
            RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled';
        END IF;
        RETURN NULL;
    END $$""")
    db.execute("""
    CREATE TRIGGER too_many AFTER UPDATE ON recognition_job REFERENCING NEW TABLE AS written
        FOR EACH STATEMENT EXECUTE FUNCTION too_many()""")


async def impatient(exchange: Exchange) -> None:
    """From now on this instance waits a tenth of a second for a lock."""
    await exchange.connection.execute("SET lock_timeout = '100ms'")


def sent(service: ServiceClient) -> list[str | None]:
    """The message ids of the requests heard so far, in order."""
    return [request.msg_id for request in service.heard()]


# --- the size ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("B44")
def test_a_size_halves_with_each_failure_and_doubles_with_each_success_up_to_the_setting() -> None:
    size, seen = BatchSize(50), []
    for outcome in [FAILED] * 7 + [SUCCEEDED] * 7:
        (size.succeeded if outcome else size.failed)()
        seen.append(size.now)
    assert seen == [25, 12, 6, 3, 1, 1, 1, 2, 4, 8, 16, 32, 50, 50]


@pytest.mark.req("B44")
@given(st.integers(1, 10_000), st.lists(st.booleans()))
def test_a_size_is_never_nothing_and_never_more_than_the_setting(greatest: int, outcomes: list[bool]) -> None:
    size = BatchSize(greatest)
    for outcome in outcomes:
        (size.succeeded if outcome else size.failed)()
        assert 1 <= size.now <= greatest


@pytest.mark.req("B14", "B44")
async def test_a_pass_whose_batch_fails_as_a_whole_takes_half_of_it_next_time() -> None:
    size, limits, slow = BatchSize(40), list[int](), True

    async def attempt(limit: int, _: set[Any], claimed: list[Any]) -> None:
        limits.append(limit)
        claimed += range(limit if len(limits) < 6 else 0)
        await trio.lowlevel.checkpoint()
        if slow and limit > 10:
            raise DependencyDown(Dependency.DATABASE, "no answer to a pass within 10 s")

    async def one_pass() -> None:
        await run_pass(attempt, size=size, stop=Stop(), refused=lambda _, __: None)

    for _ in range(2):
        with pytest.raises(DependencyDown):
            await one_pass()
    slow = False
    await one_pass()
    assert limits == [40, 20, 10, 20, 40, 40]


@pytest.mark.req("B12", "B16")
@pytest.mark.parametrize("kind", [DependencyDown, RowsLocked])
async def test_a_server_that_is_away_before_anything_was_claimed_says_nothing_of_the_size(kind: type[DependencyDown]) -> None:
    size = BatchSize(40)

    async def attempt(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise kind(Dependency.DATABASE, "gone")

    with pytest.raises(kind):
        await run_pass(attempt, size=size, stop=Stop(), refused=lambda _, __: None)
    assert size.now == 40


@pytest.mark.req("B44", "D4.7")
@pytest.mark.environment(INBOX_BATCH_SIZE=16)
async def test_a_batch_of_messages_too_large_for_a_slow_server_is_applied_in_parts(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    cancel_updates_of_more_than(db, 4)
    jobs = db.insert_jobs(16, status="published")
    for job in jobs:
        service.send(envelopes.done(job), envelopes.result_id(job))
    await exchange.received(16)
    application, inbox = exchange.parts.application, exchange.parts.inbox
    sizes = []
    while batch := inbox.front(application.size.now):
        sizes.append(len(batch))
        try:
            await application.apply(exchange.connection, batch)
        except DependencyDown as down:
            assert "57014" in down.reason  # noqa: PT017 - a failure is one of two ways for a batch to end here
    assert sizes == [16, 8, 4, 8, 4, 8, 4, 4]
    assert set(db.statuses(jobs)) == {"done"}
    assert [record["count"] for record in log.named("inbox.applied")] == [4, 4, 4, 4]


@pytest.mark.req("B14", "D1.3")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=16)
async def test_a_batch_of_jobs_too_large_for_a_slow_server_goes_out_in_parts(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    cancel_updates_of_more_than(db, 4)
    jobs = db.insert_jobs(7)
    publisher = exchange.parts.publisher
    for size in (8, 4):
        with failing(DependencyDown, "57014"):
            await publisher.run_once(exchange.connection, exchange.bus, exchange.parts.stop)
        assert publisher.size.now == size
    assert sent(service) == [], "nothing is sent for rows that could not be written"
    await publisher.run_once(exchange.connection, exchange.bus, exchange.parts.stop)
    assert set(db.statuses(jobs)) == {"published"}
    assert sorted(map(str, sent(service))) == sorted(job.msg_id for job in jobs)


@pytest.mark.req("B44", "B04")
@pytest.mark.environment(INBOX_BATCH_SIZE=8)
async def test_a_locked_table_halves_the_batch_and_loses_nothing(
    db: Database, exchange: Exchange, service: ServiceClient
) -> None:
    await impatient(exchange)
    jobs = db.insert_jobs(8, status="published")
    for job in jobs:
        service.send(envelopes.ack(job))
    await exchange.received(8)
    application, inbox = exchange.parts.application, exchange.parts.inbox
    with db.transaction() as holder:
        holder.execute("LOCK TABLE recognition_job IN ACCESS EXCLUSIVE MODE")
        with failing(RowsLocked, "55P03"):
            await application.apply(exchange.connection, inbox.front(application.size.now))
    assert (application.size.now, len(inbox)) == (4, 8)
    for left, size in ((4, 8), (0, 8)):
        await application.apply(exchange.connection, inbox.front(application.size.now)[:4])
        assert (len(inbox), application.size.now) == (left, size)
    assert set(db.statuses(jobs)) == {"processing"}


# --- bytes ------------------------------------------------------------------------------------------------------------


def pending(size: int, reply: str = "") -> Pending:
    return Pending(Received(b"x" * (size - len(reply)), reply=reply or None), 1)


@pytest.mark.req("D4.9", "B44")
def test_a_batch_is_bounded_in_bytes() -> None:
    inbox = Inbox(100)
    quarters = [pending(BATCH_BYTES // 4) for _ in range(9)]
    assert all(map(inbox.put, quarters))
    for start in (0, 4, 8):
        assert inbox.front(100) == quarters[start : start + 4]
        assert inbox.front(3) == quarters[start : start + 3]
        inbox.drop(len(quarters[start : start + 4]))
    assert inbox.front(100) == []


@pytest.mark.req("D4.9", "B44")
def test_one_byte_more_is_left_for_the_next_batch_and_a_giant_makes_one_alone() -> None:
    inbox = Inbox(100)
    messages = [pending(BATCH_BYTES - 10), pending(11, reply="r"), pending(BATCH_BYTES + 1), pending(1)]
    assert all(map(inbox.put, messages))
    for message in messages:
        assert inbox.front(100) == [message]
        inbox.drop(1)


# --- new jobs before repeats ------------------------------------------------------------------------------------------


@pytest.fixture
def at_each_repeat(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something done while a batch of repeats is under way, after its rows were marked."""

    def install(act: Callable[[], object]) -> None:
        original: Callable[..., Awaitable[None]] = store.mark_republished

        async def mark(*args: Any, **options: Any) -> None:
            await original(*args, **options)
            act()

        monkeypatch.setattr(store, "mark_republished", mark)

    return install


@pytest.mark.req("D1.3", "R3")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=50)
async def test_a_new_job_waits_for_one_batch_of_repeats_and_not_for_the_backlog(
    clock: FrozenClock,
    db: Database,
    exchange: Exchange,
    service: ServiceClient,
    at_each_repeat: Callable[[Callable[[], object]], None],
) -> None:
    backlog = db.insert_jobs(230, status="published", published_at=clock.at(-31), reply_deadline=clock.at(900))
    new: list[JobIds] = []
    at_each_repeat(lambda: new.append(db.insert_job()) if len(new) < 3 else None)
    await exchange.publish()
    heard = sent(service)
    assert [heard.index(job.msg_id) for job in new] == [50, 101, 152]
    assert sorted(map(str, heard)) == sorted(job.msg_id for job in backlog + new)
    assert set(db.statuses(backlog + new)) == {"published"}


@pytest.mark.req("D3.1", "D3.2")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=5)
async def test_hopeless_jobs_are_left_alone_until_they_may_be_given_up(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the oldest. Claiming them only to leave them would be a pass over all of them with each poll."""
    claimed: list[int] = []
    original: Callable[..., Awaitable[list[Any]]] = store.claim_unacked

    async def claim(*args: Any, **options: Any) -> list[Any]:
        sources = await original(*args, **options)
        claimed.append(len(sources))
        return sources

    monkeypatch.setattr(store, "claim_unacked", claim)
    unacked: Row = {"status": "published", "reply_deadline": clock.at(900)}
    hopeless = db.insert_jobs(40, published_at=clock.at(-500), metrics={"republish_count": 3}, **unacked)
    others = db.insert_jobs(7, published_at=clock.at(-31), metrics={"republish_count": 1}, **unacked)
    before = db.jobs(hopeless)
    await exchange.publish()
    assert claimed == [5, 2], "the daemon has just started, and an ack may have been sent meanwhile"
    assert sorted(map(str, sent(service))) == sorted(job.msg_id for job in others)
    assert db.jobs(hopeless) == before

    await clock.advance(30)
    await exchange.publish()
    assert set(db.statuses(hopeless)) == {"dlq"}
    assert set(db.statuses(others)) == {"published"}


# --- rows of others ---------------------------------------------------------------------------------------------------


@pytest.mark.req("D1.5", "B35")
async def test_a_lock_on_the_file_of_a_job_without_a_valid_request_holds_up_nobody(
    db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    await impatient(exchange)
    broken, *good = db.insert_job(source=False), *db.insert_jobs(12)
    log.claim("outbox.write_refused")
    with db.transaction() as holder:
        holder.execute("SELECT FROM stored_file WHERE id = %s FOR UPDATE", [broken.file_id])
        await exchange.publish()
        assert set(db.statuses(good)) == {"published"}
    assert sorted(map(str, sent(service))) == sorted(job.msg_id for job in good), "each of them once"
    assert db.job(broken)["status"] == "queued"
    assert log.one("outbox.write_refused", sqlstate="55P03")["job_id"] == str(broken.id)

    await exchange.publish()
    assert db.job(broken)["error_code"] == "INVALID_REQUEST"
    assert len(sent(service)) == 12


@pytest.mark.req("R5", "B48")
async def test_a_lock_on_the_file_of_an_overdue_job_holds_up_nobody(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    await impatient(exchange)
    jobs = db.insert_jobs(12, status="processing", reply_deadline=clock.at(-1))
    held = jobs[7]
    log.claim("watchdog.write_refused")
    with db.transaction() as holder:
        holder.execute("SELECT FROM stored_file WHERE id = %s FOR UPDATE", [held.file_id])
        await exchange.expire()
        assert db.statuses(jobs) == ["processing" if job is held else "timeout" for job in jobs]
    assert log.one("watchdog.write_refused", sqlstate="55P03")["job_id"] == str(held.id)
    assert exchange.parts.watching.totals["timed_out"] == 11
    await exchange.expire()
    assert set(db.statuses(jobs)) == {"timeout"}


@pytest.mark.req("B48", "D1.1")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=10)
async def test_nothing_is_sent_for_a_row_that_cannot_be_written_and_its_neighbours_go_out_once(
    clock: FrozenClock, db: Database, exchange: Exchange, service: ServiceClient, log: Records
) -> None:
    queued = db.insert_jobs(20)
    unacked = db.insert_jobs(20, status="published", published_at=clock.at(-31), reply_deadline=clock.at(900))
    guilty = [queued[3], queued[13], unacked[5]]
    refuse(db, "recognition_job", guilty)
    log.claim("outbox.write_refused")
    for _ in range(3):
        await exchange.publish()
    assert sorted(map(str, sent(service))) == sorted(job.msg_id for job in queued + unacked if job not in guilty)
    refused = {record["job_id"] for record in log.named("outbox.write_refused", sqlstate="P0001")}
    assert refused == {str(job.id) for job in guilty}


@pytest.mark.req("B48")
@pytest.mark.environment(OUTBOX_BATCH_SIZE=10)
async def test_a_row_that_cannot_be_written_is_tried_once_a_pass_however_many_repeats_there_are(
    clock: FrozenClock, db: Database, exchange: Exchange, log: Records
) -> None:
    """Where a lock is the cause, each try costs a wait."""
    (guilty,) = db.insert_jobs(1)
    db.insert_jobs(35, status="published", published_at=clock.at(-31), reply_deadline=clock.at(900))
    refuse(db, "recognition_job", [guilty])
    log.claim("outbox.write_refused")
    for tries in (1, 2):
        await exchange.publish()
        assert len(log.named("outbox.write_refused", job_id=str(guilty.id))) == tries


@pytest.mark.req("B48")
def test_a_lock_is_an_outage_to_whoever_cannot_go_on_without_the_row() -> None:
    assert issubclass(RowsLocked, DependencyDown)
    assert not issubclass(RowsLocked, WriteRefused)
    assert RowsLocked(Dependency.DATABASE, "x").sqlstate == "55P03"
