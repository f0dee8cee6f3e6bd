-- Undo a hold whose request was refused later on: every limit gets back what the hold still occupies. A reservation
-- that is still on its way is refused when it arrives.
--
-- ARGV  1 hold id   2 ms to remember the end
-- Returns 1, or 0 if there was nothing to undo.
if not redis.call('SET', KEYS[1], '1', 'PX', ARGV[2], 'NX') then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 0
end
local hold = find_hold(ARGV[1])
if hold then release(hold, true) end
flush()
return hold and 1 or 0
