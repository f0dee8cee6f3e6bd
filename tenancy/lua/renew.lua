-- Renew the leases of live holds, and drop those that nobody renews.
--
-- ARGV  1 lease us   then hold ids
-- Returns the ids that have no lease any more.
local lease, gone = tonumber(ARGV[1]), {}
for i = 2, #ARGV do
  local expiry = redis.call('ZSCORE', KEYS[2], ARGV[i])
  if expiry and tonumber(expiry) > now then
    redis.call('ZADD', KEYS[2], int(now + lease), ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
drop_lapsed()
flush()
return gone
