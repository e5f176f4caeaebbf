"""Inserts notify only while a publisher sleeps: NOTIFY makes commits queue up behind each other, flush by flush."""

from alembic import op

revision = "0003"
down_revision = "0002"

_UNLESS_NOBODY_SLEEPS = "WHEN (NOT pg_try_advisory_xact_lock_shared(27428886886183525))"


def upgrade() -> None:
    """An insert that gets the lock, shared until its commit, need not notify: no publisher that goes to sleep overlooks it.

    It takes the lock exclusively to do so, then looks once more. The condition stands in the trigger, so that the usual
    insert does not even call the function.
    """
    _replace(_UNLESS_NOBODY_SLEEPS)


def downgrade() -> None:
    """Each insert notifies."""
    _replace("")


def _replace(condition: str) -> None:
    """The trigger, where it is: an operator may have dropped or disabled it, and has reasons."""
    op.execute(
        """
    DO $$
    DECLARE enabled "char" := (
        SELECT tgenabled FROM pg_trigger
        WHERE tgrelid = 'recognition_job'::regclass AND tgname = 'recognition_job_notify'
    );
    BEGIN
        IF enabled IS NOT NULL THEN
            CREATE OR REPLACE TRIGGER recognition_job_notify AFTER INSERT ON recognition_job
                FOR EACH STATEMENT <condition> EXECUTE FUNCTION recognition_job_notify();
        END IF;
        IF enabled = 'D' THEN
            ALTER TABLE recognition_job DISABLE TRIGGER recognition_job_notify;
        END IF;
    END $$""".replace("<condition>", condition)
    )
