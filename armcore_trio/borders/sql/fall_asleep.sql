-- Inserts notify while somebody holds this lock exclusively; one that does not holds it shared until its commit (D1.6).
-- Its number is `armcore` in ASCII.
SELECT CASE
    WHEN pg_try_advisory_lock(27428886886183525) THEN true
    WHEN pg_try_advisory_lock_shared(27428886886183525) THEN NOT pg_advisory_unlock_shared(27428886886183525) -- inserts are under way
    ELSE true -- another instance sleeps, and is notified for all
END
