-- Keep a message until it is due by the server's clock, whatever the clocks of publisher and worker say.
-- KEYS: 1 sorted set of due times, 2 hash of delayed messages, 3 wake stream
-- ARGV: 1 tag, 2 milliseconds from now, 3 index of the priority's stream (from 1), 4.. field, value, ...
-- Reply: due time in ms. A message that became the first one due wakes one blocked reader.
local time = redis.call('TIME')
local due = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])
local fields = {}
for i = 4, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
redis.call('HSET', KEYS[2], ARGV[1], cmsgpack.pack({ tonumber(ARGV[3]), fields }))
redis.call('ZADD', KEYS[1], string.format('%.0f', due), ARGV[1])
if redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1] then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', '100', '*', 'why', 'due')
end
return string.format('%.0f', due)
