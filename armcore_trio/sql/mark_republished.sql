-- The server has confirmed these repeats (R3). Whatever else stands in metrics is left alone.
UPDATE recognition_job
SET published_at = now(),
    reply_deadline = coalesce(reply_deadline, now() + %(reply_timeout)s * interval '1 second'),
    metrics = CASE jsonb_typeof(metrics) WHEN 'object' THEN metrics ELSE '{}' END
              || jsonb_build_object('republish_count', sent.republish_count)
FROM unnest(%(ids)s::uuid[], %(republish_counts)s::integer[]) AS sent (sent_id, republish_count)
WHERE id = sent.sent_id AND status = 'published'
