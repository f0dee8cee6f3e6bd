-- Check every limit of a tenant, then take from all of them or from none.
--
-- KEYS  1 rate: theoretical arrival time (TAT), microseconds
--       2 open: zset hold id -> when the work of that hold ends in the order of arrival, microseconds
--       3 slots: zset hold id:n -> lease expiry, microseconds
--       4 withdrawn: there if this hold was voided before this call arrived
-- ARGV  1 hold id   2 emission interval us (0: no rate limit)   3 burst, units   4 units
--       5 slot limit (-1: none)   6 slots   7 lease us
-- Returns {status, remaining units, us until the rate is full again, us until the next try (-1: never)}
--   status 0 reserved, 1 over the rate, 2 no free slot, 3 withdrawn
--
-- The rate is GCRA (ITU-T I.371 annex A): with emission interval T and burst B, TAT - now never passes B*T.
-- Numbers pass through string.format: Lua's own conversion keeps 14 digits only.
local id, emission, burst, units = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local slot_limit, slots, lease = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local function int(number) return string.format('%.0f', number) end

if redis.call('EXISTS', KEYS[4]) == 1 then return {3, 0, 0, -1} end

-- Bounded: what is left over is not counted below either, and goes next time.
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  local lapsed = redis.call('ZRANGEBYSCORE', key, '-inf', int(now), 'LIMIT', 0, 200)
  if #lapsed > 0 then redis.call('ZREM', key, unpack(lapsed)) end
end

local capacity = burst * emission
local tat, after = now, now
local function reply(status, level, retry)
  local remaining = emission > 0 and math.floor((capacity - (level - now)) / emission) or 0
  return {status, remaining, level - now, retry}
end

if emission > 0 then
  -- The upper clamp: a limit just lowered, or a clock that stepped back, locks nobody out for longer than a burst.
  tat = math.max(now, math.min(tonumber(redis.call('GET', KEYS[1]) or now), now + capacity))
  after = tat + units * emission
  if after - now > capacity then
    return reply(1, tat, units > burst and -1 or after - now - capacity)
  end
end

if slot_limit >= 0 then
  local live = redis.call('ZCOUNT', KEYS[3], '(' .. int(now), '+inf')
  if live + slots > slot_limit then
    -- When a slot comes free nobody can know: a second is a fair time to ask again.
    return reply(2, tat, slots > slot_limit and -1 or 1000000)
  end
end

if emission > 0 then
  local ttl = int(math.ceil((after - now) / 1000) + 60000)
  redis.call('SET', KEYS[1], int(after), 'PX', ttl)
  redis.call('ZADD', KEYS[2], int(after), id)
  redis.call('PEXPIRE', KEYS[2], ttl)
end
if slot_limit >= 0 then
  for n = 1, slots do redis.call('ZADD', KEYS[3], int(now + lease), id .. ':' .. n) end
  redis.call('PEXPIRE', KEYS[3], int(math.ceil(lease / 1000) + 1000))
end
return reply(0, after, 0)
