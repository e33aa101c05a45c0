-- Gives an amount back, at most once for an id.
-- KEYS: the key; with an id, also the key that remembers it (in the same slot).
-- ARGV: the limit (see parse_limit), now (us; empty for the server's clock), amount, the instant it was charged (us; empty
--   if unknown), how long to remember the id (ms), lease id, "undo" where a shard takes back its own, the channel for news
--   (empty for none), the counter's name in them.
-- Reply: 1 if anything was given back, else 0, -1 if the key holds a foreign value; then remaining, retry, reset, delay,
--   as they are after it.

local limit, now, amount, at, id = parse_limit(1), current(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[9]

local remaining, retry, reset, delay, adopted = JUDGE(KEYS[1], now, 0, limit, id)
if not remaining then
  return { -1, 0, 0, 0, 0 }
end
if KEYS[2] and not call('SET', KEYS[2], '1', 'PX', ARGV[8], 'NX') then
  return { 0, remaining, retry, reset, delay }
end
if adopted then
  write(KEYS[1], adopted, reset)
end
local state = amount > 0 and REFUND(KEYS[1], now, amount, limit, at, id, ARGV[10] == 'undo')
if not state then
  return { 0, remaining, retry, reset, delay }
end
if (remaining == 0 or remaining * 10 < limit.capacity) and ARGV[11] ~= '' then
  -- Denials that are remembered elsewhere hold no longer: none is of more than a tenth of a limit (see denials.py). Who
  -- may not publish may give back all the same.
  pcall('PUBLISH', ARGV[11], format('forget %s', ARGV[12]))
end
-- It owes less than before, so that its lifetime is known only after it is written.
write(KEYS[1], state, reset)
remaining, retry, reset, delay = JUDGE(KEYS[1], now, 0, limit, id)
call('PEXPIRE', KEYS[1], format(WHOLE, ceil_div(reset, 1000) + MARGIN))
return { 1, remaining, retry, reset, delay }
