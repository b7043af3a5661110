-- Acknowledge and delete finished messages, whoever owns them now: a late ack of finished work also cancels the
-- copy that another worker took over.
-- KEYS: streams     ARGV: 1 group, then for each stream the number of its ids and the ids
-- Reply: how many were still pending. A stream or group that is gone has nothing to settle.
-- A server that dies in between leaves messages that are acknowledged and not deleted: the next delivery of nobody,
-- they count in the length of the stream until it is purged; the append-only file has the script as one unit.
local settled, at = 0, 2
for i = 1, #KEYS do
  local count = tonumber(ARGV[at])
  local acked = redis.pcall('XACK', KEYS[i], ARGV[1], unpack(ARGV, at + 1, at + count))
  if type(acked) == 'number' then
    settled = settled + acked
  end
  redis.pcall('XDEL', KEYS[i], unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end
return settled
