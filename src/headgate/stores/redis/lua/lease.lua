-- Renews or releases a lease.
-- KEYS: the key. ARGV: the limit (see parse_limit), now (us; empty for the server's clock), "renew" or "leave", lease id.
-- Reply: 1 if the lease was held, else 0; -1 if the key holds a foreign value.

local limit, now = parse_limit(1), current_us(ARGV[5])
if not concurrency(KEYS[1], now, 0, limit, '') then return -1 end
local commands
if ARGV[6] == 'renew' then
  commands = concurrency_renew(KEYS[1], now, limit, ARGV[7])
else
  commands = concurrency_leave(KEYS[1], now, ARGV[7])
end
if not commands then return 0 end
write(KEYS[1], commands, limit.period)
local _, _, reset = concurrency(KEYS[1], now, 0, limit, '')
call('PEXPIRE', KEYS[1], format(INT, ceil_div(reset, 1000) + MARGIN_MS))
return 1
