-- Reads the epoch of a server and writes it back, which fails if the server would not serve a check, either.
-- KEYS: the epoch. ARGV: the epoch to set if there is none, its TTL (ms).
-- Reply: the current epoch; that of ARGV if the server is new or has lost its data.

local epoch = call('GET', KEYS[1]) or ARGV[1]
call('SET', KEYS[1], epoch, 'PX', ARGV[2])
return epoch
