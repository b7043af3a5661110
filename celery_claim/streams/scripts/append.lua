-- Append one message to a queue, under the limits that the queue was declared with, now or when it is due.
-- KEYS: 1 the queue's meta, 2 the stream of the message's priority, 3 due times, 4 delayed messages, 5 wake stream,
--       6.. all streams of the queue
-- ARGV: 1 "1" when the queue must still exist (it expires), 2 ms from now until it is due (0 is at once),
--       3 tag of a delayed message, 4 index of the priority's stream (from 1), 5.. field, value, ...
-- Reply: the entry's id or the due time in ms; "gone" when the queue had to exist and does not; "full" at max_length.
-- Nothing is written before the checks. A delayed message is written to the hash first: a run that is cut off after
-- that (no memory) answers with an error and leaves a message that is never due, which the publisher sends again.
-- The due time is the server's, so neither the publisher's nor a worker's clock matters. A message that became the
-- first one due wakes a blocked reader.
local limits = redis.call('HMGET', KEYS[1], 'expires', 'max_length')
if ARGV[1] == '1' and redis.call('EXISTS', KEYS[1]) == 0 then
  return 'gone'
end
if limits[2] then
  local length = redis.call('ZCARD', KEYS[3])
  for i = 6, #KEYS do
    length = length + redis.call('XLEN', KEYS[i])
  end
  if length >= tonumber(limits[2]) then
    return 'full'
  end
end
local answer
if ARGV[2] == '0' then
  answer = redis.call('XADD', KEYS[2], '*', unpack(ARGV, 5))
else
  local time = redis.call('TIME')
  answer = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2]))
  redis.call('HSET', KEYS[4], ARGV[3], cmsgpack.pack({ tonumber(ARGV[4]), { unpack(ARGV, 5) } }))
  redis.call('ZADD', KEYS[3], answer, ARGV[3])
  if redis.call('ZRANGE', KEYS[3], 0, 0)[1] == ARGV[3] then
    redis.call('XADD', KEYS[5], 'MAXLEN', '~', '100', '*', 'why', 'due')
  end
end
if limits[1] then
  for i = 1, #KEYS do
    redis.call('PEXPIRE', KEYS[i], limits[1])
  end
end
return answer
