-- Make streams and their groups where they are missing, from the first message on; those of a queue that expires with
-- their end in the same step, so that a program that dies after this leaves nothing behind for good.
-- KEYS: streams     ARGV: 1 group, 2 ms until they expire, 0 for never
-- Reply: nil, or the first error that is none of these: the group exists; a full server, where the stream exists. It
-- refuses to create even what is there, and a worker must still be able to drain it.
for i = 1, #KEYS do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[i], ARGV[1], '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP') then
    if not string.find(made.err, 'OOM') or redis.call('EXISTS', KEYS[i]) == 0 then
      return made
    end
  end
  if ARGV[2] ~= '0' then
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
  end
end
return nil
