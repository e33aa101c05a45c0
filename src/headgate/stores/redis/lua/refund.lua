-- Refunds an amount, at most once per id, and at most what the check with that id consumed, if there was one.
-- KEYS: the key; with an id, also the key of its record (in the same slot).
-- ARGV: the limit (see parse_limit), now (us; empty for the server's clock), amount, the instant it was charged (us; empty
--   if unknown), the validity of the record of a refund whose id no check had (us), lease id, "undo" to take back a check
--   with its record, the channel for notifications (empty for none), the counter's name in them.
-- Reply: 1 if anything was refunded, else 0, -1 for a foreign value; then remaining, retry, reset and delay after it.

local limit, now, amount, at, id = parse_limit(1), current_us(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[9]
local is_undo = ARGV[10] == 'undo'

local unknown = edges_error(limit, now)
if unknown then return unknown end
local remaining, retry, reset, delay, migrated = DECIDE(KEYS[1], now, 0, limit, id)
local record = KEYS[2] and read_record(KEYS[2], now)
if not remaining or record == false then return { -1, 0, 0, 0, 0 } end
if KEYS[2] and is_undo then
  -- Each caller that got the recorded answer is a holder: the undo of the last one refunds the charge.
  if not record or record.holders ~= 1 then
    if record and record.holders > 1 then
      record.holders = record.holders - 1
      write_record(KEYS[2], record)
    end
    return { 0, remaining, retry, reset, delay }
  end
  amount = record.left
  call('DEL', KEYS[2])
elseif record then
  if record.holders == 0 or record.left < record.cost then -- the one refund of this id has been made
    return { 0, remaining, retry, reset, delay }
  end
  amount, at = math.min(amount, record.left), at or record.at
end
if migrated then write(KEYS[1], migrated, reset) end
local state = amount > 0 and REFUND(KEYS[1], now, amount, limit, at, id, is_undo)
if not state then return { 0, remaining, retry, reset, delay } end
if record and not is_undo then
  record.left = record.left - amount
  write_record(KEYS[2], record)
elseif KEYS[2] and not is_undo then
  local validity = tonumber(ARGV[8])
  local refunded = { at = now, cost = 0, left = 0, holders = 0, remaining = 0, reset = 0, delay = 0 }
  refunded.until_us = now + validity
  write_record(KEYS[2], refunded, validity)
end
if (remaining == 0 or remaining * 10 < limit.capacity) and ARGV[11] ~= '' then
  -- Invalidates cached denials, which exist only below a tenth of a limit (see denial_cache.py). Without permission to
  -- publish, the refund still applies.
  pcall('PUBLISH', ARGV[11], format('forget %s', ARGV[12]))
end
-- The TTL is known only after the new state is written.
write(KEYS[1], state, reset)
remaining, retry, reset, delay = DECIDE(KEYS[1], now, 0, limit, id)
if type(state) == 'string' or not state.lifetime then
  call('PEXPIRE', KEYS[1], format(INT, ceil_div(reset, 1000) + MARGIN_MS))
end
return { 1, remaining, retry, reset, delay }
