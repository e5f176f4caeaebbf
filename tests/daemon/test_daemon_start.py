"""How the daemon starts, refuses to start, and stops: exit codes and what it says, as a process."""

import json
import os
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import pytest

from armcore_trio.borders.fitness import SCHEMA_VERSION
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.settings import DSN, JWT, SEED, URL
from tests.conftest import StartDaemon
from tests.support.credentials import user_credentials
from tests.support.database import Database
from tests.support.servers import RESULT_SUBJECT, TABULAR_SUBJECT, administration, fresh_database
from tests.support.waiting import wait_until

REFUSED_SUBJECTS = {
    "a request subject": ("same.subject", {TABULAR_SUBJECT: "same.subject"}),
    "a wildcard": ("files.>", {}),
}


@pytest.mark.req("S7.3", "R7")
@pytest.mark.parametrize("case", REFUSED_SUBJECTS)
def test_a_bad_result_subject_is_no_start_and_named(start_daemon: StartDaemon, case: str) -> None:
    subject, others = REFUSED_SUBJECTS[case]
    daemon = start_daemon(**others, **{RESULT_SUBJECT: subject})
    daemon.claim("settings.invalid")
    assert daemon.wait_exit() == 78
    (record,) = daemon.all
    assert record["event"] == "settings.invalid"
    assert list(record["problems"]) == [RESULT_SUBJECT]


@pytest.mark.req("S7.4", "B28", "R7")
@pytest.mark.parametrize("more", [{}, {"LOG_FORMAT": "console"}, {"PYTHONWARNINGS": "default"}])
def test_every_bad_key_is_named_and_no_secret_shown(start_daemon: StartDaemon, more: dict[str, str]) -> None:
    seed, jwt = user_credentials()
    canaries = {
        SEED: seed,
        JWT: jwt,
        URL: "nats://someone:url-canary-7719@127.0.0.1:4222",
        DSN: "postgresql://core:dsn-canary-3140@127.0.0.1/core",
    }
    daemon = start_daemon(canaries, OUTBOX_POLL_SECONDS="abc", DEBUG="maybe", INBOX_BATCH_SIZE="1.9", **more)
    daemon.claim("settings.invalid")
    assert daemon.wait_exit() == 78
    (record,) = daemon.all
    assert set(record["problems"]) == {"OUTBOX_POLL_SECONDS", "DEBUG", "INBOX_BATCH_SIZE"}
    told = json.dumps(daemon.all) + daemon.stderr
    assert not [secret for secret in (seed, jwt, "url-canary-7719", "dsn-canary-3140") if secret in told]


@pytest.mark.req("S7.4", "B28")
def test_no_secret_is_in_the_log_of_a_run_that_cannot_log_in(
    start_daemon: StartDaemon, environment: dict[str, str], own_nats: Nats
) -> None:
    seed, jwt = user_credentials()
    own_nats.stop()
    own_nats.config = "authorization { user: someone, password: another }"
    own_nats.start()
    url = f"nats://someone:url-canary-7719@127.0.0.1:{own_nats.port}"
    dsn = f"{environment[DSN]} password=dsn-canary-3140"
    daemon = start_daemon(environment | {DSN: dsn, URL: url, SEED: seed, JWT: jwt}, DEBUG="true")
    report = daemon.wait_health(lambda report: report["tasks"]["subscriber"]["restarts"] >= 2)
    assert "authorization" in report["tasks"]["subscriber"]["last_error"].lower()
    assert report["nats"] == "down"
    assert daemon.stop() == 0
    told = json.dumps(daemon.all) + json.dumps(report)
    assert not [secret for secret in (seed, jwt, "url-canary-7719", "dsn-canary-3140") if secret in told]


@pytest.mark.req("D9.1", "B52")
def test_an_unmigrated_database_is_exit_69_and_told_what_to_do(
    start_daemon: StartDaemon, environment: dict[str, str], postgres: Postgres
) -> None:
    name = f"empty_{uuid4().hex}"
    with administration(postgres) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    try:
        daemon = start_daemon(environment | {DSN: postgres.dsn(name)})
        daemon.claim("supervisor.gave_up")
        assert daemon.wait_exit() == 69
        assert "armcore-trio migrate" in daemon.one("supervisor.gave_up")["error"]
        assert daemon.one("shutdown.complete")["exit_code"] == 69
        daemons = [start_daemon(environment | {DSN: postgres.dsn(name)}, "run", "--migrate") for _ in range(4)]
        assert [daemon.wait_ok().stop() for daemon in daemons] == [0] * 4
        assert sum(len(daemon.named("migrate.done")) for daemon in daemons) == 1
    finally:
        with administration(postgres) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.req("D9.1", "B09")
@pytest.mark.parametrize("arguments", [("run",), ("run", "--migrate")])
def test_with_both_servers_away_it_answers_503_and_comes_up_when_they_do(
    start_daemon: StartDaemon,
    own_postgres: Postgres,
    own_nats: Nats,
    own_environment: dict[str, str],
    own_db: Database,
    arguments: tuple[str, ...],
) -> None:
    if "--migrate" in arguments:
        with administration(own_postgres) as connection:
            connection.execute("CREATE DATABASE empty")
        own_environment[DSN] = own_postgres.dsn("empty")
    own_db.close()
    own_postgres.stop()
    own_nats.stop()
    daemon = start_daemon(own_environment, *arguments)
    report = daemon.wait_health(
        lambda report: all(report["tasks"][name]["restarts"] >= 2 for name in ("publisher", "subscriber", "watchdog"))
    )
    assert (report["status"], report["nats"], report["database"]) == ("degraded", "down", "down")
    assert daemon.get("/healthcheck")[0] == daemon.get("/readyz")[0] == 503
    assert daemon.get("/livez")[0] == 200
    own_postgres.start()
    own_nats.start()
    daemon.wait_ok()
    assert len(daemon.named("task.restarting")) <= 8, "a line for each change of the cause, not for each attempt"
    assert daemon.stop() == 0


@pytest.mark.req("D9.2")
def test_an_outage_backs_off_and_never_uses_up_the_restarts(
    start_daemon: StartDaemon, environment: dict[str, str], own_nats: Nats
) -> None:
    own_nats.stop()
    daemon = start_daemon(environment | {URL: own_nats.url})
    instants: list[float] = []

    def four_restarts(report: dict[str, Any]) -> bool:
        restarts = report["tasks"]["subscriber"]["restarts"]
        if restarts > len(instants):
            instants.append(monotonic())
        return bool(restarts >= 4)

    daemon.wait_health(four_restarts, nats="down")
    delays = [later - earlier for earlier, later in pairwise(instants)]
    assert all(0.8 * wanted <= delay <= 1.2 * wanted + 0.5 for delay, wanted in zip(delays, (0.5, 1, 2), strict=False))
    assert daemon.running
    assert daemon.stop() == 0
    assert not daemon.named("supervisor.gave_up")


@pytest.mark.req("R6", "S6.3")
def test_it_migrates_with_the_exchange_turned_off(start_daemon: StartDaemon, postgres: Postgres) -> None:
    with fresh_database(postgres, template="template0") as dsn, closing(Database(dsn)) as database:
        daemon = start_daemon({DSN: dsn}, "run", "--migrate", NATS_ENABLED="false")
        daemon.wait_for_event("migrate.done", revision=SCHEMA_VERSION)
        assert database.value("SELECT max(version_num) FROM armcore_trio_version") == SCHEMA_VERSION
        report = daemon.wait_health()
        assert (report["status"], report["database"], list(report["tasks"])) == ("ok", "off", ["health"])
        assert daemon.stop() == 0
        again = start_daemon({DSN: dsn}, "run", "--migrate", NATS_ENABLED="false").wait_ok()
        assert again.stop() == 0
        assert not again.named("migrate.done")


@pytest.mark.req("R6")
def test_a_migration_needs_a_database_even_if_the_exchange_is_off(start_daemon: StartDaemon) -> None:
    daemon = start_daemon({}, "run", "--migrate", NATS_ENABLED="false")
    daemon.claim("settings.invalid")
    assert daemon.wait_exit() == 78
    assert daemon.one("settings.invalid")["problems"] == {DSN: "is required for --migrate"}


def test_the_console_script_is_the_same_command() -> None:
    script = str(Path(sys.executable).with_name("armcore-trio"))
    for command in ([script, "run"], [sys.executable, "-m", "armcore_trio", "run"]):
        environment = {"PATH": os.environ["PATH"], "NATS_ENABLED": "false", "HEALTH_BIND": "127.0.0.1:0"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while json.loads(process.stdout.readline())["event"] != "health.listening":
                pass
            process.terminate()
            rest, complaint = process.communicate(timeout=15)
        assert (process.returncode, complaint) == (0, "")
        assert [json.loads(line)["event"] for line in rest.splitlines()][-1] == "shutdown.complete"
    version = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, timeout=15)
    assert version.stdout.startswith("armcore-trio")


def test_health_follows_the_log_of_the_start(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    wait_until(lambda: daemon.named("health.listening"))
    assert daemon.all[0]["event"] == "daemon.started"
    assert daemon.wait_health()["version"] == daemon.all[0]["version"]
