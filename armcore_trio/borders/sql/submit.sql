-- A source object, its file and the file's first job, as the core would insert them.
WITH source AS (
    INSERT INTO s3_object (bucket, key, bucket_role, created_by) VALUES (%(bucket)s, %(key)s, 'source', %(created_by)s)
    RETURNING id
), file AS (
    INSERT INTO stored_file (id, file_name, content_type, s3_object_id, current_recognition_job_id)
    SELECT %(file_id)s, %(file_name)s, %(content_type)s, id, %(job_id)s FROM source
)
INSERT INTO recognition_job (id, file_id, pipeline, status) VALUES (%(job_id)s, %(file_id)s, %(pipeline)s, 'queued')
