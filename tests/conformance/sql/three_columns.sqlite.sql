-- claim
UPDATE mail SET status=1, claim_token=:token, claim_time=CAST(strftime('%s', 'now') AS INTEGER) WHERE mail.id IN (SELECT mail.id FROM mail WHERE mail.status = 0 ORDER BY mail.id LIMIT :limit OFFSET :param_1) AND mail.status = 0 RETURNING id;

-- expired
SELECT mail.id FROM mail WHERE mail.status = 1 AND mail.claim_time + :lease < CAST(strftime('%s', 'now') AS INTEGER) ORDER BY mail.id LIMIT :limit OFFSET :param_1;

-- fail
UPDATE mail SET status=3 WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- recover
UPDATE mail SET status=0, claim_token=NULL, claim_time=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_time + :lease < CAST(strftime('%s', 'now') AS INTEGER) RETURNING id;

-- release
UPDATE mail SET status=0, claim_token=NULL, claim_time=NULL WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- renew
UPDATE mail SET claim_time=CAST(strftime('%s', 'now') AS INTEGER) WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- succeed
UPDATE mail SET status=2 WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token RETURNING id;

-- won
SELECT mail.id, mail.status, mail.claim_time, mail.claim_token FROM mail WHERE (mail.id IN :keys) AND mail.status = 1 AND mail.claim_token = :token ORDER BY mail.id;
