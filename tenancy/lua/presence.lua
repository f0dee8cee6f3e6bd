-- KEYS  1 zset gateway -> when it stops counting, microseconds
-- ARGV  1 gateway   2 us from now
-- Returns how many gateways there are.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], '3600000')
return redis.call('ZCARD', KEYS[1])
