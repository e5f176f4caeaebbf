"""A database that refuses to write single rows: what no check before the write can foresee."""

from collections.abc import Iterable

from tests.support.database import Database, JobIds

_JOB_OF = {"recognition_job": "NEW.id", "quality_failure_fact": "NEW.job_id"}


def refuse(db: Database, table: str, jobs: Iterable[JobIds], *, at_commit: bool = False, sqlstate: str = "P0001") -> None:
    """From now on rows of `recognition_job` or `quality_failure_fact` that concern these jobs cannot be written.

    With `at_commit` they can, and the commit fails.
    """
    db.execute("CREATE TABLE refused (job_id uuid)")
    db.execute("INSERT INTO refused SELECT unnest(%s::uuid[])", [job.id for job in jobs])
    db.execute(f"""
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM refused WHERE job_id = {_JOB_OF[table]}) THEN
            RAISE EXCEPTION 'not this one' USING ERRCODE = '{sqlstate}';
        END IF;
        RETURN NEW;
    END $$""")
    kind, when, deferred = ("CONSTRAINT", "AFTER", "DEFERRABLE INITIALLY DEFERRED") if at_commit else ("", "BEFORE", "")
    db.execute(f"""
    CREATE {kind} TRIGGER refuse {when} INSERT OR UPDATE ON {table} {deferred} FOR EACH ROW EXECUTE FUNCTION refuse()""")


def relent(db: Database) -> None:
    """Take the refusal back."""
    db.execute("DELETE FROM refused")
