"""NATS on Trio: one connection for the length of a block, confirmed publishing, a queue subscription, a bounded end.

nats-py runs in an asyncio loop of the connection's own (trio-asyncio), opened and closed with it. It never reconnects
by itself: a connection that is closed, refused, expired or deaf ends the block with `DependencyDown` naming the cause,
within `2 * PING_SECONDS` even if the peer just falls silent. The owner is then restarted under the supervisor's policy.
"""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
import nkeys
import trio
import trio_asyncio
from attrs import frozen
from nats.aio.client import Client
from nats.aio.msg import Msg

from armcore_trio.errors import Dependency, DependencyDown
from armcore_trio.settings import NatsServer, Settings

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

RV = TypeVar("RV")

CONNECT_SECONDS = 3.0
PING_SECONDS = 5.0
ANSWER_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_NEVER_SECONDS = 10**9

MSG_ID = "Nats-Msg-Id"
_CONFLICT = "conflict"


@frozen
class Message:
    """A message to publish. `reply` is the subject on which an answer is awaited."""

    subject: str
    data: bytes
    msg_id: str | None = None
    reply: str | None = None


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


class _Client(Client):
    """nats-py's client with what it lacks: a PONG that proves a batch arrived, and a refusal to speak in clear."""

    def __init__(self, server: NatsServer) -> None:
        super().__init__()
        self._wanted = server

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Called with the server's first line, before any credential is sent."""
        if initial_connection and self._wanted.tls and not info.get("tls_required"):
            raise nats.errors.Error("the server does not require TLS, and tls:// was asked for")
        await super()._process_info(info, initial_connection)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """The one header we read, in any case and number."""
        pairs = (line.partition(b":") for line in raw.split(b"\r\n"))
        values = [value.strip() for name, _, value in pairs if name.strip().lower() == b"nats-msg-id" and value.strip()]
        if not values:
            return {}
        msg_id = values[0].decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        return {MSG_ID: msg_id} | ({_CONFLICT: ""} if len(set(values)) > 1 else {})

    async def confirm(self) -> None:
        """Wait for the PONG to a PING written after everything published so far (D1.1).

        Not `flush()`: its PING overtakes what is still buffered, and it returns without a PONG on a dead connection.
        The future is shielded because the client's reader dies of a PONG whose future was cancelled.
        """
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        await self._send_command(b"PING\r\n")
        await self._flush_pending()
        await asyncio.shield(pong)

    async def leave(self, subscription: "Subscription") -> None:
        """End a subscription without losing what is under way, as `drain()` can: its PING overtakes its own UNSUB."""
        await self._send_unsubscribe(subscription._id)
        await self.confirm()
        await subscription._pending_queue.join()

    def abort(self) -> None:
        """Drop the connection without waiting for a peer that may be frozen."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


class Bus:
    """A live connection, made by `open_bus`. Every method ends in bounded time, in success or in `DependencyDown`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: NatsServer) -> None:
        self.server = server
        self._loop = loop
        self._client = _Client(server)
        self._groups: list[Subscription] = []
        self._ended = trio.Event()
        self._waiting: set[trio.Event] = set()
        self._lame_duck = False
        self._violations: list[str] = []
        self._last_failure: Exception | None = None

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
            deliver(Received(message.data, headers.get(MSG_ID), reply, _CONFLICT in headers, message.subject))

        async def join() -> None:
            subscription = await self._client.subscribe(subject, queue=queue, cb=take)
            if queue:
                self._groups.append(subscription)
            await self._client.confirm()

        await self._permitted("confirm the subscription", join())

    async def drain(self) -> None:
        """Leave the queue groups; on return all that the server had for us has been delivered."""
        while self._groups:
            await self._call("drain the subscription", ANSWER_SECONDS, self._client.leave(self._groups.pop()))

    async def watch(self) -> None:
        """Raise `DependencyDown` once the connection has ended, has been announced to end, or has been silent for too long."""
        while True:
            with trio.move_on_after(PING_SECONDS):
                await self._ended.wait()
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
            raise DependencyDown(Dependency.NATS, f"{self.server}: {_explain(cause)}") from None
        finally:
            self._waiting.discard(done)
            task.cancel()

    def _end(self) -> None:
        self._ended.set()
        for waiting in self._waiting:
            waiting.set()

    def _connection_lost(self) -> DependencyDown:
        return DependencyDown(Dependency.NATS, f"{self.server}: {_explain(self._client.last_error)}")

    async def _connect(self, settings: Settings, name: str) -> None:
        async def ended() -> None:
            self._end()

        async def lame_duck() -> None:
            self._lame_duck = True
            self._ended.set()

        async def failed(error: Exception) -> None:
            self._last_failure = error
            if "permissions violation" in str(error).lower():
                self._violations.append(_explain(error))

        connecting = self._client.connect(
            [f"nats://{self.server.host if ':' not in self.server.host else f'[{self.server.host}]'}:{self.server.port}"],
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
            **_credentials(settings, self.server),
        )
        await self._call("let us connect", CONNECT_SECONDS, connecting)

    async def _close(self) -> None:
        with suppress(DependencyDown), trio.move_on_after(_CLOSE_SECONDS, shield=True):
            await self._call("close", _CLOSE_SECONDS, self._client.close())
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
        bus = Bus(loop, server)
        try:
            await bus._connect(settings, name)
        except DependencyDown as down:
            reasons.append(down.reason)
            await bus._close()
        else:
            return bus
    raise DependencyDown(Dependency.NATS, "; ".join(reasons))


def _leave_to_watch(_: asyncio.AbstractEventLoop, __: dict[str, Any]) -> None:
    """Failures of tasks nobody waits for: the connection they belonged to ends, and `watch` says so once."""


def _credentials(settings: Settings, server: NatsServer) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if server.tls:
        options["tls"] = ssl.create_default_context(cafile=settings.nats_ca_file)
        options["tls_hostname"] = server.host
    if server.user and server.password:
        options |= {"user": server.user.reveal(), "password": server.password.reveal()}
    elif server.user:
        options["token"] = server.user.reveal()
    if settings.nats_seed and settings.nats_jwt:
        seed, jwt = settings.nats_seed.reveal(), settings.nats_jwt.reveal()
        options["user_jwt_cb"] = lambda: bytearray(jwt.encode())
        options["signature_cb"] = lambda nonce: base64.b64encode(nkeys.from_seed(bytearray(seed.encode())).sign(nonce.encode()))
    elif settings.nats_seed:
        options["nkeys_seed_str"] = settings.nats_seed.reveal()
    return options


def _explain(error: Exception | None) -> str:
    """The cause in a line. nats-py wraps what it was told in its own prefix."""
    if error is None or isinstance(error, nats.errors.UnexpectedEOF):
        return "the server closed the connection"
    return " ".join(str(error).removeprefix("nats: ").split()).strip("'\"") or type(error).__name__
