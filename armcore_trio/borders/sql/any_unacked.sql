-- Whether any published job waits too long for its ack: a look at what claim_unacked.sql would choose from (R3).
SELECT EXISTS (
    SELECT FROM recognition_job
    WHERE status = 'published'
      AND published_at <= now() - %(ack_timeout)s * interval '1 second'
      AND (reply_deadline IS NULL OR reply_deadline >= now())
)
