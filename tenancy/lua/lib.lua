-- Shared by the quota scripts of one tenant; put in front of each of them.
--
-- KEYS, all with the tenant's hash tag:
--   1 done     there once the hold has been settled or voided, for a while
--   2 leases   zset hold id -> lease expiry, microseconds
--   3 holds    hash hold id -> what it has taken: msgpack {time, meta, kind, field, amount, kind, field, amount, ...}
--   4 windows  hash limit -> log of the last minute: msgpack {time, amount, time, amount, ...}, ascending
--   5 counts   hash limit -> slots taken, or a budget: msgpack {period, used, held}
--   6 ledger   stream of usage rows
--   7 usage    hash day|model|what -> sum
-- Kinds of limits: r requests per minute, t tokens per minute, c concurrency, b budget.
--
-- Time is Redis TIME alone, in microseconds. Numbers that go to a command pass through string.format, since Lua's own
-- conversion keeps 14 digits only.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local function int(number) return string.format('%.0f', number) end

local WINDOW, DAY = 60000000, 86400000000
local KEEP_MS = 70 * 86400000 -- longer than any month: what nobody touches goes by itself
-- Up to EXACT entries a log has one per request. Beyond, those of the same WINDOW/SLOTS share the time of the latest,
-- which bounds its size and errs on the side of the limit.
local EXACT, SLOTS = 32, 100

-- State is read once, changed in memory and written once at the end: a script that refuses writes nothing.
local cache, dirty, logs = {[4] = {}, [5] = {}}, {[4] = {}, [5] = {}}, {}

local function preload(key, fields)
  if #fields == 0 then return end
  local values = redis.call('HMGET', KEYS[key], unpack(fields))
  for i, field in ipairs(fields) do cache[key][field] = values[i] end
end

local function read(key, field)
  local value = cache[key][field]
  if value == nil then
    value = redis.call('HGET', KEYS[key], field)
    cache[key][field] = value
  end
  return value
end

local function flush()
  for key, fields in pairs(dirty) do
    local values, gone = {}, {}
    for field, value in pairs(fields) do
      if key == 4 then value = #value > 0 and cmsgpack.pack(value) or false
      elseif type(value) == 'table' then value = cmsgpack.pack(value)
      else value = value > 0 and int(value) or false end
      if value then
        values[#values + 1] = field
        values[#values + 1] = value
      else
        gone[#gone + 1] = field
      end
    end
    if #gone > 0 then redis.call('HDEL', KEYS[key], unpack(gone)) end
    if #values > 0 then
      redis.call('HSET', KEYS[key], unpack(values))
      redis.call('PEXPIRE', KEYS[key], key == 4 and '120000' or int(KEEP_MS))
    end
  end
end

-- Windows ------------------------------------------------------------------------------------------------------------

local function window(field)
  if logs[field] then return logs[field] end
  local packed, entries = read(4, field), {}
  if packed then
    local log, first = cmsgpack.unpack(packed), 1
    local size = #log
    -- Not later than now: a clock that stepped back locks nobody out for longer than the window.
    for i = size - 1, 1, -2 do
      if log[i] <= now then break end
      log[i] = now
    end
    while first < size and log[first] <= now - WINDOW do first = first + 2 end
    entries = first == 1 and log or {unpack(log, first)}
  end
  logs[field] = entries
  return entries
end

local function append(field, amount)
  local log = window(field)
  local last = #log - 1
  local slot = WINDOW / SLOTS
  if last > 0 and (log[last] == now or
     (#log > 2 * EXACT and math.floor(log[last] / slot) == math.floor(now / slot))) then
    log[last], log[last + 1] = now, log[last + 1] + amount
  else
    log[#log + 1] = now
    log[#log + 1] = amount
  end
  dirty[4][field] = log
end

-- Take back `amount` of what was appended at `at`: out of the entry it went into, which may have moved to a later time,
-- and nothing if the window has left it behind.
local function refund(field, at, amount)
  at = math.min(at, now)
  if at <= now - WINDOW then return end
  local log = window(field)
  for i = 1, #log, 2 do
    if log[i] >= at then
      log[i + 1] = log[i + 1] - math.min(amount, log[i + 1])
      if log[i + 1] <= 0 then
        table.remove(log, i)
        table.remove(log, i)
      end
      dirty[4][field] = log
      return
    end
  end
end

-- Whether `amount` fits `limit` over the last `span` microseconds: what is left, and how long until it fits.
local function room(log, amount, limit, span)
  local sum, from, begin = 0, #log + 1, now - span
  for i = from - 2, 1, -2 do
    if log[i] <= begin then break end
    from = i
    sum = sum + log[i + 1]
  end
  local over, wait = sum + amount - limit, 0
  if amount > limit then
    wait = -1
  elseif over > 0 then
    for i = from, #log, 2 do
      over = over - log[i + 1]
      if over <= 0 then
        wait = log[i] + span - now
        break
      end
    end
  end
  return math.max(0, limit - sum), wait
end

-- Counts and budgets -------------------------------------------------------------------------------------------------

local function count(field)
  if dirty[5][field] then return dirty[5][field] end
  return tonumber(read(5, field) or 0)
end

local function add_count(field, amount) dirty[5][field] = math.max(0, count(field) + amount) end

-- Days since 1970 to year and month (H. Hinnant, "chrono-compatible low-level date algorithms", civil_from_days), and
-- back to the first day of a month.
local function month_of(day)
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return (yoe + era * 400 + (month <= 2 and 1 or 0)) * 12 + month - 1
end

local function first_day(month)
  local y, m = math.floor(month / 12), month % 12 + 1
  if m <= 2 then y = y - 1 end
  local era = math.floor(y / 400)
  local yoe = y - era * 400
  local doy = math.floor((153 * (m + (m > 2 and -3 or 9)) + 2) / 5)
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
end

local today = math.floor(now / DAY)

-- Periods are days or calendar months in UTC; the field's last letters tell which.
local function period(field)
  if field:sub(-3) == 'day' then return today, (today + 1) * DAY end
  local month = month_of(today)
  return month, first_day(month + 1) * DAY
end

local function budget(field)
  if dirty[5][field] then return dirty[5][field] end
  local packed, current = read(5, field), period(field)
  local state = packed and cmsgpack.unpack(packed)
  if not state or state[1] ~= current then state = {current, 0, 0} end
  return state
end

local function add_budget(field, since, held, used)
  local state = budget(field)
  -- What was held in an earlier period is gone with it.
  if since == state[1] then state[3] = math.max(0, state[3] + held) end
  state[2] = state[2] + used
  dirty[5][field] = state
end

-- Holds --------------------------------------------------------------------------------------------------------------

-- Periods when the hold was made, from its time.
local function period_at(field, at)
  local day = math.floor(at / DAY)
  return field:sub(-3) == 'day' and day or month_of(day)
end

-- Give back all that a hold has taken: its requests too if it never counted.
local function release(hold, requests)
  for i = 3, #hold, 3 do
    local kind, field, amount = hold[i], hold[i + 1], hold[i + 2]
    if kind == 'c' then add_count(field, -amount)
    elseif kind == 'b' then add_budget(field, period_at(field, hold[1]), -amount, 0)
    elseif kind == 't' or requests then refund(field, hold[1], amount) end
  end
end

local function find_hold(id)
  local packed = redis.call('HGET', KEYS[3], id)
  if not packed then return nil end
  redis.call('HDEL', KEYS[3], id)
  redis.call('ZREM', KEYS[2], id)
  return cmsgpack.unpack(packed)
end

local function write_row(id, row) redis.call('XADD', KEYS[6], '*', 'hold', id, 'at', int(now), 'row', row) end

-- Holds whose gateway has not renewed them: what they took is free again, the ledger says that they were never settled.
-- Bounded: what is left over goes next time.
local function drop_lapsed()
  local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', int(now), 'LIMIT', 0, 500)
  for _, id in ipairs(lapsed) do
    local hold = find_hold(id)
    if hold then
      release(hold, false)
      write_row(id, hold[2])
    end
  end
  return #lapsed
end
