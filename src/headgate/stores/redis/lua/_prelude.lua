-- Shared by all scripts: time, limits, and writing of states.

-- The current time (us): that of the client if given, else that of the server.
local function current_us(client_us)
  if client_us ~= '' then
    return tonumber(client_us)
  end
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Parses a limit from ARGV[first ..]: capacity, tokens, ticks, period (us). States end with its signature, or with the
-- period. Long TTLs are multiples of `ttl_step`, a sixteenth of the time that an empty bucket takes to fill; `separator`
-- marks the states of keys that have one.
local function parse_limit(first)
  local ARGV = ARGV
  local capacity, tokens, ticks = ARGV[first], ARGV[first + 1], ARGV[first + 2]
  local signature = tokens .. '/' .. ticks .. '/' .. capacity
  capacity, tokens, ticks = capacity + 0, tokens + 0, ticks + 0 -- faster than tonumber
  return {
    capacity = capacity,
    tokens = tokens,
    ticks = ticks,
    period = ARGV[first + 3] + 0,
    period_text = ARGV[first + 3],
    period_suffix = ' ' .. ARGV[first + 3],
    full = capacity * ticks,
    ttl_step = ceil_div(capacity * ticks, tokens * 16),
    separator = ' ',
    signature = signature,
    signature_suffix = ' ' .. signature,
    suffix_at = -1 - #signature,
  }
end

-- The last TTL as text: many requests of a batch have the same.
local last_reset, last_ttl

-- Writes a state, which is the text of a string, or the commands that change a collection, and sets the TTL: until the key
-- is as new, and the margin.
local function write(key, state, reset)
  if reset ~= last_reset then
    last_reset, last_ttl = reset, format(INT, ceil_div(reset, 1000) + MARGIN_MS)
  end
  if not state[1] then -- a text: three times as fast as checking its type
    return call('SET', key, state, 'PX', last_ttl)
  end
  for _, command in ipairs(state) do
    call(unpack(command))
  end
  call('PEXPIRE', key, last_ttl)
end

-- Sets the TTL after a denial, which writes no state, of a key that has none (persisted by hand) or too short a one (its
-- window has become longer): a long one, as its state may be marked so.
local function repair_ttl(key, reset, limit)
  local left = call('PTTL', key)
  if left == -1 or (left >= 0 and left < ceil_div(reset, 1000)) then
    call('PEXPIRE', key, format(INT, ceil_div(reset + limit.ttl_step, 1000) + MARGIN_MS))
  end
end
