-- claim
UPDATE mail SET status=1, claim_token=:token::VARCHAR, claim_time=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT), lease_seconds=:lease::INTEGER, worker_id=:worker::VARCHAR WHERE mail.id = any(array((SELECT mail.id FROM mail WHERE mail.status = 0 ORDER BY mail.id LIMIT :limit::INTEGER FOR UPDATE SKIP LOCKED))) AND mail.status = 0 RETURNING mail.id;

-- due
SELECT mail.id FROM mail WHERE mail.status = 5 AND (mail.next_retry_time IS NULL OR mail.next_retry_time <= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT)) ORDER BY mail.next_retry_time, mail.id LIMIT :limit::INTEGER;

-- expired
SELECT mail.id FROM mail WHERE mail.status = 1 AND mail.claim_time + coalesce(mail.lease_seconds, :lease::INTEGER) < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) ORDER BY mail.id LIMIT :limit::INTEGER;

-- fail
UPDATE mail SET status=3, error_message=:error::VARCHAR WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- promote
UPDATE mail SET status=0 WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 5 AND (mail.next_retry_time IS NULL OR mail.next_retry_time <= CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT)) RETURNING mail.id;

-- recover
UPDATE mail SET status=CASE WHEN (mail.reclaim_count >= :max_reclaims::INTEGER) THEN 3 ELSE 0 END, error_message=CASE WHEN (mail.reclaim_count >= :max_reclaims::INTEGER) THEN :error::VARCHAR ELSE mail.error_message END, reclaim_count=CASE WHEN (mail.reclaim_count < :reclaim_count_1::SMALLINT) THEN mail.reclaim_count + :reclaim_count_2::SMALLINT ELSE mail.reclaim_count END, claim_token=NULL, claim_time=NULL, lease_seconds=NULL, worker_id=NULL WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_time + coalesce(mail.lease_seconds, :lease::INTEGER) < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) RETURNING mail.id;

-- release
UPDATE mail SET status=0, claim_token=NULL, claim_time=NULL, lease_seconds=NULL, worker_id=NULL WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- renew
UPDATE mail SET claim_time=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- retry
UPDATE mail SET status=5, next_retry_time=(CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) + :seconds::BIGINT), error_message=:error::VARCHAR, retry_count=CASE WHEN (mail.retry_count < :retry_count_1::SMALLINT) THEN mail.retry_count + :retry_count_2::SMALLINT ELSE mail.retry_count END WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- succeed
UPDATE mail SET status=2, error_message=NULL WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- won
SELECT mail.id, mail.address, mail.answer, mail.status, mail.claim_time, mail.lease_seconds, mail.claim_token, mail.worker_id, mail.retry_count, mail.reclaim_count, mail.next_retry_time, mail.error_message FROM mail WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR ORDER BY mail.id;
