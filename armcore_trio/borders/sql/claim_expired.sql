-- Jobs a service took or was sent, whose answer did not come by the deadline, locked (R5). After an outage, only those it
-- did not concern: created since (N11).
SELECT id, file_id, status::text
FROM recognition_job
WHERE status IN ('published', 'processing') AND reply_deadline < %(instant)s::timestamptz AND id <> ALL (%(skip)s)
  AND (%(spared)s::float8 IS NULL OR created_at > %(instant)s::timestamptz - %(spared)s * interval '1 second')
ORDER BY reply_deadline, id
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED
