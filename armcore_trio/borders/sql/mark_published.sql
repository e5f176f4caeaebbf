-- These requests are about to go out, and this is committed once the server has confirmed them (R1, D1.4). The expected status
-- comes as a column: as a constant it would match the partial index of the backlog, and the whole backlog would be read to
-- mark one batch.
WITH sent AS MATERIALIZED (
    SELECT id, 'queued' AS expected FROM unnest(%(ids)s::uuid[]) AS sent (id)
)
UPDATE recognition_job AS job
SET status = 'published',
    published_at = now(),
    request_msg_id = job.id || ':' || job.attempt::bigint,
    request_subject = %(subjects)s::jsonb ->> job.pipeline::text,
    reply_deadline = coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second')
FROM sent
WHERE job.id = ANY (%(ids)s::uuid[]) AND job.id = sent.id AND job.status::text = sent.expected
