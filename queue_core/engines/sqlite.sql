-- Every statement of the SQLite engine, in the order of a job's life:
-- enqueue, claim, extend, finish, promote, reap, replay, prune, counts.
--
-- State literals stand in the text, never in parameters: only then can the
-- planner match a partial index. Times are microseconds since the epoch, save
-- lease_us, which is CLOCK_MONOTONIC of the boot named in meta.
--
-- Every write of a claim is fenced: WHERE id = :id AND run = :run AND state = 'claimed'.

-- ---------------------------------------------------------------- schema

-- name: schema_tables
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- Settings that belong to a queue and not to whoever opened it.
CREATE TABLE queue (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
    max_depth INTEGER CHECK (max_depth >= 0),
    key_ttl_us INTEGER CHECK (key_ttl_us >= 0),
    keep_done_us INTEGER CHECK (keep_done_us >= 0),
    keep_dead_us INTEGER CHECK (keep_dead_us >= 0),
    created_us INTEGER NOT NULL
);

-- Who claims: a worker process, or a process that uses the library.
-- Numbers are never given twice: a claim may outlive its holder's row.
CREATE TABLE holder (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    worker TEXT NOT NULL,
    instance TEXT NOT NULL,
    pid INTEGER NOT NULL,
    boot TEXT NOT NULL,
    time_namespace TEXT NOT NULL,
    created_us INTEGER NOT NULL
);

-- Live jobs only; finished ones move to done or dead, so that a million of
-- them slow nothing. payload is NULL when the bytes are in body.
CREATE TABLE job (
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ready', 'delayed', 'claimed')),
    parked INTEGER NOT NULL DEFAULT 0,
    priority INTEGER NOT NULL DEFAULT 0,
    seq INTEGER,
    run INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER,
    deaths INTEGER NOT NULL DEFAULT 0,
    tree_deaths INTEGER NOT NULL DEFAULT 0,
    suspect INTEGER NOT NULL DEFAULT 0,
    task TEXT NOT NULL,
    job_key TEXT,
    headers TEXT,
    job_group TEXT,
    enqueued_us INTEGER NOT NULL,
    delay_us INTEGER NOT NULL DEFAULT 0,
    due_us INTEGER,
    ready_us INTEGER,
    expires_us INTEGER,
    holder INTEGER,
    lease_us INTEGER,
    claimed_us INTEGER,
    started INTEGER NOT NULL DEFAULT 0,
    payload BLOB,
    CHECK (state <> 'ready' OR (seq IS NOT NULL AND ready_us IS NOT NULL)),
    CHECK (state <> 'delayed' OR due_us IS NOT NULL),
    CHECK (state <> 'claimed' OR (holder IS NOT NULL AND lease_us IS NOT NULL))
);
CREATE INDEX job_ready ON job (queue, priority DESC, seq) WHERE state = 'ready' AND parked = 0;
CREATE INDEX job_parked ON job (task) WHERE state = 'ready' AND parked = 1;
CREATE INDEX job_suspect ON job (state, parked) WHERE suspect = 1;
CREATE INDEX job_expires ON job (queue, expires_us)
    WHERE state = 'ready' AND expires_us IS NOT NULL;
CREATE INDEX job_delayed ON job (queue, due_us, id) WHERE state = 'delayed';
CREATE INDEX job_claimed ON job (lease_us, holder) WHERE state = 'claimed';

-- Payloads over about 2 KB, so that moving a job does not rewrite them.
CREATE TABLE body (
    id INTEGER PRIMARY KEY,
    payload BLOB NOT NULL
);

-- Jobs that ended well or were cancelled. The attempt that succeeded is here
-- (run, started_us, finished_us, worker); those before it are in attempt.
CREATE TABLE done (
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('succeeded', 'cancelled')),
    priority INTEGER NOT NULL,
    run INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER,
    deaths INTEGER NOT NULL,
    task TEXT NOT NULL,
    job_key TEXT,
    headers TEXT,
    job_group TEXT,
    enqueued_us INTEGER NOT NULL,
    ready_us INTEGER,
    claimed_us INTEGER,
    started_us INTEGER,
    finished_us INTEGER NOT NULL,
    worker TEXT,
    payload BLOB
);
CREATE INDEX done_finished ON done (queue, finished_us);

CREATE TABLE dead (
    id INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    reason TEXT NOT NULL
        CHECK (reason IN ('exhausted', 'rejected', 'poison', 'expired', 'undecodable', 'invalid')),
    priority INTEGER NOT NULL,
    run INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER,
    deaths INTEGER NOT NULL,
    task TEXT NOT NULL,
    job_key TEXT,
    headers TEXT,
    job_group TEXT,
    enqueued_us INTEGER NOT NULL,
    ready_us INTEGER,
    claimed_us INTEGER,
    finished_us INTEGER NOT NULL,
    worker TEXT,
    error TEXT,
    traceback TEXT,
    payload BLOB
);
CREATE INDEX dead_queue ON dead (queue, id);
CREATE INDEX dead_finished ON dead (queue, finished_us);

-- The ledger: attempts that did not end in success, the newest hundred of a job.
CREATE TABLE attempt (
    job INTEGER NOT NULL,
    run INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    finished_us INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN (
        'succeeded', 'failed', 'rejected', 'timed_out', 'crashed', 'interrupted', 'lease_lost')),
    cause TEXT,
    error TEXT,
    worker TEXT,
    PRIMARY KEY (job, run)
) WITHOUT ROWID;

-- Keys live apart, so that the hot table carries no unique index for them.
-- expires_us is NULL while the job lives, and where the row's life decides.
CREATE TABLE idempotency (
    queue INTEGER NOT NULL,
    job_key TEXT NOT NULL,
    job INTEGER NOT NULL,
    digest BLOB NOT NULL,
    expires_us INTEGER,
    PRIMARY KEY (queue, job_key)
) WITHOUT ROWID;
CREATE INDEX idempotency_expires ON idempotency (expires_us) WHERE expires_us IS NOT NULL;

-- Every number the queue keeps about itself: depth by state, totals, histogram
-- buckets, and (queue 0) the sequence that ids and ready order are drawn from.
-- One table, so that a put dirties one page for all of them.
CREATE TABLE stat (
    queue INTEGER NOT NULL,
    task TEXT NOT NULL,
    name TEXT NOT NULL,
    label TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (queue, task, name, label)
) WITHOUT ROWID;

-- name: schema_foreign_tables
-- returns how many tables the file has: a file with tables that are not ours is refused.
SELECT count(*) FROM sqlite_master WHERE type = 'table';

-- name: schema_sequence
INSERT INTO stat (queue, task, name, label, value) VALUES (0, '', 'sequence', '', 0);

-- name: pragma_journal_mode
PRAGMA journal_mode;

-- name: pragma_wal
PRAGMA journal_mode = WAL;

-- name: pragma_application_id
PRAGMA application_id;

-- name: pragma_set_application_id
-- 'HERD' in ASCII.
PRAGMA application_id = 1212502596;

-- name: pragma_user_version
PRAGMA user_version;

-- name: pragma_set_user_version
PRAGMA user_version = 1;

-- name: pragma_synchronous
-- NORMAL: the log is flushed by us after the lock is free, not by COMMIT (group commit).
PRAGMA synchronous = NORMAL;

-- name: pragma_no_autocheckpoint
PRAGMA wal_autocheckpoint = 0;

-- name: pragma_untrusted_schema
PRAGMA trusted_schema = OFF;

-- name: pragma_busy_timeout
-- A backstop for what the flock does not cover: recovery, and writers that do not know it.
PRAGMA busy_timeout = 1000;

-- name: pragma_no_patience
PRAGMA busy_timeout = 0;

-- name: pragma_data_version
-- returns a number that changes when another connection has committed.
PRAGMA data_version;

-- name: pragma_checkpoint
PRAGMA wal_checkpoint(PASSIVE);

-- name: pragma_checkpoint_truncate
PRAGMA wal_checkpoint(TRUNCATE);

-- name: pragma_page_bytes
-- returns the size of the database in bytes.
SELECT page_count * page_size FROM pragma_page_count, pragma_page_size;

-- name: begin_write
BEGIN IMMEDIATE;

-- name: begin_read
BEGIN DEFERRED;

-- name: commit
COMMIT;

-- name: rollback
ROLLBACK;

-- name: savepoint
SAVEPOINT put;

-- name: savepoint_undo
ROLLBACK TO put;

-- name: savepoint_end
RELEASE put;

-- name: meta_get
SELECT value FROM meta WHERE name = :name;

-- name: meta_set
INSERT INTO meta (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: boot_instances
-- returns the instances that hold claims, to ask whether they still live.
SELECT DISTINCT holder.instance FROM job JOIN holder ON holder.id = job.holder
WHERE job.state = 'claimed' AND holder.boot <> :boot AND holder.instance <> '';

-- name: boot_depths
SELECT queue, task, count(*) FROM job WHERE state = 'claimed' GROUP BY queue, task;

-- name: boot_release
-- After a reboot every claim is void: its process is gone, and its lease counts another clock.
-- A power cut is nobody's fault; a job that met three is a suspect (parked 2).
UPDATE job SET state = 'ready', holder = NULL, lease_us = NULL, started = 0,
    tree_deaths = tree_deaths + 1,
    suspect = CASE WHEN tree_deaths >= 2 THEN 1 ELSE suspect END,
    parked = CASE WHEN tree_deaths >= 2 THEN 2 ELSE 0 END
WHERE state = 'claimed';

-- name: hold_insert
-- takes an id from the sequence, since those of removed rows must not come back. It runs again
-- when a claim is made for a holder whose row is gone: prune removes old ones.
INSERT INTO holder (id, worker, instance, pid, boot, time_namespace, created_us)
VALUES (:id, :worker, :instance, :pid, :boot, :time_namespace, :now);

-- name: queue_ids
SELECT id, name FROM queue;

-- name: queue_id
SELECT id FROM queue WHERE name = :name;

-- name: queue_insert
-- returns the id, also when another process was first.
INSERT INTO queue (name, created_us) VALUES (:name, :now)
ON CONFLICT (name) DO UPDATE SET name = excluded.name
RETURNING id;

-- name: queue_options
SELECT paused, max_depth, key_ttl_us, keep_done_us, keep_dead_us FROM queue WHERE id = :queue;

-- name: queue_configure
UPDATE queue SET paused = :paused, max_depth = :max_depth, key_ttl_us = :key_ttl_us,
    keep_done_us = :keep_done_us, keep_dead_us = :keep_dead_us
WHERE id = :queue;

-- name: stat_sequence
-- returns the last of :number fresh numbers; none is ever given twice.
UPDATE stat SET value = value + :number
WHERE queue = 0 AND task = '' AND name = 'sequence' AND label = ''
RETURNING value;

-- name: put_batch
SELECT value FROM stat
WHERE queue = 0 AND task = '' AND name = 'put_batch' AND label = :board;

-- name: put_batch_next
-- returns the number of a transaction that stores what several processes show on a board.
INSERT INTO stat (queue, task, name, label, value) VALUES (0, '', 'put_batch', :board, 1)
ON CONFLICT (queue, task, name, label) DO UPDATE SET value = value + 1
RETURNING value;

-- name: stat_add
INSERT INTO stat (queue, task, name, label, value) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (queue, task, name, label) DO UPDATE SET value = value + excluded.value;

-- name: stat_add_error
-- the first 20 classes of a task count apart, those after them together: a counter must never
-- move from one label to another.
INSERT INTO stat (queue, task, name, label, value)
SELECT :queue, :task, :name, CASE WHEN
    EXISTS (SELECT 1 FROM stat
        WHERE queue = :queue AND task = :task AND name = :name AND label = :label)
    OR (SELECT count(*) FROM stat
        WHERE queue = :queue AND task = :task AND name = :name AND label <> '__other__') < 20
    THEN :label ELSE '__other__' END, :value
WHERE true
ON CONFLICT (queue, task, name, label) DO UPDATE SET value = value + excluded.value;

-- ---------------------------------------------------------------- enqueue

-- name: enqueue_sequence
-- returns the last of :number fresh ids, and what bounds the queue they are for.
UPDATE stat SET value = value + :number
WHERE queue = 0 AND task = '' AND name = 'sequence' AND label = ''
RETURNING value, (SELECT max_depth FROM queue WHERE queue.id = :queue);

-- name: enqueue_job
INSERT INTO job (id, queue, state, priority, seq, max_attempts, task, job_key, headers, job_group,
    enqueued_us, delay_us, due_us, ready_us, expires_us, payload)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: enqueue_body
INSERT INTO body (id, payload) VALUES (?, ?);

-- name: enqueue_key_get
SELECT job, digest, expires_us FROM idempotency WHERE queue = :queue AND job_key = :key;

-- name: enqueue_key_set
INSERT INTO idempotency (queue, job_key, job, digest, expires_us)
VALUES (:queue, :key, :job, :digest, NULL)
ON CONFLICT (queue, job_key) DO UPDATE
SET job = excluded.job, digest = excluded.digest, expires_us = NULL;

-- name: enqueue_depth
-- returns the live jobs of a queue, which is what max_depth bounds.
SELECT coalesce(sum(value), 0) FROM stat
WHERE queue = :queue AND task = '' AND name = 'queue_jobs'
    AND label IN ('ready', 'delayed', 'claimed');

-- ---------------------------------------------------------------- claim

-- name: claim_queues
-- returns every queue that has something to claim, a queue 0 if jobs were set aside, and a queue
-- -1 if the holder has no row; read without the lock when idle, for holder 0.
SELECT id, name FROM queue
WHERE paused = 0 AND EXISTS (
    SELECT 1 FROM job WHERE job.queue = queue.id AND state = 'ready' AND parked = 0)
UNION ALL
SELECT 0, '' WHERE EXISTS (SELECT 1 FROM job WHERE task > '' AND state = 'ready' AND parked = 1)
UNION ALL
SELECT -1, '' WHERE :holder > 0 AND NOT EXISTS (SELECT 1 FROM holder WHERE id = :holder);

-- name: claim_rows
-- returns the jobs to claim next, best first, as claim_jobs will leave them.
SELECT id, run + 1, :name, task,
    coalesce(payload, (SELECT body.payload FROM body WHERE body.id = job.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, ready_us, :now, expires_us, enqueued_us + delay_us
FROM job WHERE queue = :queue AND state = 'ready' AND parked = 0
ORDER BY priority DESC, seq LIMIT :limit;

-- name: claim_jobs
-- claims the rows that claim_rows returned (ids as a JSON array), in the same transaction. Two
-- statements: RETURNING brings them in no order, and keeps a copy of each on the way.
UPDATE job SET state = 'claimed', run = run + 1, holder = :holder, lease_us = :lease,
    claimed_us = :now, started = :started AND (expires_us IS NULL OR expires_us > :now)
WHERE id IN (SELECT value FROM json_each(:ids)) AND +state = 'ready';

-- name: claim_expired
-- claims jobs of a queue that expired, for their settlement: a claim that met one clears more.
UPDATE job SET state = 'claimed', run = run + 1, holder = :holder, lease_us = :lease,
    claimed_us = :now
WHERE id IN (
    SELECT id FROM job WHERE queue = :queue AND state = 'ready' AND expires_us IS NOT NULL
        AND expires_us <= :now AND parked = 0
    ORDER BY expires_us LIMIT :limit)
RETURNING id, run;

-- name: claim_park
-- A job no handler is configured for steps out of the way, and stays ready.
UPDATE job SET state = 'ready', parked = 1, holder = NULL, lease_us = NULL, started = 0
WHERE id = ? AND run = ? AND state = 'claimed';

-- name: claim_parked
-- returns whether a parked job of these tasks (a JSON array) waits.
SELECT 1 FROM json_each(:tasks) AS wanted
WHERE EXISTS (
    SELECT 1 FROM job WHERE task = wanted.value AND state = 'ready' AND parked = 1)
LIMIT 1;

-- name: claim_parked_in
-- returns the tasks that a queue has parked jobs of.
SELECT task FROM stat
WHERE queue = :queue AND name = 'queue_parked_jobs' AND label = '' AND value > 0;

-- name: claim_parked_count
-- returns how many jobs each queue has parked of these tasks, by the numbers kept of them.
SELECT queue, task, value FROM stat
WHERE queue IN (SELECT id FROM queue) AND task IN (SELECT value FROM json_each(:tasks))
    AND name = 'queue_parked_jobs' AND label = '' AND value <> 0;

-- name: claim_unpark
UPDATE job SET parked = 0
WHERE state = 'ready' AND parked = 1 AND task IN (SELECT value FROM json_each(:tasks));

-- name: claim_held
-- returns what a holder has claimed, best first; the claimed rows are few.
SELECT job.id, run, task,
    coalesce(job.payload, (SELECT body.payload FROM body WHERE body.id = job.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, ready_us, claimed_us, expires_us, enqueued_us + delay_us, started, seq, queue
FROM job WHERE state = 'claimed' AND holder = :holder
ORDER BY priority DESC, seq;

-- name: claim_abandoned
-- returns the claims of a supervisor's holders that are not among the living (a JSON array).
SELECT job.id, run, task,
    coalesce(job.payload, (SELECT body.payload FROM body WHERE body.id = job.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, ready_us, claimed_us, expires_us, enqueued_us + delay_us, started, seq, queue,
    job.holder, suspect
FROM job JOIN holder ON holder.id = job.holder
WHERE state = 'claimed' AND instance = :instance
    AND job.holder NOT IN (SELECT value FROM json_each(:living))
ORDER BY priority DESC, seq LIMIT :limit;

-- ---------------------------------------------------------------- extend

-- name: extend_lease
UPDATE job SET lease_us = :lease WHERE id = :id AND run = :run AND state = 'claimed';

-- name: extend_holders
-- renews every lease of these holders (a JSON array) that would end before :lease.
UPDATE job SET lease_us = :lease
WHERE state = 'claimed' AND lease_us < :lease
    AND holder IN (SELECT value FROM json_each(:holders));

-- ---------------------------------------------------------------- finish

-- name: finish_rows
-- returns the claims of a batch (ids as a JSON array) that are still claimed; the
-- caller compares the runs, inside the same write transaction.
SELECT id, run, queue, task, attempts, ready_us, enqueued_us + delay_us, claimed_us, job_key,
    started
FROM job WHERE +state = 'claimed' AND id IN (SELECT value FROM json_each(:ids));

-- name: finish_is_done
SELECT 1 FROM done WHERE id = :id AND run = :run AND outcome = 'succeeded';

-- name: finish_done
-- takes id, run, started, now; by number, since a batch binds hundreds.
INSERT INTO done (id, queue, outcome, priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, started_us, finished_us, worker, payload)
SELECT id, queue, 'succeeded', priority, run, attempts + 1, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, ?3, ?4,
    (SELECT worker FROM holder WHERE holder.id = job.holder), payload
FROM job WHERE id = ?1 AND run = ?2 AND state = 'claimed';

-- name: finish_dead
INSERT INTO dead (id, queue, reason, priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, finished_us, worker, error, traceback,
    payload)
SELECT id, queue, :reason, priority, run, attempts + :charge, max_attempts, deaths + :death, task,
    job_key, headers, job_group, enqueued_us, ready_us, claimed_us, :now,
    (SELECT worker FROM holder WHERE holder.id = job.holder), :error, :traceback, payload
FROM job WHERE id = :id AND run = :run AND state = 'claimed';

-- name: finish_remove
-- takes id, run.
DELETE FROM job WHERE id = ?1 AND run = ?2 AND state = 'claimed';

-- name: finish_plain
-- the same for a worker's successes of one run, as a JSON object of id to start: one statement
-- for all of them takes half the time of one for each.
INSERT INTO done (id, queue, outcome, priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, started_us, finished_us, worker, payload)
SELECT job.id, queue, 'succeeded', priority, run, attempts + 1, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, ended.value, :now, :worker, payload
FROM json_each(:started) AS ended CROSS JOIN job
WHERE job.id = CAST(ended.key AS INTEGER) AND run = :run AND state = 'claimed';

-- name: finish_removes
-- removes what finish_plain has just stored (ids as a JSON array), each fenced by that.
DELETE FROM job WHERE id IN (SELECT value FROM json_each(:ids)) AND +state = 'claimed';

-- name: finish_ready
-- keeps seq where :seq is NULL: a released job goes back to where it stood, and so does one
-- whose worker died; another retry stands at the end. What has started does not expire.
-- A suspect waits (parked 2) until promote_suspect lets it run.
UPDATE job SET state = 'ready', holder = NULL, lease_us = NULL, started = 0,
    attempts = attempts + :charge, deaths = deaths + :death,
    tree_deaths = tree_deaths + :tree_death, seq = coalesce(:seq, seq),
    expires_us = CASE WHEN :charge THEN NULL ELSE expires_us END,
    suspect = CASE WHEN :suspect OR (:tree_death AND tree_deaths >= 2) THEN 1 ELSE suspect END,
    parked = CASE WHEN :suspect OR (:tree_death AND tree_deaths >= 2) THEN 2 ELSE 0 END,
    ready_us = CASE WHEN :charge THEN :now ELSE ready_us END
WHERE id = :id AND run = :run AND state = 'claimed';

-- name: finish_delayed
UPDATE job SET state = 'delayed', holder = NULL, lease_us = NULL, started = 0,
    attempts = attempts + :charge, deaths = deaths + :death, due_us = :due, seq = NULL,
    expires_us = CASE WHEN :charge THEN NULL ELSE expires_us END
WHERE id = :id AND run = :run AND state = 'claimed';

-- name: finish_attempt
-- runs before the row moves: the worker's name comes from the claim.
INSERT OR REPLACE INTO attempt (job, run, started_us, finished_us, outcome, cause, error, worker)
SELECT id, run, :started, :now, :outcome, :cause, :error,
    (SELECT worker FROM holder WHERE holder.id = job.holder)
FROM job WHERE id = :id AND run = :run AND state = 'claimed';

-- name: finish_ledger_trim
DELETE FROM attempt WHERE job = :id AND run <= :run - 100;

-- name: finish_key
-- starts the life of a finished job's key, where the queue sets one.
UPDATE idempotency SET expires_us = :expires
WHERE queue = :queue AND job_key = :key AND job = :id;

-- name: cancel_rows
SELECT id, queue, task, state, job_key, parked FROM job
WHERE state IN ('ready', 'delayed') AND id IN (SELECT value FROM json_each(:ids));

-- name: cancel_done
INSERT INTO done (id, queue, outcome, priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, started_us, finished_us, worker, payload)
SELECT id, queue, 'cancelled', priority, run, attempts, max_attempts, deaths, task, job_key,
    headers, job_group, enqueued_us, ready_us, claimed_us, NULL, :now, NULL, payload
FROM job WHERE id = :id AND state IN ('ready', 'delayed');

-- name: cancel_remove
DELETE FROM job WHERE id = :id AND state IN ('ready', 'delayed');

-- ---------------------------------------------------------------- promote

-- name: promote_next
-- returns each queue's earliest due time: one probe of the index a queue.
SELECT queue.id, (
    SELECT due_us FROM job WHERE job.queue = queue.id AND state = 'delayed'
    ORDER BY due_us LIMIT 1) AS due
FROM queue WHERE due IS NOT NULL;

-- name: promote_due
-- returns the due jobs of a queue, earliest first.
SELECT id FROM job WHERE queue = :queue AND state = 'delayed' AND due_us <= :now
ORDER BY due_us, id LIMIT :limit;

-- name: promote_job
-- ready_us is when it became due, not when we came by: the wait counts from there.
UPDATE job SET state = 'ready', seq = :seq, ready_us = min(due_us, :now)
WHERE id = :id AND state = 'delayed';

-- name: promote_suspects_wait
-- returns whether a suspect waits and none runs or is about to.
SELECT 1 WHERE EXISTS (
        SELECT 1 FROM job WHERE suspect = 1 AND state = 'ready' AND parked = 2)
    AND NOT EXISTS (SELECT 1 FROM job WHERE suspect = 1 AND state = 'claimed')
    AND NOT EXISTS (SELECT 1 FROM job WHERE suspect = 1 AND state = 'ready' AND parked = 0);

-- name: promote_suspect
-- lets one suspect run; the caller has asked promote_suspects_wait in this transaction.
UPDATE job SET parked = 0 WHERE id = (
    SELECT id FROM job WHERE suspect = 1 AND state = 'ready' AND parked = 2 ORDER BY id LIMIT 1)
RETURNING queue;

-- ---------------------------------------------------------------- reap

-- name: reap_next
SELECT lease_us FROM job WHERE state = 'claimed' AND (:only IS NULL OR queue = :only)
ORDER BY lease_us LIMIT 1;

-- name: reap_expired
-- returns claims whose lease ran out, with the queue's id and whether they had started.
SELECT job.id, run, task,
    coalesce(job.payload, (SELECT body.payload FROM body WHERE body.id = job.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, ready_us, claimed_us, expires_us, enqueued_us + delay_us, started, seq, queue
FROM job WHERE state = 'claimed' AND lease_us <= :now AND (:only IS NULL OR queue = :only)
ORDER BY lease_us LIMIT :limit;

-- ---------------------------------------------------------------- replay

-- name: replay_rows
SELECT id, queue, task, job_key FROM dead
WHERE id IN (SELECT value FROM json_each(:ids)) AND (:queue IS NULL OR queue = :queue);

-- name: replay_job
-- delay_us makes the latency count from now.
-- run is kept: it never goes back, so an old claim of this job stays stale.
INSERT INTO job (id, queue, state, priority, seq, run, max_attempts, task, job_key, headers,
    job_group, enqueued_us, delay_us, ready_us, payload)
SELECT id, queue, 'ready', priority, :seq, run, max_attempts, task, job_key, headers,
    job_group, enqueued_us, max(0, :now - enqueued_us), :now, payload
FROM dead WHERE id = :id;

-- name: replay_remove
DELETE FROM dead WHERE id = :id;

-- name: replay_key
UPDATE idempotency SET expires_us = NULL WHERE queue = :queue AND job_key = :key AND job = :id;

-- ---------------------------------------------------------------- prune

-- name: prune_done
-- returns finished jobs of one queue older than its retention, oldest first.
SELECT id, task, outcome, job_key FROM done
WHERE queue = :queue AND finished_us <= :before ORDER BY finished_us LIMIT :limit;

-- name: prune_dead
SELECT id, task, 'dead', job_key FROM dead
WHERE queue = :queue AND finished_us <= :before ORDER BY finished_us LIMIT :limit;

-- name: prune_done_job
DELETE FROM done WHERE id = :id;

-- name: prune_dead_job
DELETE FROM dead WHERE id = :id;

-- name: prune_body
DELETE FROM body WHERE id = :id;

-- name: prune_attempts
DELETE FROM attempt WHERE job = :id;

-- name: prune_key
-- a key whose life is that of the row goes with it; one with a life of its own stays.
DELETE FROM idempotency
WHERE queue = :queue AND job_key = :key AND job = :id AND (expires_us IS NULL OR expires_us <= :now);

-- name: prune_keys_due
SELECT 1 FROM idempotency WHERE expires_us IS NOT NULL AND expires_us <= :now LIMIT 1;

-- name: prune_keys
DELETE FROM idempotency WHERE (queue, job_key) IN (
    SELECT queue, job_key FROM idempotency
    WHERE expires_us IS NOT NULL AND expires_us <= :now LIMIT :limit);

-- name: prune_holders
-- only those of long ago that hold nothing; a holder that comes back registers again.
DELETE FROM holder WHERE created_us <= :before
    AND NOT EXISTS (SELECT 1 FROM job WHERE state = 'claimed' AND job.holder = holder.id);

-- ---------------------------------------------------------------- counts

-- name: counts_queue
SELECT task, name, label, value FROM stat WHERE queue = :queue;

-- name: counts_all
-- returns every number but those of the store itself; queue 0 is "no queue in particular".
SELECT queue, task, name, label, value FROM stat
WHERE queue > 0 OR name NOT IN ('sequence', 'put_batch');

-- name: counts_queues
SELECT id, name, paused, max_depth FROM queue;

-- name: counts_oldest_ready
-- returns when the longest-waiting ready job became ready. Order is by priority
-- first, so it steps from one priority to the next, at most 64 of them.
WITH RECURSIVE step (priority, n) AS (
    SELECT (SELECT priority FROM job WHERE queue = :queue AND state = 'ready' AND parked = 0
            ORDER BY priority DESC LIMIT 1), 1
    UNION ALL
    SELECT (SELECT priority FROM job WHERE queue = :queue AND state = 'ready' AND parked = 0
                AND priority < step.priority ORDER BY priority DESC LIMIT 1), n + 1
    FROM step WHERE step.priority IS NOT NULL AND n < 64
)
SELECT min((
    SELECT ready_us FROM job WHERE queue = :queue AND state = 'ready' AND parked = 0
        AND priority = step.priority ORDER BY seq LIMIT 1))
FROM step WHERE step.priority IS NOT NULL;

-- name: counts_claimed
-- returns per queue the oldest claim and the leases that ran out unreaped; claimed rows are few.
SELECT queue, min(claimed_us), sum(lease_us <= :now) FROM job WHERE state = 'claimed' GROUP BY queue;

-- name: counts_recent_done
-- returns examples of late; the inner limit bounds the work whatever the rows are.
SELECT id, queue, task, ready_us, started_us, finished_us, headers
FROM (SELECT * FROM done WHERE id > 0 ORDER BY id DESC LIMIT :limit)
WHERE outcome = 'succeeded' AND started_us IS NOT NULL;

-- name: counts_recent_failed
SELECT late.job, coalesce(job.queue, dead.queue, done.queue),
    coalesce(job.task, dead.task, done.task), NULL, late.started_us, late.finished_us,
    coalesce(job.headers, dead.headers, done.headers)
FROM (SELECT * FROM attempt WHERE job > 0 ORDER BY job DESC, run DESC LIMIT :limit) AS late
LEFT JOIN job ON job.id = late.job
LEFT JOIN dead ON dead.id = late.job
LEFT JOIN done ON done.id = late.job
WHERE coalesce(job.id, dead.id, done.id) IS NOT NULL;

-- name: counts_latest_dead
SELECT finished_us, id FROM dead WHERE queue = :queue ORDER BY finished_us DESC LIMIT :limit;

-- name: counts_find_live
SELECT id, run, queue, task, state,
    coalesce(payload, (SELECT body.payload FROM body WHERE body.id = job.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, due_us, ready_us, claimed_us, NULL, expires_us,
    (SELECT worker FROM holder WHERE holder.id = job.holder), NULL, NULL, NULL, NULL
FROM job WHERE id = :id;

-- name: counts_find_done
SELECT id, run, queue, task, CASE outcome WHEN 'succeeded' THEN 'done' ELSE 'cancelled' END,
    coalesce(payload, (SELECT body.payload FROM body WHERE body.id = done.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, NULL, ready_us, claimed_us, finished_us, NULL, worker, NULL, NULL, NULL, started_us
FROM done WHERE id = :id;

-- name: counts_find_dead
SELECT id, run, queue, task, 'dead',
    coalesce(payload, (SELECT body.payload FROM body WHERE body.id = dead.id)),
    attempts, max_attempts, deaths, priority, job_key, headers, job_group,
    enqueued_us, NULL, ready_us, claimed_us, finished_us, NULL, worker, reason, error, traceback,
    NULL
FROM dead WHERE id = :id;

-- name: counts_ledger
SELECT run, started_us, finished_us, outcome, cause, error, worker
FROM attempt WHERE job = :id ORDER BY run;

-- name: counts_list_live
-- returns ids of one state in id order. The plus signs keep the planner on the
-- primary key, where it can stop at the limit without sorting.
SELECT id FROM job
WHERE state = :state AND (:queue IS NULL OR +queue = :queue) AND (:task IS NULL OR task = :task)
    AND id > :after
ORDER BY id LIMIT :limit;

-- name: counts_list_done
SELECT id FROM done
WHERE outcome = :state AND (:queue IS NULL OR +queue = :queue) AND (:task IS NULL OR task = :task)
    AND id > :after
ORDER BY id LIMIT :limit;

-- name: counts_peek
-- returns the job that would be claimed next.
SELECT id FROM job WHERE queue = :queue AND state = 'ready' AND parked = 0
ORDER BY priority DESC, seq LIMIT 1;

-- name: counts_list_dead_of
-- the same for one queue, which has an index of its own.
SELECT id FROM dead
WHERE queue = :queue AND (:task IS NULL OR task = :task)
    AND (:reason IS NULL OR reason = :reason) AND id > :after
ORDER BY id LIMIT :limit;

-- name: counts_list_dead
SELECT id FROM dead
WHERE (:queue IS NULL OR +queue = :queue) AND (:task IS NULL OR task = :task)
    AND (:reason IS NULL OR reason = :reason) AND id > :after
ORDER BY id LIMIT :limit;
