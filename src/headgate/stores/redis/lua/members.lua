-- Live members of the fleet, by the server's clock: adds or removes one.
-- KEYS: a sorted set, member -> its expiry (us). ARGV: "beat" or "leave", member, TTL (us).
-- Reply: the number of live members.

local now = current_us('')
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', format(INT, now))
if ARGV[1] == 'beat' then
  call('ZADD', KEYS[1], format(INT, now + tonumber(ARGV[3])), ARGV[2])
else
  call('ZREM', KEYS[1], ARGV[2])
end
local last = call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if last[2] then
  call('PEXPIRE', KEYS[1], format(INT, ceil_div(tonumber(last[2]) - now, 1000) + MARGIN_MS))
end
return call('ZCARD', KEYS[1])
