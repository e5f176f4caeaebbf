"""The door of the health port: hypercorn's connections, few at a time, so that a flood of them takes nothing from the exchange.

It does what `hypercorn.trio.serve` does, which knows no bound: there every connection is let in, a half-sent request stays
for five seconds, and once the descriptors are used up neither NATS nor the database can be reached again.
"""

import errno
import resource
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import trio
from attrs import define, field
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState
from hypercorn.utils import repr_socket_addr

from armcore_trio import logs
from armcore_trio.supervision.supervisor import Stop

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

_log = logs.get(task="health")

IDLE_SECONDS = 2.0
"""How long a connection may be without a whole request."""
_MOST, _LEAST = 64, 4
_OTHERS_DESCRIPTORS = 40
"""What all the rest needs at the worst: two dozen for long, others for looking up names, files and cancelling queries."""
_PAUSE_SECONDS = 0.005
"""Between two who come while it is full: so long, times the places, each has to say what it wants."""
_RETRY_SECONDS = 0.1
_USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


def _room() -> int:
    """How many connections this process can bear."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if descriptors == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, descriptors - _OTHERS_DESCRIPTORS))


class _Visitor(TCPServer):
    """One connection. `idle` while it has not sent a whole request."""

    idle = True

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.idle = event.idle
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()  # or one whose client has left would stay as long as if it had not

    def expel(self) -> None:
        """Free its descriptor now; its task ends soon."""
        cast("Any", self.stream).socket.close()


@define
class Door:
    """Serves an ASGI application on a socket that listens already. When there is no room, who has been idle longest must go."""

    _app: "ASGIFramework"
    _config: Config
    _socket: socket.socket
    _context: WorkerContext = field(factory=lambda: WorkerContext(None))
    _visitors: dict[_Visitor, None] = field(factory=dict)
    """Whoever is inside, in the order of arrival."""

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{repr_socket_addr(self._socket.family, self._socket.getsockname())}"

    async def serve(self, stop: Stop) -> None:
        """Serve until the stop; then requests under way have the configuration's `graceful_timeout`."""
        async with trio.open_nursery() as nursery:
            with closing(trio.socket.from_stdlib_socket(self._socket)) as listening, stop.interrupts():
                await self._let_in(trio.SocketListener(listening), nursery)
            await self._context.terminated.set()
            nursery.cancel_scope.deadline = trio.current_time() + self._config.graceful_timeout

    async def _let_in(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        room, told = _room(), False
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _USED_UP:
                    raise
                if not told:
                    _log.warning("health.crowded", connections=len(self._visitors), error=str(error.strerror))
                told = True
                self._expel()
                await trio.sleep(_RETRY_SECONDS)
                continue
            full = len(self._visitors) >= room
            if full:
                self._expel()
            nursery.start_soon(self._receive, self._visitor(stream))
            if full:
                await trio.sleep(_PAUSE_SECONDS)

    def _expel(self) -> None:
        first = next(iter(self._visitors), None)
        if chosen := next((visitor for visitor in self._visitors if visitor.idle), first):
            del self._visitors[chosen]
            chosen.expel()

    def _visitor(self, stream: trio.SocketStream) -> _Visitor:
        state = ConnectionState(LifespanState({}))
        visitor = _Visitor(ASGIWrapper(self._app), self._config, self._context, state, cast("Any", stream))
        self._visitors[visitor] = None
        return visitor

    async def _receive(self, visitor: _Visitor) -> None:
        try:
            await visitor.run()
        finally:
            self._visitors.pop(visitor, None)
            visitor.expel()  # a cancelled one has not closed it
