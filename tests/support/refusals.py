"""A database that refuses to write single rows: what no check before the write can foresee."""

from collections.abc import Iterable

from tests.support.database import Database, JobIds

_JOB_OF = {"recognition_job": "NEW.id", "quality_failure_fact": "NEW.job_id"}


def refuse(db: Database, table: str, jobs: Iterable[JobIds]) -> None:
    """From now on rows of `recognition_job` or `quality_failure_fact` that concern these jobs cannot be written (P0001)."""
    db.execute("CREATE TABLE refused (job_id uuid)")
    db.execute("INSERT INTO refused SELECT unnest(%s::uuid[])", [job.id for job in jobs])
    db.execute(f"""
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM refused WHERE job_id = {_JOB_OF[table]}) THEN RAISE EXCEPTION 'not this one'; END IF;
        RETURN NEW;
    END $$""")
    db.execute(f"CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()")


def relent(db: Database) -> None:
    """Take the refusal back."""
    db.execute("DELETE FROM refused")
