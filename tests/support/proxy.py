"""A TCP link that can be made to fail: it stalls, holds bytes back, breaks, or breaks after so many bytes.

Up is from the client to the server, down the other way. Everything that arrives is recorded, forwarded or not.
"""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Self

from attrs import define, field, frozen

Address = tuple[str, int]


class Direction(Enum):
    UP = "up"
    DOWN = "down"


class Mode(Enum):
    """What the link does with bytes."""

    PASS = "pass"
    SWALLOW = "swallow"
    """Taken and lost: the sender sees nothing wrong."""
    HOLD = "hold"
    """Kept, in order, until the link passes again."""


BOTH = (Direction.UP, Direction.DOWN)


@frozen
class Chunk:
    """Bytes as they arrived: on which of the connections, counted from 0, and in which direction."""

    connection: int
    direction: Direction
    data: bytes


@define(eq=False)
class _Link:
    number: int
    client: socket.socket
    server: socket.socket
    ends: int = 2
    threads: list[threading.Thread] = field(factory=list)

    def close(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on a port of its own on 127.0.0.1 and connects every client to `target`."""

    def __init__(self, port: int) -> None:
        self.target: Address = ("127.0.0.1", port)
        self.chunks: list[Chunk] = []
        self._modes = dict.fromkeys(Direction, Mode.PASS)
        self._limits: dict[Direction, int | None] = dict.fromkeys(Direction)
        self._changed = threading.Condition()
        self._links: list[_Link] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._accepter = threading.Thread(target=self._accept, daemon=True)
        self._accepter.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepter.join()
        self.cut()
        for link in self._links:
            for thread in link.threads:
                thread.join()

    @property
    def connections(self) -> int:
        """How many clients have connected so far."""
        return len(self._links)

    def set(self, mode: Mode, directions: Sequence[Direction] = BOTH) -> None:
        """From now on the link does this, connections to come included."""
        with self._changed:
            self._modes.update(dict.fromkeys(directions, mode))
            self._changed.notify_all()

    def stall(self) -> None:
        """Swallow both ways without closing anything."""
        self.set(Mode.SWALLOW)

    def hold(self, *directions: Direction) -> None:
        """Keep bytes back until `resume`; in both directions if none is named."""
        self.set(Mode.HOLD, directions or BOTH)

    def resume(self) -> None:
        """Pass everything again, what was held back first."""
        self.set(Mode.PASS)

    def cut(self) -> None:
        """Close all connections; new ones are taken."""
        with self._changed:
            for link in self._links:
                link.close()
            self._changed.notify_all()

    def cut_after(self, size: int, direction: Direction = Direction.UP) -> None:
        """Forward so many more bytes in that direction, then cut, once."""
        with self._changed:
            self._limits[direction] = size

    def recorded(self, direction: Direction, connection: int | None = None) -> bytes:
        """All bytes of a direction: of one connection, or of all as they came."""
        return b"".join(
            chunk.data for chunk in list(self.chunks) if chunk.direction is direction and connection in (None, chunk.connection)
        )

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target, 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = _Link(len(self._links), client, server)
            for source, sink, direction in ((client, server, Direction.UP), (server, client, Direction.DOWN)):
                thread = threading.Thread(target=self._pump, args=(link, source, sink, direction), daemon=True)
                link.threads.append(thread)
            self._links.append(link)
            for thread in link.threads:
                thread.start()

    def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.chunks.append(Chunk(link.number, direction, data))
                allowed, cut = self._allow(direction, data)
                if allowed:
                    sink.sendall(allowed)
                if cut:
                    break
        link.close()
        with self._changed:
            link.ends -= 1
            last = link.ends == 0
        if last:
            link.client.close()
            link.server.close()

    def _allow(self, direction: Direction, data: bytes) -> tuple[bytes, bool]:
        """What may go on, and whether the link is to be cut after it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._modes[direction] is not Mode.HOLD)
            if self._modes[direction] is Mode.SWALLOW:
                return b"", False
            limit = self._limits[direction]
            if limit is None:
                return data, False
            if len(data) < limit:
                self._limits[direction] = limit - len(data)
                return data, False
            self._limits[direction] = None
            return data[:limit], True
