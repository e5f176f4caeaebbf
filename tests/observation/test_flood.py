"""A flood of the health port where descriptors are few: it takes nothing from the exchange, and honest callers are answered."""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from armcore_trio.demo.embedded import Nats, Postgres
from tests.conftest import StartDaemon
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.envelopes import done, result_id
from tests.support.service import ServiceClient
from tests.support.waiting import wait_until

FEW = ("prlimit", "--nofile=48:48")
HALF = b"GET /healthcheck HTTP/1.1\r\nHost: hea"


@contextmanager
def flooded(url: str, request: bytes = HALF, count: int = 60) -> Iterator[Callable[[], int]]:
    """So many connections with half of a request each, whoever is cut off coming again; the block gets the number made so far."""
    address, over, made = urlsplit(url), threading.Event(), 0

    def flood() -> None:
        nonlocal made
        held: list[socket.socket] = []
        while not over.wait(0.01):
            for one in [one for one in held if _cut(one)]:
                held.remove(one)
                one.close()
            with suppress(OSError):
                while len(held) < count:
                    one = socket.create_connection((address.hostname, address.port), 1)
                    held.append(one)
                    made += 1
                    one.sendall(request)
                    one.setblocking(False)
        for one in held:
            one.close()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    try:
        yield lambda: made
    finally:
        over.set()
        thread.join()


def _cut(one: socket.socket) -> bool:
    try:
        return not one.recv(65536)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _travel(db: Database, service: ServiceClient) -> None:
    """A job goes out, and its result comes in."""
    job = db.insert_job()
    assert service.wait_heard(1)[0].msg_id == job.msg_id
    service.send(done(job), result_id(job))
    wait_until(lambda: db.job(job)["status"] == "done", what="the job's end")


def processor_seconds(daemon: DaemonProcess) -> float:
    """What it has cost so far."""
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(daemon: DaemonProcess) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


@pytest.mark.req("N21")
@pytest.mark.parametrize(
    "request_sent", [b"", HALF, b"GET /healthcheck HTTP/1.1\r\nHost: health\r\n\r\n"], ids=["none", "half", "whole"]
)
def test_the_exchange_is_unharmed(
    own_environment: dict[str, str],
    own_nats: Nats,
    own_postgres: Postgres,
    open_service: Callable[..., ServiceClient],
    request_sent: bytes,
) -> None:
    with DaemonProcess(own_environment, wrapper=FEW) as daemon:
        daemon.wait_ok()
        with flooded(daemon.url, request_sent) as made:
            wait_until(lambda: made() > 60, what="the flood")
            for server in (own_nats, own_postgres):
                server.stop()
                server.start()
                daemon.wait_ok()
                with closing(Database(own_postgres.dsn())) as db, open_service(own_environment) as service:
                    _travel(db, service)
            for _ in range(8):
                assert daemon.get("/livez") == (200, "ok\n")
                assert descriptors(daemon) < 48
            daemon.wait_ok()
        assert daemon.named("task.restarting", level="error") == []
        assert [record for record in daemon.all if str(record["event"]).startswith(("library.", "health.crowded"))] == []
        assert len(daemon.all) < 60
        assert daemon.stop() == 0


@pytest.mark.req("N21")
def test_descriptors_that_others_have_used_up_are_told_once(start_daemon: StartDaemon) -> None:
    """The limit is lowered to what the daemon has, so that nobody can be let in; then raised again."""
    daemon = start_daemon().wait_ok()
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    with flooded(daemon.url):
        daemon.wait_for_event("health.crowded")
        busy = processor_seconds(daemon)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 1)
        assert processor_seconds(daemon) - busy < 0.3
    assert len(daemon.named("health.crowded")) == 1
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
    daemon.wait_ok()
    assert daemon.stop() == 0
