-- Deposits a batch of tokens in a pool, at most once per id, or takes unspent ones back.
-- KEYS: the key; for a deposit, also the key of the record of its id (in the same slot).
-- ARGV: the limit (see parse_limit), now (us; empty for the server's clock), tokens, and the lifetime of the batch (us; 0
--   until the end of the limit's period), or the time in which tokens to take back expire (us); for a deposit, the instant
--   at which its lifetime began (us; empty for now).
-- Reply: the tokens that were deposited, by this deposit or by the first one with its id, or taken; -1 for a foreign value.

local limit, now, amount, ttl = parse_limit(1), current_us(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if not pool(KEYS[1], now, 0, limit) then return -1 end
local state, moved
if KEYS[2] then
  local since = tonumber(ARGV[8])
  if since and ttl > 0 then
    ttl = ttl - math.max(0, now - since)
    if ttl <= 0 then return 0 end
  end
  local record = read_record(KEYS[2], now)
  if record == false then return -1 end
  if record then return record.cost end
  state, moved = pool_deposit(KEYS[1], now, amount, ttl, limit)
  local validity = pool_expiry(now, ttl, limit) - now
  write_record(KEYS[2], {
    until_us = now + validity, at = now, cost = moved, left = 0, holders = 0, remaining = 0, reset = 0, delay = 0,
  }, validity)
else
  state, moved = pool_take_back(KEYS[1], now, amount, ttl, limit)
end
if moved > 0 then
  local _, _, reset = pool(KEYS[1], now, 0, limit, nil, state)
  write(KEYS[1], state, reset)
end
return moved
