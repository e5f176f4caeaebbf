"""What fault tests do to a database, and what must hold of job, file and fact together at any moment meanwhile."""

from tests.support.database import Database

# One row for each job whose row, file and fact do not belong together.
_CONTRADICTIONS = """
SELECT job.id::text, job.status, job.error_code, job.finished_at, file.status AS file_status, file.error_code AS file_code,
       fact.failure_kind, fact.error_code AS fact_code
FROM recognition_job AS job
JOIN stored_file AS file ON file.id = job.file_id
LEFT JOIN quality_failure_fact AS fact ON fact.job_id = job.id
WHERE file.current_recognition_job_id = job.id AND NOT CASE
    WHEN job.status IN ('queued', 'published') THEN
        fact.id IS NULL AND job.finished_at IS NULL AND file.status = 'UPLOADED'
    WHEN job.status = 'processing' THEN
        fact.id IS NULL AND job.finished_at IS NULL AND job.started_at IS NOT NULL AND file.status = 'PROCESSING'
    WHEN job.status IN ('done', 'needs_check') THEN
        fact.id IS NULL AND job.finished_at IS NOT NULL AND job.result_s3_object_id IS NOT NULL AND file.status = 'PROCESSING'
    ELSE
        job.finished_at IS NOT NULL AND file.status = 'ERROR' AND file.error_code = job.error_code
        AND CASE job.status
            WHEN 'dlq' THEN job.error_code = 'NO_ACK' AND fact.failure_kind = 'NO_ACK' AND fact.error_code = 'NO_ACK'
            WHEN 'timeout' THEN job.error_code = 'TIMEOUT' AND fact.failure_kind = 'TIMEOUT' AND fact.error_code = 'TIMEOUT'
            ELSE job.error_code = 'INVALID_REQUEST' AND fact.id IS NULL
                OR fact.failure_kind = 'SERVICE_ERROR' AND fact.error_code = job.error_code
        END IS TRUE
END
"""


def contradictions(db: Database) -> list[dict[str, object]]:
    """The jobs whose row, file and fact contradict each other; empty if all is well."""
    return db.execute(_CONTRADICTIONS)


def record_changes(db: Database) -> None:
    """From now on keep each status a job takes in the table `changes` (job_id, status), in order."""
    db.execute("CREATE TABLE changes (n bigserial, job_id uuid, status text)")
    db.execute("""
    CREATE FUNCTION record_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO changes (job_id, status) VALUES (NEW.id, NEW.status); RETURN NULL; END $$""")
    db.execute("CREATE TRIGGER record_change AFTER UPDATE ON recognition_job FOR EACH ROW EXECUTE FUNCTION record_change()")


def slow_updates(db: Database, seconds: float) -> None:
    """Each UPDATE of jobs takes so much longer, before its commit."""
    db.execute(f"""
    CREATE FUNCTION slow_update() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$""")
    db.execute("CREATE TRIGGER slow_update AFTER UPDATE ON recognition_job EXECUTE FUNCTION slow_update()")


def commit_to_disk(db: Database) -> None:
    """From now on a commit outlives a kill of the server; the tests' servers do without that otherwise."""
    db.execute(f"ALTER DATABASE {db.value('SELECT current_database()')} SET synchronous_commit = on")
    db.close()


def backends(db: Database, task: str = "%") -> list[int]:
    """The server processes that serve the daemon, or one task of it."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND backend_type = 'client backend'"
    return [row["pid"] for row in db.execute(query, f"armcore-trio {task}")]


def terminate_backends(db: Database, task: str = "%") -> None:
    """End these connections as an administrator does; returns when they are gone."""
    for pid in backends(db, task):
        db.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
