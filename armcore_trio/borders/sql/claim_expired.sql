-- Jobs a service took or was sent, whose answer did not come by the deadline, locked (R5).
SELECT id, file_id, status::text
FROM recognition_job
WHERE status IN ('published', 'processing') AND reply_deadline < now() AND id <> ALL (%(skip)s)
ORDER BY reply_deadline, id
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED
