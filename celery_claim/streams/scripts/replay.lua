-- Put dead letters back into their queue as fresh messages: at its end, with no delivery counted.
-- KEYS: 1 dead letters, 2.. the queue's streams, most urgent first
-- ARGV: per letter its id and the index of its stream (from 1)
-- Reply: the ids of the letters that were put back. Each is put back and removed in one go or not at all, so whatever
-- dies in between, none is lost and none is in the queue twice. A letter that somebody else took is left out.
local replayed = {}
for i = 1, #ARGV, 2 do
  local letter = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  if letter then
    -- The first four fields are the broker's notes about the death.
    local added = redis.pcall('XADD', KEYS[1 + tonumber(ARGV[i + 1])], '*', unpack(letter[2], 9))
    if type(added) == 'table' and added.err then
      if #replayed == 0 then
        return added
      end
      return replayed
    end
    redis.call('XDEL', KEYS[1], ARGV[i])
    replayed[#replayed + 1] = ARGV[i]
  end
end
return replayed
