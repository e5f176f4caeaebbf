-- Jobs that another program put into an awaited status without a deadline get one, or nobody would ever end them (D1.4). A
-- published one without published_at is not repeated, having no time to count from, and ends by its deadline.
UPDATE recognition_job
SET reply_deadline = now() + %(reply_timeout)s * interval '1 second'
WHERE id IN (
    SELECT id FROM recognition_job
    WHERE status IN ('published', 'processing') AND reply_deadline IS NULL
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
RETURNING id
