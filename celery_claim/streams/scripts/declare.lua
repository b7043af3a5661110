-- Make the streams and groups of a queue that expires, each with its end in the same step: a program that dies after
-- this leaves nothing behind for good.
-- KEYS: streams     ARGV: 1 group, 2 ms until they expire
-- Reply: nil, or the first error that is none of these: the group exists; a full server, where the stream exists.
for i = 1, #KEYS do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[i], ARGV[1], '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP') then
    if not string.find(made.err, 'OOM') or redis.call('EXISTS', KEYS[i]) == 0 then
      return made
    end
  end
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return nil
