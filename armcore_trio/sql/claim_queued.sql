-- The oldest queued jobs with their sources, locked until commit; those another instance holds are skipped (R1, D1.2, D1.3).
SELECT job.id, job.file_id, job.attempt, job.pipeline, file.file_name, file.content_type, source.bucket, source.key,
       to_char(
           coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second') AT TIME ZONE 'UTC',
           'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
       ),
       0
FROM recognition_job AS job
JOIN stored_file AS file ON file.id = job.file_id
LEFT JOIN s3_object AS source ON source.id = file.s3_object_id
WHERE job.status = 'queued' AND job.id <> ALL (%(skip)s)
ORDER BY job.created_at, job.id
LIMIT %(limit)s
FOR UPDATE OF job SKIP LOCKED
