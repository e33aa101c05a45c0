-- Gives an amount back, at most once for an id.
-- KEYS: the key; with an id, also the key that remembers it (in the same slot).
-- ARGV: margin (ms), the limit (see parse_limit), now (us; empty for the server's clock), amount, the instant it
-- was charged (us; empty if unknown), how long to remember the id (ms), lease id. Reply: 1 if anything was given
-- back, else 0; now (us); then remaining, retry, reset, delay, as they are after it.

local margin, limit = tonumber(ARGV[1]), parse_limit(2)
local now = current(ARGV[7])
local id = ARGV[11]

local first = true
if KEYS[2] then
  first = call('SET', KEYS[2], '1', 'PX', ARGV[10], 'NX')
end
local state = first and REFUND[limit.algorithm](KEYS[1], now, tonumber(ARGV[8]), limit, tonumber(ARGV[9]), id) or nil
if state then
  -- Written before it is known how long it must live, and then given just that.
  write(KEYS[1], state, limit.period, margin)
end
local remaining, retry, reset, delay = JUDGE[limit.algorithm](KEYS[1], now, 0, limit, id)
if state and remaining then
  call('PEXPIRE', KEYS[1], format(WHOLE, ceil_div(reset, 1000) + margin))
end
return { state and 1 or 0, now, remaining or -1, retry or 0, reset or 0, delay or 0 }
