-- These repeats are about to go out (R3). Whatever else stands in metrics is left alone. As in mark_published.sql, the
-- expected status comes as a column.
WITH sent AS MATERIALIZED (
    SELECT id, republish_count, 'published' AS expected
    FROM unnest(%(ids)s::uuid[], %(counts)s::integer[]) AS sent (id, republish_count)
)
UPDATE recognition_job AS job
SET published_at = now(),
    reply_deadline = coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second'),
    metrics = CASE jsonb_typeof(job.metrics::jsonb) WHEN 'object' THEN job.metrics::jsonb ELSE '{}' END
              || jsonb_build_object('republish_count', sent.republish_count)
FROM sent
WHERE job.id = ANY (%(ids)s::uuid[]) AND job.id = sent.id AND job.status::text = sent.expected
