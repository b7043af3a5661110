-- Acknowledge and delete finished messages, whoever owns them now: a late ack of finished work also cancels the
-- copy that another worker took over.
-- KEYS: streams, one per message     ARGV: 1 group, 2.. ids, one per key
-- Reply: how many were still pending.
local settled = 0
for i = 1, #KEYS do
  local acked = redis.pcall('XACK', KEYS[i], ARGV[1], ARGV[i + 1])
  if type(acked) == 'number' then
    settled = settled + acked
  end
  redis.pcall('XDEL', KEYS[i], ARGV[i + 1])
end
return settled
