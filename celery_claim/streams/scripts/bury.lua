-- Move one pending entry to the dead letters, where it is still ours.
-- KEYS: 1 stream, 2 dead letters     ARGV: 1 group, 2 consumer, 3 id, 4 reason, 5 length of the dead letter stream
-- Reply: the fields { field, value, ... } of the message, or nil when it is no longer ours.
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if not pending[1] then
  return nil
end
local entry = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
if entry then
  local time = redis.call('TIME')
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'reason', ARGV[4], 'n', pending[1][4], 'id', ARGV[3], 'at',
    string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), unpack(entry[2]))
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
return entry and entry[2] or nil
