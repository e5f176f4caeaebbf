"""The commands from outside: exit codes, what is printed where, and that the documentation lists what there is."""

import json
import re

import pytest
from attrs import fields

from armcore_trio.cli import COMMANDS
from armcore_trio.settings import DSN, Settings, load
from tests.conftest import StartDaemon
from tests.support.commands import NOBODY, ROOT, run

JOB = "3f2b8a54-6c1d-4e0f-9b7a-2d5c8e1f0a63"
SUBMIT = ("submit", "--bucket", "b", "--key", "k", "--name", "n.csv", "--pipeline", "tabular")
PUBLIC_VARIABLES = [field.metadata["env"] for field in fields(Settings)]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: ")
    assert len(result.stdout.splitlines()[2].strip()) > 10
    assert not result.stderr


@pytest.mark.req("R7")
@pytest.mark.parametrize(
    "arguments", [("check",), ("check", "--json"), SUBMIT, ("retry", JOB), ("migrate",), ("probe",), ("simulate",)]
)
def test_bad_settings_are_named_on_stderr_and_exit_78(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, **{DSN: NOBODY, "DEBUG": "perhaps", "OUTBOX_BATCH_SIZE": "0"})
    assert result.returncode == 78
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["DEBUG", "OUTBOX_BATCH_SIZE"]
    assert not result.stdout


@pytest.mark.req("R7")
def test_run_says_bad_settings_in_its_log_and_exits_78() -> None:
    result = run("run", DEBUG="perhaps", OUTBOX_BATCH_SIZE="0")
    assert result.returncode == 78
    record = json.loads(result.stdout)
    assert record["event"] == "settings.invalid"
    assert set(record["problems"]) == {DSN, "DEBUG", "OUTBOX_BATCH_SIZE"}
    assert not result.stderr


@pytest.mark.parametrize("arguments", [SUBMIT, ("retry", JOB), ("migrate",), ("check", "--connect")])
def test_a_server_out_of_reach_is_one_line_and_exit_69(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, **{DSN: NOBODY, "OPENBAO__NATS__NATS_URL": "nats://127.0.0.1:1"})
    assert result.returncode == 69
    assert "Traceback" not in result.stderr + result.stdout
    told = (result.stderr or result.stdout).splitlines()[-1]
    assert told.startswith("database: ")
    assert "refused" in told


def test_commands_that_write_need_a_database_even_if_the_daemon_does_not() -> None:
    for arguments in (SUBMIT, ("retry", JOB), ("migrate",)):
        result = run(*arguments, NATS_ENABLED="false")
        assert (result.returncode, result.stderr.partition(":")[0]) == (78, DSN)


@pytest.mark.parametrize("options", [(), ("--live",)])
def test_probe_of_nobody_exits_1(options: tuple[str, ...]) -> None:
    result = run("probe", *options, **{DSN: NOBODY, "HEALTH_BIND": "127.0.0.1:1"})
    assert result.returncode == 1
    assert result.stdout.startswith("no answer from 127.0.0.1:1")


def test_probe_tells_a_server_that_is_away_from_a_daemon_that_hangs(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(**{DSN: NOBODY})
    bind = daemon.url.removeprefix("http://")
    plain, live = run("probe", HEALTH_BIND=bind), run("probe", "--live", HEALTH_BIND=bind)
    assert (plain.returncode, plain.stdout.strip()) == (1, "status degraded, nats ok, database down")
    assert (live.returncode, live.stdout.strip()) == (0, "ok")


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("run", "--no-such-option"),
        ("retry",),
        ("retry", "no-uuid"),
        ("submit", "--bucket", "b"),
        ("demo", "--jobs", "0"),
        ("simulate", "--pipeline", "audio"),
        ("simulate", "--delay", "-1"),
        ("review-log", "/no/such/file"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, **{DSN: NOBODY})
    assert result.returncode == 2
    assert "Error: " in result.stderr


def test_migrate_prints_the_sql_without_any_setting() -> None:
    result = run("migrate", "--sql")
    assert result.returncode == 0
    for table in ("s3_object", "stored_file", "recognition_job", "quality_failure_fact"):
        assert f"CREATE TABLE IF NOT EXISTS {table} " in result.stdout
    assert "armcore_trio_version" in result.stdout
    assert not result.stderr
    first = run("migrate", "--sql", "--to", "0001").stdout
    assert "CREATE TABLE" in first
    assert "CREATE TRIGGER" not in first


def test_check_prints_every_variable_and_no_secret() -> None:
    dsn = "host=127.0.0.1 user=core password=canary"
    result = run("check", "--json", **{DSN: dsn, "OUTBOX_POLL_SECONDS": "0.25", "HEALTH_BIND": "[::1]:9"})
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert list(document["settings"]) == PUBLIC_VARIABLES
    assert document["settings"]["OUTBOX_POLL_SECONDS"] == "0.25"
    assert document["settings"]["HEALTH_BIND"] == "[::1]:9"
    assert "canary" not in result.stdout
    plain = run("check", **{DSN: dsn})
    assert [line.partition("=")[0] for line in plain.stdout.splitlines()] == PUBLIC_VARIABLES
    assert "canary" not in plain.stdout


def test_version_is_told() -> None:
    assert re.fullmatch(r"armcore-trio, version \d+\.\d+\.\d+\S*", run("--version").stdout.strip())


def readme_variables() -> dict[str, str]:
    rows = re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \| (\S+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {name: "" if default == "–" else default.strip("`") for name, default in rows}


def test_the_readme_lists_every_variable_with_its_default() -> None:
    documented = readme_variables()
    assert list(documented) == PUBLIC_VARIABLES
    given = {name: default for name, default in documented.items() if default}
    assert load({**given, DSN: NOBODY}) == load({DSN: NOBODY})
    shown = json.loads(run("check", "--json", **{DSN: NOBODY}).stdout)["settings"]
    assert {name for name, value in shown.items() if value} == {*given, DSN}


def test_the_readme_lists_every_command() -> None:
    commands = re.findall(r"^\| `([a-z-]+)[^`]*` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(commands) == sorted(COMMANDS)


def test_the_operations_guide_lists_every_event_of_the_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("<!-- events: begin -->")[2].partition("<!-- events: end -->")[0]
    documented = set(re.findall(r"^\| `([a-z_.]+)` \|", table, re.MULTILINE))
    logged = re.compile(r'(?:info|warning|error|critical)\)?\(\s*"([a-z_]+\.[a-z_]+)"|_report\("([a-z_]+\.[a-z_]+)"')
    found = {
        event
        for path in (ROOT / "armcore_trio").rglob("*.py")
        for match in logged.findall(path.read_text())
        for event in match
        if event
    }
    assert {event for event in found if not event.startswith("simulator.")} <= documented
    from armcore_trio.protocol.lifecycle import Outcome

    assert {f"inbox.{outcome}" for outcome in Outcome} <= documented
