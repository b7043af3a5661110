-- Append one message to a queue, under the limits that the queue was declared with.
-- KEYS: 1 the stream of the message's priority, 2 the queue's meta, 3.. every other key of the queue
-- ARGV: 1 "1" when the queue must still exist (it expires), 2.. field, value, ...
-- Reply: the entry's id; "gone" when it had to exist and does not; "full" at max_length. Either nothing or all is done.
local meta = redis.call('HMGET', KEYS[2], 'expires', 'max_length')
if ARGV[1] == '1' and redis.call('EXISTS', KEYS[2]) == 0 then
  return 'gone'
end
if meta[2] then
  local length = 0
  for i = 1, #KEYS do
    if i ~= 2 and redis.call('TYPE', KEYS[i]).ok == 'stream' and string.sub(KEYS[i], -5) ~= ':wake' and (i == 1 or KEYS[i] ~= KEYS[1]) then
      length = length + redis.call('XLEN', KEYS[i])
    end
  end
  if length >= tonumber(meta[2]) then
    return 'full'
  end
end
local id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 2))
if meta[1] then
  for i = 1, #KEYS do
    redis.call('PEXPIRE', KEYS[i], meta[1])
  end
end
return id
