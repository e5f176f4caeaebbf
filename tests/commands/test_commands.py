"""One-off commands at their edges, and connection strings: what is refused, with which exit code, and what is never shown."""

import json

import psycopg
import pytest
from click.testing import CliRunner

from armcore_trio import logs
from armcore_trio.cli import main
from armcore_trio.demo.embedded import Nats
from armcore_trio.errors import SettingsError
from armcore_trio.settings import DSN, URL, load
from tests.conftest import StartDaemon
from tests.support.commands import NOBODY, run
from tests.support.database import Database

CANARY = "CANARY77"

# --- migrate ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D9.1")
@pytest.mark.parametrize("revision", ["9999", "0004", "2", "", "head", "0002 ", "-1"])
@pytest.mark.parametrize("options", [(), ("--sql",)])
def test_a_revision_that_does_not_exist_is_a_usage_error(revision: str, options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["migrate", f"--to={revision}", *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"there is no revision {revision}; there are 0001, 0002, 0003" in result.stderr


@pytest.mark.req("D9.1")
def test_down_to_base_is_refused_while_there_are_rows_and_done_when_there_are_none(dsn: str, db: Database) -> None:
    job = db.insert_job()
    before = db.snapshot()
    refused = run("migrate", "--to", "base", **{DSN: dsn})
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the tables hold rows" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert db.snapshot() == before, "and the revision above it is still there too"
    assert db.value("SELECT max(version_num) FROM armcore_trio_version") == "0003"

    db.execute("UPDATE stored_file SET current_recognition_job_id = NULL")
    for table in ("recognition_job", "stored_file", "s3_object"):
        db.execute(f"DELETE FROM {table}")
    done = run("migrate", "--to", "base", **{DSN: dsn})
    assert (done.returncode, done.stdout, done.stderr) == (0, "schema: 0003 -> base\n", "")
    with pytest.raises(psycopg.errors.UndefinedTable):
        db.job(job)


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.req("R6")
@pytest.mark.parametrize(
    ("config", "url", "reason"),
    [
        ("no_header_support: true", "nats://127.0.0.1:{}", "the server takes no headers"),
        ("max_connections: 1", "nats://127.0.0.1:{}", "nats: "),
        (
            "accounts { A { users: [{ user: u, password: p }], limits { max_conn: 1 } } }",
            "nats://u:p@127.0.0.1:{}",
            "maximum account active connections exceeded",
        ),
    ],
    ids=["no headers", "one connection", "one connection an account"],
)
def test_check_connect_says_what_would_keep_the_daemon_from_working(dsn: str, config: str, url: str, reason: str) -> None:
    with Nats(config=config) as server:
        checked = run("check", "--connect", **{URL: url.format(server.port), DSN: dsn})
    *_, nats, database = checked.stdout.splitlines()
    assert (checked.returncode, checked.stderr, database) == (69, "", "database: ok")
    assert nats.startswith("nats: ")
    assert reason in nats
    assert nats != "nats: ok"


@pytest.mark.req("R7")
@pytest.mark.parametrize("dsn", [NOBODY, ""])
def test_check_connect_tries_nothing_if_the_exchange_is_switched_off(dsn: str) -> None:
    variables = {"NATS_ENABLED": "false", URL: "nats://127.0.0.1:1", DSN: dsn}
    plain = run("check", "--connect", **variables)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert all("=" in line for line in plain.stdout.splitlines()), "settings, and no word of a server"
    told = json.loads(run("check", "--connect", "--json", **variables).stdout)
    assert told["problems"] == {}


# --- connection strings -----------------------------------------------------------------------------------------------

MISREAD = [
    f"postgresql://core:Tr0ub4dor@{CANARY}@127.0.0.1:1/db",
    f"postgresql://core:Tr0ub4dor@{CANARY}@127.0.0.1/db",
    f"postgresql://core:Ab12/{CANARY}+x@127.0.0.1:1/db",
    f"postgresql://core:{CANARY}/abc+x@127.0.0.1:1/db",
    f"postgresql://core:p@ss/{CANARY}@127.0.0.1:1/db",
    f"postgresql://core:{CANARY}@one:1,core:{CANARY}@two:2/db",
    f"host=core:x@{CANARY} dbname=db",
    f"host=127.0.0.1 port={CANARY} dbname=db",
    f"host=127.0.0.1 password=has {CANARY} dbname=db",
]


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize("text", MISREAD)
def test_a_connection_string_that_cannot_be_meant_is_refused_by_its_key_alone(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({DSN: text, "DEBUG": "perhaps"})
    assert caught.value.problems.keys() == {DSN, "DEBUG"}
    assert CANARY not in str(caught.value.problems)
    assert CANARY not in str(caught.value)


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize("text", MISREAD[:4:2])
def test_the_daemon_and_its_commands_show_nothing_of_it(text: str, start_daemon: StartDaemon) -> None:
    daemon = start_daemon({DSN: text})
    daemon.claim("settings.invalid")
    assert daemon.wait_exit() == 78
    assert daemon.one("settings.invalid")["problems"].keys() == {DSN}
    assert CANARY not in str(daemon)
    command = run("check", "--connect", **{DSN: text})
    assert command.returncode == 78
    assert command.stderr.startswith(f"{DSN}: ")
    assert CANARY not in command.stdout + command.stderr


@pytest.mark.req("R7")
@pytest.mark.parametrize(
    "text",
    [
        "postgresql://core:p%40ss%2Fword@127.0.0.1:5432/db",
        "postgresql://core:secret@one:1,two,[::1]:3/db",
        "postgresql://core@/db?host=/run/postgresql",
        "postgresql:///db",
        "host=/run/postgresql,127.0.0.1 port=5432,5433 user=core password='p@ss/word'",
        "host=@abstract dbname=db",
        "host=127.0.0.1 port=5432,",
        "service=core",
    ],
)
def test_what_libpq_understands_as_it_is_meant_is_accepted(text: str) -> None:
    settings = load({DSN: text})
    assert settings.postgres_dsn is not None
    assert settings.postgres_dsn.reveal() == text


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        ("host=127.0.0.1 password=first sslpassword=second", ["first", "second"]),
        ("host=127.0.0.1 sslpassword=second", ["second"]),
        ("postgresql://core:p%40ss%2Fword@127.0.0.1/db", ["p@ss/word"]),
        ("host=127.0.0.1", []),
    ],
)
def test_the_passwords_in_it_are_secrets(text: str, secrets: list[str]) -> None:
    assert load({DSN: text}).secrets == secrets


# --- what of a NATS URL is secret -------------------------------------------------------------------------------------


@pytest.mark.req("R7", "B28")
@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("nats://outbox:hunter22@one", ["hunter22"]),
        ("nats://to-ken-1@one", ["to-ken-1"]),
        ("nats://one:4222", []),
        ("nats://outbox:hunter22@one,nats://to-ken-1@two,three", ["hunter22", "to-ken-1"]),
    ],
)
def test_a_token_is_secret_and_a_user_is_not(url: str, secrets: list[str]) -> None:
    assert load({DSN: "host=unused", URL: url}).secrets == secrets


@pytest.mark.req("B28", "B41")
def test_a_secret_that_is_a_word_of_ours_leaves_the_names_of_events_and_tasks_whole() -> None:
    ours = {"timestamp": "2026-11-30", "level": "warning", "event": "outbox.published", "task": "publisher"}
    redact = logs._Redactor(["published", "publisher", "warning", "2026-1"])
    assert redact(None, "", {**ours, "error": "not published"}) == {**ours, "error": f"not {logs.HIDDEN}"}


@pytest.mark.req("R7", "B41")
def test_a_user_and_a_password_of_common_words_do_no_harm_to_the_log(
    start_daemon: StartDaemon, environment: dict[str, str]
) -> None:
    with_user = environment[URL].replace("nats://", "nats://publisher:listening@")
    daemon = start_daemon(environment, **{URL: with_user}).wait_ok()
    assert daemon.stop() == 0
    events = {record["event"] for record in daemon.all}
    assert {"daemon.started", "health.listening", "shutdown.complete"} <= events
    assert "publisher" in daemon.one("shutdown.complete")["totals"]
    assert logs.HIDDEN not in str(daemon)
