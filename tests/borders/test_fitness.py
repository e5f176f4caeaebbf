"""What a role, a database or a core's own tables do to a session: set by the session itself, or told at the start."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from armcore_trio.borders.migrate import migrate
from armcore_trio.borders.store import Store
from armcore_trio.demo.embedded import Nats, Postgres
from armcore_trio.errors import SchemaUnfit, WriteRefused
from armcore_trio.settings import DSN, load
from tests.conftest import StartDaemon
from tests.support import envelopes
from tests.support.commands import run
from tests.support.database import Database
from tests.support.exchange import Exchange, open_exchange
from tests.support.records import Records
from tests.support.responder import OpenService
from tests.support.servers import administration, new_environment
from tests.support.service import ServiceClient

TABLES = "s3_object, stored_file, recognition_job, quality_failure_fact"

HOSTILE = {
    "search_path": "core, nowhere",
    "statement_timeout": "1ms",
    "transaction_timeout": "50ms",
    "idle_session_timeout": "50ms",
    "lock_timeout": "1ms",
    "idle_in_transaction_session_timeout": "1ms",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "synchronous_commit": "off",
    "TimeZone": "Asia/Kathmandu",
    "DateStyle": "German",
    "IntervalStyle": "iso_8601",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
    "array_nulls": "off",
    "exit_on_error": "on",
    "quote_all_identifiers": "on",
}


@pytest.fixture
def role(db: Database) -> Iterator[str]:
    """A role that may do what the exchange does, and owns nothing."""
    name = f"core_{uuid4().hex[:8]}"
    db.execute(f"CREATE ROLE {name} LOGIN")
    db.execute(f"GRANT SELECT, INSERT, UPDATE ON {TABLES}, armcore_trio_version TO {name}")
    yield name
    db.execute(f"DROP OWNED BY {name}")
    db.execute(f"DROP ROLE {name}")


@pytest.fixture
def role_dsn(dsn: str, role: str) -> str:
    """The test's database as that role reaches it."""
    return f"{dsn} user={role}"


async def accepts(dsn: str) -> dict[str, str]:
    """Open a connection as a task does; what the session's settings are then."""
    async with Store(dsn).open("test") as connection:
        cursor = await connection.execute(
            "SELECT name, setting FROM pg_settings WHERE lower(name) = ANY (%s)", [[name.lower() for name in HOSTILE]]
        )
        return dict(await cursor.fetchall())


@pytest.mark.req("N07", "N08")
async def test_what_a_role_sets_is_set_back(db: Database, role: str, role_dsn: str) -> None:
    usual = await accepts(role_dsn)
    for name, value in HOSTILE.items():
        text = value if name == "search_path" else f"'{value}'"
        db.execute(f"ALTER ROLE {role} SET {name} = {text}")
    assert await accepts(role_dsn) == usual
    assert usual["synchronous_commit"] == "on"
    assert usual["client_encoding"] == "UTF8"
    assert usual["search_path"].startswith("public")


@pytest.mark.req("N08")
async def test_a_durability_that_was_chosen_is_kept(db: Database, role: str, role_dsn: str) -> None:
    db.execute(f"ALTER ROLE {role} SET synchronous_commit = remote_write")
    assert (await accepts(role_dsn))["synchronous_commit"] == "remote_write"


@pytest.mark.req("N07")
def test_a_role_with_another_schema_migrates_checks_and_works(
    db: Database, dsn: str, environment: dict[str, str], start_daemon: StartDaemon, service: ServiceClient
) -> None:
    db.execute("CREATE SCHEMA core")
    name = db.value("SELECT current_database()")
    db.execute(f"ALTER DATABASE {name} SET search_path = core")
    assert migrate(dsn)
    daemon = start_daemon(environment).wait_ok()
    with db.connect(options="-c search_path=public", autocommit=True) as session:
        file_id = session.execute("INSERT INTO stored_file (file_name) VALUES ('a.xlsx') RETURNING id").fetchall()[0]["id"]
        session.execute("INSERT INTO recognition_job (file_id, pipeline) VALUES (%s, 'tabular')", [file_id])
    assert daemon.wait_for_event("outbox.refused")["error_code"] == "INVALID_REQUEST"
    assert service.heard() == []
    assert daemon.stop() == 0


@pytest.mark.req("N07")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("REVOKE UPDATE ON stored_file FROM <role>", "permission denied for table stored_file"),
        ("REVOKE SELECT ON s3_object FROM <role>", "permission denied for table s3_object"),
        ("REVOKE INSERT ON quality_failure_fact FROM <role>", "permission denied for table quality_failure_fact"),
        ("REVOKE SELECT ON armcore_trio_version FROM <role>", "permission denied for table armcore_trio_version"),
        ("ALTER TABLE recognition_job ENABLE ROW LEVEL SECURITY", "row-level security.*BYPASSRLS"),
        ("ALTER TABLE stored_file ENABLE ROW LEVEL SECURITY", "row-level security.*BYPASSRLS"),
        ("ALTER TABLE recognition_job DROP COLUMN result_msg_id", "result_msg_id"),
        ("ALTER TABLE recognition_job ALTER reply_deadline TYPE text", "cannot be used: .*text"),
        ("ALTER TABLE quality_failure_fact RENAME TO fact", "quality_failure_fact"),
        ("ALTER TABLE armcore_trio_version RENAME version_num TO num", "armcore_trio_version cannot be read"),
        ("UPDATE armcore_trio_version SET version_num = 'head'", "damaged: it holds .'head'."),
        ("INSERT INTO armcore_trio_version VALUES ('0001')", "damaged: it holds"),
    ],
)
async def test_what_keeps_the_work_from_being_done_is_told_at_the_start(
    db: Database, role: str, role_dsn: str, change: str, told: str
) -> None:
    await accepts(role_dsn)
    db.execute(change.replace("<role>", role))
    with pytest.raises(SchemaUnfit, match=told) as caught:
        await accepts(role_dsn)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 69


@pytest.mark.req("N07")
def test_check_and_run_tell_it_in_one_line(
    db: Database, role: str, role_dsn: str, environment: dict[str, str], start_daemon: StartDaemon
) -> None:
    db.execute(f"REVOKE UPDATE ON recognition_job FROM {role}")
    unfit = environment | {DSN: role_dsn}
    checked = run("check", "--connect", **unfit)
    assert (checked.returncode, checked.stderr) == (69, "")
    (line,) = [line for line in checked.stdout.splitlines() if line.startswith("database:")]
    assert "permission denied for table recognition_job" in line
    assert "GRANT" in line
    daemon = start_daemon(unfit)
    daemon.claim("supervisor.gave_up")
    assert daemon.wait_exit() == 69
    assert not daemon.named("library.psycopg")


# --- encodings (N06) --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["SQL_ASCII", "WIN1251"])
def odd_dsn(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database in another encoding than UTF-8."""
    name = f"test_{uuid4().hex}"
    with administration(postgres) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{request.param}' LOCALE 'C' TEMPLATE template0")
    migrate(postgres.dsn(name))
    yield postgres.dsn(name)
    with administration(postgres) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.req("N06")
async def test_a_text_that_cannot_be_read_costs_its_own_row(
    odd_dsn: str, nats_server: Nats, open_service: OpenService, log: Records
) -> None:
    environment = new_environment(odd_dsn, nats_server.url)
    service = open_service(environment)
    db = Database(f"{odd_dsn} client_encoding=utf8")
    jobs = db.insert_jobs(7)
    encoding = db.value("SHOW server_encoding")
    with db.connect(autocommit=True) as session:
        bad = {"SQL_ASCII": "ff", "WIN1251": "98"}[encoding]
        session.execute(
            "UPDATE stored_file SET file_name = convert_from(decode(%s, 'hex'), getdatabaseencoding()) WHERE id = %s",
            [bad, jobs[3].file_id],
        )
    settings = load(environment)
    async with open_exchange(settings) as exchange:
        await exchange.publish()
        assert await _heard(service, exchange, 6) == {str(job.id) for number, job in enumerate(jobs) if number != 3}
        row = db.job(jobs[3])
        assert (row["status"], row["error_code"]) == ("error", "INVALID_REQUEST")
        assert "file_name is not text" in row["error_message"]
        assert log.one("outbox.refused")["job_id"] == str(jobs[3].id)
        said = [(envelopes.error(job, message="Лист «Ж» 😀" if encoding == "SQL_ASCII" else "Лист"), None) for job in jobs[:2]]
        assert await exchange.outcomes(service, *said) == ["applied", "applied"]
    db.close()


async def _heard(service: ServiceClient, exchange: Exchange, count: int) -> set[str]:
    assert exchange is not None
    service.wait_heard(count)
    return {request.document["job_id"] for request in service.heard()}


# --- migrations on what is there (N15, N16) ---------------------------------------------------------------------------


@pytest.mark.req("N15")
@pytest.mark.parametrize("revision", ["0002", "base"])
def test_a_newer_schema_is_not_taken_back_by_who_does_not_know_it(dsn: str, db: Database, revision: str) -> None:
    db.execute("UPDATE armcore_trio_version SET version_num = '0009'")
    migrated = run("migrate", "--to", revision, **{DSN: dsn})
    assert migrated.returncode == 1
    assert migrated.stderr.count("\n") == 1
    assert "0009" in migrated.stderr
    assert db.value("SELECT version_num FROM armcore_trio_version") == "0009"


@pytest.mark.req("N15")
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE armcore_trio_version SET version_num = 'x'",
        "INSERT INTO armcore_trio_version VALUES ('0001')",
        "ALTER TABLE armcore_trio_version RENAME version_num TO num",
    ],
)
def test_a_damaged_record_of_the_revision_is_told(dsn: str, db: Database, damage: str) -> None:
    db.execute(damage)
    with pytest.raises(WriteRefused, match=r"damaged|version_num"):
        migrate(dsn)


@pytest.fixture
def empty(postgres: Postgres) -> Iterator[str]:
    """A database without the schema."""
    name = f"test_{uuid4().hex}"
    with administration(postgres) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgres.dsn(name)
    with administration(postgres) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.req("N16")
def test_old_orphans_do_not_keep_the_key_from_what_is_new(empty: str) -> None:
    migrate(empty, "0001")
    db = Database(empty)
    db.execute("ALTER TABLE stored_file DROP CONSTRAINT stored_file_current_recognition_job_id_fkey")
    db.execute("DROP TABLE armcore_trio_version")
    db.execute("INSERT INTO stored_file (file_name, current_recognition_job_id) VALUES ('a', gen_random_uuid())")
    assert migrate(empty) == ""
    assert (
        db.value("SELECT convalidated FROM pg_constraint WHERE conname = 'stored_file_current_recognition_job_id_fkey'") is False
    )
    db.close()


@pytest.mark.req("N16")
def test_tables_that_cannot_be_built_upon_end_the_migration_with_one_line(
    empty: str, environment: dict[str, str], start_daemon: StartDaemon
) -> None:
    db = Database(empty)
    db.execute("CREATE TABLE recognition_job (id bigint PRIMARY KEY)")
    db.close()
    migrated = run("migrate", **{DSN: empty})
    assert (migrated.returncode, migrated.stderr.count("\n")) == (1, 1)
    daemon = start_daemon(environment | {DSN: empty}, "run", "--migrate")
    daemon.claim("supervisor.gave_up")
    assert daemon.wait_exit() == 69
