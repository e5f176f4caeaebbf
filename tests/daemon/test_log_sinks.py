"""A log that cannot hurt: sinks that break, stall and come back, as the daemon and its neighbours feel them (N02, N03)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from signal import SIGTERM
from time import monotonic
from typing import Any

import pytest

from armcore_trio.demo.server_process import _free_port
from tests.support import envelopes
from tests.support.database import Database
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until


class Daemon:
    """`armcore-trio run` with this descriptor as its standard output (None: closed)."""

    def __init__(self, environment: dict[str, str], stdout: int | None) -> None:
        self.port = _free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "armcore_trio", "run"],
            env={**environment, "HEALTH_BIND": f"127.0.0.1:{self.port}", "PATH": os.environ["PATH"]},
            stdout=stdout if stdout is not None else subprocess.DEVNULL,
            preexec_fn=None if stdout is not None else lambda: os.close(1),  # noqa: PLW1509 - nothing runs beside this fork
        )

    def get(self, path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def wait_ok(self) -> None:
        wait_until(lambda: self.get("/healthcheck")[0] == 200)

    @property
    def lost(self) -> float:
        (line,) = [one for one in self.get("/metrics")[1].splitlines() if one.startswith("armcore_log_lines_lost_total")]
        return float(line.split()[1])

    def stop(self, seconds: float = 25) -> int:
        self.process.send_signal(SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def running(environment: dict[str, str], stdout: int | None) -> Iterator[Daemon]:
    daemon = Daemon(environment, stdout)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.wait()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.req("N02")
@pytest.mark.parametrize("sink", ["full", "closed", "nobody"])
def test_a_sink_that_takes_nothing_costs_its_lines_and_nothing_else(
    sink: str, environment: dict[str, str], db: Database, service: ServiceClient
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    with running(environment, {"full": full, "closed": None, "nobody": writer}[sink]) as daemon:
        os.close(writer)
        os.close(full)
        daemon.wait_ok()
        (job,) = db.insert_jobs(1)
        service.wait_heard(1)
        assert service.ask(envelopes.done(job), envelopes.result_id(job))["outcome"] == "applied"
        if sink != "closed":
            wait_until(lambda: daemon.lost >= 4)
        assert daemon.stop() == 0


@pytest.mark.req("N03", "R9")
def test_a_reader_that_stalls_is_felt_by_nobody(environment: dict[str, str], db: Database, service: ServiceClient) -> None:
    reader, writer = os.pipe()
    with running(environment | {"SHUTDOWN_GRACE_SECONDS": "5"}, writer) as daemon:
        os.close(writer)
        daemon.wait_ok()
        jobs = db.insert_jobs(2500)
        service.wait_heard(2500)
        for job in jobs[:500]:
            service.send(envelopes.done(job), envelopes.result_id(job))
        wait_until(lambda: db.statuses(jobs).count("done") == 500)
        begun = monotonic()
        assert daemon.get("/livez")[0] == 200
        assert monotonic() - begun < 1
        assert daemon.stop() == 0
        assert monotonic() - begun < 6
    os.close(reader)


@pytest.mark.req("N03", "N12")
def test_a_reader_that_is_only_slow_gets_every_line_in_order_and_none_too_long(
    environment: dict[str, str], db: Database, service: ServiceClient
) -> None:
    reader, writer = os.pipe()
    with running(environment, writer) as daemon, os.fdopen(reader, "rb") as stream:
        os.close(writer)
        daemon.wait_ok()
        jobs = db.insert_jobs(2500)
        service.wait_heard(2500)
        wait_until(lambda: set(db.statuses(jobs)) == {"published"})
        daemon.process.send_signal(SIGTERM)
        lines = stream.readlines()
        assert daemon.process.wait(10) == 0
    assert max(map(len, lines)) <= 8192
    told = [json.loads(line) for line in lines]
    assert told[-1]["event"] == "shutdown.complete"
    assert [one["timestamp"] for one in told] == sorted(one["timestamp"] for one in told)
    published = [one for one in told if one["event"] == "outbox.published"]
    assert sum(one["count"] for one in published) == 2500
    assert sorted(job_id for one in published for job_id in one["job_ids"]) == sorted(str(job.id) for job in jobs)


@pytest.mark.req("N02")
def test_what_was_lost_is_told_once_when_the_sink_works_again(tmp_path: Path) -> None:
    program = """
import os, resource, signal, sys
from armcore_trio import logs
from armcore_trio.values import LogFormat
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logs.configure(LogFormat.JSON, debug=False, secrets=[])
log = logs.get()
log.info("first")
logs.flush(5)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(1).st_size + 10, hard))
for _ in range(3):
    log.info("lost")
    logs.flush(5)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert logs.lines_lost() == 3, logs.lines_lost()
log.info("last")
log.info("end")
"""
    path = tmp_path / "log"
    with path.open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, timeout=30)
    whole = []
    for line in path.read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except ValueError:
            assert len(line) == 10, "what the full disk took of the first one lost"
    assert [record["event"] for record in whole] == ["first", "log.lines_lost", "last", "end"]
    assert (whole[1]["count"], whole[1]["error"]) == (3, "File too large")


@pytest.mark.req("N02")
@pytest.mark.parametrize("arguments", [["--version"], ["check"], ["review-log", "/dev/null"], ["migrate", "--sql"]])
def test_a_command_that_cannot_print_says_so_in_one_line(arguments: list[str], environment: dict[str, str]) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "armcore_trio", *arguments],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "Error: what it did could not be written to standard output: No space left on device\n"
