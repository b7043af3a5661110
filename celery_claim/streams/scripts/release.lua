-- Give messages back, in their old order, where they are still ours.
-- KEYS: 1 wake stream, 2.. streams, one per message
-- ARGV: 1 group, 2 consumer, 3 "1" to count this as a delivery (and back off), 4.. ids, one per key from KEYS[2]
-- Reply: how many were given back. As many blocked readers are woken, ten at most.
local released = 0
for i = 2, #KEYS do
  local id = ARGV[i + 2]
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], id, id, 1, ARGV[2])
  if not pending.err and pending[1] then
    local count = pending[1][4]
    if ARGV[3] == '1' then
      redis.call('XCLAIM', KEYS[i], ARGV[1], '@free', 0, id, 'IDLE', 0, 'RETRYCOUNT', count, 'JUSTID')
    else
      redis.call('XCLAIM', KEYS[i], ARGV[1], '@free', 0, id, 'IDLE', '1000000000000', 'RETRYCOUNT',
        math.max(0, count - 1), 'JUSTID')
    end
    released = released + 1
  end
end
-- One entry ends the waiting of one reader, and one alone may not have room for all.
for _ = 1, math.min(released, 10) do
  redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', '100', '*', 'why', 'released')
end
return released
