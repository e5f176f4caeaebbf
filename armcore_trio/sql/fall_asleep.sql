-- Inserts notify while somebody holds this lock exclusively; one that does not holds it shared until its commit (D1.6).
WITH sleeper AS MATERIALIZED (SELECT hashtextextended('recognition_job_queued', 0) AS lock)
SELECT CASE
    WHEN pg_try_advisory_lock(lock) THEN true
    WHEN pg_try_advisory_lock_shared(lock) THEN NOT pg_advisory_unlock_shared(lock) -- inserts are under way
    ELSE true -- another instance sleeps, and is notified for all
END
FROM sleeper
