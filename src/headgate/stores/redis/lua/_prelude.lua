-- Shared by all scripts: time, limits, and writing of states.

-- The current time (us): that of the client if given, else that of the server.
local function current_us(client_us)
  if client_us ~= '' then return tonumber(client_us) end
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Parses a limit from ARGV[first ..]: capacity, tokens, ticks, and one of: the period (us); for a calendar the longest
-- period (us), the series and edges; for the part of a tenant in a fair limit the period (us), "~", its weight, ":" and its
-- name. States end with the signature of the limit, or with the period. Long TTLs are multiples of `ttl_step`, a sixteenth of the time that an empty bucket takes to fill; `separator`
-- marks the states of keys that have one.
local function parse_limit(first)
  local ARGV = ARGV
  local capacity, tokens, ticks, period_text = ARGV[first], ARGV[first + 1], ARGV[first + 2], ARGV[first + 3]
  local signature = tokens .. '/' .. ticks .. '/' .. capacity
  capacity, tokens, ticks = capacity + 0, tokens + 0, ticks + 0 -- faster than tonumber
  local period, edges, series, weight, member = tonumber(period_text), nil, nil, nil, nil
  if not period then
    period, weight, member = match(period_text, '^(%d+) ~(%d+):(.*)$')
  end
  if member then
    period, weight = period + 0, weight + 0
  elseif not period then
    edges, period, series = {}, match(period_text, '^(%d+) (%S+)')
    period = period + 0
    for edge in gmatch(period_text, ' (%-?%d+)') do
      edges[#edges + 1] = edge + 0
    end
  end
  return {
    capacity = capacity, tokens = tokens, ticks = ticks, full = capacity * ticks,
    period = period, period_text = period_text, period_suffix = ' ' .. ARGV[first + 3], edges = edges, series = series,
    ttl_step = ceil_div(capacity * ticks, tokens * 16), separator = ' ',
    member = member, member_weight = weight,
    signature = signature, signature_suffix = ' ' .. signature, suffix_at = -1 - #signature,
  }
end

-- The error for edges of a calendar that are not those around now, as the clocks of client and server differ by more than
-- a day: the client then sends others. Nil if they are.
local function edges_error(limit, now)
  local edges = limit.edges
  if edges and (now < edges[1] or edges[#edges] - now <= 2 * limit.period) then
    return redis.error_reply(format('EDGES %s', format(INT, now)))
  end
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
  if state.lifetime then return call('SET', key, state[1], 'PX', format(INT, ceil_div(state.lifetime, 1000) + MARGIN_MS)) end
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
