-- add_runs
INSERT INTO celery_claim_run (id, window, fire_seq, slot_start, kind, triggered_by, node, consumer_id, ordinal, consumers, attempt, state, token, boot_id, start_before, published_at, max_run_time, stop_at, lease_until, created_at, started_at, finished_at, claimed, succeeded, failed, retried, released, lost, error, pid, task_id) VALUES (:id, :window, :fire_seq, :slot_start, :kind, :triggered_by, :node, :consumer_id, :ordinal, :consumers, :attempt, :state, :token, :boot_id, :start_before, :published_at, :max_run_time, :stop_at, :lease_until, :created_at, :started_at, :finished_at, :claimed, :succeeded, :failed, :retried, :released, :lost, :error, :pid, :task_id);

-- add_window
INSERT INTO celery_claim_window (name, task, frequency, max_run_time, concurrency, max_concurrency, run_type, enabled, continuous, min_interval, message, frequency_override, max_run_time_override, concurrency_override, enabled_override, last_slot_start, active_until, fire_seq, triggered_by, triggered_at) VALUES (:name, :task, :frequency, :max_run_time, :concurrency, :max_concurrency, :run_type, :enabled, :continuous, :min_interval, :message, :frequency_override, :max_run_time_override, :concurrency_override, :enabled_override, :last_slot_start, :active_until, :fire_seq, :triggered_by, :triggered_at);

-- ages
SELECT min(celery_claim_run.id) AS min_1, max(celery_claim_run.id) AS max_1 FROM celery_claim_run;

-- attempts
SELECT celery_claim_run.node, celery_claim_run.consumer_id, max(celery_claim_run.attempt) AS attempt FROM celery_claim_run WHERE celery_claim_run.window = :window AND celery_claim_run.fire_seq = :fire_seq GROUP BY celery_claim_run.node, celery_claim_run.consumer_id;

-- bounds
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at FROM celery_claim_window WHERE celery_claim_window.name = :name;

-- clock
SELECT (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS epoch_milliseconds_1;

-- dead_runs
SELECT celery_claim_run.id, celery_claim_run.window, celery_claim_run.fire_seq, celery_claim_run.consumer_id, celery_claim_run.node FROM celery_claim_run WHERE celery_claim_run.state = :state_1 AND (celery_claim_run.lease_until <= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) OR (EXISTS (SELECT * FROM celery_claim_node WHERE celery_claim_node.node = celery_claim_run.node AND celery_claim_node.boot_id != celery_claim_run.boot_id))) ORDER BY celery_claim_run.id;

-- drop_own
DELETE FROM celery_claim_run WHERE celery_claim_run.id = :run_id AND celery_claim_run.token = :by_token AND celery_claim_run.state = :state_1;

-- drop_runs
DELETE FROM celery_claim_run WHERE celery_claim_run.id IN (:ids);

-- end
UPDATE celery_claim_run SET state=:ended, lease_until=NULL, finished_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)), claimed=:n_claimed, succeeded=:n_succeeded, failed=:n_failed, retried=:n_retried, released=:n_released, lost=:n_lost, error=:text WHERE celery_claim_run.id = :run_id AND celery_claim_run.token = :by_token AND celery_claim_run.state = :state_1;

-- ended_as
SELECT celery_claim_run.state FROM celery_claim_run WHERE celery_claim_run.id = :run_id AND celery_claim_run.token = :by_token;

-- field
SELECT :param_1 AS what, celery_claim_node.node AS node, celery_claim_node.queues AS text, celery_claim_node.running AS number, celery_claim_node.role AS role, celery_claim_node.pool_size AS size FROM celery_claim_node WHERE celery_claim_node.heartbeat_at > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) - :node_timeout AND celery_claim_node.accepting = 1 UNION ALL SELECT :param_2 AS anon_1, celery_claim_run.node, celery_claim_run.window, celery_claim_run.consumer_id, NULL AS anon_2, NULL AS anon__1 FROM celery_claim_run WHERE celery_claim_run.state = :state_1 AND celery_claim_run.start_before >= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) OR celery_claim_run.state = :state_2 AND celery_claim_run.lease_until > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) UNION ALL SELECT :param_3 AS anon_3, celery_claim_lease.owner, celery_claim_lease.name, NULL AS anon_2, NULL AS anon__1, NULL AS anon__2 FROM celery_claim_lease WHERE celery_claim_lease.name = :name_1 AND celery_claim_lease.expires_at > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) UNION ALL SELECT :param_4 AS anon_4, NULL AS anon_2, NULL AS anon__1, (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS epoch_milliseconds_1, NULL AS anon__2, NULL AS anon__3;

-- forget_window
DELETE FROM celery_claim_window WHERE celery_claim_window.name = :name;

-- free_window
UPDATE celery_claim_window SET active_until=NULL WHERE celery_claim_window.name = :window_name AND celery_claim_window.fire_seq = :fire AND NOT (EXISTS (SELECT * FROM celery_claim_run WHERE celery_claim_run.window = :window_name AND celery_claim_run.fire_seq = :fire AND (celery_claim_run.state = :state_1 AND celery_claim_run.start_before >= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) OR celery_claim_run.state = :state_2 AND celery_claim_run.lease_until > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)))));

-- lock_window
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at, (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS now FROM celery_claim_window WHERE celery_claim_window.name = :name;

-- lock_windows
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at, (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS now FROM celery_claim_window WHERE celery_claim_window.name IN (:names) ORDER BY celery_claim_window.name;

-- look
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at, (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS now FROM celery_claim_window ORDER BY celery_claim_window.name;

-- lose
UPDATE celery_claim_run SET state=:state, finished_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)), error=:error WHERE celery_claim_run.id = :run_id AND celery_claim_run.state = :state_1 AND (celery_claim_run.lease_until <= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) OR (EXISTS (SELECT * FROM celery_claim_node WHERE celery_claim_node.node = celery_claim_run.node AND celery_claim_node.boot_id != celery_claim_run.boot_id)));

-- lose_earlier_starts
UPDATE celery_claim_run SET state=:state, finished_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)), error=:error WHERE celery_claim_run.state = :state_1 AND celery_claim_run.node = :at_node AND celery_claim_run.boot_id != :boot;

-- mark_fired
UPDATE celery_claim_window SET last_slot_start=(:at - :at % coalesce(celery_claim_window.frequency_override, celery_claim_window.frequency)), active_until=(:at + coalesce(celery_claim_window.max_run_time_override, celery_claim_window.max_run_time)), fire_seq=(celery_claim_window.fire_seq + :fire_seq_1) WHERE celery_claim_window.name IN (:names);

-- mark_published
UPDATE celery_claim_run SET published_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) WHERE celery_claim_run.task_id IN (:task_ids) AND celery_claim_run.window IN (:names) AND celery_claim_run.fire_seq IN (:fires) AND celery_claim_run.published_at IS NULL;

-- mark_triggered
UPDATE celery_claim_window SET active_until=(:at + coalesce(celery_claim_window.max_run_time_override, celery_claim_window.max_run_time)), fire_seq=(celery_claim_window.fire_seq + :fire_seq_1), triggered_by=:by, triggered_at=:at WHERE celery_claim_window.name = :window_name;

-- mark_unmanned
UPDATE celery_claim_window SET last_slot_start=(:at - :at % coalesce(celery_claim_window.frequency_override, celery_claim_window.frequency)), fire_seq=(celery_claim_window.fire_seq + :fire_seq_1) WHERE celery_claim_window.name IN (:names);

-- miss
UPDATE celery_claim_run SET state=:state, finished_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)), error=:error WHERE celery_claim_run.window = :of_window AND celery_claim_run.fire_seq = :fire AND celery_claim_run.consumer_id = :consumer AND celery_claim_run.attempt = :number AND celery_claim_run.node = :to_node AND celery_claim_run.state = :state_1 AND celery_claim_run.start_before < (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER));

-- miss_overdue
UPDATE celery_claim_run SET state=:state, finished_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)), error=:error WHERE celery_claim_run.state = :state_1 AND celery_claim_run.start_before < (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER));

-- move
UPDATE celery_claim_run SET node=:new_node, attempt=(celery_claim_run.attempt + :attempt_1), published_at=NULL, task_id=:new_task_id WHERE celery_claim_run.id = :run_id AND celery_claim_run.attempt = :number AND celery_claim_run.state = :state_1;

-- renew
UPDATE celery_claim_run SET lease_until=((CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) + :timeout) WHERE celery_claim_run.id = :run_id AND celery_claim_run.token = :by_token AND celery_claim_run.state = :state_1 AND celery_claim_run.lease_until > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER));

-- start
UPDATE celery_claim_run SET node=:by_node, state=:state, token=:by_token, boot_id=:boot, stop_at=((CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) + celery_claim_run.max_run_time), lease_until=((CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) + :timeout), started_at=(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)), pid=:by_pid WHERE celery_claim_run.window = :of_window AND celery_claim_run.fire_seq = :fire AND celery_claim_run.consumer_id = :consumer AND celery_claim_run.attempt = :number AND celery_claim_run.node = :to_node AND celery_claim_run.state = :state_1 AND celery_claim_run.start_before >= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER));

-- started
SELECT celery_claim_run.id, celery_claim_run.stop_at - (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS "left", celery_claim_run.slot_start, celery_claim_run.ordinal, celery_claim_run.consumers FROM celery_claim_run WHERE celery_claim_run.window = :of_window AND celery_claim_run.fire_seq = :fire AND celery_claim_run.consumer_id = :consumer AND celery_claim_run.attempt = :number AND celery_claim_run.token = :by_token;

-- still_ours
SELECT celery_claim_run.id FROM celery_claim_run WHERE celery_claim_run.id = :run_id AND celery_claim_run.token = :by_token AND celery_claim_run.state = :state_1 AND celery_claim_run.lease_until > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER));

-- too_many
SELECT celery_claim_run.id FROM celery_claim_run WHERE celery_claim_run.id < :bound AND celery_claim_run.state IN (['done', 'empty', 'timeout', 'error', 'skipped', 'missed', 'lost']) ORDER BY celery_claim_run.id LIMIT :limit OFFSET :param_1;

-- too_old
SELECT celery_claim_run.id FROM celery_claim_run WHERE celery_claim_run.created_at < (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) - :retention AND celery_claim_run.state IN (['done', 'empty', 'timeout', 'error', 'skipped', 'missed', 'lost']) ORDER BY celery_claim_run.created_at LIMIT :limit OFFSET :param_1;

-- waiting
SELECT celery_claim_run.id, celery_claim_run.window, celery_claim_run.fire_seq, celery_claim_run.slot_start, celery_claim_run.kind, celery_claim_run.triggered_by, celery_claim_run.node, celery_claim_run.consumer_id, celery_claim_run.ordinal, celery_claim_run.consumers, celery_claim_run.attempt, celery_claim_run.state, celery_claim_run.token, celery_claim_run.boot_id, celery_claim_run.start_before, celery_claim_run.published_at, celery_claim_run.max_run_time, celery_claim_run.stop_at, celery_claim_run.lease_until, celery_claim_run.created_at, celery_claim_run.started_at, celery_claim_run.finished_at, celery_claim_run.claimed, celery_claim_run.succeeded, celery_claim_run.failed, celery_claim_run.retried, celery_claim_run.released, celery_claim_run.lost, celery_claim_run.error, celery_claim_run.pid, celery_claim_run.task_id, celery_claim_run.published_at IS NULL AS unpublished FROM celery_claim_run WHERE celery_claim_run.state = :state_1 AND celery_claim_run.start_before >= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AND coalesce(celery_claim_run.published_at, celery_claim_run.created_at) <= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) - :accept_timeout ORDER BY celery_claim_run.id LIMIT :limit OFFSET :param_1;

-- entry_add
INSERT INTO celery_claim_entry (name, last_run_at, total_run_count, schedule) VALUES (:entry_name, :at, :total_run_count, :text);

-- entry_all_entries
SELECT celery_claim_entry.name, celery_claim_entry.last_run_at, celery_claim_entry.total_run_count, celery_claim_entry.schedule FROM celery_claim_entry;

-- entry_claim
UPDATE celery_claim_entry SET last_run_at=:at, total_run_count=(celery_claim_entry.total_run_count + :total_run_count_1) WHERE celery_claim_entry.name = :entry_name AND celery_claim_entry.last_run_at = :seen AND (EXISTS (SELECT * FROM celery_claim_lease WHERE celery_claim_lease.name = :lease_name AND celery_claim_lease.owner = :by AND celery_claim_lease.epoch = :epoch AND celery_claim_lease.expires_at > (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER))));

-- entry_restart
UPDATE celery_claim_entry SET last_run_at=:at, schedule=:text WHERE celery_claim_entry.name = :entry_name AND celery_claim_entry.schedule != :text;

-- entry_undo
UPDATE celery_claim_entry SET last_run_at=:seen, total_run_count=(celery_claim_entry.total_run_count - :total_run_count_1) WHERE celery_claim_entry.name = :entry_name AND celery_claim_entry.last_run_at = :at AND celery_claim_entry.total_run_count = :counted;

-- node_add_lease
INSERT INTO celery_claim_lease (name, owner, epoch, expires_at) VALUES (:lease_name, :by, :epoch, ((CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) + :ttl));

-- node_all_nodes
SELECT celery_claim_node.node, celery_claim_node.boot_id, celery_claim_node.role, celery_claim_node.pid, celery_claim_node.started_at, celery_claim_node.heartbeat_at, celery_claim_node.accepting, celery_claim_node.pool_size, celery_claim_node.max_running, celery_claim_node.running, celery_claim_node.success, celery_claim_node."fail", celery_claim_node.version, celery_claim_node.broker_id, celery_claim_node.queues, (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) - celery_claim_node.heartbeat_at AS silent_ms FROM celery_claim_node ORDER BY celery_claim_node.node;

-- node_boot_of
SELECT celery_claim_node.boot_id FROM celery_claim_node WHERE celery_claim_node.node = :node_name;

-- node_forget
DELETE FROM celery_claim_node WHERE celery_claim_node.node = :node_name AND celery_claim_node.heartbeat_at < (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) - :silent_ms;

-- node_give_lease_up
UPDATE celery_claim_lease SET expires_at=:expires_at WHERE celery_claim_lease.name = :lease_name AND celery_claim_lease.owner = :by;

-- node_leave
DELETE FROM celery_claim_node WHERE celery_claim_node.node = :node_name AND celery_claim_node.boot_id = :boot;

-- node_read_lease
SELECT celery_claim_lease.owner, celery_claim_lease.epoch, celery_claim_lease.expires_at - (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) AS left_ms FROM celery_claim_lease WHERE celery_claim_lease.name = :lease_name;

-- node_silent
SELECT celery_claim_node.node FROM celery_claim_node WHERE celery_claim_node.heartbeat_at < (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) - :silent_ms;

-- node_take_lease
UPDATE celery_claim_lease SET epoch=CASE WHEN (celery_claim_lease.owner = :by) THEN celery_claim_lease.epoch ELSE celery_claim_lease.epoch + :epoch_1 END, owner=:by, expires_at=((CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)) + :ttl) WHERE celery_claim_lease.name = :lease_name AND (celery_claim_lease.owner = :by OR celery_claim_lease.expires_at <= (CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)));
