-- Reads the mark of a server and writes it back: what fails when the server would not serve a check, either.
-- KEYS: the mark. ARGV: the mark to leave where there is none, how long it lives (ms).
-- Reply: the mark as it is now; the one of ARGV where what the server knew was lost.

local mark = call('GET', KEYS[1]) or ARGV[1]
call('SET', KEYS[1], mark, 'PX', ARGV[2])
return mark
