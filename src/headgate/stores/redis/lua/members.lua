-- Counts who is alive, by the server's clock: those who have said so, each for as long as they said.
-- KEYS: a sorted set, member -> the us at which it is over. ARGV: "beat" or "leave", member, lifetime (us).
-- Reply: how many live.

local now = current('')
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', format(WHOLE, now))
if ARGV[1] == 'beat' then
  call('ZADD', KEYS[1], format(WHOLE, now + tonumber(ARGV[3])), ARGV[2])
else
  call('ZREM', KEYS[1], ARGV[2])
end
local last = call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if last[2] then
  call('PEXPIRE', KEYS[1], format(WHOLE, ceil_div(tonumber(last[2]) - now, 1000) + MARGIN))
end
return call('ZCARD', KEYS[1])
