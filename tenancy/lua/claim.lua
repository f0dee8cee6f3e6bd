-- KEYS[1] one idempotency key of one tenant. ARGV: fingerprint of the request, id of this claim, lease in ms.
-- Returns 'mine' (run the request), 'running' (somebody else does), 'other' (another request had this key), or
-- {answer}: what the first run answered.
local found = redis.call('HMGET', KEYS[1], 'request', 'answer')
if not found[1] then
  redis.call('HSET', KEYS[1], 'request', ARGV[1], 'claim', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 'mine'
end
if found[1] ~= ARGV[1] then return 'other' end
if found[2] then return {found[2]} end
return 'running'
