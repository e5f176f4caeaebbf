-- The highest attempt of the job's file; read after the locks, so that it sees what a rival has committed (R8).
SELECT coalesce(max(attempt), 0)::bigint
FROM recognition_job
WHERE file_id = (SELECT file_id FROM recognition_job WHERE id = %(id)s)
