-- Statements of upkeep: import, vacuum, backup, check, recount, newest, diagnostics.
-- None is on the way of a job; each may read whole tables, and says so.

-- ---------------------------------------------------------------- import

-- name: import_origin_get
-- Origins of imported jobs stand among the keys, as those of queue 0, which is no queue.
SELECT job FROM idempotency WHERE queue = 0 AND job_key = :origin;

-- name: import_origins
-- returns those of some origins (a JSON array) that have been imported.
SELECT job_key FROM idempotency
WHERE queue = 0 AND job_key IN (SELECT value FROM json_each(:origins));

-- name: import_origin_set
INSERT INTO idempotency (queue, job_key, job, digest, expires_us)
VALUES (0, :origin, :job, x'', NULL);

-- name: import_live
INSERT INTO job (id, queue, state, priority, seq, run, attempts, max_attempts, task, job_key,
    headers, enqueued_us, delay_us, due_us, ready_us, payload)
VALUES (:id, :queue, :state, :priority, :seq, :attempts, :attempts, :max_attempts, :task, :key,
    :headers, :enqueued, max(0, :now - :enqueued), :due, :ready, :payload);

-- name: import_dead
INSERT INTO dead (id, queue, reason, priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, finished_us, worker, error, traceback,
    payload)
VALUES (:id, :queue, :reason, :priority, :attempts, :attempts, :max_attempts, 0, :task, :key,
    :headers, NULL, :enqueued, NULL, NULL, :finished, NULL, :error, NULL, :payload);

-- name: import_done
INSERT INTO done (id, queue, outcome, priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, started_us, finished_us, worker, payload)
VALUES (:id, :queue, 'succeeded', :priority, :attempts, :attempts, :max_attempts, 0, :task, :key,
    :headers, NULL, :enqueued, NULL, NULL, NULL, :finished, NULL, :payload);

-- name: import_attempt
-- the last attempt the job had in its old home; when it began is not known there.
INSERT INTO attempt (job, run, started_us, finished_us, outcome, cause, error, worker)
VALUES (:id, :attempts, :finished, :finished, 'failed', 'imported', :error, NULL);

-- ---------------------------------------------------------------- vacuum

-- name: vacuum_pack
VACUUM;

-- ---------------------------------------------------------------- backup

-- name: backup_pin
-- any read begins the snapshot, which then stays the same however long the copy takes.
SELECT count(*) FROM sqlite_master;

-- name: backup_detach
-- a copy belongs to no boot: whoever opens it voids its claims and skips ids, as after a reboot.
UPDATE meta SET value = 'backup' WHERE name = 'boot';

-- name: backup_journal
PRAGMA journal_mode = DELETE;

-- ---------------------------------------------------------------- check

-- name: check_quick
PRAGMA quick_check(100);

-- name: check_full
PRAGMA integrity_check(100);

-- name: check_no_payload
-- returns jobs whose payload is nowhere; reads whole tables.
SELECT id FROM (
    SELECT id, payload FROM job UNION ALL SELECT id, payload FROM done
    UNION ALL SELECT id, payload FROM dead) AS stored
WHERE payload IS NULL AND NOT EXISTS (SELECT 1 FROM body WHERE body.id = stored.id)
LIMIT :limit;

-- name: check_no_job
-- returns payloads whose job is nowhere; reads the whole table.
SELECT id FROM body
WHERE NOT EXISTS (SELECT 1 FROM job WHERE job.id = body.id)
    AND NOT EXISTS (SELECT 1 FROM done WHERE done.id = body.id)
    AND NOT EXISTS (SELECT 1 FROM dead WHERE dead.id = body.id)
LIMIT :limit;

-- name: check_twice
-- returns jobs that stand in two places at once.
SELECT id FROM job WHERE id IN (SELECT id FROM done UNION ALL SELECT id FROM dead)
UNION ALL SELECT id FROM done WHERE id IN (SELECT id FROM dead)
LIMIT :limit;

-- ---------------------------------------------------------------- recount

-- name: recount_rows
-- returns the number of jobs of each queue in each state, from the rows; reads whole tables.
SELECT queue, state, count(*) FROM job GROUP BY queue, state
UNION ALL
SELECT queue, CASE outcome WHEN 'succeeded' THEN 'done' ELSE 'cancelled' END AS state, count(*)
FROM done GROUP BY queue, state
UNION ALL
SELECT queue, 'dead', count(*) FROM dead GROUP BY queue;

-- name: recount_stored
SELECT queue, label, value FROM stat WHERE task = '' AND name = 'queue_jobs';

-- ---------------------------------------------------------------- newest

-- name: newest_live
-- returns ids of one state, largest first. The plus signs keep the planner on the
-- primary key, where it can stop at the limit without sorting.
SELECT id FROM job
WHERE +state = :state AND (:queue IS NULL OR +queue = :queue) AND (:task IS NULL OR task = :task)
    AND id < :before
ORDER BY id DESC LIMIT :limit;

-- name: newest_done
SELECT id FROM done
WHERE +outcome = :state AND (:queue IS NULL OR +queue = :queue) AND (:task IS NULL OR task = :task)
    AND id < :before
ORDER BY id DESC LIMIT :limit;

-- name: newest_dead
SELECT id FROM dead
WHERE (:queue IS NULL OR +queue = :queue) AND (:task IS NULL OR task = :task)
    AND (:reason IS NULL OR reason = :reason) AND id < :before
ORDER BY id DESC LIMIT :limit;

-- ---------------------------------------------------------------- diagnostics

-- name: diagnostics_pages
SELECT page_size, page_count, freelist_count, journal_mode, user_version
FROM pragma_page_size, pragma_page_count, pragma_freelist_count, pragma_journal_mode,
    pragma_user_version;

-- name: diagnostics_leases
SELECT count(*), coalesce(sum(lease_us <= :now), 0), min(lease_us) FROM job
WHERE state = 'claimed';

-- name: diagnostics_holders
SELECT count(*) FROM holder;
