"""Credentials and certificates: right, wrong, expired, mended. Whatever they are, the daemon says why and tells no secret."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic

import pytest
import trustme
from attrs import Factory, define, frozen

from armcore_trio.demo.embedded import Nats
from armcore_trio.settings import CA_FILE, JWT, SEED, URL
from armcore_trio.supervision.supervisor import RestartPolicy
from tests.conftest import StartDaemon
from tests.support.credentials import Operator, new_seed, public_key, tls_config
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.proxy import Direction, Proxy
from tests.support.waiting import wait_until

QUICK = {"OUTBOX_POLL_SECONDS": "0.2", "WATCHDOG_PERIOD_SECONDS": "0.2"}
TASKS = ("publisher", "subscriber")
HOST = "127.0.0.1"
TOKEN = "token-canary-5093"
STOP_SECONDS = 5

Link = Callable[[int], Proxy]


@frozen
class Case:
    """What the daemon is given, and the nats.conf of a server that refuses it and of one that lets it in."""

    variables: Mapping[str, str]
    admits: str
    refuses: str = ""
    reason: str = "Authorization Violation"
    reload: bool = False
    """The server goes from one to the other without a restart."""

    @property
    def tls(self) -> bool:
        return CA_FILE in self.variables

    @property
    def secrets(self) -> list[str]:
        """No part of a JWT either may be told."""
        seed, jwt = self.variables.get(SEED, "").strip(), self.variables.get(JWT, "").strip()
        return [secret for secret in (seed, jwt, *jwt.split("."), TOKEN if self.tls else "") if secret]

    def environment(self, base: Mapping[str, str], port: int) -> dict[str, str]:
        return {**base, **QUICK, **self.variables, URL: f"tls://{TOKEN}@{HOST}:{port}" if self.tls else f"nats://{HOST}:{port}"}

    def change(self, server: Nats, config: str) -> None:
        if self.reload:
            server.reload(config)
        else:
            server.stop()
            server.config = config
            server.start()


@define
class Told:
    """All that anybody can read of a daemon: its log, its HTTP answers, what `check` prints."""

    daemon: DaemonProcess
    texts: list[str] = Factory(list)

    def ask(self) -> None:
        self.texts += [self.daemon.get(path)[1] for path in ("/healthcheck", "/metrics", "/livez", "/readyz")]

    def check(self, environment: Mapping[str, str], *, exit_code: int) -> str:
        """What `check --connect` says of NATS."""
        for options in ([], ["--connect"]):
            command = [sys.executable, "-m", "armcore_trio", "check", *options]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
            self.texts += [done.stdout, done.stderr]
            assert (done.returncode, done.stderr) == (exit_code if options else 0, "")
        return next(line for line in self.texts[-2].splitlines() if line.startswith("nats: "))

    def leaks(self, secrets: list[str]) -> list[str]:
        """The secrets that were told."""
        everything = json.dumps(self.daemon.all) + "".join(self.daemon.not_json) + self.daemon.stderr + "".join(self.texts)
        return [secret for secret in secrets if secret in everything]


def _nkey_users(*seeds: str) -> str:
    return f"authorization {{ users: [{', '.join(f'{{nkey: {public_key(seed)}}}' for seed in seeds)}] }}"


def _tls(directory: Path, certificate: trustme.LeafCert) -> str:
    return f'{tls_config(certificate, directory)}\nauthorization {{ token: "{TOKEN}" }}'


def _trusting(authority: trustme.CA, directory: Path) -> dict[str, str]:
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    return {CA_FILE: str(directory / "ca.pem")}


def _unknown_seed(_: Path) -> Case:
    seed, other = new_seed(), new_seed()
    return Case({SEED: seed}, _nkey_users(other, seed), _nkey_users(other), reload=True)


def _seed_without_jwt(_: Path) -> Case:
    seed = new_seed()
    return Case({SEED: seed}, _nkey_users(seed), Operator().config())


def _unknown_account(_: Path) -> Case:
    seed, operator = new_seed(), Operator()
    return Case({SEED: seed, JWT: operator.user(seed)}, operator.config(), operator.config(accounts=False), reload=True)


def _revoked(_: Path) -> Case:
    seed, operator = new_seed(), Operator()
    return Case({SEED: seed, JWT: operator.user(seed)}, operator.config(), operator.config(revoked=seed), reload=True)


def _expired(_: Path) -> Case:
    seed, operator = new_seed(), Operator()
    return Case({SEED: seed, JWT: operator.user(seed, exp=int(time.time()) - 10)}, "", operator.config())


def _mended_certificate(directory: Path, bad: Callable[[trustme.CA], trustme.LeafCert], reason: str) -> Case:
    authority = trustme.CA()
    good = _tls(directory, authority.issue_cert(HOST))
    return Case(_trusting(authority, directory), good, _tls(directory, bad(authority)), reason)


def _other_authority(directory: Path) -> Case:
    return _mended_certificate(directory, lambda _: trustme.CA().issue_cert(HOST), "certificate verify failed")


def _expired_certificate(directory: Path) -> Case:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    return _mended_certificate(directory, lambda ours: ours.issue_cert(HOST, not_after=yesterday), "certificate has expired")


def _no_tls(directory: Path) -> Case:
    case = _mended_certificate(directory, lambda ours: ours.issue_cert(HOST), "")
    return Case(case.variables, case.admits, f'authorization {{ token: "{TOKEN}" }}', "offers no TLS, and tls://")


REFUSED = {
    "a seed the server does not know": _unknown_seed,
    "a seed whose JWT is missing": _seed_without_jwt,
    "a JWT of an account the server does not know": _unknown_account,
    "a JWT that was revoked": _revoked,
    "a JWT that has expired": _expired,
    "a certificate of another authority": _other_authority,
    "a certificate that has expired": _expired_certificate,
    "no TLS where it was asked for": _no_tls,
}


def _most_attempts(seconds: float) -> int:
    """How often the tasks may have tried in so long: at once, and after each of their back-offs at its shortest."""
    policy, each = RestartPolicy(), 1
    pause = policy.base_seconds
    while (seconds := seconds - pause * (1 - policy.jitter)) > 0:
        each, pause = each + 1, min(policy.cap_seconds, pause * policy.factor)
    return each * len(TASKS)


def _wait_refused(daemon: DaemonProcess, proxy: Proxy, reason: str, since: float, before: int = 0) -> None:
    """Each task has failed three times, lastly for this reason, and they back off meanwhile."""
    report = daemon.wait_health(
        lambda report: all(report["tasks"][task]["restarts"] >= 3 for task in TASKS), nats="down", database="ok"
    )
    attempts = proxy.connections - before
    assert 2 * len(TASKS) <= attempts <= _most_attempts(monotonic() - since)
    assert report["status"] == "degraded"
    for task in TASKS:
        assert re.search(reason, report["tasks"][task]["last_error"])
    assert daemon.get("/livez")[0] == 200


def _assert_not_on_the_wire(case: Case, proxy: Proxy) -> None:
    sent = proxy.recorded(Direction.UP)
    kept = case.secrets if case.tls else [case.variables[SEED].strip()]
    assert [secret for secret in kept if secret.encode() in sent] == []
    assert not case.tls or b"CONNECT" not in sent


@pytest.mark.req("R6", "R7", "B20", "B21")
@pytest.mark.parametrize("name", REFUSED)
def test_a_server_that_will_not_have_us_is_waited_for(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, link: Link, tmp_path: Path, name: str
) -> None:
    case = REFUSED[name](tmp_path)
    with Nats(config=case.refuses) as server:
        proxy = link(server.port)
        own = case.environment(environment, proxy.port)
        job = db.insert_job()
        started = monotonic()
        daemon = start_daemon(own, DEBUG="true")
        told = Told(daemon)
        _wait_refused(daemon, proxy, case.reason, started)
        told.ask()
        assert re.search(case.reason, told.check(own, exit_code=69))
        assert db.job(job)["status"] == "queued"
        case.change(server, case.admits)
        daemon.wait_ok()
        wait_until(lambda: db.job(job)["status"] == "published")
        told.ask()
        case.change(server, case.refuses)
        daemon.wait_health(nats="down")
        told.ask()
        started = monotonic()
        assert daemon.stop() == 0
        assert monotonic() - started < STOP_SECONDS
    assert daemon.one("shutdown.complete")["exit_code"] == 0
    assert told.leaks(case.secrets) == []
    _assert_not_on_the_wire(case, proxy)


def _right_nkey(ending: str) -> Callable[[Path], Case]:
    seed = new_seed()
    return lambda _: Case({SEED: seed + ending}, _nkey_users(seed))


def _right_jwt(ending: str) -> Callable[[Path], Case]:
    seed, operator = new_seed(), Operator()
    return lambda _: Case({SEED: seed + ending, JWT: operator.user(seed) + ending}, operator.config())


ADMITTED = {
    "an nkey seed alone": _right_nkey(""),
    "an nkey seed and a line end": _right_nkey("\n"),
    "a seed and its JWT": _right_jwt(""),
    "a seed and its JWT, with line ends": _right_jwt("\r\n"),
    "a certificate of the right authority": _no_tls,
}


@pytest.mark.req("R6", "R7", "B21")
@pytest.mark.parametrize("name", ADMITTED)
def test_what_is_right_lets_a_job_travel(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, link: Link, tmp_path: Path, name: str
) -> None:
    case = ADMITTED[name](tmp_path)
    with Nats(config=case.admits) as server:
        proxy = link(server.port)
        own = case.environment(environment, proxy.port)
        daemon, service = start_daemon(own, DEBUG="true"), start_daemon(own, "simulate", "--delay", "0")
        told = Told(daemon)
        service.wait_for_event("simulator.listening")
        daemon.wait_ok()
        job = db.insert_job()
        service.wait_for_event("simulator.confirmed", job_id=str(job.id), outcome="applied")
        assert db.job(job)["status"] == "done"
        told.ask()
        assert told.check(own, exit_code=0) == "nats: ok"
        assert (daemon.stop(), service.stop()) == (0, 0)
    assert not daemon.named("task.restarting")
    assert told.leaks(case.secrets) == Told(service).leaks(case.secrets) == []
    _assert_not_on_the_wire(case, proxy)


@pytest.mark.req("R6", "R7", "B20")
def test_a_jwt_that_expires_while_we_are_connected_is_told_and_a_server_that_lets_us_in_again_used(
    start_daemon: StartDaemon, environment: dict[str, str], db: Database, link: Link
) -> None:
    seed, operator = new_seed(), Operator()
    with Nats(config=operator.config()) as server:
        proxy = link(server.port)
        case = Case({SEED: seed, JWT: operator.user(seed, exp=int(time.time()) + 6)}, "")
        daemon = start_daemon(case.environment(environment, proxy.port), DEBUG="true").wait_ok()
        told = Told(daemon)
        before = proxy.connections
        for task in ("publisher", "subscriber.intake"):
            assert "user authentication expired" in daemon.wait_for_event("task.restarting", task=task)["error"]
        expired = monotonic()
        assert daemon.health()["nats"] == "down"
        job = db.insert_job()
        _wait_refused(daemon, proxy, "Authorization Violation", expired, before)
        assert db.job(job)["status"] == "queued"
        told.ask()
        case.change(server, case.admits)
        daemon.wait_ok()
        wait_until(lambda: db.job(job)["status"] == "published")
        started = monotonic()
        assert daemon.stop() == 0
        assert monotonic() - started < STOP_SECONDS
    assert len(daemon.named("task.restarting")) <= 4 * len(TASKS), "a line for each change of the cause, not for each attempt"
    assert told.leaks(case.secrets) == []
