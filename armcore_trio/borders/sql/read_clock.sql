-- This instant in a form that no setting of a session changes, and for how long the server has been up, in seconds (N11).
SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       extract(epoch FROM now() - pg_postmaster_start_time())::float8
