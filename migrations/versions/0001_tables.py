"""The four tables of the exchange. A core that already has them keeps its own: nothing existing is touched."""

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create what is missing."""
    _create("""
    CREATE TABLE IF NOT EXISTS s3_object (
        id uuid PRIMARY KEY DEFAULT new_id(),
        bucket text NOT NULL,
        key text NOT NULL,
        bucket_role text NOT NULL CHECK (bucket_role IN ('source', 'results', 'raw')),
        created_by text,
        created_at timestamptz NOT NULL DEFAULT now(),
        UNIQUE (bucket, key)
    )""")
    _create("""
    CREATE TABLE IF NOT EXISTS stored_file (
        id uuid PRIMARY KEY DEFAULT new_id(),
        file_name text NOT NULL,
        content_type text,
        s3_object_id uuid REFERENCES s3_object,
        status text NOT NULL DEFAULT 'UPLOADED' CHECK (status IN ('UPLOADED', 'PROCESSING', 'PROCESSED', 'ERROR')),
        error_code text,
        error_message text,
        current_recognition_job_id uuid,
        created_at timestamptz NOT NULL DEFAULT now(),
        updated_at timestamptz NOT NULL DEFAULT now()
    )""")
    _create("""
    CREATE TABLE IF NOT EXISTS recognition_job (
        id uuid PRIMARY KEY DEFAULT new_id(),
        file_id uuid NOT NULL REFERENCES stored_file,
        pipeline text NOT NULL,
        status text NOT NULL DEFAULT 'queued' CHECK (
            status IN ('queued', 'published', 'processing', 'done', 'needs_check', 'error', 'timeout', 'dlq')
        ),
        attempt integer NOT NULL DEFAULT 1,
        reply_deadline timestamptz,
        request_subject text,
        request_msg_id text,
        published_at timestamptz,
        started_at timestamptz,
        finished_at timestamptz,
        service_name text,
        service_version text,
        metrics jsonb NOT NULL DEFAULT '{}',
        error_code text,
        error_message text,
        result_schema_version text,
        result_s3_object_id uuid REFERENCES s3_object,
        raw_s3_object_id uuid REFERENCES s3_object,
        result_msg_id text,
        created_at timestamptz NOT NULL DEFAULT now(),
        UNIQUE (file_id, attempt)
    )""")
    op.execute("""
    DO $$ BEGIN
        IF NOT EXISTS (
            SELECT FROM pg_constraint c
            JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
            WHERE c.contype = 'f' AND c.conrelid = 'stored_file'::regclass AND a.attname = 'current_recognition_job_id'
        ) THEN
            BEGIN
                ALTER TABLE stored_file ADD FOREIGN KEY (current_recognition_job_id) REFERENCES recognition_job;
            EXCEPTION WHEN foreign_key_violation THEN -- what a core's own rows have been so far stays theirs
                ALTER TABLE stored_file ADD FOREIGN KEY (current_recognition_job_id) REFERENCES recognition_job NOT VALID;
                RAISE WARNING 'stored_file.current_recognition_job_id names jobs that are gone: mend them, then VALIDATE the key';
            END;
        END IF;
    END $$""")
    _create("""
    CREATE TABLE IF NOT EXISTS quality_failure_fact (
        id uuid PRIMARY KEY DEFAULT new_id(),
        job_id uuid NOT NULL UNIQUE REFERENCES recognition_job,
        file_id uuid NOT NULL,
        pipeline text NOT NULL,
        failure_kind text NOT NULL CHECK (failure_kind IN ('SERVICE_ERROR', 'TIMEOUT', 'NO_ACK')),
        error_code text,
        service_name text,
        occurred_at timestamptz NOT NULL DEFAULT now()
    )""")


def _create(table: str) -> None:
    """Ids grow with time where the server can make such (PostgreSQL 18): each random one costs a page of every index."""
    op.execute(f"""
    DO $$ BEGIN
        EXECUTE replace($table${table}$table$, 'new_id()',
            CASE WHEN to_regprocedure('pg_catalog.uuidv7()') IS NULL THEN 'gen_random_uuid()' ELSE 'uuidv7()' END);
    END $$""")


def downgrade() -> None:
    """Drop the tables, if they are empty: rows are never worth less than a clean downgrade."""
    op.execute("""
    DO $$ BEGIN
        IF EXISTS (SELECT FROM stored_file) OR EXISTS (SELECT FROM s3_object) OR EXISTS (SELECT FROM recognition_job) THEN
            RAISE EXCEPTION 'the tables hold rows; move or delete them before going below revision 0001';
        END IF;
    END $$""")
    op.execute("DROP TABLE quality_failure_fact, recognition_job, stored_file, s3_object")
