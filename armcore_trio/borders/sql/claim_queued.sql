-- The oldest queued jobs with their sources, locked until commit; those another instance holds are skipped (R1, D1.2, D1.3).
-- The rows are chosen first and the rest looked up for each: no plan joins a whole backlog, whatever is known of its size.
WITH job AS MATERIALIZED (
    SELECT id, file_id, attempt, pipeline, reply_deadline, created_at
    FROM recognition_job
    WHERE status = 'queued' AND id <> ALL (%(skip)s)
    ORDER BY created_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
SELECT job.id, file.id, job.attempt::bigint, job.pipeline::text, file.file_name::text, file.content_type::text,
       source.bucket::text, source.key::text,
       to_char(
           coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second') AT TIME ZONE 'UTC',
           'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
       ),
       0
FROM job
LEFT JOIN LATERAL (SELECT * FROM stored_file WHERE id = job.file_id LIMIT 1) AS file ON true
LEFT JOIN LATERAL (SELECT * FROM s3_object WHERE id = file.s3_object_id LIMIT 1) AS source ON true
ORDER BY job.created_at, job.id
