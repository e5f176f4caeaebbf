"""Podman as the checks of the image use it, also on a machine without systemd, bridge networks or a registry."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from tests.support.records import Records
from tests.support.waiting import wait_until

# What the machine needs, not the image: podman runs as root in a container, or beside other containers' limits.
GLOBAL_FLAGS = ("--runtime=runc",)
BUILD_FLAGS = ("--isolation=chroot", "--network=host", "--layers=false")  # or each run leaves images without a name
RUN_FLAGS = ("--network=host", "--ulimit=nofile=1000:1000", "--ulimit=nproc=1000:1000", "--log-driver=k8s-file")
# What the image promises to bear.
HARDENING = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges")

PACKAGES = {"podman": "podman", "runc": "runc"}  # program: Debian package
LIMIT_SECONDS = 120


def need(packages: Mapping[str, str]) -> None:
    """Installs what is missing if this is root on a CI machine, and refuses to go on without it otherwise."""
    missing = [package for program, package in packages.items() if not shutil.which(program)]
    if not missing:
        return
    if os.geteuid() != 0 or not os.environ.get("CI") or not shutil.which("apt-get"):
        raise RuntimeError(f"missing: {' '.join(missing)} (installed by itself only for root, with CI set, where apt-get is)")
    tell(f"installing {' '.join(missing)} with apt-get")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        run("apt-get", *arguments, seconds=600, env=environment)


def tell(text: str) -> None:
    """To the person who waits, past pytest's capture."""
    print(f"image-test: {text}", file=sys.__stderr__, flush=True)


def run(
    *command: str, check: bool = True, seconds: float = LIMIT_SECONDS, stdin: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program to its end; with `check`, a failure shows what it said."""
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False, **options)
    said = f"{result.stdout[-3000:]}{result.stderr[-3000:]}"
    assert not check or result.returncode == 0, f"{' '.join(command)} exited with {result.returncode}:\n{said}"
    return result


def podman(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One command of podman's."""
    return run("podman", *GLOBAL_FLAGS, *arguments, env=podman_environment(), **options)


def podman_environment() -> dict[str, str]:
    """Health checks are ours to run where no systemd is there to run them."""
    return dict(os.environ) if Path("/run/systemd/system").exists() else os.environ | {"DISABLE_HC_SYSTEMD": "true"}


def inspect_image(name: str) -> dict[str, Any]:
    """What podman knows of an image."""
    (document,) = json.loads(podman("image", "inspect", name).stdout)
    return dict(document)


def one_off(image: str, *command: str, program: str = "armcore-trio", stdin: str = "") -> str:
    """What a container of the image, hardened like the others, prints until it ends with exit code 0."""
    flags = ("--rm", "--interactive", f"--entrypoint={program}")
    return podman("run", *flags, *RUN_FLAGS, *HARDENING, image, *command, stdin=stdin).stdout


def free_port() -> int:
    """For a server inside a container that shares our network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Container:
    """`podman run` of an image with all its hardening, at once and in the background; removed at the end."""

    def __init__(
        self, image: str, *command: str, environment: Mapping[str, str], secrets: Mapping[str, str], options: tuple[str, ...] = ()
    ) -> None:
        """`secrets` are variables that podman keeps: variable → its value."""
        self.name = f"armcore-trio-test-{uuid4().hex}"
        self._secrets = {variable: f"{self.name}-{number}" for number, variable in enumerate(secrets)}
        for variable, secret in self._secrets.items():
            podman("secret", "create", secret, "-", stdin=secrets[variable])
        flags = [f"--env={name}={value}" for name, value in environment.items()]
        flags += [f"--secret={secret},type=env,target={variable}" for variable, secret in self._secrets.items()]
        podman("run", "--detach", f"--name={self.name}", *RUN_FLAGS, *HARDENING, *flags, *options, image, *command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        podman("rm", "--force", "--time=0", self.name, check=False)
        if self._secrets:
            podman("secret", "rm", *self._secrets.values(), check=False)

    def inspect(self) -> dict[str, Any]:
        """What podman knows of it."""
        (document,) = json.loads(podman("container", "inspect", self.name).stdout)
        return dict(document)

    @property
    def pid(self) -> int:
        """Of its first process, as the machine counts; 0 when it has ended."""
        return int(self.inspect()["State"]["Pid"])

    def execute(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command beside the daemon."""
        return podman("exec", self.name, *command, check=check)

    @property
    def healthy(self) -> bool:
        """What its health check says now."""
        return podman("healthcheck", "run", self.name, check=False).returncode == 0

    def wait_healthy(self, healthy: bool = True) -> None:
        """Until the health check says so."""
        self._wait(lambda: self.healthy is healthy, f"healthy = {healthy}")

    def wait_ready(self, code: int) -> None:
        """Until `armcore-trio probe` beside the daemon exits so."""
        self._wait(lambda: self.execute("armcore-trio", "probe", check=False).returncode == code, f"probe's exit code {code}")

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float = 40) -> None:
        def right() -> bool:
            return condition() or not self.pid

        wait_until(right, seconds, lambda: f"{what}; its log:\n{self.text}\n")
        assert condition(), f"it has ended without {what}; its log:\n{self.text}"

    @property
    def text(self) -> str:
        """All that it wrote to stdout; it must not have written to stderr."""
        logs = podman("logs", self.name)
        assert not logs.stderr, logs.stderr
        return logs.stdout

    @property
    def records(self) -> Records:
        """Its log, each line of which is a JSON object."""
        return Records([json.loads(line) for line in self.text.splitlines()])

    def wait_exit(self, seconds: float = 40) -> int:
        """Its exit code, once it has ended."""
        return int(podman("wait", self.name, seconds=seconds).stdout)

    def stop(self, seconds: int = 30) -> int:
        """`podman stop`, which kills after so many seconds; returns the exit code."""
        podman("stop", f"--time={seconds}", self.name)
        return int(self.inspect()["State"]["ExitCode"])
