-- Everything a batch of events changes, in one statement: objects, jobs, their files and failure facts (R2-R5, D4.10).
-- A row whose status is no longer the expected one is left alone, and so are its file and fact; the caller counts.
-- The words stand as literals beside a column, whose type they take: the core may have made that an enum, to which no text can
-- be assigned (N01).
WITH change AS MATERIALIZED (
    SELECT *,
           CASE WHEN result_key IS NOT NULL THEN gen_random_uuid() END AS result_id,
           CASE WHEN raw_key IS NOT NULL THEN gen_random_uuid() END AS raw_id
    FROM json_to_recordset(%(changes)s::json) AS one (
        job_id uuid, effect integer, metrics jsonb, result_msg_id text, result_bucket text, result_key text,
        raw_bucket text, raw_key text
    )
    JOIN json_to_recordset(%(effects)s::json) AS effect (
        number integer, status text, expected text, file text, fact text, acked boolean, final boolean, service_name text,
        service_version text, error_code text, error_message text, result_schema_version text
    ) ON effect.number = one.effect
), result AS (
    INSERT INTO s3_object (id, bucket, key, bucket_role, created_by, created_at)
    SELECT result_id, result_bucket, result_key, 'results', service_name, now() FROM change WHERE result_key IS NOT NULL
), raw AS (
    INSERT INTO s3_object (id, bucket, key, bucket_role, created_by, created_at)
    SELECT raw_id, raw_bucket, raw_key, 'raw', service_name, now() FROM change WHERE raw_key IS NOT NULL
), job AS (
    UPDATE recognition_job AS job
    SET status = CASE change.status
            WHEN 'processing' THEN 'processing' WHEN 'done' THEN 'done' WHEN 'needs_check' THEN 'needs_check'
            WHEN 'error' THEN 'error' WHEN 'timeout' THEN 'timeout' WHEN 'dlq' THEN 'dlq'
            ELSE job.status
        END,
        started_at = CASE WHEN change.acked THEN now() ELSE job.started_at END,
        finished_at = CASE WHEN change.final THEN now() ELSE job.finished_at END,
        service_name = coalesce(change.service_name, job.service_name),
        service_version = coalesce(change.service_version, job.service_version),
        metrics = CASE
            WHEN change.metrics IS NULL THEN job.metrics::jsonb
            ELSE CASE jsonb_typeof(job.metrics::jsonb) WHEN 'object' THEN job.metrics::jsonb ELSE '{}' END || change.metrics
        END,
        error_code = change.error_code,
        error_message = change.error_message,
        result_schema_version = change.result_schema_version,
        result_msg_id = change.result_msg_id,
        result_s3_object_id = change.result_id,
        raw_s3_object_id = change.raw_id
    FROM change
    WHERE job.id = change.job_id AND job.status::text = change.expected
    RETURNING job.id, job.file_id, job.pipeline, job.service_name, change.error_code, change.error_message,
              change.file AS file_status, change.fact
), file AS (
    UPDATE stored_file AS file
    SET status = CASE job.file_status WHEN 'PROCESSING' THEN 'PROCESSING' WHEN 'ERROR' THEN 'ERROR' ELSE file.status END,
        error_code = CASE job.file_status WHEN 'ERROR' THEN job.error_code END,
        error_message = CASE job.file_status WHEN 'ERROR' THEN job.error_message END,
        updated_at = now()
    FROM job
    WHERE file.id = job.file_id AND file.current_recognition_job_id = job.id AND job.file_status IS NOT NULL
), fact AS (
    INSERT INTO quality_failure_fact (job_id, file_id, pipeline, failure_kind, error_code, service_name, occurred_at)
    SELECT id, file_id, pipeline,
           CASE fact
               WHEN 'SERVICE_ERROR' THEN 'SERVICE_ERROR' WHEN 'TIMEOUT' THEN 'TIMEOUT' WHEN 'NO_ACK' THEN 'NO_ACK'
               ELSE (NULL::quality_failure_fact).failure_kind
           END,
           error_code, service_name, now()
    FROM job WHERE fact IS NOT NULL
)
SELECT count(*) FROM job
