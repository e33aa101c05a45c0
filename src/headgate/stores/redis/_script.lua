-- Shared by the scripts of the Redis store: time, limits, and the writing of states.

-- Now, in us: the caller's if it brings one, else the server's own. Callers' clocks disagree; the server's is the
-- same for all of them.
local function current(given)
  if given ~= '' then
    return tonumber(given)
  end
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A limit from ARGV[first ..]: algorithm, capacity, tokens, ticks, period (us).
local function parse_limit(first)
  local capacity, ticks = tonumber(ARGV[first + 1]), tonumber(ARGV[first + 3])
  return {
    algorithm = ARGV[first],
    capacity = capacity,
    tokens = tonumber(ARGV[first + 2]),
    ticks = ticks,
    period = tonumber(ARGV[first + 4]),
    full = capacity * ticks,
    signed = ARGV[first + 2] .. '/' .. ARGV[first + 3] .. '/' .. ARGV[first + 1],
  }
end

-- How long a key must live, in ms: until it is as new, and the margin.
local function lifetime(reset, margin)
  return text(ceil_div(reset, 1000) + margin)
end

-- A state is the text of a string, or the commands that change a collection; its expiry is set in the same run.
local function write(key, state, reset, margin)
  if type(state) == 'string' then
    redis.call('SET', key, state, 'PX', lifetime(reset, margin))
  else
    for _, command in ipairs(state) do
      redis.call(unpack(command))
    end
    redis.call('PEXPIRE', key, lifetime(reset, margin))
  end
end

-- A denial changes nothing, but a key without an expiry (persisted by hand) would live for ever.
local function mend_expiry(key, reset, margin)
  if redis.call('PTTL', key) == -1 then
    redis.call('PEXPIRE', key, lifetime(reset, margin))
  end
end
