-- Who is blocked: sets a block, drops one, or lists all that have not ended.
-- KEYS: a hash, identity -> '{"until_us":123,...}', or null for a block without end.
-- ARGV: now (us; empty for the server's clock), "set", "drop" or "list"; to set and to drop, also the channel for news and
--   the identity; to set, the block.
-- Reply: to "list", identity and block in turn; else 1 if there was a block of that identity, else 0.

local now, verb, channel, identity, block = current(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- The instant, or nothing if it has no end.
local function ends(stored)
  return tonumber(match(stored, '^{"until_us":(%d+)'))
end

-- For how long (ms) the key must live so that a block can end.
local function lifetime(instant)
  return math.max(0, ceil_div(instant - now, 1000)) + MARGIN
end

-- All blocks that hold, as the reply to "list". The others are dropped, and the key lives until the last one ends.
local function settle()
  local all, live, last = call('HGETALL', KEYS[1]), {}, 0
  for index = 1, #all, 2 do
    local instant = ends(all[index + 1])
    if instant and instant <= now then
      call('HDEL', KEYS[1], all[index])
    else
      live[#live + 1], live[#live + 2] = all[index], all[index + 1]
      last = math.max(last, instant or math.huge)
    end
  end
  if last == math.huge then
    call('PERSIST', KEYS[1])
  elseif last > 0 then
    call('PEXPIRE', KEYS[1], format(WHOLE, lifetime(last)))
  end
  return live
end

if verb == 'list' then
  return settle()
end
local before, message = call('HGET', KEYS[1], identity), nil
local was_endless = before and not ends(before)
if verb == 'drop' then
  message = format('unblock %s', identity)
  call('HDEL', KEYS[1], identity)
else
  message = format('block %s', block)
  local left, instant = call('PTTL', KEYS[1]), ends(block)
  call('HSET', KEYS[1], identity, block)
  if not instant then
    call('PERSIST', KEYS[1])
  elseif left ~= -1 and left < lifetime(instant) then
    call('PEXPIRE', KEYS[1], format(WHOLE, lifetime(instant)))
  end
end
if was_endless then
  settle() -- what kept the key may be gone
end
-- In the same run as the change: nothing is heard of that is not stored. Who may not publish may block all the same, and
-- the others find out when they look.
pcall('PUBLISH', channel, message)
return before and 1 or 0
