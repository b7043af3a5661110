-- List delayed messages without their bodies, the next one due first.
-- KEYS: 1 due times, 2 delayed messages     ARGV: 1 how many
-- Reply: { { tag, due in ms, index of the priority's stream, headers or '' }, ... }
local listed = {}
local pairs_ = redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1, 'WITHSCORES')
for i = 1, #pairs_, 2 do
  local packed = redis.call('HGET', KEYS[2], pairs_[i])
  if packed then
    local message, headers = cmsgpack.unpack(packed), ''
    for j = 1, #message[2], 2 do
      if message[2][j] == 'headers' then
        headers = message[2][j + 1]
      end
    end
    listed[#listed + 1] = { pairs_[i], pairs_[i + 1], message[1], headers }
  end
end
return listed
