-- Statements over the files of other queues, which are only ever read.
-- Each returns a job per row in the order in which it was put.

-- name: foreign_untrusted
PRAGMA trusted_schema = OFF;

-- name: foreign_tables
SELECT name FROM sqlite_master WHERE type = 'table';

-- name: foreign_columns
SELECT name FROM pragma_table_info(:table);

-- name: litequeue_jobs
-- litequeue up to 0.10, in which several queues could share a file and nothing counted claims.
SELECT data, message_id, status, in_time, lock_time, done_time, NULL, NULL
FROM {table} ORDER BY message_id;

-- name: litequeue_keyed_jobs
-- litequeue from 0.11 on, with idempotency keys and the number of claims.
SELECT data, message_id, status, in_time, lock_time, done_time, idempotency_key, claim_id
FROM {table} ORDER BY message_id;

-- name: localqueue_jobs
SELECT id, queue, payload, status, attempts, max_attempts, available_at, last_error,
    failure_reason, failure_category, job_id, dedup_key, created_at, updated_at
FROM messages ORDER BY id;
