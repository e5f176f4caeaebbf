-- A job and its file, locked in that order, with what a retry depends on (R8). A file's row that is gone is no reason to
-- overlook the job (N26).
WITH job AS MATERIALIZED (
    SELECT id, file_id, status, attempt FROM recognition_job WHERE id = %(id)s FOR UPDATE
)
SELECT job.status::text, coalesce(job.attempt, 0)::bigint, file.id IS NOT NULL,
       file.current_recognition_job_id IS NOT DISTINCT FROM job.id
FROM job
LEFT JOIN LATERAL (
    SELECT id, current_recognition_job_id FROM stored_file WHERE id = job.file_id FOR UPDATE
) AS file ON true
