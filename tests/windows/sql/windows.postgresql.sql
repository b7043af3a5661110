-- add_runs
INSERT INTO celery_claim_run (id, "window", fire_seq, slot_start, kind, triggered_by, node, consumer_id, ordinal, consumers, attempt, state, token, boot_id, start_before, published_at, max_run_time, stop_at, lease_until, created_at, started_at, finished_at, claimed, succeeded, failed, retried, released, lost, error, pid, task_id) VALUES (:id::BIGINT, :window::VARCHAR, :fire_seq::BIGINT, :slot_start::BIGINT, :kind::VARCHAR, :triggered_by::VARCHAR, :node::VARCHAR, :consumer_id::INTEGER, :ordinal::INTEGER, :consumers::INTEGER, :attempt::INTEGER, :state::VARCHAR, :token::VARCHAR, :boot_id::VARCHAR, :start_before::BIGINT, :published_at::BIGINT, :max_run_time::BIGINT, :stop_at::BIGINT, :lease_until::BIGINT, :created_at::BIGINT, :started_at::BIGINT, :finished_at::BIGINT, :claimed::INTEGER, :succeeded::INTEGER, :failed::INTEGER, :retried::INTEGER, :released::INTEGER, :lost::INTEGER, :error::VARCHAR, :pid::INTEGER, :task_id::VARCHAR);

-- add_window
INSERT INTO celery_claim_window (name, task, frequency, max_run_time, concurrency, max_concurrency, run_type, enabled, continuous, min_interval, message, frequency_override, max_run_time_override, concurrency_override, enabled_override, last_slot_start, active_until, fire_seq, triggered_by, triggered_at) VALUES (:name::VARCHAR, :task::VARCHAR, :frequency::BIGINT, :max_run_time::BIGINT, :concurrency::INTEGER, :max_concurrency::INTEGER, :run_type::VARCHAR, :enabled, :continuous, :min_interval::BIGINT, :message::VARCHAR, :frequency_override::BIGINT, :max_run_time_override::BIGINT, :concurrency_override::INTEGER, :enabled_override, :last_slot_start::BIGINT, :active_until::BIGINT, :fire_seq::BIGINT, :triggered_by::VARCHAR, :triggered_at::BIGINT);

-- ages
SELECT min(celery_claim_run.id) AS min_1, max(celery_claim_run.id) AS max_1 FROM celery_claim_run;

-- attempts
SELECT celery_claim_run.node, celery_claim_run.consumer_id, max(celery_claim_run.attempt) AS attempt FROM celery_claim_run WHERE celery_claim_run."window" = :window::VARCHAR AND celery_claim_run.fire_seq = :fire_seq::BIGINT GROUP BY celery_claim_run.node, celery_claim_run.consumer_id;

-- bounds
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at FROM celery_claim_window WHERE celery_claim_window.name = :name::VARCHAR;

-- clock
SELECT CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS epoch_milliseconds_1;

-- dead_runs
SELECT celery_claim_run.id, celery_claim_run."window", celery_claim_run.fire_seq, celery_claim_run.consumer_id, celery_claim_run.node FROM celery_claim_run WHERE celery_claim_run.state = :state_1::VARCHAR AND (celery_claim_run.lease_until <= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) OR (EXISTS (SELECT * FROM celery_claim_node WHERE celery_claim_node.node = celery_claim_run.node AND celery_claim_node.boot_id != celery_claim_run.boot_id))) ORDER BY celery_claim_run.id;

-- drop_own
DELETE FROM celery_claim_run WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.token = :by_token::VARCHAR AND celery_claim_run.state = :state_1::VARCHAR;

-- drop_runs
DELETE FROM celery_claim_run WHERE celery_claim_run.id IN (:ids);

-- end
UPDATE celery_claim_run SET state=:ended::VARCHAR, lease_until=NULL, finished_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT), claimed=:n_claimed::INTEGER, succeeded=:n_succeeded::INTEGER, failed=:n_failed::INTEGER, retried=:n_retried::INTEGER, released=:n_released::INTEGER, lost=:n_lost::INTEGER, error=:text::VARCHAR WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.token = :by_token::VARCHAR AND celery_claim_run.state = :state_1::VARCHAR;

-- ended_as
SELECT celery_claim_run.state FROM celery_claim_run WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.token = :by_token::VARCHAR;

-- field
SELECT :param_1::VARCHAR AS what, celery_claim_node.node AS node, celery_claim_node.queues AS text, celery_claim_node.running AS number, celery_claim_node.role AS role, celery_claim_node.pool_size AS size FROM celery_claim_node WHERE celery_claim_node.heartbeat_at > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) - :node_timeout::BIGINT AND celery_claim_node.accepting = true UNION ALL SELECT :param_2::VARCHAR AS anon_1, celery_claim_run.node, celery_claim_run."window", celery_claim_run.consumer_id, NULL AS anon_2, NULL AS anon__1 FROM celery_claim_run WHERE celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.start_before >= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) OR celery_claim_run.state = :state_2::VARCHAR AND celery_claim_run.lease_until > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) UNION ALL SELECT :param_3::VARCHAR AS anon_3, celery_claim_lease.owner, celery_claim_lease.name, NULL AS anon_2, NULL AS anon__1, NULL AS anon__2 FROM celery_claim_lease WHERE celery_claim_lease.name = :name_1::VARCHAR AND celery_claim_lease.expires_at > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) UNION ALL SELECT :param_4::VARCHAR AS anon_4, NULL AS anon_2, NULL AS anon__1, CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS epoch_milliseconds_1, NULL AS anon__2, NULL AS anon__3;

-- forget_window
DELETE FROM celery_claim_window WHERE celery_claim_window.name = :name::VARCHAR;

-- free_window
UPDATE celery_claim_window SET active_until=NULL WHERE celery_claim_window.name = :window_name::VARCHAR AND celery_claim_window.fire_seq = :fire::BIGINT AND NOT (EXISTS (SELECT * FROM celery_claim_run WHERE celery_claim_run."window" = :window_name::VARCHAR AND celery_claim_run.fire_seq = :fire::BIGINT AND (celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.start_before >= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) OR celery_claim_run.state = :state_2::VARCHAR AND celery_claim_run.lease_until > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT))));

-- lock_window
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at, CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS now FROM celery_claim_window WHERE celery_claim_window.name = :name::VARCHAR FOR UPDATE;

-- lock_windows
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at, CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS now FROM celery_claim_window WHERE celery_claim_window.name IN (:names) ORDER BY celery_claim_window.name FOR UPDATE;

-- look
SELECT celery_claim_window.name, celery_claim_window.task, celery_claim_window.frequency, celery_claim_window.max_run_time, celery_claim_window.concurrency, celery_claim_window.max_concurrency, celery_claim_window.run_type, celery_claim_window.enabled, celery_claim_window.continuous, celery_claim_window.min_interval, celery_claim_window.message, celery_claim_window.frequency_override, celery_claim_window.max_run_time_override, celery_claim_window.concurrency_override, celery_claim_window.enabled_override, celery_claim_window.last_slot_start, celery_claim_window.active_until, celery_claim_window.fire_seq, celery_claim_window.triggered_by, celery_claim_window.triggered_at, CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS now FROM celery_claim_window ORDER BY celery_claim_window.name;

-- lose
UPDATE celery_claim_run SET state=:state::VARCHAR, finished_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT), error=:error::VARCHAR WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.state = :state_1::VARCHAR AND (celery_claim_run.lease_until <= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) OR (EXISTS (SELECT * FROM celery_claim_node WHERE celery_claim_node.node = celery_claim_run.node AND celery_claim_node.boot_id != celery_claim_run.boot_id)));

-- lose_earlier_starts
UPDATE celery_claim_run SET state=:state::VARCHAR, finished_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT), error=:error::VARCHAR WHERE celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.node = :at_node::VARCHAR AND celery_claim_run.boot_id != :boot::VARCHAR;

-- mark_fired
UPDATE celery_claim_window SET last_slot_start=(:at::BIGINT - :at::BIGINT % coalesce(celery_claim_window.frequency_override, celery_claim_window.frequency)), active_until=(:at::BIGINT + coalesce(celery_claim_window.max_run_time_override, celery_claim_window.max_run_time)), fire_seq=(celery_claim_window.fire_seq + :fire_seq_1::BIGINT) WHERE celery_claim_window.name IN (:names);

-- mark_published
UPDATE celery_claim_run SET published_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) WHERE celery_claim_run.task_id IN (:task_ids) AND celery_claim_run."window" IN (:names) AND celery_claim_run.fire_seq IN (:fires) AND celery_claim_run.published_at IS NULL;

-- mark_triggered
UPDATE celery_claim_window SET active_until=(:at::BIGINT + coalesce(celery_claim_window.max_run_time_override, celery_claim_window.max_run_time)), fire_seq=(celery_claim_window.fire_seq + :fire_seq_1::BIGINT), triggered_by=:by::VARCHAR, triggered_at=:at::BIGINT WHERE celery_claim_window.name = :window_name::VARCHAR;

-- mark_unmanned
UPDATE celery_claim_window SET last_slot_start=(:at::BIGINT - :at::BIGINT % coalesce(celery_claim_window.frequency_override, celery_claim_window.frequency)), fire_seq=(celery_claim_window.fire_seq + :fire_seq_1::BIGINT) WHERE celery_claim_window.name IN (:names);

-- miss
UPDATE celery_claim_run SET state=:state::VARCHAR, finished_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT), error=:error::VARCHAR WHERE celery_claim_run."window" = :of_window::VARCHAR AND celery_claim_run.fire_seq = :fire::BIGINT AND celery_claim_run.consumer_id = :consumer::INTEGER AND celery_claim_run.attempt = :number::INTEGER AND celery_claim_run.node = :to_node::VARCHAR AND celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.start_before < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT);

-- miss_overdue
UPDATE celery_claim_run SET state=:state::VARCHAR, finished_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT), error=:error::VARCHAR WHERE celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.start_before < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT);

-- move
UPDATE celery_claim_run SET node=:new_node::VARCHAR, attempt=(celery_claim_run.attempt + :attempt_1::INTEGER), published_at=NULL, task_id=:new_task_id::VARCHAR WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.attempt = :number::INTEGER AND celery_claim_run.state = :state_1::VARCHAR;

-- renew
UPDATE celery_claim_run SET lease_until=(CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) + :timeout::BIGINT) WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.token = :by_token::VARCHAR AND celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.lease_until > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT);

-- start
UPDATE celery_claim_run SET node=:by_node::VARCHAR, state=:state::VARCHAR, token=:by_token::VARCHAR, boot_id=:boot::VARCHAR, stop_at=(CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) + celery_claim_run.max_run_time), lease_until=(CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) + :timeout::BIGINT), started_at=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT), pid=:by_pid::INTEGER WHERE celery_claim_run."window" = :of_window::VARCHAR AND celery_claim_run.fire_seq = :fire::BIGINT AND celery_claim_run.consumer_id = :consumer::INTEGER AND celery_claim_run.attempt = :number::INTEGER AND celery_claim_run.node = :to_node::VARCHAR AND celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.start_before >= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT);

-- started
SELECT celery_claim_run.id, celery_claim_run.stop_at - CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS "left", celery_claim_run.slot_start, celery_claim_run.ordinal, celery_claim_run.consumers FROM celery_claim_run WHERE celery_claim_run."window" = :of_window::VARCHAR AND celery_claim_run.fire_seq = :fire::BIGINT AND celery_claim_run.consumer_id = :consumer::INTEGER AND celery_claim_run.attempt = :number::INTEGER AND celery_claim_run.token = :by_token::VARCHAR;

-- still_ours
SELECT celery_claim_run.id FROM celery_claim_run WHERE celery_claim_run.id = :run_id::BIGINT AND celery_claim_run.token = :by_token::VARCHAR AND celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.lease_until > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT);

-- too_many
SELECT celery_claim_run.id FROM celery_claim_run WHERE celery_claim_run.id < :bound::BIGINT AND celery_claim_run.state IN (['done', 'empty', 'timeout', 'error', 'skipped', 'missed', 'lost']) ORDER BY celery_claim_run.id LIMIT :limit::INTEGER;

-- too_old
SELECT celery_claim_run.id FROM celery_claim_run WHERE celery_claim_run.created_at < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) - :retention::BIGINT AND celery_claim_run.state IN (['done', 'empty', 'timeout', 'error', 'skipped', 'missed', 'lost']) ORDER BY celery_claim_run.created_at LIMIT :limit::INTEGER;

-- waiting
SELECT celery_claim_run.id, celery_claim_run."window", celery_claim_run.fire_seq, celery_claim_run.slot_start, celery_claim_run.kind, celery_claim_run.triggered_by, celery_claim_run.node, celery_claim_run.consumer_id, celery_claim_run.ordinal, celery_claim_run.consumers, celery_claim_run.attempt, celery_claim_run.state, celery_claim_run.token, celery_claim_run.boot_id, celery_claim_run.start_before, celery_claim_run.published_at, celery_claim_run.max_run_time, celery_claim_run.stop_at, celery_claim_run.lease_until, celery_claim_run.created_at, celery_claim_run.started_at, celery_claim_run.finished_at, celery_claim_run.claimed, celery_claim_run.succeeded, celery_claim_run.failed, celery_claim_run.retried, celery_claim_run.released, celery_claim_run.lost, celery_claim_run.error, celery_claim_run.pid, celery_claim_run.task_id, celery_claim_run.published_at IS NULL AS unpublished FROM celery_claim_run WHERE celery_claim_run.state = :state_1::VARCHAR AND celery_claim_run.start_before >= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AND coalesce(celery_claim_run.published_at, celery_claim_run.created_at) <= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) - :accept_timeout::BIGINT ORDER BY celery_claim_run.id LIMIT :limit::INTEGER;

-- entry_add
INSERT INTO celery_claim_entry (name, last_run_at, total_run_count, schedule) VALUES (:entry_name::VARCHAR, :at::BIGINT, :total_run_count::BIGINT, :text::VARCHAR);

-- entry_all_entries
SELECT celery_claim_entry.name, celery_claim_entry.last_run_at, celery_claim_entry.total_run_count, celery_claim_entry.schedule FROM celery_claim_entry;

-- entry_claim
UPDATE celery_claim_entry SET last_run_at=:at::BIGINT, total_run_count=(celery_claim_entry.total_run_count + :total_run_count_1::BIGINT) WHERE celery_claim_entry.name = :entry_name::VARCHAR AND celery_claim_entry.last_run_at = :seen::BIGINT AND (EXISTS (SELECT * FROM celery_claim_lease WHERE celery_claim_lease.name = :lease_name::VARCHAR AND celery_claim_lease.owner = :by::VARCHAR AND celery_claim_lease.epoch = :epoch::BIGINT AND celery_claim_lease.expires_at > CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT)));

-- entry_restart
UPDATE celery_claim_entry SET last_run_at=:at::BIGINT, schedule=:text::VARCHAR WHERE celery_claim_entry.name = :entry_name::VARCHAR AND celery_claim_entry.schedule != :text::VARCHAR;

-- entry_undo
UPDATE celery_claim_entry SET last_run_at=:seen::BIGINT, total_run_count=(celery_claim_entry.total_run_count - :total_run_count_1::BIGINT) WHERE celery_claim_entry.name = :entry_name::VARCHAR AND celery_claim_entry.last_run_at = :at::BIGINT AND celery_claim_entry.total_run_count = :counted::BIGINT;

-- node_add_lease
INSERT INTO celery_claim_lease (name, owner, epoch, expires_at) VALUES (:lease_name::VARCHAR, :by::VARCHAR, :epoch::BIGINT, (CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) + :ttl::BIGINT));

-- node_all_nodes
SELECT celery_claim_node.node, celery_claim_node.boot_id, celery_claim_node.role, celery_claim_node.pid, celery_claim_node.started_at, celery_claim_node.heartbeat_at, celery_claim_node.accepting, celery_claim_node.pool_size, celery_claim_node.max_running, celery_claim_node.running, celery_claim_node.success, celery_claim_node.fail, celery_claim_node.version, celery_claim_node.broker_id, celery_claim_node.queues, CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) - celery_claim_node.heartbeat_at AS silent_ms FROM celery_claim_node ORDER BY celery_claim_node.node;

-- node_boot_of
SELECT celery_claim_node.boot_id FROM celery_claim_node WHERE celery_claim_node.node = :node_name::VARCHAR;

-- node_forget
DELETE FROM celery_claim_node WHERE celery_claim_node.node = :node_name::VARCHAR AND celery_claim_node.heartbeat_at < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) - :silent_ms::BIGINT;

-- node_give_lease_up
UPDATE celery_claim_lease SET expires_at=:expires_at::BIGINT WHERE celery_claim_lease.name = :lease_name::VARCHAR AND celery_claim_lease.owner = :by::VARCHAR;

-- node_leave
DELETE FROM celery_claim_node WHERE celery_claim_node.node = :node_name::VARCHAR AND celery_claim_node.boot_id = :boot::VARCHAR;

-- node_read_lease
SELECT celery_claim_lease.owner, celery_claim_lease.epoch, celery_claim_lease.expires_at - CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) AS left_ms FROM celery_claim_lease WHERE celery_claim_lease.name = :lease_name::VARCHAR;

-- node_silent
SELECT celery_claim_node.node FROM celery_claim_node WHERE celery_claim_node.heartbeat_at < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) - :silent_ms::BIGINT;

-- node_take_lease
UPDATE celery_claim_lease SET epoch=CASE WHEN (celery_claim_lease.owner = :by::VARCHAR) THEN celery_claim_lease.epoch ELSE celery_claim_lease.epoch + :epoch_1::BIGINT END, owner=:by::VARCHAR, expires_at=(CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT) + :ttl::BIGINT) WHERE celery_claim_lease.name = :lease_name::VARCHAR AND (celery_claim_lease.owner = :by::VARCHAR OR celery_claim_lease.expires_at <= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT));
