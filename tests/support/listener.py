"""A server that is none: it accepts, may greet, records what it hears and never answers."""

import socket
import threading
from contextlib import suppress
from typing import Self


class Listener:
    """Accepts on 127.0.0.1 and writes `greeting`; `hang_up` closes each connection right after it."""

    def __init__(self, greeting: bytes = b"", *, hang_up: bool = False) -> None:
        self.accepted = 0
        self.ended = 0
        self._greeting = greeting
        self._hang_up = hang_up
        self._heard: list[bytes] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    @property
    def heard(self) -> bytes:
        """All that any client has sent."""
        return b"".join(self._heard)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            self.accepted += 1
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.sendall(self._greeting)
            while not self._hang_up and (data := connection.recv(65536)):
                self._heard.append(data)
        self.ended += 1
