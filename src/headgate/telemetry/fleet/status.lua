-- Mirrors MemoryStatusStore in status_store.py: named documents with the time of their write and of their expiry.
-- KEYS[1]  the collection: a hash of names, each with "expires_ms written_ms document"
-- ARGV     put, name, document, keep_ms, sweep_ms    or    read
-- Times are milliseconds of the server's clock. Replies 1, or alternating names and texts: "age_ms document".
-- Expired documents are not returned; a later put removes them, as a read must not write.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function split(text)
  local expires, written, document = string.match(text, '^(%d+) (%d+) (.*)$')
  return tonumber(expires), tonumber(written), document
end

if ARGV[1] == 'read' then
  local stored, reply = redis.call('HGETALL', KEYS[1]), {}
  for i = 1, #stored, 2 do
    local expires, written, document = split(stored[i + 1])
    if expires and expires > now and stored[i] ~= '%sweep' then
      reply[#reply + 1] = stored[i]
      local age = math.max(0, now - written)
      reply[#reply + 1] = string.format('%.0f ', age) .. document
    end
  end
  return reply
end

local keep = tonumber(ARGV[4])
if keep <= 0 then
  redis.call('HDEL', KEYS[1], ARGV[2])
  return 1
end

local sweep = split(redis.call('HGET', KEYS[1], '%sweep') or '')
-- The last condition: a clock that was set back must not postpone the sweep.
if not sweep or now >= sweep or sweep > now + 2 * ARGV[5] then
  local stored = redis.call('HGETALL', KEYS[1])
  for i = 1, #stored, 2 do
    local expires = split(stored[i + 1])
    if not expires or expires <= now then
      redis.call('HDEL', KEYS[1], stored[i])
    end
  end
  redis.call('HSET', KEYS[1], '%sweep', string.format('%.0f 0 ', now + ARGV[5]))
end
redis.call('HSET', KEYS[1], ARGV[2], string.format('%.0f %.0f ', now + keep, now) .. ARGV[3])
-- The collection expires with its last document.
local ttl = redis.call('PTTL', KEYS[1])
if ttl < keep then
  redis.call('PEXPIRE', KEYS[1], keep)
end
return 1
