"""What each pass needs to be independent of history, and the wake-up of the publisher (D1.6)."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Partial indexes for the three passes, and the notification."""
    op.execute("""
    CREATE INDEX IF NOT EXISTS recognition_job_queued_idx
        ON recognition_job (created_at, id) WHERE status = 'queued'""")
    op.execute("""
    CREATE INDEX IF NOT EXISTS recognition_job_unacked_idx
        ON recognition_job (published_at, id) WHERE status = 'published'""")
    op.execute("""
    CREATE INDEX IF NOT EXISTS recognition_job_awaited_idx
        ON recognition_job (reply_deadline, id) WHERE status IN ('published', 'processing')""")
    op.execute("""
    CREATE OR REPLACE FUNCTION recognition_job_notify() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    BEGIN
        -- A full queue would make the producer's commit fail; the publisher's poll does without the wake-up.
        IF pg_notification_queue_usage() < 0.5 THEN
            PERFORM pg_notify('recognition_job_queued', '');
        END IF;
        RETURN NULL;
    END $$""")
    op.execute("""
    CREATE OR REPLACE TRIGGER recognition_job_notify AFTER INSERT ON recognition_job
        FOR EACH STATEMENT EXECUTE FUNCTION recognition_job_notify()""")


def downgrade() -> None:
    """Without the wake-up and the indexes the daemon of this version does not start."""
    op.execute("DROP TRIGGER IF EXISTS recognition_job_notify ON recognition_job")
    op.execute("DROP FUNCTION recognition_job_notify()")
    op.execute("DROP INDEX recognition_job_queued_idx, recognition_job_unacked_idx, recognition_job_awaited_idx")
