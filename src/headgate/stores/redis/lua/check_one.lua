-- Decides one request over one limit: what most calls are when they come alone.
-- KEYS: the key. ARGV: the limit (see parse_limit), and all the rest only where it is not the usual: cost (1), now (us;
--   empty for the server's clock), lease id.
-- Reply: now (us), remaining, reset (us); remaining is -1 for a foreign value. Then, where one of them is not 0: retry (us,
--   -1 never), delay (us), and, where the request leaves less than its own cost, how long until the same would pass again
--   (us).

local limit, now, cost = parse_limit(1), current(ARGV[6] or ''), (ARGV[5] or 1) + 0
local remaining, retry, reset, delay, state = JUDGE(KEYS[1], now, cost, limit, ARGV[7])
if not remaining then
  return { now, -1, 0 }
end
local again = 0
if state and cost > 0 then
  write(KEYS[1], state, reset)
  -- Not of leases, the only states that are hashes: they end when their holders like.
  if remaining < cost and retry == 0 and (type(state) == 'string' or state[#state][1] ~= 'HSET') then
    local _, wait = JUDGE(KEYS[1], now, cost, limit, ARGV[7], state)
    again = wait
  end
elseif retry ~= 0 then
  mend_expiry(KEYS[1], reset, limit)
end
if retry == 0 and delay == 0 and again == 0 then
  return { now, remaining, reset }
end
return { now, remaining, reset, retry, delay, again }
