-- The server has confirmed these requests (R1, D1.4). The expected status comes as a column: as a constant it would match the
-- partial index of the backlog, and the whole backlog would be read to mark one batch.
WITH sent AS MATERIALIZED (
    SELECT id, msg_id, subject, 'queued' AS expected
    FROM json_to_recordset(%(sent)s::json) AS (id uuid, msg_id text, subject text)
)
UPDATE recognition_job AS job
SET status = 'published',
    published_at = now(),
    request_msg_id = sent.msg_id,
    request_subject = sent.subject,
    reply_deadline = coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second')
FROM sent
WHERE job.id = ANY (%(ids)s::uuid[]) AND job.id = sent.id AND job.status = sent.expected
