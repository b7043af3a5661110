-- claim
UPDATE mail SET status=1, claim_token=:token::VARCHAR, claim_time=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) WHERE mail.id = any(array((SELECT mail.id FROM mail WHERE mail.status = 0 ORDER BY mail.id LIMIT :limit::INTEGER FOR UPDATE SKIP LOCKED))) AND mail.status = 0 RETURNING mail.id;

-- expired
SELECT mail.id FROM mail WHERE mail.status = 1 AND mail.claim_time + :lease::INTEGER < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) ORDER BY mail.id LIMIT :limit::INTEGER;

-- fail
UPDATE mail SET status=3 WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- recover
UPDATE mail SET status=0, claim_token=NULL, claim_time=NULL WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_time + :lease::INTEGER < CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) RETURNING mail.id;

-- release
UPDATE mail SET status=0, claim_token=NULL, claim_time=NULL WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- renew
UPDATE mail SET claim_time=CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT) WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- succeed
UPDATE mail SET status=2 WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR RETURNING mail.id;

-- won
SELECT mail.id, mail.status, mail.claim_time, mail.claim_token FROM mail WHERE mail.id = ANY (:keys::BIGINT[]) AND mail.status = 1 AND mail.claim_token = :token::VARCHAR ORDER BY mail.id;
