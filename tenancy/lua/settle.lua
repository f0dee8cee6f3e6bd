-- End a hold: its slots are free, its rate units stay spent. Harmless when it has ended or lapsed.
--
-- KEYS  1 rate   2 open   3 slots   4 withdrawn (as in reserve.lua)
-- ARGV  1 hold id   2 slots
redis.call('ZREM', KEYS[2], ARGV[1])
for n = 1, tonumber(ARGV[2]) do redis.call('ZREM', KEYS[3], ARGV[1] .. ':' .. n) end
return 0
