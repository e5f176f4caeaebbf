"""In the place of a nats-server: one that greets, lets everybody in, and says what a test wants it to say."""

import json
import socket
import threading
from contextlib import suppress
from typing import Self

_INFO = {"server_id": "STAND-IN", "version": "2.10.0", "proto": 1, "headers": True, "max_payload": 1_048_576}
_INFO |= {"auth_required": True, "nonce": "c3RhbmQtaW4"}


class StandInNats:
    """Serves CONNECT, PING and SUB and loses what is published. `expel` ends every connection with an error line."""

    def __init__(self) -> None:
        self.connects: list[str] = []
        """The CONNECT lines seen so far."""
        self.refusal: str | None = None
        """What a newcomer is told instead of PONG before it is put out."""
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def expel(self, reason: str) -> None:
        """`-ERR 'reason'` to every client, and the end of its connection."""
        for client in self._clients:
            self._put_out(client, reason)

    @staticmethod
    def _put_out(client: socket.socket, reason: str) -> None:
        with suppress(OSError):
            client.sendall(f"-ERR '{reason}'\r\n".encode())
            client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as stream, suppress(OSError):
            client.sendall(f"INFO {json.dumps(_INFO)}\r\n".encode())
            for line in stream:
                if line.startswith(b"CONNECT"):
                    self.connects.append(line.decode())
                elif line.startswith(b"PING"):
                    if self.refusal:
                        self._put_out(client, self.refusal)
                        return
                    client.sendall(b"PONG\r\n")
                elif line.startswith((b"PUB ", b"HPUB ")):
                    stream.read(int(line.split()[-1]) + 2)
