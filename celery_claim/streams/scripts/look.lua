-- What stands in one queue, in numbers; no message is read as a whole by the caller, whatever the backlog.
-- KEYS: its streams, 2 last: due times, dead letters
-- ARGV: 1 group, 2 how many pending entries per stream are looked at for the oldest
-- Reply: { ready, pending, delayed, dead, ms the longest silent pending entry was not renewed or -1,
--          ms the oldest ready message has waited or -1, ms until the next delayed one is due or -1,
--          when the last message was delivered in ms or 0, { consumer, ... } }
-- Ready are also the messages that were given back. Nothing is written.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ready, pending, silent, waited, delivered, consumers = 0, 0, -1, -1, 0, {}

local function waits_since(id)
  local age = math.max(0, now - tonumber(string.match(id, '^%d+')))
  if age > waited then
    waited = age
  end
end

local function group_of(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then
    return nil
  end
  for _, group in ipairs(groups) do
    local facts = {}
    for i = 1, #group, 2 do
      facts[group[i]] = group[i + 1]
    end
    if facts['name'] == ARGV[1] then
      return facts
    end
  end
  return nil
end

for i = 1, #KEYS - 2 do
  local stream = KEYS[i]
  local length, held, last = redis.call('XLEN', stream), 0, '0-0'
  local group = group_of(stream)
  if group then
    last = group['last-delivered-id']
    delivered = math.max(delivered, tonumber(string.match(last, '^%d+')))
    for _, each in ipairs(redis.call('XPENDING', stream, ARGV[1])[4] or {}) do
      if each[1] ~= '@free' then
        held = held + tonumber(each[2])
      end
    end
    for _, entry in ipairs(redis.call('XPENDING', stream, ARGV[1], '-', '+', ARGV[2])) do
      if entry[2] ~= '@free' and entry[3] > silent then
        silent = entry[3]
      end
    end
    local released = redis.call('XPENDING', stream, ARGV[1], '-', '+', 1, '@free')[1]
    if released then
      waits_since(released[1])
    end
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, ARGV[1])) do
      if consumer[2] ~= '@free' then
        consumers[#consumers + 1] = consumer[2]
      end
    end
  end
  local first = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
  if first then
    waits_since(first[1])
  end
  -- An entry that was deleted while it was pending is still listed until its owner lets go of it.
  ready = ready + math.max(0, length - held)
  pending = pending + held
end
local due = KEYS[#KEYS - 1]
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local next_due = first[2] and math.max(0, tonumber(first[2]) - now) or -1
return { ready, pending, redis.call('ZCARD', due), redis.call('XLEN', KEYS[#KEYS]), silent, waited, next_due, delivered,
  consumers }
