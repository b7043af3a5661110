-- Take up to `budget` messages for one consumer: due ones are moved in first, then per priority step the
-- released, the abandoned and the new ones.
-- KEYS: per queue, in service order: its streams (most urgent first), due times, delayed messages, dead letters
-- ARGV: 1 group, 2 consumer, 3 budget, 4 lease in ms, 5 "1" to take over expired leases, 6 delivery limit (0 none),
--       7 length of the dead letter stream, 8 longest back-off in ms, 9 number of steps, 10 due messages moved at once
-- Reply: { ms until the next delayed message is due or -1,
--          { {index in KEYS, id, deliveries, {field, value, ...}}, ... },
--          { {index in KEYS, id, deliveries, {field, value, ...}}, ... } dead letters made just now,
--          { {index in KEYS, id}, ... } pending entries without a message, which somebody deleted: forgotten,
--          1 when abandoned messages were left for later because a last delivery is made alone, else 0 }
-- Never more than `budget`; a message is delivered to one consumer; no entry is dropped without a dead letter.
local group, me = ARGV[1], ARGV[2]
local left, lease = tonumber(ARGV[3]), tonumber(ARGV[4])
local recover, limit = ARGV[5] == '1', tonumber(ARGV[6])
local steps, per = tonumber(ARGV[9]), tonumber(ARGV[9]) + 3
local queues = #KEYS / per
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken, dead, gone, next_due = {}, {}, {}, -1
-- A read looks at so many hundreds of messages that were given back, for it must not take long.
local PAGES_GIVEN_BACK = 10

local function first_due(due)
  local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
  return first[2] and tonumber(first[2])
end

for q = 0, queues - 1 do
  local due, delayed = KEYS[q * per + steps + 1], KEYS[q * per + steps + 2]
  local first = first_due(due)
  if first and first <= now then
    for _, tag in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[10])) do
      local packed = redis.call('HGET', delayed, tag)
      if packed then
        local message = cmsgpack.unpack(packed)
        local added = redis.pcall('XADD', KEYS[q * per + message[1]], '*', unpack(message[2]))
        -- A server without memory refuses; the message stays where it is until there is room.
        if type(added) == 'table' and added.err then
          break
        end
        redis.call('HDEL', delayed, tag)
      end
      redis.call('ZREM', due, tag)
    end
    first = first_due(due)
  end
  if first then
    local wait = math.max(0, first - now)
    if next_due < 0 or wait < next_due then
      next_due = wait
    end
  end
end

-- Make one pending entry ours, or a dead letter, or forget it when its message was deleted.
local function claim(index, dead_stream, id, count)
  local stream = KEYS[index]
  if limit > 0 and count >= limit then
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if entry then
      local fields = { 'reason', 'delivery limit', 'n', tostring(count), 'id', id, 'at', string.format('%.0f', now) }
      for _, word in ipairs(entry[2]) do
        fields[#fields + 1] = word
      end
      local added = redis.pcall('XADD', dead_stream, 'MAXLEN', '~', ARGV[7], '*', unpack(fields))
      if type(added) == 'table' and added.err then
        return
      end
      dead[#dead + 1] = { index, id, count, entry[2] }
    end
    redis.call('XACK', stream, group, id)
    redis.call('XDEL', stream, id)
    return
  end
  local entry = redis.call('XCLAIM', stream, group, me, 0, id)[1]
  if entry and entry[2] then
    taken[#taken + 1] = { index, id, count + 1, entry[2] }
    left = left - 1
  else
    gone[#gone + 1] = { index, id }
    redis.call('XACK', stream, group, id)
  end
end

-- Of the messages that a dead worker had, one may be what killed it. Before they all reach the limit together, each is
-- delivered for the last time without the others: this consumer holds one of them at a time.
local left_for_later, holds_suspect = 0, nil
local function has_suspect()
  if holds_suspect == nil then
    holds_suspect = false
    for q = 0, queues - 1 do
      for step = 1, steps do
        for _, pending in ipairs(redis.call('XPENDING', KEYS[q * per + step], group, '-', '+', 1000, me)) do
          holds_suspect = holds_suspect or pending[4] >= limit
        end
      end
    end
  end
  return holds_suspect
end

local function take_over(index, dead_stream, id, count)
  if limit > 1 and count == limit - 1 then
    if has_suspect() then
      left_for_later = 1
      return
    end
    holds_suspect = true
  end
  claim(index, dead_stream, id, count)
end

-- Show entries that are pending for `idle` ms or longer to `look` until it has seen enough, page by page: many that
-- wait must not hide what is behind.
local function each_pending(stream, idle, pages, look, ...)
  local first = '-'
  for _ = 1, pages do
    local page = redis.call('XPENDING', stream, group, 'IDLE', idle, first, '+', 100, ...)
    for _, pending in ipairs(page) do
      if not look(pending) then
        return
      end
    end
    if #page < 100 then
      return
    end
    first = '(' .. page[100][1]
  end
end

local function serve(index, dead_stream, share)
  local stream = KEYS[index]
  -- Most queues are empty most of the time, and an idle worker should not be heard.
  if redis.call('XLEN', stream) == 0 then
    return
  end
  local floor = math.max(0, left - share)
  -- The first time at once, then after 1, 2, 4, ... seconds.
  each_pending(stream, 0, PAGES_GIVEN_BACK, function(pending)
    local wait = pending[4] > 1 and math.min(tonumber(ARGV[8]), 250 * 2 ^ math.min(pending[4], 20)) or 0
    if pending[3] >= wait then
      claim(index, dead_stream, pending[1], pending[4])
    elseif next_due < 0 or wait - pending[3] < next_due then
      next_due = wait - pending[3]
    end
    return left > floor
  end, '@free')
  if recover and left > floor then
    -- Our own belong to a process that was frozen and is back: it still works on them, and its keeper renews them.
    each_pending(stream, lease, math.huge, function(pending)
      if pending[2] ~= '@free' and pending[2] ~= me then
        take_over(index, dead_stream, pending[1], pending[4])
      end
      return left > floor
    end)
  end
  if left > floor then
    local reply = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', left - floor, 'STREAMS', stream, '>')
    if reply then
      for _, entry in ipairs(reply[1][2]) do
        taken[#taken + 1] = { index, entry[1], 1, entry[2] }
        left = left - 1
      end
    end
  end
end

for step = 1, steps do
  local share = math.ceil(left / queues)
  -- Every queue gets its share of a step before any of them gets the rest.
  for pass = 1, (queues > 1 and 2 or 1) do
    for q = 0, queues - 1 do
      if left > 0 then
        serve(q * per + step, KEYS[q * per + steps + 3], pass == 1 and share or left)
      end
    end
  end
end
return { next_due, taken, dead, gone, left_for_later }
