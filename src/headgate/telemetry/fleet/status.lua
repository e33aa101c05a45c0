-- Mirrors MemoryBoard in boards.py: documents that are put under names, each with its time, and read together.
-- KEYS[1]  the room: a hash of names, each with "until_ms put_ms document"
-- ARGV     put, name, document, keep_ms, sweep_ms    or    read
-- Times are milliseconds of the server's clock. Replies 1, or names and texts in turn: "age_ms document".
-- What is over is not told, and is taken away by a later put: a read does not write.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function split(text)
  local ends, put, after = string.match(text, '^(%d+) (%d+) (.*)$')
  return tonumber(ends), tonumber(put), after
end

if ARGV[1] == 'read' then
  local found, told = redis.call('HGETALL', KEYS[1]), {}
  for i = 1, #found, 2 do
    local ends, put, after = split(found[i + 1])
    if ends and ends > now and found[i] ~= '%sweep' then
      told[#told + 1] = found[i]
      local age = math.max(0, now - put)
      told[#told + 1] = string.format('%.0f ', age) .. after
    end
  end
  return told
end

local keep = tonumber(ARGV[4])
if keep <= 0 then
  redis.call('HDEL', KEYS[1], ARGV[2])
  return 1
end

local sweeps = split(redis.call('HGET', KEYS[1], '%sweep') or '')
-- A clock that was set back must not put it off.
if not sweeps or now >= sweeps or sweeps > now + 2 * ARGV[5] then
  local found = redis.call('HGETALL', KEYS[1])
  for i = 1, #found, 2 do
    local ends = split(found[i + 1])
    if not ends or ends <= now then
      redis.call('HDEL', KEYS[1], found[i])
    end
  end
  redis.call('HSET', KEYS[1], '%sweep', string.format('%.0f 0 ', now + ARGV[5]))
end
redis.call('HSET', KEYS[1], ARGV[2], string.format('%.0f %.0f ', now + keep, now) .. ARGV[3])
-- The room goes with its last document: it is never kept for less long than any of them.
local left = redis.call('PTTL', KEYS[1])
if left < keep then
  redis.call('PEXPIRE', KEYS[1], keep)
end
return 1
