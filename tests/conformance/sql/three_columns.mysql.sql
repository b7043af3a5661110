-- candidates
SELECT mail.id FROM mail WHERE mail.status = 0 ORDER BY mail.id LIMIT :offset, :limit;

-- claim
UPDATE mail FORCE INDEX (PRIMARY) SET status=1, claim_token=:token, claim_time=UNIX_TIMESTAMP() WHERE (mail.id IN :keys) AND mail.status = 0;

-- expired
SELECT mail.id FROM mail WHERE mail.status = 1 AND mail.claim_time + :lease < UNIX_TIMESTAMP() ORDER BY mail.id LIMIT :limit;

-- fail
UPDATE mail FORCE INDEX (PRIMARY) SET status=3 WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- recover
UPDATE mail FORCE INDEX (PRIMARY) SET status=0, claim_token=NULL, claim_time=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_time + :lease < UNIX_TIMESTAMP();

-- release
UPDATE mail FORCE INDEX (PRIMARY) SET status=0, claim_token=NULL, claim_time=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- renew
UPDATE mail FORCE INDEX (PRIMARY) SET claim_time=UNIX_TIMESTAMP() WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- succeed
UPDATE mail FORCE INDEX (PRIMARY) SET status=2 WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token;

-- won
SELECT mail.id, mail.status, mail.claim_time, mail.claim_token FROM mail FORCE INDEX (PRIMARY) WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token ORDER BY mail.id;
