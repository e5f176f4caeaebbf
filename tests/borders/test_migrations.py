"""The schema goes up and down, once however many try, beside tables that exist already, and never waits for ever."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
import pytest
import trio

from armcore_trio.borders import migrate as migrate_module
from armcore_trio.borders.fitness import SCHEMA_VERSION
from armcore_trio.borders.migrate import migrate, script
from armcore_trio.borders.store import Store
from armcore_trio.demo.embedded import Postgres
from armcore_trio.errors import Dependency, DependencyDown, SchemaOutdated, WriteRefused
from armcore_trio.protocol.lifecycle import Status
from tests.support.database import TABLES, Database, Sleeper
from tests.support.failing import failing
from tests.support.records import Records
from tests.support.servers import POSTGRES, fresh_database
from tests.support.waiting import wait_until

# Everything a program can see of the schema: each row is a kind, a place and a definition.
CATALOG = """
SELECT 'column', c.relname, a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || ' ' || a.attnotnull::text
       || ' ' || coalesce(pg_get_expr(d.adbin, d.adrelid), '')
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL
SELECT 'index', tablename, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL
SELECT 'trigger', tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL
SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
ORDER BY 1, 2, 3
"""

Catalog = list[tuple[str, str, str]]

INDEXES = {"recognition_job_queued_idx", "recognition_job_unacked_idx", "recognition_job_awaited_idx"}


def catalog(dsn: str) -> Catalog:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(CATALOG).fetchall()


def run_sql(dsn: str, *statements: LiteralString) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def empty(postgres: Postgres) -> Iterator[str]:
    """A database without any table."""
    with fresh_database(postgres, "template1") as dsn:
        yield dsn


@contextmanager
def holding(dsn: str, statement: LiteralString) -> Iterator[None]:
    """An open transaction that has run this."""
    with psycopg.connect(dsn) as connection:
        connection.execute(statement)
        yield
        connection.rollback()


async def accepts(dsn: str) -> None:
    """The daemon would start on it."""
    with trio.fail_after(10):
        async with Store(dsn).open("test") as connection:
            assert await (await connection.execute("SELECT count(*) FROM recognition_job")).fetchone() is not None


# Up and down


def test_up_tells_the_revision_that_was(empty: str) -> None:
    assert migrate(empty) == ""
    assert migrate(empty) == SCHEMA_VERSION
    with psycopg.connect(empty) as connection:
        assert connection.execute("SELECT * FROM armcore_trio_version").fetchall() == [(SCHEMA_VERSION,)]


def test_up_again_changes_nothing(dsn: str) -> None:
    before = catalog(dsn)
    migrate(dsn)
    assert catalog(dsn) == before


def test_down_and_up_again_equals_up_once(dsn: str) -> None:
    once = catalog(dsn)
    assert migrate(dsn, "0001") == SCHEMA_VERSION
    halfway = catalog(dsn)
    assert {name for kind, _, name in once if kind == "trigger"} != set()
    assert [row for row in halfway if row[0] in ("trigger", "function")] == []
    assert migrate(dsn, "base") == "0001"
    assert {table for _, table, _ in catalog(dsn)} == {"armcore_trio_version"}
    assert migrate(dsn, "0001") == ""
    assert catalog(dsn) == halfway
    assert migrate(dsn) == "0001"
    assert catalog(dsn) == once


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_down_to_a_revision_equals_up_to_it(dsn: str, empty: str, revision: str) -> None:
    migrate(empty, revision)
    assert migrate(dsn, revision) == SCHEMA_VERSION
    assert catalog(dsn) == catalog(empty)


@pytest.mark.parametrize("table", ["s3_object", "stored_file", "recognition_job"])
def test_down_to_nothing_is_refused_while_there_are_rows(dsn: str, db: Database, table: str) -> None:
    if table == "s3_object":
        db.execute("INSERT INTO s3_object (bucket, key, bucket_role) VALUES ('a', 'b', 'source')")
    elif table == "stored_file":
        db.execute("INSERT INTO stored_file (file_name) VALUES ('a.xlsx')")
    else:
        db.insert_job()
    before, rows = catalog(dsn), db.snapshot()
    with pytest.raises(WriteRefused, match="the tables hold rows; move or delete them"):
        migrate(dsn, "base")
    assert catalog(dsn) == before  # not even halfway
    assert db.snapshot() == rows
    assert migrate(dsn) == SCHEMA_VERSION


def test_the_other_programs_tables_survive_the_way_down(dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE other (n int)", "INSERT INTO other VALUES (1)")
    migrate(dsn, "base")
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT n FROM other").fetchall() == [(1,)]


# By hand


async def test_the_printed_sql_makes_the_same_schema(empty: str, dsn: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(script().encode())
    assert catalog(empty) == catalog(dsn)
    assert migrate(empty) == SCHEMA_VERSION
    await accepts(empty)


def test_the_printed_sql_is_one_transaction_without_a_comment_of_the_tools(empty: str) -> None:
    """Half of it leaves nothing behind."""
    text = script()
    assert text.split()[0] == "BEGIN;"
    assert text.rstrip().endswith("COMMIT;")
    broken = text.replace("CREATE OR REPLACE TRIGGER", "CREATE OR REPLACE BLUNDER")
    assert broken != text
    with psycopg.connect(empty, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.SyntaxError):
            connection.execute(broken.encode())
        connection.rollback()
    assert catalog(empty) == []


def test_the_printed_sql_up_to_a_revision(empty: str, dsn: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(script("0001").encode())
    migrate(dsn, "0001")
    assert catalog(empty) == catalog(dsn)
    assert migrate(empty) == "0001"


# Tables that exist already

LARGER_CORE: tuple[LiteralString, ...] = (
    """
    CREATE TABLE s3_object (
        id uuid PRIMARY KEY DEFAULT gen_random_uuid(), bucket varchar(63) NOT NULL, key varchar(1024) NOT NULL,
        bucket_role varchar(10) NOT NULL, created_by text, created_at timestamptz NOT NULL DEFAULT now(),
        etag text, UNIQUE (bucket, key)
    )""",
    """
    CREATE TABLE stored_file (
        id uuid PRIMARY KEY DEFAULT gen_random_uuid(), owner text NOT NULL, file_name text NOT NULL, content_type text,
        s3_object_id uuid REFERENCES s3_object, status varchar(20) NOT NULL DEFAULT 'UPLOADED', error_code text,
        error_message text, current_recognition_job_id uuid, created_at timestamptz NOT NULL DEFAULT now(),
        updated_at timestamptz NOT NULL DEFAULT now()
    )""",
    """
    CREATE TABLE recognition_job (
        id uuid PRIMARY KEY DEFAULT gen_random_uuid(), tenant int NOT NULL DEFAULT 7,
        file_id uuid NOT NULL REFERENCES stored_file, pipeline text NOT NULL, status varchar(20) NOT NULL DEFAULT 'queued',
        attempt int NOT NULL DEFAULT 1, reply_deadline timestamptz, request_subject text, request_msg_id text,
        published_at timestamptz, started_at timestamptz, finished_at timestamptz, service_name text, service_version text,
        metrics jsonb NOT NULL DEFAULT '{}', error_code text, error_message text, result_schema_version text,
        result_s3_object_id uuid REFERENCES s3_object, raw_s3_object_id uuid REFERENCES s3_object, result_msg_id text,
        created_at timestamptz NOT NULL DEFAULT now(), UNIQUE (file_id, attempt)
    )""",
    """
    ALTER TABLE stored_file
        ADD CONSTRAINT current_job FOREIGN KEY (current_recognition_job_id) REFERENCES recognition_job DEFERRABLE""",
    """
    CREATE TABLE quality_failure_fact (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id uuid NOT NULL UNIQUE REFERENCES recognition_job,
        file_id uuid NOT NULL, pipeline text NOT NULL, failure_kind text NOT NULL, error_code text, service_name text,
        occurred_at timestamptz NOT NULL DEFAULT now()
    )""",
    "INSERT INTO stored_file (owner, file_name) SELECT 'core', n || '.xlsx' FROM generate_series(1, 100) n",
    "INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'tabular' FROM stored_file",
    "UPDATE stored_file SET current_recognition_job_id = job.id FROM recognition_job job WHERE job.file_id = stored_file.id",
)


async def test_tables_of_a_larger_core_are_left_alone_and_gain_what_a_pass_needs(empty: str) -> None:
    run_sql(empty, *LARGER_CORE)
    db = Database(empty)
    before, rows = catalog(empty), db.snapshot()
    assert migrate(empty) == ""
    gained = set(catalog(empty)) - set(before)
    assert set(before) - set(catalog(empty)) == set()
    assert db.snapshot() == rows
    ours = {(kind, table) for kind, table, _ in gained if table != "armcore_trio_version"}
    assert ours == {("index", "recognition_job"), ("trigger", "recognition_job"), ("function", "recognition_job_notify")}
    definitions = [text for kind, table, text in gained if (kind, table) == ("index", "recognition_job")]
    assert {text.split()[2] for text in definitions} == INDEXES
    await accepts(empty)
    db.close()


def test_a_core_without_the_circular_key_gains_it(empty: str) -> None:
    run_sql(empty, *LARGER_CORE[:3])
    migrate(empty)
    with psycopg.connect(empty) as connection, pytest.raises(psycopg.errors.ForeignKeyViolation):
        connection.execute(
            "INSERT INTO stored_file (owner, file_name, current_recognition_job_id) VALUES ('a', 'b', gen_random_uuid())"
        )


# Several at once, and locks


@pytest.mark.req("B52")
@pytest.mark.req("D1.6")
def test_a_trigger_that_an_operator_has_dropped_or_disabled_stays_so(dsn: str, db: Database) -> None:
    """As the guide tells users of two-phase commit to."""
    state = "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'recognition_job_notify'"
    db.execute("ALTER TABLE recognition_job DISABLE TRIGGER recognition_job_notify")
    for revision in ("0002", None):
        migrate(dsn, revision)
        assert db.value(state) == "D"
    db.execute("DROP TRIGGER recognition_job_notify ON recognition_job")
    for revision in ("0002", None, "base"):
        migrate(dsn, revision)
        assert not db.execute(state)


@pytest.mark.parametrize("start", ["", "0001", "0002"])
def test_of_several_at_once_one_migrates_and_all_are_content(empty: str, start: str) -> None:
    if start:
        migrate(empty, start)
    barrier = threading.Barrier(4)

    def one(_: int) -> str:
        barrier.wait(10)
        return migrate(empty)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(4), timeout=30))
    assert sorted(found) == [start, SCHEMA_VERSION, SCHEMA_VERSION, SCHEMA_VERSION]


@pytest.mark.req("B52")
def test_an_open_transaction_that_reads_holds_nothing_up(dsn: str, log: Records) -> None:
    migrate(dsn, "0001")
    with holding(dsn, "SELECT FROM recognition_job"):
        assert migrate(dsn) == "0001"
    assert log.named("migrate.waiting_for_lock") == []


@pytest.mark.req("B52")
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'image' FROM stored_file",
        "SELECT pg_advisory_xact_lock(4201370114)",
    ],
    ids=["a writer", "another that migrates"],
)
def test_a_lock_is_waited_for_in_attempts_until_it_is_free(
    dsn: str, log: Records, monkeypatch: pytest.MonkeyPatch, statement: LiteralString
) -> None:
    migrate(dsn, "0001")
    monkeypatch.setattr(migrate_module, "LOCK_ATTEMPT_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as pool:
        with holding(dsn, statement):
            migrating = pool.submit(migrate, dsn)
            wait_until(lambda: len(log.named("migrate.waiting_for_lock")) >= 2, 10, "two attempts")
            assert not migrating.done()
        assert migrating.result(10) == "0001"
    records = log.named("migrate.waiting_for_lock", log_level="warning")
    assert {record["error"] for record in records} == {"canceling statement due to lock timeout"}


@pytest.mark.req("B52")
def test_a_lock_that_is_never_freed_ends_the_wait(dsn: str, log: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(dsn, "0001")
    monkeypatch.setattr(migrate_module, "LOCK_ATTEMPT_SECONDS", 0.1)
    monkeypatch.setattr(migrate_module, "LOCK_SECONDS", 0.35)
    before = catalog(dsn)
    with (
        holding(dsn, "INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'image' FROM stored_file"),
        pytest.raises(DependencyDown, match="migration: canceling statement due to lock timeout") as caught,
    ):
        migrate(dsn)
    assert caught.value.dependency is Dependency.DATABASE
    assert 1 <= len(log.named("migrate.waiting_for_lock")) <= 4
    assert catalog(dsn) == before
    assert migrate(dsn) == "0001"


@pytest.mark.req("B52")
def test_an_attempt_lets_others_write_in_between(dsn: str, db: Database, monkeypatch: pytest.MonkeyPatch, log: Records) -> None:
    """A writer queued behind a waiting migration gets its turn after one attempt."""
    migrate(dsn, "0001")
    monkeypatch.setattr(migrate_module, "LOCK_ATTEMPT_SECONDS", 0.2)
    db.execute("INSERT INTO stored_file (file_name) VALUES ('a')")
    with ThreadPoolExecutor(1) as pool:
        with holding(dsn, "INSERT INTO recognition_job (file_id, pipeline, attempt) SELECT id, 'image', 9 FROM stored_file"):
            migrating = pool.submit(migrate, dsn)
            wait_until(lambda: log.named("migrate.waiting_for_lock"), 10, "an attempt")
            db.execute("INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'image' FROM stored_file")
        assert migrating.result(10) == "0001"
    assert db.value("SELECT count(*) FROM recognition_job") == 1


# What cannot work


@pytest.mark.req("D9.1")
def test_a_database_that_is_away_is_told_at_once(postgres: Postgres) -> None:
    for dsn in (postgres.dsn("absent"), postgres.dsn(port="1")):
        with pytest.raises(DependencyDown) as caught:
            migrate(dsn)
        assert caught.value.dependency is Dependency.DATABASE
        assert "\n" not in caught.value.reason


@pytest.mark.req("B12")
def test_a_database_that_only_reads_is_told_at_once(empty: str) -> None:
    with pytest.raises(DependencyDown, match="read-only transaction"):
        migrate(f"{empty} options='-c default_transaction_read_only=on'")
    assert catalog(empty) == []


def test_a_role_without_the_right_is_told_at_once(empty: str) -> None:
    with pytest.raises(WriteRefused, match="permission denied for schema public"):
        migrate(f"{empty} options='-c role=pg_monitor'")
    assert catalog(empty) == []


# What the daemon makes of what it finds


@pytest.mark.req("D9.1", "B52")
@pytest.mark.parametrize("revision", ["base", "0001", "0002"])
async def test_an_old_schema_is_refused_with_what_to_do(dsn: str, revision: str) -> None:
    migrate(dsn, revision)
    found = "is missing" if revision == "base" else f"is at revision {revision}"
    with pytest.raises(SchemaOutdated) as caught:
        await accepts(dsn)
    assert str(caught.value) == f"the schema {found}, this version needs {SCHEMA_VERSION}: run `armcore-trio migrate`"
    assert caught.value.exit_code == 69


@pytest.mark.req("D9.1")
async def test_an_empty_database_is_refused(empty: str) -> None:
    with pytest.raises(SchemaOutdated, match="the schema is missing"):
        await accepts(empty)


@pytest.mark.req("D9.1", "B52")
@pytest.mark.parametrize("revision", ["base", "0001", "0002"])
async def test_an_old_schema_is_upgraded_if_asked(dsn: str, revision: str) -> None:
    migrate(dsn, revision)
    calls: list[str] = []

    async def upgrade() -> None:
        calls.append(await trio.to_thread.run_sync(migrate, dsn))

    for _ in range(2):
        with trio.fail_after(10):
            async with Store(dsn, upgrade).open("test"):
                pass
    assert calls == ["" if revision == "base" else revision]


@pytest.mark.req("D9.1")
async def test_a_newer_schema_is_accepted(dsn: str) -> None:
    run_sql(dsn, "UPDATE armcore_trio_version SET version_num = '9001'")
    await accepts(dsn)


@pytest.mark.req("B52")
def test_an_older_program_that_migrates_leaves_a_newer_schema_as_it_is(dsn: str) -> None:
    run_sql(dsn, "UPDATE armcore_trio_version SET version_num = '9001'")
    before = catalog(dsn)
    assert migrate(dsn) == "9001"
    assert catalog(dsn) == before


@pytest.mark.req("B12")
async def test_a_read_only_database_is_down(dsn: str) -> None:
    with pytest.raises(DependencyDown, match="the server is read-only"):
        await accepts(f"{dsn} options='-c default_transaction_read_only=on'")


# The contract of the tables


ENUMERATIONS = {
    ("s3_object", "bucket_role"): {"source", "results", "raw"},
    ("stored_file", "status"): {"UPLOADED", "PROCESSING", "PROCESSED", "ERROR"},
    ("recognition_job", "status"): {status.value for status in Status},
    ("quality_failure_fact", "failure_kind"): {"SERVICE_ERROR", "TIMEOUT", "NO_ACK"},
}


@pytest.mark.parametrize(("table", "column"), ENUMERATIONS)
def test_each_enumeration_takes_its_values_and_no_other(db: Database, table: str, column: str) -> None:
    job = db.insert_job()
    rows: dict[str, dict[str, Any]] = {
        "s3_object": {"bucket": "a", "key": "b"},
        "stored_file": {"file_name": "a"},
        "recognition_job": {"file_id": job.file_id, "pipeline": "tabular", "attempt": 2},
        "quality_failure_fact": {"job_id": job.id, "file_id": job.file_id, "pipeline": "tabular"},
    }
    columns = rows[table]
    names, marks = ", ".join([*columns, column]), ", ".join(["%s"] * (len(columns) + 1))
    insert = f"INSERT INTO {table} ({names}) VALUES ({marks}) RETURNING id"
    for value in ENUMERATIONS[table, column]:
        new = db.value(insert, *columns.values(), value)
        db.execute(f"DELETE FROM {table} WHERE id = %s", new)
    for value in ("other", "", *(value.swapcase() for value in ENUMERATIONS[table, column])):
        with pytest.raises(psycopg.errors.CheckViolation):
            db.execute(insert, *columns.values(), value)
    with pytest.raises(psycopg.errors.NotNullViolation):
        db.execute(insert, *columns.values(), None)


@pytest.mark.req("D1.5")
def test_an_unknown_pipeline_is_not_the_tables_concern(db: Database) -> None:
    assert db.job(db.insert_job(pipeline="audio"))["pipeline"] == "audio"


def test_a_job_needs_no_more_than_a_file_and_a_pipeline(db: Database) -> None:
    file_id = db.value("INSERT INTO stored_file (file_name) VALUES ('a.xlsx') RETURNING id")
    job_id = db.value("INSERT INTO recognition_job (file_id, pipeline) VALUES (%s, 'tabular') RETURNING id", file_id)
    (job,), (file,) = db.rows("recognition_job"), db.rows("stored_file")
    given = {"id": job_id, "file_id": file_id, "pipeline": "tabular", "status": "queued", "attempt": 1, "metrics": {}}
    assert {name: value for name, value in job.items() if value is not None and name not in ("xmin", "created_at")} == given
    wanted = {"id": file_id, "file_name": "a.xlsx", "status": "UPLOADED"}
    others = ("xmin", "created_at", "updated_at")
    assert {name: value for name, value in file.items() if value is not None and name not in others} == wanted
    recent = "SELECT bool_and(created_at BETWEEN now() - interval '1 minute' AND now()) FROM"
    assert db.value(f"{recent} recognition_job")
    assert db.value(f"{recent} stored_file")


def test_the_columns_are_those_of_the_contract(dsn: str) -> None:
    columns: dict[str, list[str]] = {}
    for kind, table, text in catalog(dsn):
        if kind == "column":
            columns.setdefault(table, []).append(text.split()[0])
    assert set(columns) == {*TABLES, "armcore_trio_version"}
    expected = (
        "id file_id pipeline status attempt reply_deadline request_subject request_msg_id published_at started_at finished_at "
        "service_name service_version metrics error_code error_message result_schema_version result_s3_object_id "
        "raw_s3_object_id result_msg_id created_at"
    )
    assert sorted(columns["recognition_job"]) == sorted(expected.split(" "))


@pytest.mark.req("R8", "D4.4")
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO recognition_job (file_id, pipeline) SELECT file_id, pipeline FROM recognition_job",
        "INSERT INTO s3_object (bucket, key, bucket_role) SELECT bucket, key, 'raw' FROM s3_object",
        """
        INSERT INTO quality_failure_fact (job_id, file_id, pipeline, failure_kind)
        SELECT id, file_id, pipeline, kind FROM recognition_job, unnest(ARRAY['TIMEOUT', 'NO_ACK']) kind
        """,
    ],
    ids=["file and attempt", "bucket and key", "fact of a job"],
)
def test_what_may_exist_once(db: Database, statement: str) -> None:
    db.insert_job()
    with pytest.raises(psycopg.errors.UniqueViolation):
        db.execute(statement)


# The wake-up


@pytest.mark.req("D1.6")
def test_each_statement_that_inserts_notifies_once_while_somebody_sleeps(dsn: str, db: Database) -> None:
    with Sleeper(dsn) as sleeper:
        assert sleeper.fall_asleep()
        db.execute("INSERT INTO stored_file (file_name) SELECT 'a' FROM generate_series(1, 50)")
        db.execute("INSERT INTO recognition_job (file_id, pipeline) SELECT id, 'tabular' FROM stored_file")
        assert sleeper.notified() == 1
        db.execute("UPDATE recognition_job SET status = 'done'")
        assert sleeper.notified() == 0
        sleeper.wake_up()
        db.execute("INSERT INTO recognition_job (file_id, pipeline, attempt) SELECT id, 'tabular', 2 FROM stored_file")
        assert sleeper.notified() == 0


# What a producer's search path may find in place of the functions that the trigger calls.
TRAPS = {
    "pg_notify(text, text)": "void",
    "hashtextextended(text, bigint)": "bigint",
    "pg_try_advisory_xact_lock_shared(bigint)": "boolean",
    "pg_notification_queue_usage()": "double precision",
}


@pytest.mark.req("D1.6")
@pytest.mark.parametrize("asleep", [True, False], ids=["somebody sleeps", "nobody sleeps"])
def test_the_least_of_producers_can_insert(dsn: str, db: Database, asleep: bool) -> None:
    """A role with no right but to insert, whose search path holds traps, in a transaction of any kind."""
    db.execute("INSERT INTO stored_file (file_name) VALUES ('a')")
    file_id = db.value("SELECT id FROM stored_file")
    role = f"producer_{psycopg.conninfo.conninfo_to_dict(dsn)['dbname']}"
    db.execute(f"CREATE ROLE {role}")
    try:
        db.execute("CREATE SCHEMA trap")
        for signature, result in TRAPS.items():
            body = "BEGIN RAISE EXCEPTION $$no$$; END"
            db.execute(f"CREATE FUNCTION trap.{signature} RETURNS {result} LANGUAGE plpgsql AS '{body}'")
        db.execute(f"GRANT INSERT ON recognition_job TO {role}")
        db.execute(f"GRANT USAGE ON SCHEMA trap TO {role}")
        with Sleeper(dsn) as sleeper, psycopg.connect(dsn) as producer:
            assert not asleep or sleeper.fall_asleep()
            producer.execute(f"SET ROLE {role}".encode())
            producer.execute("SET search_path = trap, pg_catalog, public")
            producer.commit()
            for attempt, level in enumerate(psycopg.IsolationLevel, 1):
                producer.isolation_level = level
                producer.execute(
                    "INSERT INTO recognition_job (file_id, pipeline, attempt) VALUES (%s, 'tabular', %s)", (file_id, attempt)
                )
                producer.commit()
                assert sleeper.notified() == asleep
    finally:
        db.execute(f"DROP OWNED BY {role}")
        db.execute(f"DROP ROLE {role}")
    assert db.value("SELECT count(*) FROM recognition_job") == len(psycopg.IsolationLevel)


@pytest.mark.req("D1.6")
def test_a_full_notification_queue_fails_no_insert() -> None:
    with Postgres(settings=POSTGRES | {"max_notify_queue_pages": "64"}) as server:
        dsn = server.dsn()
        migrate(dsn)
        db = Database(dsn)
        with Sleeper(dsn) as sleeper, psycopg.connect(dsn, autocommit=True) as stuck:
            stuck.execute("LISTEN nothing")  # and never looks, so nothing can be forgotten
            stuck.execute("BEGIN")
            stuck.execute("SELECT 1")
            with failing(psycopg.errors.ProgramLimitExceeded, "too many notifications"):
                for _ in range(1_000):
                    db.execute("SELECT pg_notify('other', repeat('x', 7000))")
            jobs = [db.insert_job()]
            assert sleeper.fall_asleep()
            jobs.append(db.insert_job())
            assert db.statuses(jobs) == ["queued", "queued"]
            assert sleeper.notified() == 0
            stuck.execute("ROLLBACK")
            wait_until(lambda: db.value("SELECT pg_notification_queue_usage()") < 0.5, what="room in the queue")
            db.insert_job()
            assert sleeper.notified() == 1
        db.close()


def test_metrics_of_a_job_are_an_object_by_default(db: Database) -> None:
    assert json.loads(db.value("SELECT metrics::text FROM recognition_job WHERE id = %s", db.insert_job().id)) == {}
