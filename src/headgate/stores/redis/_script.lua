-- Shared by the scripts of the Redis store: time, limits, and the writing of states.

-- Now, in us: the caller's if it brings one, else the server's own, which is the same for all callers.
local function current(given)
  if given ~= '' then
    return tonumber(given)
  end
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A limit from ARGV[first ..]: algorithm, capacity, tokens, ticks, period (us).
local function parse_limit(first)
  local capacity, tokens, ticks = ARGV[first + 1], ARGV[first + 2], ARGV[first + 3]
  return {
    algorithm = ARGV[first],
    capacity = tonumber(capacity),
    tokens = tonumber(tokens),
    ticks = tonumber(ticks),
    period = tonumber(ARGV[first + 4]),
    full = capacity * ticks,
    signed = tokens .. '/' .. ticks .. '/' .. capacity,
  }
end

-- A state is the text of a string, or the commands that change a collection. Its expiry is set in the same run: when
-- the key is as new, and the margin.
local function write(key, state, reset, margin)
  local lifetime = format(WHOLE, ceil_div(reset, 1000) + margin)
  if type(state) == 'string' then
    call('SET', key, state, 'PX', lifetime)
  else
    for _, command in ipairs(state) do
      call(unpack(command))
    end
    call('PEXPIRE', key, lifetime)
  end
end
