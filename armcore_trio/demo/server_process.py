"""One server as a child process in a temporary directory: start, stop, kill, freeze, and nothing left behind.

What `embedded.py` builds PostgreSQL and nats-server on. Every call blocks and has a limit. A server has a session of
its own, so Ctrl-C in a terminal reaches only the program that started it; a small shell beside it ends it and removes
its directory should that program die without a word. (PR_SET_PDEATHSIG would strike when the starting *thread* ends.)
"""

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

START_SECONDS, STOP_SECONDS = 30.0, 20.0

# Reads the server's pid from the program that started it (empty: stopped). End of input means that program has ended.
_GUARDIAN = """
pid=
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then
    kill -s "$1" "$pid"; kill -s CONT "$pid"; n=0
    while [ "$n" -lt 100 ] && kill -s 0 "$pid"; do n=$((n + 1)); sleep 0.1; done
    kill -s KILL "$pid"
fi
rm -rf -- "$2"
"""


class EmbeddedError(RuntimeError):
    """A server is missing, did not start, or is not in the state a call needs; the text says which and why."""


class ServerProcess:
    """One server in one temporary directory: `start` and `stop` may alternate, `close` removes the directory."""

    name: ClassVar[str]
    _guardian_signal: ClassVar[str] = "KILL"
    _base: Path
    _guardian: "subprocess.Popen[bytes] | None" = None
    _process: "subprocess.Popen[bytes] | None" = None

    def __init__(self) -> None:
        self.port = _free_port()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server's main process. Raises EmbeddedError before the start and after a stop."""
        if self._process is None:
            raise EmbeddedError(f"{self.name} was not started")
        return self._process.pid

    @property
    def log(self) -> str:
        """All that the server has written since its first start; empty after `close`."""
        return self._log_path.read_text(errors="replace") if self._guardian and self._log_path.exists() else ""

    def start(self) -> None:
        """Returns once the server answers. Only the first start may change the port, should another program take it."""
        if self.running:
            raise EmbeddedError(f"{self.name} is already running")
        first = self._guardian is None
        try:
            if first:
                self._create()
            for attempts_left in (4, 3, 2, 1, 0) if first else (0,):
                log_length = len(self.log)
                if self._launch():
                    return
                report = self.log[log_length:]
                if not attempts_left or "address already in use" not in report.lower():
                    raise EmbeddedError(f"{self.name} ended at once; the end of its log:\n{report[-3000:]}")
                self.port = _free_port()
        except BaseException:
            self.close() if first else self.kill()
            raise

    def close(self) -> None:
        """Ends the server, however it is, and removes its directory. Closing twice does no harm."""
        self.kill()
        if self._guardian is not None:
            self._guardian.communicate(timeout=STOP_SECONDS)
        self._guardian = None

    def kill(self) -> None:
        """SIGKILL to the server and all its processes; returns when they are gone."""
        if self.running:
            family = self.freeze()
            _signal_all(family, signal.SIGKILL)
            self._forget()
            _wait(lambda: _states(family) <= {"Z", "X"}, STOP_SECONDS, lambda: f"{self.name} outlived SIGKILL")
        self._forget()

    def freeze(self) -> list[int]:
        """SIGSTOP to the server and all its processes; returns their ids once all have stopped."""
        self._halt([self.pid])  # a stopped parent makes no more children
        family = [self.pid, *_children(self.pid)]
        self._halt(family)
        return family

    def thaw(self) -> None:
        """SIGCONT to the server and all its processes; harmless if they are not frozen."""
        _signal_all([*_children(self.pid), self.pid], signal.SIGCONT)

    def _halt(self, family: list[int]) -> None:
        _signal_all(family, signal.SIGSTOP)
        _wait(lambda: _states(family) <= {"T", "t", "Z", "X"}, 5, lambda: f"{self.name} did not freeze")

    def _end(self, signal_number: signal.Signals) -> None:
        if self._process is not None and self.running:
            self.thaw()
            self._process.send_signal(signal_number)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None:
            self._process.wait(STOP_SECONDS)
            self._tell_guardian("")
        self._process = None

    @property
    def _log_path(self) -> Path:
        return self._base / "log"

    def _create(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix=f"armcore-trio-{self.name}-", dir=_temporary_directory()))
        command = ["/bin/sh", "-c", _GUARDIAN, "sh", self._guardian_signal, str(self._base)]
        null = subprocess.DEVNULL
        self._guardian = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/", start_new_session=True
        )

    def _tell_guardian(self, line: str) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.write(f"{line}\n".encode())
            self._guardian.stdin.flush()

    def _launch(self) -> bool:
        """Starts the process: True when it answers, False when it has ended instead."""
        self._forget()
        self._process = self._spawn(self._command())
        self._tell_guardian(str(self.pid))
        complaint = f"{self.name} does not answer; the end of its log:\n"
        _wait(lambda: not self.running or self._answers(), START_SECONDS, lambda: complaint + self.log[-3000:])
        return self.running

    def _spawn(self, command: Sequence[str | Path], **options: Any) -> "subprocess.Popen[bytes]":
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._base,
                env=environment,
                start_new_session=True,
                **options,
            )

    def _command(self) -> list[str | Path]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


def _temporary_directory() -> str:
    """The system's, or for root the first that other users can reach into."""
    usual = tempfile.gettempdir()
    if os.geteuid() != 0:
        return usual
    for candidate in (Path(usual).resolve(), Path("/tmp"), Path("/var/tmp")):
        if all(path.stat().st_mode & 0o001 for path in (candidate, *candidate.parents)):
            return str(candidate)
    raise EmbeddedError(f"{usual} is closed to other users, and PostgreSQL refuses to run as root: set TMPDIR")


def _free_port() -> int:
    """Below the range from which outgoing connections get theirs: none may take it while the server is down."""
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise EmbeddedError("no free port between 20000 and 32000")


def _wait(done: Callable[[], bool], limit_seconds: float, complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + limit_seconds
    while not done():
        if time.monotonic() > deadline:
            raise EmbeddedError(complaint())
        time.sleep(0.005)


def _signal_all(pids: Iterable[int], signal_number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def _processes() -> dict[int, tuple[int, str]]:
    """Every process of the machine: id → (its parent's id, state letter)."""
    found = {}
    if Path("/proc/self/stat").exists():
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            found[int(directory.name)] = (int(parent), state)
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, check=True, text=True)
        for pid, parent, state in (line.split() for line in listing.stdout.splitlines()):
            found[int(pid)] = (int(parent), state[0])
    return found


def _children(pid: int) -> list[int]:
    return [child for child, (parent, _) in _processes().items() if parent == pid]


def _states(pids: Iterable[int]) -> set[str]:
    processes = _processes()
    return {processes[pid][1] for pid in pids if pid in processes}
