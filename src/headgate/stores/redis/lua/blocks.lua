-- The block list: sets a block, drops one, reads some by identity, or lists a page of those that have not ended.
-- KEYS: a hash, identity -> '{"until_us":123,...}', or null there for a block without end; and "%" -> how many of those
--   there are, and the last instant (us) at which any other ends, or would have ended.
-- ARGV: now (us; empty for the server's clock), then
--   "list", where to go on ("0" to begin), and about how many to look at; or
--   "get" and identities; or
--   "set" or "drop", the channel for news, the identity, and, to set, the block.
-- Reply: to "list", where to go on ("0" at the end), then identity and block in turn; to "get", for each identity its
--   block, or an empty text; else 1 if there was a block of that identity, else 0.

local CENTURY = 3155760000000 -- ms
local LONGEST_IDENTITY = 16384 -- bytes that are published; of longer ones only that something has changed
local key, now = KEYS[1], current(ARGV[1])

-- The instant, or nothing if it has no end.
local function ends(block)
  return tonumber(match(block, '^{"until_us":(%d+)'))
end

-- Nothing is left of a hash that holds nobody, not even its own count.
local function tidy()
  if call('HLEN', key) == 1 and call('HGET', key, '%') then
    call('DEL', key)
  end
end

-- A page at a time: however many there are, no request waits for all of them.
local function list(cursor, number)
  local page = call('HSCAN', key, cursor, 'COUNT', number)
  local reply, fields = { page[1] }, page[2]
  for index = 1, #fields, 2 do
    local identity, block = fields[index], fields[index + 1]
    local instant = ends(block)
    if instant and instant <= now then
      call('HDEL', key, identity)
    elseif identity ~= '%' then
      reply[#reply + 1], reply[#reply + 2] = identity, block
    end
  end
  tidy()
  return reply
end

local function get(first)
  local reply = {}
  for index = first, #ARGV do
    local identity = ARGV[index]
    local block = identity ~= '%' and call('HGET', key, identity) or ''
    local instant = ends(block)
    reply[#reply + 1] = instant and instant <= now and '' or block
  end
  return reply
end

local function change(channel, identity, block)
  local before, kept = call('HGET', key, identity), call('HGET', key, '%') or '0 0'
  local endless, last = match(kept, '^(%d+) (%d+)$')
  endless, last = tonumber(endless), tonumber(last)
  if before and not ends(before) then
    endless = math.max(0, endless - 1)
  end
  if block then
    call('HSET', key, identity, block)
    endless, last = endless + (ends(block) and 0 or 1), math.max(last, ends(block) or 0)
  else
    call('HDEL', key, identity)
  end
  call('HSET', key, '%', format(TWO, endless, last))
  -- Not for ever, as check.lua trusts in that all keys have a lifetime where most have.
  local lifetime = endless > 0 and CENTURY or math.max(0, ceil_div(last - now, 1000)) + MARGIN
  call('PEXPIRE', key, format(WHOLE, lifetime))
  tidy()
  -- In the same run as the change, so that subscribers who read the block on this message find it. Only the identity is
  -- published: anybody may publish, so subscribers believe nothing but what is stored. A client without the right to
  -- publish may still block; subscribers then find out when they next read all blocks.
  pcall('PUBLISH', channel, #identity <= LONGEST_IDENTITY and format('block %s', identity) or 'block')
  return before and 1 or 0
end

if ARGV[2] == 'list' then
  return list(ARGV[3], ARGV[4])
elseif ARGV[2] == 'get' then
  return get(3)
end
return change(ARGV[3], ARGV[4], ARGV[2] == 'set' and ARGV[5] or nil)
