-- End a hold with what its request used, and write its ledger row. Works once per hold, also for one that has lapsed
-- or was never made: then all of the usage is charged.
--
-- ARGV  1 hold id   2 ledger row   3 ms to remember the end   4 'new' if no limit has seen the request
--       5 model   6 input tokens   7 cached tokens   8 output tokens   9 price
--       then per limit: kind, field, amount used
-- Returns 1, or 0 if the hold had ended before.
local id = ARGV[1]
if not redis.call('SET', KEYS[1], '1', 'PX', ARGV[3], 'NX') then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 0
end

local hold, reserved = find_hold(id), {}
if hold then
  for i = 3, #hold, 3 do reserved[hold[i + 1]] = hold[i + 2] end
end
for i = 10, #ARGV, 3 do
  local kind, field, used = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local held = reserved[field] or 0
  if kind == 'c' then
    if held > 0 then add_count(field, -held) end
  elseif kind == 'b' then
    add_budget(field, hold and period_at(field, hold[1]) or -1, -held, used)
  elseif kind == 't' then
    -- What it took stays where it is in the window; only the difference moves.
    if used < held then refund(field, hold[1], held - used)
    elseif used > held then append(field, used - held) end
  elseif not hold and ARGV[4] == 'new' then
    append(field, used)
  end
end
flush()
write_row(id, ARGV[2])

if redis.call('HGET', KEYS[7], 'day') ~= int(today) then
  redis.call('HSET', KEYS[7], 'day', int(today))
  for _, field in ipairs(redis.call('HKEYS', KEYS[7])) do
    local day = tonumber(field:match('^(%d+)|'))
    if day and day < today - 62 then redis.call('HDEL', KEYS[7], field) end
  end
end
local sums = {requests = 1, input = ARGV[6], cached = ARGV[7], output = ARGV[8], price = ARGV[9]}
for what, amount in pairs(sums) do
  if amount ~= '0' then
    redis.call('HINCRBY', KEYS[7], int(today) .. '|' .. ARGV[5] .. '|' .. what, amount)
  end
end
redis.call('PEXPIRE', KEYS[7], int(KEEP_MS))
return 1
