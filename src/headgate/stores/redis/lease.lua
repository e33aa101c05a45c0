-- Renews or leaves a lease.
-- KEYS: the key. ARGV: margin (ms), the limit (see parse_limit), now (us; empty for the server's clock), "renew" or
-- "leave", lease id. Reply: 1 if the lease was held, else 0.

local margin, limit = tonumber(ARGV[1]), parse_limit(2)
local now = current(ARGV[7])
local remaining = concurrency(KEYS[1], now, 0, limit, '')
if not remaining then
  return -1
end
local commands
if ARGV[8] == 'renew' then
  commands = concurrency_renew(KEYS[1], now, limit, ARGV[9])
else
  commands = concurrency_leave(KEYS[1], now, ARGV[9])
end
if not commands then
  return 0
end
write(KEYS[1], commands, limit.period, margin)
local _, _, reset = concurrency(KEYS[1], now, 0, limit, '')
call('PEXPIRE', KEYS[1], format(WHOLE, ceil_div(reset, 1000) + margin))
return 1
