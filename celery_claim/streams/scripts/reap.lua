-- Remove the names of consumers that are gone, and calls to look again that nobody took back.
-- KEYS: 1 wake stream, 2.. streams     ARGV: 1 group, 2 idle time in ms
-- Reply: how many names were removed. A name with pending entries stays, for they would be lost with it; one that
-- still reads is made again by its next read. A run that is cut off leaves the rest to the next one.
local removed = 0
local calls = redis.pcall('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[2], '-', '+', 100)
if not calls.err then
  for _, call in ipairs(calls) do
    redis.call('XACK', KEYS[1], ARGV[1], call[1])
    redis.call('XDEL', KEYS[1], call[1])
  end
end
for i = 1, #KEYS do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], ARGV[1])
  if not consumers.err then
    for _, consumer in ipairs(consumers) do
      local facts = {}
      for j = 1, #consumer, 2 do
        facts[consumer[j]] = consumer[j + 1]
      end
      if facts['pending'] == 0 and facts['idle'] >= tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], facts['name'])
        removed = removed + 1
      end
    end
  end
end
return removed
