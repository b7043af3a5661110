-- Remove a consumer that has nothing pending; with pending entries it stays, for removing it would lose them.
-- KEYS: streams     ARGV: 1 group, 2 consumer
-- Reply: from how many streams it was removed.
local left = 0
for i = 1, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', 1, ARGV[2])
  if not pending.err and #pending == 0 then
    redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
    left = left + 1
  end
end
return left
