-- Published jobs whose ack is overdue, longest first, locked; a job past its reply_deadline is the watchdog's (R3, D3.2).
SELECT job.id, job.file_id, job.attempt, job.pipeline, file.file_name, file.content_type, source.bucket, source.key,
       to_char(
           coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second') AT TIME ZONE 'UTC',
           'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
       ),
       CASE jsonb_typeof(job.metrics -> 'republish_count')
           WHEN 'number' THEN greatest(0, least((job.metrics ->> 'republish_count')::numeric, 1000000))::integer
           ELSE 0
       END
FROM recognition_job AS job
JOIN stored_file AS file ON file.id = job.file_id
LEFT JOIN s3_object AS source ON source.id = file.s3_object_id
WHERE job.status = 'published'
  AND job.published_at <= now() - %(ack_timeout)s * interval '1 second'
  AND (job.reply_deadline IS NULL OR job.reply_deadline >= now())
  AND job.id <> ALL (%(skip)s)
ORDER BY job.published_at, job.id
LIMIT %(limit)s
FOR UPDATE OF job SKIP LOCKED
