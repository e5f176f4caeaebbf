-- The server has confirmed these requests (R1, D1.4).
UPDATE recognition_job AS job
SET status = 'published',
    published_at = now(),
    request_msg_id = sent.msg_id,
    request_subject = sent.subject,
    reply_deadline = coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second')
FROM unnest(%(ids)s::uuid[], %(msg_ids)s::text[], %(subjects)s::text[]) AS sent (id, msg_id, subject)
WHERE job.id = sent.id AND job.status = 'queued'
