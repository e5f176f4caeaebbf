"""NATS on Trio: one connection for the length of a block, confirmed publishing, a queue subscription, a bounded end.

nats-py runs in an asyncio loop of the connection's own (trio-asyncio), opened and closed with it. It never reconnects
by itself: a connection that is closed, refused, expired or deaf ends the block with `DependencyDown` naming the cause,
within `2 * PING_SECONDS` even if the peer just falls silent. The owner is then restarted under the supervisor's policy.
"""

import asyncio
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
import trio
from attrs import frozen
from nats.aio.msg import Msg

from armcore_trio.borders.nats_client import CONFLICT, MSG_ID, NatsClient, credentials, explain
from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.settings import Settings
from armcore_trio.values import Endpoint, NatsServer

with warnings.catch_warnings():  # it defines a child watcher, of which Python 3.12 and 3.13 announce the end
    warnings.filterwarnings("ignore", "'AbstractChildWatcher' is deprecated", DeprecationWarning)
    import trio_asyncio

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

RV = TypeVar("RV")

CONNECT_SECONDS = 3.0
PING_SECONDS = 5.0
ANSWER_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_NEVER_SECONDS = 10**9


@frozen
class Message:
    """A message to publish. `reply` is the subject on which an answer is awaited."""

    subject: str
    data: bytes
    msg_id: str | None = None
    reply: str | None = None

    @property
    def size(self) -> int:
        """Bytes as the server counts them against its maximum: body and header."""
        return len(self.data) + (len(f"NATS/1.0\r\n{MSG_ID}: {self.msg_id}\r\n\r\n".encode()) if self.msg_id else 0)


@frozen
class Received:
    """A message as it arrived.

    `msg_id` is found whatever the header's case; empty counts as missing (D4.5). Of several different ones the first
    counts, as everywhere in NATS, and `conflicting` is set.
    """

    data: bytes
    msg_id: str | None = None
    reply: str | None = None
    conflicting: bool = False
    subject: str = ""


class Bus:
    """A live connection, made by `open_bus`. Every method ends in bounded time, in success or in `DependencyDown`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: NatsServer) -> None:
        self.server = server
        self._loop = loop
        self._client = NatsClient(server)
        self._groups: list[Subscription] = []
        self._ended = trio.Event()
        self._waiting: set[trio.Event] = set()
        self._lame_duck = False
        self._violations: list[str] = []
        self._last_failure: Exception | None = None
        self._fault: Exception | None = None

    @property
    def max_payload(self) -> int:
        """The largest message the server takes, in bytes."""
        return self._client.max_payload

    async def publish_batch(self, messages: Sequence[Message]) -> None:
        """Publish all, in order, and return once the server has confirmed them (D1.1). On any failure none counts."""

        async def publish() -> None:
            for message in messages:
                headers = {MSG_ID: message.msg_id} if message.msg_id is not None else None
                await self._client.publish(message.subject, message.data, message.reply or "", headers)
            await self._client.confirm()

        await self._permitted("confirm a batch", publish())

    async def subscribe(self, subject: str, queue: str, deliver: Callable[[Received], None]) -> None:
        """Join a queue group; `deliver` is called with each message, in order. Returns once the server has confirmed it.

        With an empty `queue` every message is ours, as an inbox for answers wants it, and a drain does not end it.
        """

        async def take(message: Msg) -> None:
            headers = message.headers or {}
            reply = message.reply or None
            try:
                deliver(Received(message.data, headers.get(MSG_ID), reply, CONFLICT in headers, message.subject))
            except Exception as fault:  # noqa: BLE001 - the client would report it and go on; it is the owner's to fail
                self._fault = fault
                self._end()

        async def join() -> None:
            subscription = await self._client.subscribe(subject, queue=queue, cb=take)
            if queue:
                self._groups.append(subscription)
            await self._client.confirm()

        await self._permitted("confirm the subscription", join())

    async def hear(self) -> None:
        """Return once everything the server had for us by now has been delivered."""
        await self._call("answer a ping", ANSWER_SECONDS, self._client.hear(self._groups))

    async def drain(self) -> None:
        """Leave the queue groups; on return all that the server had for us has been delivered."""
        while self._groups:
            await self._call("drain the subscription", ANSWER_SECONDS, self._client.leave(self._groups.pop()))

    async def watch(self) -> None:
        """Raise `DependencyDown` once the connection has ended, has been announced to end, or has been silent for too long."""
        while True:
            with trio.move_on_after(PING_SECONDS):
                await self._ended.wait()
            if self._fault is not None:
                raise self._fault
            if self._lame_duck:
                await self.drain()
                raise DependencyDown(Dependency.NATS, f"{self.server} is shutting down (lame duck mode)")
            if self._ended.is_set():
                raise self._connection_lost()
            await self._call("answer a ping", PING_SECONDS, self._client.confirm())

    async def _permitted(self, what: str, call: Coroutine[Any, Any, RV]) -> RV:
        """As `_call`, failing too if the server refused a subject meanwhile; it says so before the PONG."""
        self._violations.clear()
        result = await self._call(what, ANSWER_SECONDS, call)
        if self._violations:
            raise DependencyDown(Dependency.NATS, self._violations[0])
        return result

    async def _call(self, what: str, seconds: float, call: Coroutine[Any, Any, RV]) -> RV:
        """Run a coroutine in the client's loop and wait for it, until the limit or the end of the connection.

        The client swallows cancellation in places, so what has not ended by then is left behind: the connection's end,
        which follows every failure, ends it too.
        """
        done = trio.Event()
        task = self._loop.create_task(call)
        task.add_done_callback(lambda _: done.set())
        self._waiting.add(done)
        try:
            with trio.fail_after(seconds):
                await done.wait()
            if not task.done() or task.cancelled():
                raise self._connection_lost()
            return task.result()
        except trio.TooSlowError:
            raise DependencyDown(Dependency.NATS, f"{self.server} did not {what} within {seconds:g} s") from None
        except (nats.errors.Error, OSError) as error:
            cause = self._last_failure if isinstance(error, nats.errors.NoServersError) else error
            raise DependencyDown(Dependency.NATS, f"{self.server}: {explain(cause)}") from None
        finally:
            self._waiting.discard(done)
            task.cancel()

    def _end(self) -> None:
        self._ended.set()
        for waiting in self._waiting:
            waiting.set()

    def _connection_lost(self) -> DependencyDown:
        return DependencyDown(Dependency.NATS, f"{self.server}: {explain(self._client.last_error)}")

    async def _connect(self, settings: Settings, name: str, address: str) -> None:
        async def ended() -> None:
            self._end()

        async def lame_duck() -> None:
            self._lame_duck = True
            self._ended.set()

        async def failed(error: Exception) -> None:
            self._last_failure = error
            if "permissions violation" in str(error).lower():
                self._violations.append(explain(error))

        async def connect() -> None:
            try:
                await self._client.connect(
                    [f"nats://{Endpoint(address, self.server.port)}"],
                    tls_hostname=self.server.host,
                    name=name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=_NEVER_SECONDS,
                    ping_interval=_NEVER_SECONDS,
                    pending_size=0,
                    error_cb=failed,
                    closed_cb=ended,
                    lame_duck_mode_cb=lame_duck,
                    **credentials(settings, self.server),
                )
            except (nats.errors.Error, OSError):
                raise
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise nats.errors.Error(f"it does not speak NATS ({type(error).__name__})") from None

        await self._call("let us connect", CONNECT_SECONDS, connect())
        self._client.when_deaf(self._end)

    async def _close(self) -> None:
        with suppress(DependencyDown), trio.move_on_after(_CLOSE_SECONDS, shield=True):
            await self._call("close", _CLOSE_SECONDS, self._client.close())
        self._drop()

    def _drop(self) -> None:
        self._client.abort()
        self._end()


@asynccontextmanager
async def open_bus(settings: Settings, name: str) -> AsyncIterator[Bus]:
    """A connection to the first of the configured servers that lets us in, for the length of the block.

    Raises `DependencyDown` (in a group, as everything that leaves this block) if there is none, or when the connection
    ends before the block does: whatever the block was doing is then cancelled. `name` shows in the server's monitoring.
    """
    async with trio_asyncio.open_loop() as loop:
        loop.set_exception_handler(_leave_to_watch)
        bus = await _connect_any(loop, settings, name)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bus.watch)
                yield bus
                nursery.cancel_scope.cancel()
        finally:
            await bus._close()


async def _connect_any(loop: asyncio.AbstractEventLoop, settings: Settings, name: str) -> Bus:
    reasons = []
    for server in settings.nats_url:
        try:
            addresses = await _resolve(server)
        except DependencyDown as down:
            reasons.append(down.reason)
            continue
        for address in addresses:
            try:
                return await _connect_to(Bus(loop, server), settings, name, address)
            except DependencyDown as down:
                reasons.append(down.reason)
    raise DependencyDown(Dependency.NATS, "; ".join(reasons))


async def _connect_to(bus: Bus, settings: Settings, name: str, address: str) -> Bus:
    try:
        await bus._connect(settings, name, address)
    except BaseException:
        bus._drop()
        raise
    return bus


async def _resolve(server: NatsServer) -> list[str]:
    """The server's addresses, best first. The client's own look-up could not be abandoned if the name server is silent.

    Outside the shared limit on threads: look-ups that hang must not keep others from theirs.
    """
    look_up = partial(socket.getaddrinfo, server.host, server.port, type=socket.SOCK_STREAM)
    try:
        with trio.fail_after(CONNECT_SECONDS):
            found = await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    except trio.TooSlowError:
        reason = f"no answer from the name server within {CONNECT_SECONDS:g} s"
        raise DependencyDown(Dependency.NATS, f"{server}: {reason}") from None
    except (OSError, UnicodeError) as error:
        raise DependencyDown(Dependency.NATS, f"{server}: its name cannot be resolved: {error}") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _leave_to_watch(_: asyncio.AbstractEventLoop, __: dict[str, Any]) -> None:
    """Failures of tasks nobody waits for: the connection they belonged to ends, and `watch` says so once."""
