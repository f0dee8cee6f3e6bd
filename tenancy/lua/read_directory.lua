-- Tenants and keys at one moment, put back first from a gateway's memory where Redis has lost all of them.
--
-- KEYS  1 hash of tenants   2 hash of keys
-- ARGV  1 how many of the following fields and values are tenants, then those, then fields and values of keys
-- Returns {1 if they were put back, tenants, keys}
local restored = 0
if #ARGV > 1 and redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then
  local tenants = tonumber(ARGV[1])
  for i = 2, #ARGV, 2 do
    redis.call('HSET', i < 2 + 2 * tenants and KEYS[1] or KEYS[2], ARGV[i], ARGV[i + 1])
  end
  restored = 1
end
return {restored, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
