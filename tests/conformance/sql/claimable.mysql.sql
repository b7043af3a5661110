-- candidates
SELECT mail.id FROM mail WHERE mail.status = 0 ORDER BY mail.id LIMIT :offset, :limit;

-- claim
UPDATE mail FORCE INDEX (PRIMARY) SET status=1, claim_token=:token, claim_time=UNIX_TIMESTAMP(), lease_seconds=:lease, worker_id=:worker WHERE (mail.id IN :keys) AND mail.status = 0;

-- due
SELECT mail.id FROM mail WHERE mail.status = 5 AND (mail.next_retry_time IS NULL OR mail.next_retry_time <= UNIX_TIMESTAMP()) ORDER BY mail.next_retry_time, mail.id LIMIT :limit;

-- expired
SELECT mail.id FROM mail WHERE mail.status = 1 AND mail.claim_time + coalesce(mail.lease_seconds, :lease) < UNIX_TIMESTAMP() ORDER BY mail.id LIMIT :limit;

-- fail
UPDATE mail FORCE INDEX (PRIMARY) SET status=3, error_message=:error WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- promote
UPDATE mail FORCE INDEX (PRIMARY) SET status=0 WHERE (mail.id IN :keys) AND mail.status = 5 AND (mail.next_retry_time IS NULL OR mail.next_retry_time <= UNIX_TIMESTAMP());

-- recover
UPDATE mail FORCE INDEX (PRIMARY) SET status=CASE WHEN (mail.reclaim_count >= :max_reclaims) THEN 3 ELSE 0 END, error_message=CASE WHEN (mail.reclaim_count >= :max_reclaims) THEN :error ELSE mail.error_message END, reclaim_count=CASE WHEN (mail.reclaim_count < :reclaim_count_1) THEN mail.reclaim_count + :reclaim_count_2 ELSE mail.reclaim_count END, claim_token=NULL, claim_time=NULL, lease_seconds=NULL, worker_id=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_time + coalesce(mail.lease_seconds, :lease) < UNIX_TIMESTAMP();

-- release
UPDATE mail FORCE INDEX (PRIMARY) SET status=0, claim_token=NULL, claim_time=NULL, lease_seconds=NULL, worker_id=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- renew
UPDATE mail FORCE INDEX (PRIMARY) SET claim_time=UNIX_TIMESTAMP() WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- retry
UPDATE mail FORCE INDEX (PRIMARY) SET status=5, next_retry_time=(UNIX_TIMESTAMP() + :seconds), error_message=:error, retry_count=CASE WHEN (mail.retry_count < :retry_count_1) THEN mail.retry_count + :retry_count_2 ELSE mail.retry_count END WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- succeed
UPDATE mail FORCE INDEX (PRIMARY) SET status=2, error_message=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- won
SELECT mail.id, mail.address, mail.answer, mail.status, mail.claim_time, mail.lease_seconds, mail.claim_token, mail.worker_id, mail.retry_count, mail.reclaim_count, mail.next_retry_time, mail.error_message FROM mail FORCE INDEX (PRIMARY) WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token ORDER BY mail.id;
