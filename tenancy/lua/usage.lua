-- KEYS  1 usage (as in lib.lua)
-- Returns its fields and values.
return redis.call('HGETALL', KEYS[1])
