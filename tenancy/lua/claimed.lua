-- KEYS[1] as in claim.lua. ARGV: id of the claim, 'keep' | 'drop' | 'answer', lease or time to live in ms, answer.
-- Changes nothing when the claim has lapsed and the key is somebody else's.
if redis.call('HGET', KEYS[1], 'claim') ~= ARGV[1] then return 0 end
if ARGV[2] == 'drop' then return redis.call('DEL', KEYS[1]) end
if ARGV[2] == 'answer' then redis.call('HSET', KEYS[1], 'answer', ARGV[4]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
