-- Note what a queue that expires was declared with, and its end in the same step: nothing is left behind for good.
-- KEYS: 1 the queue's meta     ARGV: 1 ms until it expires, 2.. field, value, ...
-- Reply: nil.
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return nil
