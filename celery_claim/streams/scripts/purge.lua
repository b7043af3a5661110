-- Delete what nobody works on: new, released and delayed messages. What live workers hold stays theirs.
-- KEYS: 1 due times, 2 delayed messages, 3.. streams     ARGV: 1 group
-- Reply: how many were deleted.
local purged = redis.call('ZCARD', KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2])
for i = 3, #KEYS do
  local groups = redis.pcall('XINFO', 'GROUPS', KEYS[i])
  local last = '0-0'
  if not groups.err then
    for _, group in ipairs(groups) do
      local facts = {}
      for j = 1, #group, 2 do
        facts[group[j]] = group[j + 1]
      end
      if facts['name'] == ARGV[1] then
        last = facts['last-delivered-id']
        for _, pending in ipairs(redis.call('XPENDING', KEYS[i], ARGV[1], '-', '+', facts['pending'] + 1, '@free')) do
          redis.call('XACK', KEYS[i], ARGV[1], pending[1])
          purged = purged + redis.call('XDEL', KEYS[i], pending[1])
        end
      end
    end
  end
  local entries
  repeat
    entries = redis.call('XRANGE', KEYS[i], '(' .. last, '+', 'COUNT', 500)
    for _, entry in ipairs(entries) do
      purged = purged + redis.call('XDEL', KEYS[i], entry[1])
      last = entry[1]
    end
  until #entries == 0
end
return purged
