-- A new attempt for the file of a failed job, which becomes the file's current one (R8). The caller holds both rows.
WITH job AS (
    INSERT INTO recognition_job (file_id, pipeline, status, attempt)
    SELECT file_id, pipeline, 'queued', coalesce(attempt, 0) + 1 FROM recognition_job WHERE id = %(id)s
    RETURNING id, file_id, attempt
), file AS (
    UPDATE stored_file AS file
    SET status = 'UPLOADED', error_code = NULL, error_message = NULL, current_recognition_job_id = job.id, updated_at = now()
    FROM job WHERE file.id = job.file_id
)
SELECT id, attempt::bigint FROM job
