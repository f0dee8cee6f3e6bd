-- Undo a hold: its slots are free and the rate gets back what the hold still occupies. Harmless when it has ended.
--
-- KEYS  1 rate   2 open   3 slots   4 withdrawn (as in reserve.lua)
-- ARGV  1 hold id   2 its work, us (units * emission interval)   3 slots
--       4 ms to refuse the hold if it is not there (0: not at all), for a reservation that may still be on its way
-- Returns the work given back, us.
--
-- The rate is a queue of work served in the order of arrival, TAT being when the last of it ends. A hold occupies what
-- is not served yet of its own work: min(work, end - now). Taking that out moves the ends of the later ones forward,
-- so that each of them, voided in any order, gives back its own part and never a part of somebody else's.
local id, work = ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local function int(number) return string.format('%.0f', number) end

local refund, found = 0, 0
local ends = redis.call('ZSCORE', KEYS[2], id)
if ends then
  found = redis.call('ZREM', KEYS[2], id)
  local tat = tonumber(redis.call('GET', KEYS[1]) or now)
  refund = math.max(0, math.min(work, tonumber(ends) - now, tat - now))
  local later = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ends, '+inf', 'LIMIT', 0, 1001)
  -- Bounded: with more open holds than this behind it, the units stay spent.
  if #later > 1000 then refund = 0 end
  if refund > 0 then
    for _, other in ipairs(later) do redis.call('ZINCRBY', KEYS[2], int(-refund), other) end
    redis.call('SET', KEYS[1], int(tat - refund), 'KEEPTTL')
  end
end
for n = 1, tonumber(ARGV[3]) do found = found + redis.call('ZREM', KEYS[3], id .. ':' .. n) end
if found == 0 and tonumber(ARGV[4]) > 0 then redis.call('SET', KEYS[4], '1', 'PX', ARGV[4]) end
return refund
