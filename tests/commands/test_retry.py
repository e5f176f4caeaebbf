"""`retry` says what it did to each job, whatever became of the others (R8)."""

import json
from pathlib import Path
from uuid import uuid4

import pytest

from armcore_trio.settings import DSN
from tests.support.commands import run
from tests.support.database import Database

PLACES = {"job": "recognition_job", "file": "stored_file"}


@pytest.mark.req("N14", "R8")
@pytest.mark.parametrize("held", PLACES)
def test_a_job_that_another_session_holds_does_not_stop_the_others(dsn: str, db: Database, held: str) -> None:
    jobs = db.insert_jobs(3, status="timeout")
    taken = jobs[1].id if held == "job" else jobs[1].file_id
    with db.transaction() as holder:
        holder.execute(f"SELECT FROM {PLACES[held]} WHERE id = %s FOR UPDATE", [taken])
        result = run("retry", "--json", *(str(job.id) for job in jobs), **{DSN: dsn})
    assert result.returncode == 1
    told = json.loads(result.stdout)
    assert [entry["job_id"] for entry in told] == [str(job.id) for job in jobs]
    assert [entry["attempt"] for entry in told] == [2, None, 2]
    assert "held by another session" in told[1]["refusal"]
    assert told[0]["refusal"] is told[2]["refusal"] is None
    assert len(db.rows("recognition_job")) == 5


@pytest.mark.req("N14", "R8")
def test_whatever_is_refused_is_told_beside_what_was_done(dsn: str, db: Database) -> None:
    failed, done = db.insert_job(status="dlq"), db.insert_job(status="done")
    absent = uuid4()
    result = run("retry", str(done.id), str(absent), str(failed.id), str(failed.id), **{DSN: dsn})
    assert result.returncode == 1
    assert result.stdout.startswith(f"{failed.id}: attempt 2 is ")
    assert result.stderr.splitlines() == [
        f"{done.id}: it is done; only error, timeout and dlq can be retried",
        f"{absent}: there is no such job",
        f"{failed.id}: attempt 2 of its file exists",
    ]


@pytest.mark.req("N14", "R8")
def test_a_database_that_goes_away_amid_them_hides_nothing(dsn: str, db: Database) -> None:
    """The second job's insert ends the session, as an administrator might."""
    jobs = db.insert_jobs(3, status="error")
    db.execute("""
        CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$""")
    db.execute(f"""
        CREATE TRIGGER cut BEFORE INSERT ON recognition_job FOR EACH ROW WHEN (NEW.file_id = '{jobs[1].file_id}')
        EXECUTE FUNCTION cut()""")
    result = run("retry", "--json", *(str(job.id) for job in jobs), **{DSN: dsn})
    assert result.returncode == 69
    told = json.loads(result.stdout)
    assert [entry["attempt"] for entry in told] == [2, None, None]
    assert told[1]["refusal"].startswith("nobody knows: database: terminating connection")
    assert told[2]["refusal"] == "not tried"
    assert result.stderr.startswith("database: terminating connection")
    assert len(result.stderr.splitlines()) == 1
    assert len(db.rows("recognition_job")) == 4


@pytest.mark.req("N23")
@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "--bucket", "b", "--key", "k", "--name", "a\udcff.xlsx", "--pipeline", "tabular"),
        ("submit", "--bucket", "b", "--key", "k", "--name=a\udcff.xlsx", "--pipeline", "tabular"),
        ("submit", "--bucket", "b\udcff", "--key", "k", "--name", "n", "--pipeline", "tabular"),
        ("retry", "\udcff"),
        ("migrate", "--to", "\udcff"),
        ("review-log", "\udcff"),
        ("simulate", "--pipeline", "\udcff"),
        ("demo", "--jobs", "\udcff"),
        ("run", "--\udcff"),
        ("\udcff",),
        ("--\udcff",),
    ],
)
def test_an_argument_that_is_no_text_is_refused_in_one_line(arguments: tuple[str, ...], dsn: str) -> None:
    result = run(*arguments, **{DSN: dsn})
    assert (result.returncode, result.stdout) == (2, "")
    position = 1 + next(number for number, argument in enumerate(arguments) if not argument.isascii())
    assert result.stderr == f"Error: argument {position} is not UTF-8 text\n"


@pytest.mark.req("N23")
def test_any_text_can_be_submitted(dsn: str, db: Database, tmp_path: Path) -> None:
    name = "цены №1\n\t“🙂”\x1b[31m.xlsx"
    result = run("submit", "--bucket", "b", "--key", str(tmp_path), "--name", name, "--pipeline", "tabular", **{DSN: dsn})
    assert (result.returncode, result.stderr) == (0, "")
    assert db.rows("stored_file")[0]["file_name"] == name
