-- Check every limit, then take from all of them or from none.
--
-- ARGV  1 hold id   2 lease us   3 row to write if the hold lapses
--       4 '' to check; 'again' to take without checking, for a request that runs already; 'new' the same for one that
--         no limit has seen yet
--       then per limit: kind, field, amount, limit, burst (0: none), span of the burst in us
-- Returns {status, limit, us until the next try (-1: never), then for each r and t: remaining, us until all is there}
--   status 0 reserved, 1 refused by that limit (1 is the first), 2 the hold has ended already
local id, lease, row, mode = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

if redis.call('EXISTS', KEYS[1]) == 1 then return {2, 0, -1} end
drop_lapsed()
-- The same reservation again, as a client sends it whose server went away: it counts once.
local before = find_hold(id)
if before then release(before, mode ~= 'again') end

local fields = {[4] = {}, [5] = {}}
for i = 5, #ARGV, 6 do
  local key = (ARGV[i] == 'r' or ARGV[i] == 't') and 4 or 5
  if cache[key][ARGV[i + 1]] == nil then table.insert(fields[key], ARGV[i + 1]) end
end
preload(4, fields[4])
preload(5, fields[5])

local refused, retry, rates = 0, 0, {}
for i = 5, #ARGV, 6 do
  local kind, field, amount, limit = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local wait = 0
  if kind == 'r' or kind == 't' then
    local log, burst = window(field), tonumber(ARGV[i + 4])
    local left, reset = nil, #log > 0 and log[#log - 1] + WINDOW - now or 0
    left, wait = room(log, amount, limit, WINDOW)
    if burst > 0 then
      local burst_left, burst_wait = room(log, amount, burst, tonumber(ARGV[i + 5]))
      left = math.min(left, burst_left)
      if wait >= 0 then wait = burst_wait < 0 and -1 or math.max(wait, burst_wait) end
    end
    if mode == '' then
      rates[#rates + 1] = left
      rates[#rates + 1] = reset
    end
  elseif kind == 'c' then
    -- When a slot comes free nobody can know: a second is a fair time to ask again.
    if count(field) + amount > limit then wait = amount > limit and -1 or 1000000 end
  else
    local state = budget(field)
    local _, ends = period(field)
    -- What costs nothing needs no budget, also where one was overrun.
    if amount > 0 and state[2] + state[3] + amount > limit then wait = amount > limit and -1 or ends - now end
  end
  -- Named is the limit that takes longest to give way.
  if wait ~= 0 and retry >= 0 and (wait < 0 or wait > retry) then
    refused, retry = (i - 5) / 6 + 1, wait
  end
end
if refused > 0 and mode == '' then
  flush()
  return {1, refused, retry, unpack(rates)}
end

local hold, n = {now, row}, 0
for i = 5, #ARGV, 6 do
  local kind, field, amount = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  if kind == 'c' then add_count(field, amount)
  elseif kind == 'b' then add_budget(field, period(field), amount, 0)
  elseif kind == 't' or mode ~= 'again' then append(field, amount) end
  if kind == 'r' or kind == 't' then
    if mode == '' then
      rates[2 * n + 1] = math.max(0, rates[2 * n + 1] - amount)
      rates[2 * n + 2] = WINDOW
    end
    n = n + 1
  end
  hold[#hold + 1] = kind
  hold[#hold + 1] = field
  hold[#hold + 1] = amount
end
redis.call('HSET', KEYS[3], id, cmsgpack.pack(hold))
redis.call('ZADD', KEYS[2], int(now + lease), id)
redis.call('PEXPIRE', KEYS[3], int(KEEP_MS))
redis.call('PEXPIRE', KEYS[2], int(KEEP_MS))
flush()
return {0, 0, 0, unpack(rates)}
