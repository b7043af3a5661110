-- Take delayed messages out of the queue before they are due.
-- KEYS: 1 due times, 2 delayed messages     ARGV: tags
-- Reply: how many were still there; one that became due in the meantime is a message like any other.
local cancelled = 0
for _, tag in ipairs(ARGV) do
  cancelled = cancelled + redis.call('ZREM', KEYS[1], tag)
  redis.call('HDEL', KEYS[2], tag)
end
return cancelled
