"""The inbox keeps what it has room for, in order, until it has been dealt with (D4.7, D4.9)."""

import json
from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from armcore_trio.borders.bus import Received
from armcore_trio.exchange import inbox as inbox_module
from armcore_trio.exchange.inbox import BATCH_BYTES, Inbox, Pending
from armcore_trio.protocol.messages import Envelope, Invalid, Reason

JOB = "3f2b8a54-6c1d-4e0f-9b7a-2d5c8e1f0a63"


def pending(size: int = 1) -> Pending:
    return Pending(Received(b"x" * size), 1_000)


def put(inbox: Inbox, count: int, size: int = 1) -> list[Pending]:
    messages = [pending(size) for _ in range(count)]
    assert all(inbox.put(message) for message in messages)
    return messages


async def has_returned(wait: Callable[[], Awaitable[None]], act: Callable[[], object] | None = None) -> bool:
    """Whether a wait is over once nobody can go on; with `act`, not before it and then after it."""
    returned = False

    async def waiting() -> None:
        nonlocal returned
        await wait()
        returned = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting)
        await wait_all_tasks_blocked()
        if act is not None:
            assert not returned
            act()
            await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return returned


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D4.7", "B44")
def test_the_bound_in_messages_is_exact() -> None:
    inbox = Inbox(3)
    kept = put(inbox, 3)
    assert not inbox.put(pending())
    assert inbox.front(10) == kept
    inbox.drop(1)
    (last,) = put(inbox, 1)
    assert not inbox.put(pending())
    assert inbox.front(10) == [*kept[1:], last]


@pytest.mark.req("D4.7", "B44")
def test_the_bound_in_bytes_is_exact() -> None:
    inbox = Inbox(100, max_bytes=10)
    put(inbox, 2, size=4)
    assert not inbox.put(pending(3))
    put(inbox, 1, size=2)
    assert not inbox.put(pending(1))
    assert inbox.put(pending(0))
    inbox.drop(1)
    assert not inbox.put(pending(5))
    put(inbox, 1, size=4)


@pytest.mark.req("D4.7")
def test_a_message_beyond_the_bound_in_bytes_is_kept_alone() -> None:
    """It will be refused by its size, with a reason; the bound shall not make it disappear."""
    inbox = Inbox(100, max_bytes=10)
    put(inbox, 1, size=50)
    assert not inbox.put(pending(1))
    inbox.drop(1)
    put(inbox, 2, size=5)


@pytest.mark.req("D4.7", "D4.9")
@given(
    st.lists(st.one_of(st.integers(0, 6).map(lambda size: ("put", size)), st.integers(0, 4).map(lambda count: ("drop", count))))
)
def test_any_sequence_keeps_the_order_and_the_bounds(steps: list[tuple[str, int]]) -> None:
    inbox, model = Inbox(5, max_bytes=12), list[Pending]()
    for action, number in steps:
        held = sum(one.size for one in model)
        if action == "drop":
            dropped = min(number, len(model))
            inbox.drop(dropped)
            del model[:dropped]
        else:
            message = pending(number)
            room = len(model) < 5 and (not model or held + number <= 12)
            assert inbox.put(message) == room
            model += [message] if room else []
        assert len(inbox) == len(model)
        assert inbox.front(100) == model
        assert inbox.front(2) == model[:2]


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D4.7")
async def test_waiting_for_a_message() -> None:
    inbox = Inbox(10)

    def arrive() -> None:
        put(inbox, 1)

    assert not await has_returned(inbox.wait_filled)
    assert await has_returned(inbox.wait_filled, arrive)
    assert await has_returned(inbox.wait_filled)


@pytest.mark.req("D4.7", "R9", "B04")
async def test_settled_means_nothing_can_come_and_all_that_came_is_dealt_with_and_answered() -> None:
    inbox = Inbox(10)
    assert await has_returned(inbox.wait_settled)
    put(inbox, 2)
    assert not await has_returned(inbox.wait_settled)
    with inbox.receiving():
        inbox.drop(2)
        assert not await has_returned(inbox.wait_settled)
        put(inbox, 1)
    assert not await has_returned(inbox.wait_settled)
    with inbox.busy():
        inbox.drop(1)
        assert not await has_returned(inbox.wait_settled)
    assert await has_returned(inbox.wait_settled)


@pytest.mark.req("R9")
async def test_everybody_who_waits_for_the_inbox_to_settle_is_told() -> None:
    inbox, told = Inbox(10), list[str]()

    async def wait(name: str) -> None:
        await inbox.wait_settled()
        told.append(name)

    async with trio.open_nursery() as nursery:
        put(inbox, 1)
        for name in ("intake", "shutdown"):
            nursery.start_soon(wait, name)
        await wait_all_tasks_blocked()
        assert told == []
        with inbox.busy():
            inbox.drop(1)
    assert sorted(told) == ["intake", "shutdown"]


@pytest.mark.req("R9")
@pytest.mark.parametrize("block", ["receiving", "busy"])
async def test_a_block_that_fails_is_over_too(block: str) -> None:
    inbox = Inbox(10)
    with pytest.raises(ValueError, match=r"^$"), getattr(inbox, block)():
        raise ValueError
    assert await has_returned(inbox.wait_settled)


# --- pending messages -------------------------------------------------------------------------------------------------


@pytest.mark.req("D4.6")
def test_a_message_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bytes, int]] = []

    def decode(data: bytes, max_bytes: int) -> Invalid:
        calls.append((data, max_bytes))
        return Invalid(Reason.EMPTY, "x")

    monkeypatch.setattr(inbox_module, "decode", decode)
    message = Pending(Received(b"abc"), 77)
    assert message.content is message.content
    assert message.job_id is None
    assert calls == [(b"abc", 77)]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that have been read so far, in order."""
    bodies: list[bytes] = []

    def decode(data: bytes, _: int) -> Invalid:
        bodies.append(data)
        return Invalid(Reason.EMPTY, "x")

    monkeypatch.setattr(inbox_module, "decode", decode)
    return bodies


@pytest.mark.req("N22", "D4.7")
async def test_messages_are_read_in_order_no_more_than_a_batch_ahead(reading: list[bytes]) -> None:
    inbox = Inbox(1_000)
    bodies = [bytes([number]) * (BATCH_BYTES // 50) for number in range(120)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.read_ahead)
        for body in bodies:
            inbox.put(Pending(Received(body), 1))
        assert reading == [], "not by whoever puts them there"
        await wait_all_tasks_blocked()
        assert reading == bodies[:51]
        inbox.drop(30)
        await wait_all_tasks_blocked()
        assert reading == bodies[:81]
        inbox.drop(90)
        await wait_all_tasks_blocked()
        assert reading == bodies[:81], "what was dropped unread stays so"
        put(inbox, 1)
        await wait_all_tasks_blocked()
        assert len(reading) == 82
        nursery.cancel_scope.cancel()


@pytest.mark.req("D4.7", "D4.8")
def test_a_message_tells_its_job_as_far_as_it_can_be_read() -> None:
    valid = {"schema_version": "1.0", "job_id": JOB.upper(), "status": "processing", "service": {"name": "a", "version": "1"}}
    for document, kind, job_id in (
        (valid, Envelope, JOB),
        (valid | {"status": "DONE"}, Invalid, JOB),
        (valid | {"job_id": "abc"}, Invalid, None),
    ):
        message = Pending(Received(json.dumps(document).encode()), 1_000)
        assert isinstance(message.content, kind)
        assert message.job_id == job_id
    assert Pending(Received(b"{"), 1_000).job_id is None
