"""The daemon as its own process, held to its log: every line of stdout one JSON object, nothing on stderr."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from signal import SIGTERM
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.records import Record, Records
from tests.support.waiting import LIMIT_SECONDS, wait_until

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "COVERAGE_PROCESS_START")


class DaemonProcess(Records):
    """`python -m armcore_trio run`, started at once. Its records are those of its log so far.

    `HEALTH_BIND` is a port of the system's choice unless the environment sets it; `url` is what the log says. Leaving
    the block kills what still runs and checks the log. `wrapper` is put before the command (`faketime`, `unshare` …).
    """

    def __init__(self, environment: Mapping[str, str], *arguments: str, wrapper: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.not_json: list[str] = []
        self.stderr = ""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "armcore_trio", *(arguments or ("run",))],
            env=kept | {"HEALTH_BIND": "127.0.0.1:0"} | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="backslashreplace",
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_log, self._read_stderr)]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.kill()
        if kind is None:
            self.check()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send_signal(self, number: int = SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, seconds: float = LIMIT_SECONDS) -> int:
        """The exit code; all of the log is then here."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon still runs after {seconds:g} s; its log:\n{self}") from None
        self._finish()
        return code

    def stop(self, number: int = SIGTERM, seconds: float = 25) -> int:
        """Signal, then wait for the end."""
        self.send_signal(number)
        return self.wait_exit(seconds)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.process.kill()
        self.process.wait()
        self._finish()

    def check(self) -> None:
        """What must hold of every run."""
        assert not self.not_json, f"lines of the log that are no JSON object: {self.not_json}"
        assert not self.stderr, f"on stderr: {self.stderr}"
        super().check()

    def wait_for_event(self, event: str, *, count: int = 1, seconds: float = LIMIT_SECONDS, **fields: Any) -> Record:
        """The `count`th record of the event with these fields; waits for it."""

        def enough() -> list[Record]:
            found = self.named(event, **fields)
            assert len(found) >= count or self.running or self._readers[0].is_alive(), f"it ended without {event}:\n{self}"
            return found if len(found) >= count else []

        return wait_until(enough, seconds, lambda: f"{count} × {event} {fields} in the log\n{self}\n")[count - 1]

    @property
    def url(self) -> str:
        """Where its HTTP server listens; waits for the log to say so."""
        self.wait_for_event("health.listening")
        return str(self.named("health.listening")[-1]["url"])

    def get(self, path: str, seconds: float = 5) -> tuple[int, str]:
        """Status and body of one GET request."""
        address = urlsplit(self.url)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=seconds)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def health(self, seconds: float = 5) -> dict[str, Any]:
        """The body of /healthcheck, whatever the status."""
        document: dict[str, Any] = json.loads(self.get("/healthcheck", seconds)[1])
        return document

    def wait_health(
        self, condition: Callable[[dict[str, Any]], object] | None = None, seconds: float = LIMIT_SECONDS, **fields: Any
    ) -> dict[str, Any]:
        """/healthcheck, once it has these fields (`status="ok"` if none are given) and fulfils the condition."""
        wanted = fields or ({} if condition else {"status": "ok"})
        last: dict[str, Any] = {}

        def right() -> bool:
            assert self.running, f"the daemon has ended:\n{self}"
            last.clear()
            try:
                last.update(self.health())
            except (OSError, HTTPException) as error:
                last["unreachable"] = str(error)
            return wanted.items() <= last.items() and (condition is None or bool(condition(last)))

        wait_until(right, seconds, lambda: f"{wanted or 'the condition'} in /healthcheck, which says {last}; the log:\n{self}\n")
        return last

    def wait_ok(self, seconds: float = LIMIT_SECONDS) -> Self:
        """Wait until it is in full working order."""
        self.wait_health(seconds=seconds)
        return self

    def _finish(self) -> None:
        for reader in self._readers:
            reader.join(LIMIT_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and {"timestamp", "level", "event"} <= record.keys():
                self.all.append(record)
            else:
                self.not_json.append(line)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line
