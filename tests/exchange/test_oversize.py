"""Sizes at their exact bounds: what the server counts of a request, and what the inbox counts of a message."""

from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from armcore_trio.borders.bus import Message, Received
from armcore_trio.demo.embedded import Nats
from armcore_trio.exchange.inbox import Inbox, Pending
from armcore_trio.protocol.messages import Invalid
from armcore_trio.settings import URL, load
from tests.support.database import Database, JobIds
from tests.support.exchange import Exchange, open_exchange
from tests.support.records import Records
from tests.support.service import ServiceClient

LIMIT = 2000
HEADER = len(f"NATS/1.0\r\nNats-Msg-Id: {uuid4()}:1\r\n\r\n")

pytestmark = pytest.mark.req("D1.5")

# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_nats() -> Iterator[Nats]:
    """A server that takes messages of 2,000 bytes."""
    with Nats(config=f"max_payload: {LIMIT}") as server:
        yield server


@pytest.fixture
async def small(environment: dict[str, str], small_nats: Nats, log: Records) -> AsyncIterator[Exchange]:
    """An exchange on that server."""
    assert log is not None
    async with open_exchange(load(environment | {URL: small_nats.url}), receiving=False) as exchange:
        yield exchange


@pytest.fixture
def listener(small: Exchange, small_nats: Nats) -> Iterator[ServiceClient]:
    """A service that hears what passes through it."""
    with ServiceClient(small_nats.url, subjects=[small.parts.settings.tabular_request_subject]) as client:
        yield client


async def test_body_and_header_together_may_be_as_large_as_the_server_takes_and_no_byte_larger(
    db: Database, small: Exchange, listener: ServiceClient, log: Records
) -> None:
    db.insert_job(file_name="x", key="k/sample")
    await small.publish()
    room = LIMIT - HEADER - len(listener.heard()[0].data)

    def insert(number: int, excess: int) -> JobIds:
        return db.insert_job(file_name="x" * (1 + room + excess), key=f"k/{number:06}")

    largest = insert(1, 0)
    over = [insert(number, excess) for number, excess in ((2, 1), (3, HEADER - 1), (4, HEADER), (5, HEADER + 1), (6, 5000))]
    behind = db.insert_jobs(10)
    await small.publish()
    heard = listener.heard()
    assert {request.msg_id for request in heard[1:]} == {job.msg_id for job in [largest, *behind]}
    assert len(heard) == 12
    assert max(len(request.data) for request in heard) == LIMIT - HEADER
    assert set(db.statuses([largest, *behind])) == {"published"}
    assert set(db.statuses(over)) == {"error"}
    assert {row["error_code"] for row in db.jobs(over)} == {"INVALID_REQUEST"}
    assert db.job(over[0])["error_message"] == f"the request has {LIMIT + 1} bytes, the NATS server takes {LIMIT}"
    assert sorted(record["job_id"] for record in log.named("outbox.refused")) == sorted(str(job.id) for job in over)


@pytest.mark.parametrize(("msg_id", "size"), [(None, 7), ("a:1", 7 + len("NATS/1.0\r\nNats-Msg-Id: a:1\r\n\r\n"))])
def test_the_size_of_a_message(msg_id: str | None, size: int) -> None:
    assert Message("subject", b"content", msg_id, reply="no.part.of.it").size == size


# --- messages received ------------------------------------------------------------------------------------------------


def received(size: int = 10, msg_id: int = 0, reply: int = 0) -> Received:
    return Received(b"x" * size, "m" * msg_id or None, "r" * reply or None)


@pytest.mark.req("D4.7", "B44")
@pytest.mark.parametrize(
    ("message", "size"),
    [
        (received(10), 10),
        (received(10, msg_id=20), 30),
        (received(10, reply=40), 50),
        (received(10, 20, 40), 70),
        (received(0, 20_000, 5), 20_005),
    ],
)
def test_message_id_and_reply_subject_count_as_the_body_does(message: Received, size: int) -> None:
    assert Pending(message, 1_000).size == size


@pytest.mark.req("D4.7", "B44")
def test_the_inbox_has_no_room_for_ids_beyond_its_bytes() -> None:
    inbox = Inbox(100, max_bytes=1_000)
    assert inbox.put(Pending(received(1, msg_id=499), 1_000))
    assert not inbox.put(Pending(received(1, msg_id=500), 1_000))
    assert not inbox.put(Pending(received(1, reply=500), 1_000))
    assert inbox.put(Pending(received(1, msg_id=250, reply=249), 1_000))
    inbox.drop(1)
    assert inbox.put(Pending(received(1, msg_id=499), 1_000))


@pytest.mark.req("D4.7", "B44")
def test_what_has_been_dropped_counts_no_longer() -> None:
    inbox = Inbox(100, max_bytes=1_000)
    for _ in range(20):
        assert inbox.put(Pending(received(1, msg_id=600, reply=399), 1_000))
        assert not inbox.put(Pending(received(1), 1_000))
        inbox.drop(1)


@pytest.mark.req("D4.7", "B44")
def test_the_body_is_not_kept_once_it_is_read() -> None:
    pending = Pending(received(500, msg_id=7, reply=3), 1_000)
    assert (pending.msg_id, pending.reply) == ("m" * 7, "rrr")
    assert pending.size == 510
    assert isinstance(pending.content, Invalid)
    assert not any(isinstance(getattr(pending, name), Received | bytes) for name in Pending.__slots__)


@pytest.mark.req("N22", "D4.7")
def test_a_text_counts_as_what_it_takes_in_memory() -> None:
    assert Pending(Received(b"", "m" * 99 + "\N{PILE OF POO}", "r"), 1_000).size == 401
