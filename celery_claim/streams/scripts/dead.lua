-- List dead letters without their bodies: they may be large, and nobody needs them to decide.
-- KEYS: 1 dead letters     ARGV: 1 first id, 2 last id, 3 how many
-- Reply: { { id, length of the body, { field, value, ... } }, ... }, the oldest first.
local letters = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])) do
  local fields, length = {}, 0
  for i = 1, #entry[2], 2 do
    local name, value = entry[2][i], entry[2][i + 1]
    -- The first four are what the broker noted down; a message of somebody else may have fields of any name.
    if i <= 8 or name == 'headers' or name == 'properties' then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
    if i > 8 and (name == 'body' or name == 'm') then
      length = #value
    end
  end
  letters[#letters + 1] = { entry[1], length, fields }
end
return letters
