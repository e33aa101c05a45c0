-- Charges an amount that was admitted elsewhere, at most once per id, even if that much is not left.
-- KEYS: the key, and the key of the record of the id (in the same slot).
-- ARGV: the limit (see parse_limit), now (us; empty for the server's clock), amount (<= capacity), validity of the record
--   (us).
-- Reply: the amount that was charged, by this call or by the first one with its id; -1 for a foreign value.

local limit, now, amount, validity = parse_limit(1), current_us(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local remaining, _, reset, _, migrated = DECIDE(KEYS[1], now, 0, limit)
local record = read_record(KEYS[2], now)
if not remaining or record == false then return -1 end
if record then return record.cost end
if migrated then write(KEYS[1], migrated, reset) end
write(KEYS[1], OVERDRAW(KEYS[1], now, amount, limit), reset)
-- The TTL is known only after the new state is written.
_, _, reset = DECIDE(KEYS[1], now, 0, limit)
call('PEXPIRE', KEYS[1], format(INT, ceil_div(reset, 1000) + MARGIN_MS))
write_record(KEYS[2], {
  until_us = now + validity, at = now, cost = amount, left = 0, holders = 0, remaining = 0, reset = 0, delay = 0,
}, validity)
return amount
