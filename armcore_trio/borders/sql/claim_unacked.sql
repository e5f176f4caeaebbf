-- Published jobs whose ack is overdue, longest first, locked; a job past its reply_deadline is the watchdog's (R3, D3.2).
-- Only those repeated less often than %(below)s. The rows are chosen first and the rest looked up for each: no plan joins a
-- whole backlog, whatever is known of its size.
WITH job AS MATERIALIZED (
    SELECT id, file_id, attempt, pipeline, reply_deadline, published_at AS sent_at, repeats.count
    FROM recognition_job
    CROSS JOIN LATERAL (
        SELECT CASE jsonb_typeof(metrics::jsonb -> 'republish_count')
            WHEN 'number' THEN greatest(0, least((metrics::jsonb ->> 'republish_count')::numeric, 1000000))::integer
            ELSE 0
        END
    ) AS repeats (count)
    WHERE status = 'published'
      AND published_at <= %(instant)s::timestamptz - %(ack_timeout)s * interval '1 second'
      AND (reply_deadline IS NULL OR reply_deadline >= now())
      AND repeats.count < %(below)s
      AND id <> ALL (%(skip)s)
    ORDER BY published_at, id
    LIMIT %(limit)s
    FOR UPDATE OF recognition_job SKIP LOCKED
)
SELECT job.id, file.id, job.attempt::bigint,
       job.pipeline::text, file.file_name::text, file.content_type::text, source.bucket::text, source.key::text,
       to_char(
           coalesce(job.reply_deadline, now() + %(reply_timeout)s * interval '1 second') AT TIME ZONE 'UTC',
           'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
       ),
       job.count
FROM job
LEFT JOIN LATERAL (SELECT * FROM stored_file WHERE id = job.file_id LIMIT 1) AS file ON true
LEFT JOIN LATERAL (SELECT * FROM s3_object WHERE id = file.s3_object_id LIMIT 1) AS source ON true
ORDER BY job.sent_at, job.id
