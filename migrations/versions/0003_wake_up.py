"""Inserts notify only while a publisher sleeps: NOTIFY makes commits queue up behind each other, flush by flush."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """An insert that gets the lock, shared until its commit, need not notify: no publisher that goes to sleep overlooks it.

    It takes the lock exclusively to do so, then looks once more. The condition stands in the trigger, so that the usual
    insert does not even call the function.
    """
    op.execute("""
    CREATE OR REPLACE TRIGGER recognition_job_notify AFTER INSERT ON recognition_job
        FOR EACH STATEMENT
        WHEN (NOT pg_try_advisory_xact_lock_shared(hashtextextended('recognition_job_queued', 0)))
        EXECUTE FUNCTION recognition_job_notify()""")


def downgrade() -> None:
    """Each insert notifies."""
    op.execute("""
    CREATE OR REPLACE TRIGGER recognition_job_notify AFTER INSERT ON recognition_job
        FOR EACH STATEMENT EXECUTE FUNCTION recognition_job_notify()""")
