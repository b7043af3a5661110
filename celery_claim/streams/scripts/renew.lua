-- Renew the leases of one consumer, only where the server still names it: a late renewal takes nothing back.
-- KEYS: streams     ARGV: 1 group, 2 consumer, 3.. with ids, one per key; without, all that the consumer has
-- Reply: { {index in KEYS, id, id, ...}, ... } what is still owned. Renewing is not counted as a delivery.
local group, me = ARGV[1], ARGV[2]
local owned = {}
local function renew(index, first, last, count)
  local pending = redis.pcall('XPENDING', KEYS[index], group, first, last, count, me)
  if pending.err or #pending == 0 then
    return nil
  end
  local ids = {}
  for i, entry in ipairs(pending) do
    ids[i] = entry[1]
  end
  local command = { 'XCLAIM', KEYS[index], group, me, 0 }
  for _, id in ipairs(ids) do
    command[#command + 1] = id
  end
  command[#command + 1] = 'JUSTID'
  redis.call(unpack(command))
  owned[#owned + 1] = { index, unpack(ids) }
  return #pending == count and ids[#ids] or nil
end
for i = 1, #KEYS do
  if #ARGV > 2 then
    renew(i, ARGV[i + 2], ARGV[i + 2], 1)
  else
    local last = renew(i, '-', '+', 500)
    while last do
      last = renew(i, '(' .. last, '+', 500)
    end
  end
end
return owned
