-- The block list: sets or drops a block, reads blocks by identity, or lists a page of those that have not ended. The
-- records of clients with restrictions are kept in the same way, under another key: see local/restrictions.py.
-- KEYS: a hash, identity -> '{"until_us":123,...}', with null for a block without end; and "%" -> the number of blocks
--   without end, and the latest end (us) of all others so far.
-- ARGV: now (us; empty for the server's clock), then
--   "list", the cursor ("0" at first), and the approximate page size; or
--   "get" and identities; or
--   "set" or "drop", the channel for notifications, the identity, and, for "set", the block; or
--   "swap", the channel, the identity, the block that was read before (empty for none), and the block to set.
-- Reply: to "list", the next cursor ("0" at the end), then identity and block in turn; to "get", the block of each
--   identity, or an empty text; to "swap", 1 if it was set, 0 if there is another block than before; else 1 if there was
--   a block of that identity, else 0.

local CENTURY_MS = 3155760000000
local MAX_IDENTITY_BYTES = 16384 -- longer identities are not published, only that a block has changed
local key, now = KEYS[1], current_us(ARGV[1])

-- The end of a block (us); nil if it has none.
local function ends_at(block)
  return tonumber(match(block, '^{"until_us":(%d+)'))
end

-- Deletes a hash in which only the counts are left.
local function delete_if_empty()
  if call('HLEN', key) == 1 and call('HGET', key, '%') then call('DEL', key) end
end

-- By page, so that no request waits for the whole list.
local function list(cursor, number)
  local page = call('HSCAN', key, cursor, 'COUNT', number)
  local reply, fields = { page[1] }, page[2]
  for index = 1, #fields, 2 do
    local identity, block = fields[index], fields[index + 1]
    local instant = ends_at(block)
    if instant and instant <= now then
      call('HDEL', key, identity)
    elseif identity ~= '%' then
      reply[#reply + 1], reply[#reply + 2] = identity, block
    end
  end
  delete_if_empty()
  return reply
end

-- The block of an identity; an empty text if there is none, or it has ended.
local function find(identity)
  local block = identity ~= '%' and call('HGET', key, identity) or ''
  local instant = ends_at(block)
  return instant and instant <= now and '' or block
end

local function get(first)
  local reply = {}
  for index = first, #ARGV do
    reply[#reply + 1] = find(ARGV[index])
  end
  return reply
end

local function change(channel, identity, block)
  local before, counts = call('HGET', key, identity), call('HGET', key, '%') or '0 0'
  local endless, last = match(counts, '^(%d+) (%d+)$')
  endless, last = tonumber(endless), tonumber(last)
  if before and not ends_at(before) then endless = math.max(0, endless - 1) end
  if block then
    call('HSET', key, identity, block)
    endless, last = endless + (ends_at(block) and 0 or 1), math.max(last, ends_at(block) or 0)
  else
    call('HDEL', key, identity)
  end
  call('HSET', key, '%', format(INT_PAIR, endless, last))
  -- Always with a TTL: check_batch.lua sets long TTLs only if all keys have one.
  local ttl = endless > 0 and CENTURY_MS or math.max(0, ceil_div(last - now, 1000)) + MARGIN_MS
  call('PEXPIRE', key, format(INT, ttl))
  delete_if_empty()
  -- In the same run as the change, so that subscribers find it when they read. Only the identity is published: any client
  -- may publish, so subscribers trust only what is stored. Without permission to publish, the change still applies, and
  -- subscribers learn of it when they next read all blocks.
  pcall('PUBLISH', channel, #identity <= MAX_IDENTITY_BYTES and format('block %s', identity) or 'block')
  return before and 1 or 0
end

if ARGV[2] == 'list' then
  return list(ARGV[3], ARGV[4])
elseif ARGV[2] == 'get' then
  return get(3)
end
if ARGV[2] == 'swap' then
  if find(ARGV[4]) ~= ARGV[5] then return 0 end
  change(ARGV[3], ARGV[4], ARGV[6])
  return 1
end
return change(ARGV[3], ARGV[4], ARGV[2] == 'set' and ARGV[5] or nil)
