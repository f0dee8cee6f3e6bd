-- Renew the leases of holds of one tenant.
--
-- KEYS  1 slots: zset hold id:n -> lease expiry, microseconds
-- ARGV  1 lease us   2 1: take a lapsed lease again; 0: report it   then pairs: hold id, slots
-- Returns the ids of holds with a lapsed lease that was not renewed.
local lease, again = tonumber(ARGV[1]), ARGV[2] == '1'
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local function int(number) return string.format('%.0f', number) end

local lapsed = {}
for i = 3, #ARGV, 2 do
  local whole = true
  for n = 1, tonumber(ARGV[i + 1]) do
    local member = ARGV[i] .. ':' .. n
    local expiry = redis.call('ZSCORE', KEYS[1], member)
    if again or (expiry and tonumber(expiry) > now) then
      redis.call('ZADD', KEYS[1], int(now + lease), member)
    else
      whole = false
    end
  end
  if not whole then lapsed[#lapsed + 1] = ARGV[i] end
end
redis.call('PEXPIRE', KEYS[1], int(math.ceil(lease / 1000) + 1000))
return lapsed
