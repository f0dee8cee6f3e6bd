-- Changes to tenants and keys, all or none, with their audit entries.
--
-- KEYS  1 hash of tenants   2 hash of keys   3 audit stream
-- ARGV  1 who   then per change: 1 for tenants or 2 for keys, id, value it replaces ('' for none), new value,
--         action ('' to write nothing: the value must be there as it is), the two values as the audit may show them
-- Returns 0, or which change (1 is the first) found another value than the one it replaces: nothing was written.
local clock = redis.call('TIME')
for i = 2, #ARGV, 7 do
  local found = redis.call('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1]) or ''
  if found ~= ARGV[i + 2] then return (i - 2) / 7 + 1 end
end
for i = 2, #ARGV, 7 do
  if ARGV[i + 4] ~= '' then
    redis.call('HSET', KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 3])
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', '100000', '*', 'at', clock[1], 'who', ARGV[1], 'action', ARGV[i + 4],
      'kind', ARGV[i] == '1' and 'tenant' or 'key', 'id', ARGV[i + 1], 'before', ARGV[i + 5], 'after', ARGV[i + 6])
  end
end
return 0
