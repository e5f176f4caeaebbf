"""What has been received and not yet applied: the one thing that outlives connections (D4.7).

The intake puts messages in, the application takes them from the front and drops them only after its commit, so that a
database that restarts and a NATS that drops cost nothing that had arrived. Bounded in messages and in bytes.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import trio

from armcore_trio.borders.bus import Message, Received
from armcore_trio.errors import DependencyDown
from armcore_trio.protocol.messages import Envelope, Invalid, decode

MAX_BYTES = 128 * 1024 * 1024
BATCH_BYTES = 1024 * 1024
CATCH_UP_SECONDS = 2.0
_READ_AT_ONCE = 16


class Pending:
    """A received message, kept as its bytes until it is read: as objects it may take forty times as much (N22)."""

    __slots__ = ("_body", "_max_bytes", "conflicting", "msg_id", "reply", "size")

    def __init__(self, received: Received, max_bytes: int) -> None:
        self._body: bytes | Envelope | Invalid = received.data
        self._max_bytes = max_bytes
        self.msg_id, self.reply, self.conflicting = received.msg_id, received.reply, received.conflicting
        self.size = len(received.data) + _memory(received.msg_id) + _memory(received.reply)

    @property
    def content(self) -> Envelope | Invalid:
        """What the body says, which is then kept in its place."""
        if isinstance(self._body, bytes):
            self._body = decode(self._body, self._max_bytes)
        return self._body

    @property
    def job_id(self) -> str | None:
        """The job the message names, as far as it can be read."""
        return str(self.content.job_id) if self.content.job_id else None


def _memory(text: str | None) -> int:
    """The bytes of a text in memory: one other character makes each character four."""
    return 0 if text is None else len(text) if text.isascii() else 4 * len(text)


Answer = Callable[[Sequence[Message]], Awaitable[None]]


class Inbox:
    """The bounded buffer between intake and application."""

    def __init__(self, max_messages: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._pending: deque[Pending] = deque()
        self._bytes = 0
        self._read = self._read_bytes = 0  # of the oldest, by `read_ahead`
        self._changed: trio.Event | None = None
        self._open = False
        self._busy = False
        self.answer: Answer | None = None
        """Sends answers while the intake is connected; None while it is not."""
        self.hear: Callable[[], Awaitable[None]] | None = None
        """Takes in what the server has for us by now, while the intake is connected; None while it is not."""
        self._entered = self._left = 0

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, pending: Pending) -> bool:
        """Keep a message, unless there is no room: then False, and the caller says so."""
        if len(self._pending) >= self._max_messages or (self._bytes + pending.size > self._max_bytes and self._pending):
            return False
        self._pending.append(pending)
        self._entered += 1
        self._bytes += pending.size
        self._notify()
        return True

    def front(self, count: int) -> list[Pending]:
        """The oldest messages in the order received (D4.9), no more than can be dealt with at once; they stay until dropped."""
        batch: list[Pending] = []
        size = 0
        for pending in islice(self._pending, count):
            size += pending.size
            if batch and size > BATCH_BYTES:
                break
            batch.append(pending)
        return batch

    async def read_ahead(self) -> None:
        """Read the oldest messages before they are asked for, no more than a batch's bytes, until cancelled.

        So it is done while the application waits for the database, and what waits behind stays small.
        """
        while True:
            for _ in range(_READ_AT_ONCE):
                if self._read == len(self._pending) or self._read_bytes >= BATCH_BYTES:
                    await self._change()
                    break
                pending = self._pending[self._read]
                pending.content  # noqa: B018 - the object keeps it
                self._read += 1
                self._read_bytes += pending.size
            else:
                await trio.lowlevel.checkpoint()

    def drop(self, count: int) -> None:
        """Forget the oldest messages: they have been dealt with."""
        for _ in range(count):
            size = self._pending.popleft().size
            self._bytes -= size
            if self._read:
                self._read -= 1
                self._read_bytes -= size
        self._left += count
        self._notify()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While the block runs, more may arrive."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._notify()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While the block runs, messages that have been dropped are still being answered."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._notify()

    async def wait_filled(self) -> None:
        """Return once there is a message."""
        while not self._pending:
            await self._change()

    async def wait_settled(self) -> None:
        """Return once nothing more can arrive and everything that did has been dealt with and answered."""
        while self._open or self._pending or self._busy:
            await self._change()

    async def caught_up(self) -> bool:
        """Wait, for `CATCH_UP_SECONDS` at most, until whatever had been sent to us by now has been applied.

        False if that cannot be said: the intake is not connected, or the application does not keep up. Whoever is about
        to decide that an answer never came asks this first: it may be lying here (D3.1).
        """
        with trio.move_on_after(CATCH_UP_SECONDS), suppress(DependencyDown):
            if self.hear is not None:
                await self.hear()
                entered = self._entered
                while self._left < entered:
                    await self._change()
                return True
        return False

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
