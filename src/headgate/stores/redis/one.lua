-- Decides one request over one limit: what most calls are when they come alone.
-- KEYS: the key. ARGV: the limit (see parse_limit), now (us; empty for the server's clock), cost, lease id.
-- Reply: now (us), remaining, retry (us, 0 allowed, -1 never), reset (us), delay (us); remaining is -1 for a foreign value.
--   Last, where it leaves less than its own cost: how long until the same request would pass again (us).

local limit, now, cost = parse_limit(1), current(ARGV[5]), tonumber(ARGV[6])
local remaining, retry, reset, delay, state = JUDGE(KEYS[1], now, cost, limit, ARGV[7])
if not remaining then
  return { now, -1, 0, 0, 0 }
end
if state and cost > 0 then
  write(KEYS[1], state, reset)
  -- Not of leases, the only states that are hashes: they end when their holders like.
  if remaining < cost and retry == 0 and (type(state) == 'string' or state[#state][1] ~= 'HSET') then
    known[KEYS[1]] = state
    local _, again = JUDGE(KEYS[1], now, cost, limit, ARGV[7])
    return { now, remaining, retry, reset, delay, again }
  end
elseif retry ~= 0 then
  mend_expiry(KEYS[1], reset)
end
return { now, remaining, retry, reset, delay }
