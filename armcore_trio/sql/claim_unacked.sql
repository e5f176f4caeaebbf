-- Published jobs whose ack is overdue, longest first, locked; a job past its reply_deadline is the watchdog's (R3, D3.2).
-- The rows are chosen first and the rest looked up for each: no plan joins a whole backlog, whatever is known of its size.
WITH job AS MATERIALIZED (
    SELECT id, file_id, attempt, pipeline, reply_deadline, published_at, metrics
    FROM recognition_job
    WHERE status = 'published'
      AND published_at <= now() - %(ack_timeout)s * interval '1 second'
      AND (reply_deadline IS NULL OR reply_deadline >= now())
      AND id <> ALL (%(skip)s)
    ORDER BY published_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
SELECT job.id, job.file_id, job.attempt, job.pipeline, file.file_name, file.content_type, source.bucket, source.key,
       to_char(
           coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second') AT TIME ZONE 'UTC',
           'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
       ),
       CASE jsonb_typeof(job.metrics -> 'republish_count')
           WHEN 'number' THEN greatest(0, least((job.metrics ->> 'republish_count')::numeric, 1000000))::integer
           ELSE 0
       END
FROM job
CROSS JOIN LATERAL (SELECT * FROM stored_file WHERE id = job.file_id LIMIT 1) AS file
LEFT JOIN LATERAL (SELECT * FROM s3_object WHERE id = file.s3_object_id LIMIT 1) AS source ON true
ORDER BY job.published_at, job.id
