-- A job and its file, locked in that order, with what a retry depends on (R8).
SELECT job.status, job.attempt, file.current_recognition_job_id IS NOT DISTINCT FROM job.id
FROM recognition_job AS job
JOIN stored_file AS file ON file.id = job.file_id
WHERE job.id = %(id)s
FOR UPDATE
