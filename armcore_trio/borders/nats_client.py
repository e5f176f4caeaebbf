"""nats-py's client with what it lacks: a PONG that proves a batch arrived, a subscription that ends without loss, a refusal
to speak in clear, and an end that waits for nobody. Runs in asyncio; `bus` brings it to Trio.

It leans on the client's internals, so the version is pinned to one minor series and the order on the wire is tested.
"""

import asyncio
import base64
import ssl
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import nats.errors
import nkeys
from nats.aio.client import Client

from armcore_trio.settings import Settings
from armcore_trio.values import NatsServer

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

MSG_ID = "Nats-Msg-Id"
CONFLICT = "conflict"
"""Set among a message's headers if it has several different message ids."""

_GREETING_SECONDS = 1.0


class NatsClient(Client):
    """One connection to one server, which is known beforehand."""

    def __init__(self, server: NatsServer) -> None:
        super().__init__()
        self._wanted = server

    async def _process_connect_init(self) -> None:
        """Called once connected. Who wants TLS and hears nothing begins with it, as a server with `handshake_first` expects."""
        if self._wanted.tls:
            reader = self._transport._io_reader  # type: ignore[union-attr]
            try:
                greeting = await asyncio.wait_for(reader.readline(), _GREETING_SECONDS)
            except TimeoutError:
                self.options["tls_handshake_first"] = True
            else:
                if not reader.at_eof():
                    reader.feed_data(greeting)
        await super()._process_connect_init()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Called with the server's first line, before any credential is sent."""
        if initial_connection:
            if self._wanted.tls and not self.options["tls_handshake_first"]:
                if not (info.get("tls_required") or info.get("tls_available")):
                    raise nats.errors.Error("the server offers no TLS, and tls:// was asked for")
                info["tls_required"] = True  # what it only offers we require
            if not info.get("headers"):
                raise nats.errors.Error("the server takes no headers (no_header_support), and each message needs its id in one")
        await super()._process_info(info, initial_connection)

    async def connect(self, *args: Any, **options: Any) -> None:
        """As the client's own, which does not tell its stream that it runs over TLS: asyncio would remark on that at the end."""
        await super().connect(*args, **options)
        writer = self._transport._io_writer  # type: ignore[union-attr]
        writer._protocol._over_ssl = writer.get_extra_info("ssl_object") is not None

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        """The one header we read, in any case and number. Whatever raised here would end the reader and leave us deaf."""
        pairs = (line.partition(b":") for line in (headers or b"").split(b"\r\n"))
        values = [value.strip() for name, _, value in pairs if name.strip().lower() == b"nats-msg-id" and value.strip()]
        if not values:
            return None
        msg_id = values[0].decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        return {MSG_ID: msg_id} | ({CONFLICT: ""} if len(set(values)) > 1 else {})

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

    async def hear(self, subscriptions: Iterable["Subscription"]) -> None:
        """Return once all that the server had sent on these by now has been handed over."""
        await self.confirm()
        for subscription in subscriptions:
            await subscription._pending_queue.join()

    async def leave(self, subscription: "Subscription") -> None:
        """End a subscription without losing what is under way, as `drain()` can: its PING overtakes its own UNSUB."""
        await self._send_unsubscribe(subscription._id)
        await self.hear([subscription])

    def when_deaf(self, call: Callable[[], None]) -> None:
        """Have this called when nothing is read any more, for whatever reason: the client itself might not notice."""
        assert self._reading_task is not None, "connect first"
        self._reading_task.add_done_callback(lambda _: call())

    def abort(self) -> None:
        """Drop the connection without waiting for a peer that may be frozen."""
        for name in ("_io_writer", "_bare_io_writer"):
            if writer := getattr(self._transport, name, None):
                writer.transport.abort()


def credentials(settings: Settings, server: NatsServer) -> dict[str, Any]:
    """What `connect` needs to be let in and to trust the server. Raises `OSError` if the CA file is unusable."""
    options: dict[str, Any] = {}
    if server.tls:
        options["tls"] = ssl.create_default_context(cafile=settings.nats_ca_file)
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


def explain(error: Exception | None) -> str:
    """The cause in a line. nats-py wraps what it was told in its own prefix."""
    if error is None or isinstance(error, nats.errors.UnexpectedEOF):
        return "the server closed the connection"
    return " ".join(str(error).removeprefix("nats: ").split()).strip("'") or type(error).__name__
