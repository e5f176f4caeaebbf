-- Which of the objects a batch of messages wants to register are registered already (D4.4). One look-up in the unique index
-- for each, whatever the planner believes of the table's size.
SELECT registered.bucket, registered.key
FROM unnest(%(buckets)s::text[], %(keys)s::text[]) AS wanted (bucket, key)
CROSS JOIN LATERAL (
    SELECT object.bucket, object.key FROM s3_object AS object
    WHERE object.bucket = wanted.bucket AND object.key = wanted.key
    LIMIT 1
) AS registered
