-- Decides one request over one limit: what most calls are when they come alone.
-- KEYS: the key. ARGV: the limit (see parse_limit), now (us; empty for the server's clock), cost, lease id.
-- Reply: now (us), remaining, retry (us, 0 allowed, -1 never), reset (us), delay (us); remaining is -1 for a foreign value.

local limit, now, cost = parse_limit(1), current(ARGV[5]), tonumber(ARGV[6])
local remaining, retry, reset, delay, state = JUDGE(KEYS[1], now, cost, limit, ARGV[7])
if not remaining then
  return { now, -1, 0, 0, 0 }
end
if state and cost > 0 then
  write(KEYS[1], state, reset)
elseif retry ~= 0 then
  mend_expiry(KEYS[1], reset)
end
return { now, remaining, retry, reset, delay }
