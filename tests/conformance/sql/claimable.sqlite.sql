-- claim
UPDATE mail SET status=1, claim_token=:token, claim_time=CAST(strftime('%s', 'now') AS INTEGER), lease_seconds=:lease, worker_id=:worker WHERE mail.id IN (SELECT mail.id FROM mail WHERE mail.status = 0 ORDER BY mail.id LIMIT :limit OFFSET :param_1) AND mail.status = 0 RETURNING id;

-- due
SELECT mail.id FROM mail WHERE mail.status = 5 AND (mail.next_retry_time IS NULL OR mail.next_retry_time <= CAST(strftime('%s', 'now') AS INTEGER)) ORDER BY mail.next_retry_time, mail.id LIMIT :limit OFFSET :param_1;

-- expired
SELECT mail.id FROM mail WHERE mail.status = 1 AND mail.claim_time + coalesce(mail.lease_seconds, :lease) < CAST(strftime('%s', 'now') AS INTEGER) ORDER BY mail.id LIMIT :limit OFFSET :param_1;

-- fail
UPDATE mail SET status=3, error_message=:error WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- promote
UPDATE mail SET status=0 WHERE (mail.id IN :keys) AND mail.status = 5 AND (mail.next_retry_time IS NULL OR mail.next_retry_time <= CAST(strftime('%s', 'now') AS INTEGER)) RETURNING id;

-- recover
UPDATE mail SET status=CASE WHEN (mail.reclaim_count >= :max_reclaims) THEN 3 ELSE 0 END, error_message=CASE WHEN (mail.reclaim_count >= :max_reclaims) THEN :error ELSE mail.error_message END, reclaim_count=CASE WHEN (mail.reclaim_count < :reclaim_count_1) THEN mail.reclaim_count + :reclaim_count_2 ELSE mail.reclaim_count END, claim_token=NULL, claim_time=NULL, lease_seconds=NULL, worker_id=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_time + coalesce(mail.lease_seconds, :lease) < CAST(strftime('%s', 'now') AS INTEGER) RETURNING id;

-- release
UPDATE mail SET status=0, claim_token=NULL, claim_time=NULL, lease_seconds=NULL, worker_id=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- renew
UPDATE mail SET claim_time=CAST(strftime('%s', 'now') AS INTEGER) WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- retry
UPDATE mail SET status=5, next_retry_time=(CAST(strftime('%s', 'now') AS INTEGER) + :seconds), error_message=:error, retry_count=CASE WHEN (mail.retry_count < :retry_count_1) THEN mail.retry_count + :retry_count_2 ELSE mail.retry_count END WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- succeed
UPDATE mail SET status=2, error_message=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- won
SELECT mail.id, mail.address, mail.answer, mail.status, mail.claim_time, mail.lease_seconds, mail.claim_token, mail.worker_id, mail.retry_count, mail.reclaim_count, mail.next_retry_time, mail.error_message FROM mail WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token ORDER BY mail.id;
