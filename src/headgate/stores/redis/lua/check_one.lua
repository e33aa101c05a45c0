-- Decides one request over one limit.
-- KEYS: the key. ARGV: the limit (see parse_limit), and optionally cost (default 1), now (us; empty for the server's clock)
--   and lease id.
-- Reply: now (us), remaining, reset (us); remaining is -1 for a foreign value. Then, unless all are 0: retry (us, -1
--   never), delay (us), and, if the request leaves less than its own cost, the time until the same request would be
--   allowed again (us).

local limit, now, cost = parse_limit(1), current_us(ARGV[6] or ''), (ARGV[5] or 1) + 0
local unknown = edges_error(limit, now)
if unknown then return unknown end
local remaining, retry, reset, delay, state = DECIDE(KEYS[1], now, cost, limit, ARGV[7])
if not remaining then return { now, -1, 0 } end
local next_allowed = 0
if state and cost > 0 then
  write(KEYS[1], state, reset)
  -- Not for states that are hashes: leases end when their holders release them, and denials of fair limits are not cached.
  if remaining < cost and retry == 0 and (type(state) == 'string' or state[#state][1] ~= 'HSET') then
    local _, wait = DECIDE(KEYS[1], now, cost, limit, ARGV[7], state)
    next_allowed = wait
  end
elseif retry ~= 0 then
  repair_ttl(KEYS[1], reset, limit)
end
if retry == 0 and delay == 0 and next_allowed == 0 then return { now, remaining, reset } end
return { now, remaining, reset, retry, delay, next_allowed }
