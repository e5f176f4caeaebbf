-- The jobs a batch of messages names, locked in id order so that two batches never wait for each other in a circle (D1.2).
SELECT id, file_id, status::text, result_msg_id::text
FROM recognition_job
WHERE id = ANY (%(ids)s::uuid[])
ORDER BY id
FOR UPDATE
