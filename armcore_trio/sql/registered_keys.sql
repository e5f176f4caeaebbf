-- Which of the objects a batch of messages wants to register are registered already (D4.4).
SELECT object.bucket, object.key
FROM s3_object AS object
JOIN unnest(%(buckets)s::text[], %(keys)s::text[]) AS wanted (bucket, key) USING (bucket, key)
