"""A NATS client of the tests' own, on a plain socket and a reader thread.

It says exactly what it is told (headers of any case and number, which client libraries tidy up), and `flush` makes it
deterministic: what the server had for it before is then here, so a test can also assert that nothing was sent.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit
from uuid import uuid4

from attrs import frozen

from tests.support.waiting import LIMIT_SECONDS, wait_until

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


@frozen
class Heard:
    """A message as it came: headers in their own spelling and order."""

    subject: str
    data: bytes
    headers: tuple[tuple[str, str], ...] = ()
    reply: str | None = None

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.data)

    @property
    def msg_id(self) -> str | None:
        return dict(self.headers).get("Nats-Msg-Id")


def read_frame(stream: BinaryIO) -> Heard | bytes:
    """The next message of a NATS stream, or the line of anything else. Empty at the end."""
    line = stream.readline()
    words = line.decode(errors="replace").split()
    if not words or words[0] not in ("MSG", "HMSG"):
        return line
    header_size, size = (int(words[-2]), int(words[-1])) if words[0] == "HMSG" else (0, int(words[-1]))
    names = words[1 : -2 if words[0] == "HMSG" else -1]
    block = stream.read(size + 2)[:-2]
    pairs = (text.partition(":") for text in block[:header_size].decode(errors="replace").split("\r\n")[1:])
    headers = tuple((name, value.strip()) for name, colon, value in pairs if colon)
    return Heard(names[0], block[header_size:], headers, names[2] if len(names) > 2 else None)


class ServiceClient:
    """A connection that keeps all it hears. `on_message` is called in the reader's thread, and may publish."""

    def __init__(
        self,
        url: str,
        *,
        subjects: Iterable[str] = (),
        queue: str = "",
        result_subject: str = "",
        on_message: Callable[["ServiceClient", Heard], None] | None = None,
        **connect: Any,
    ) -> None:
        self.result_subject = result_subject
        self.on_message = on_message
        self.inbox = f"_INBOX.{uuid4().hex}"
        self._heard: list[Heard] = []
        self._pongs = 0
        self._pings = 0
        self._ended = False
        self._subscriptions = 0
        self._write_lock = threading.Lock()
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port), LIMIT_SECONDS)
        self._socket.settimeout(None)
        self._stream = self._socket.makefile("rb")
        options = {"verbose": False, "pedantic": False, "headers": True, "lang": "test", "version": "1", "protocol": 1, **connect}
        self._write(f"CONNECT {json.dumps(options)}\r\n".encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        for subject in [f"{self.inbox}.>", *subjects]:
            self.subscribe(subject, "" if subject.startswith("_INBOX") else queue)
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection without a word, and with it the subscriptions."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(LIMIT_SECONDS)
        self._stream.close()
        self._socket.close()

    def subscribe(self, subject: str, queue: str = "") -> None:
        self._subscriptions += 1
        self._write(f"SUB {subject} {queue} {self._subscriptions}\r\n".encode())

    def publish(
        self, subject: str, data: bytes | dict[str, Any], *, headers: Headers = (), reply: str = "", status: str = ""
    ) -> None:
        """Publish; a dict goes out as JSON. Headers are written as they are given; `status` is one in the line above them."""
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        if pairs or status:
            block = (
                f"NATS/1.0 {status}".rstrip().encode()
                + b"\r\n"
                + b"".join(f"{name}: {value}\r\n".encode() for name, value in pairs)
                + b"\r\n"
            )
            frame = f"HPUB {subject} {reply} {len(block)} {len(block) + len(body)}\r\n".encode() + block + body
        else:
            frame = f"PUB {subject} {reply} {len(body)}\r\n".encode() + body
        self._write(frame + b"\r\n")

    def send(
        self, envelope: bytes | dict[str, Any], msg_id: str | None = None, *, headers: Headers = (), reply: str = ""
    ) -> None:
        """Publish on the result subject, with `msg_id` as `Nats-Msg-Id`."""
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        ids = [("Nats-Msg-Id", msg_id)] if msg_id is not None else []
        self.publish(self.result_subject, envelope, headers=ids + pairs, reply=reply)

    def new_reply(self) -> str:
        """A subject of our own for an answer; find it with `answer`."""
        return f"{self.inbox}.{uuid4().hex}"

    def answer(self, reply: str, seconds: float = LIMIT_SECONDS) -> Any:
        """The answer that came on a reply subject, as JSON; waits for it."""
        return wait_until(lambda: self.heard(reply), seconds, f"an answer on {reply}")[0].document

    def ask(self, envelope: bytes | dict[str, Any], msg_id: str | None = None, seconds: float = LIMIT_SECONDS) -> Any:
        """Request and reply on the result subject. Blocks until the answer is there."""
        reply = self.new_reply()
        self.send(envelope, msg_id, reply=reply)
        return self.answer(reply, seconds)

    def flush(self, seconds: float = LIMIT_SECONDS) -> None:
        """Returns when the server has taken all that was sent and given all it had for us until then."""
        self._pings += 1
        awaited = self._pings
        self._write(b"PING\r\n")
        wait_until(lambda: self._pongs >= awaited or self._ended, seconds, "a PONG")
        assert not self._ended, "the server closed the test's own connection"

    def heard(self, subject: str | None = None) -> list[Heard]:
        """All that has come so far, flushed first: on one subject, or on all that are not answers to us."""
        self.flush()
        return [one for one in self._heard if (one.subject == subject if subject else not one.subject.startswith(self.inbox))]

    def wait_heard(self, count: int, subject: str | None = None, seconds: float = LIMIT_SECONDS) -> list[Heard]:
        """Wait for so many messages and return them; more than that are returned too."""
        wait_until(lambda: len(self.heard(subject)) >= count, seconds, f"{count} messages")
        return self.heard(subject)

    def _write(self, frame: bytes) -> None:
        with self._write_lock:
            self._socket.sendall(frame)

    def _read(self) -> None:
        with suppress(OSError, ValueError):
            while frame := read_frame(self._stream):
                if isinstance(frame, Heard):
                    self._heard.append(frame)
                    if self.on_message and not frame.subject.startswith(self.inbox):
                        self.on_message(self, frame)
                elif frame.startswith(b"PONG"):
                    self._pongs += 1
                elif frame.startswith(b"PING"):
                    self._write(b"PONG\r\n")
        self._ended = True
