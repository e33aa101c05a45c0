-- Shared by the scripts of the Redis store: time, limits, and the writing of states.

-- Now, in us: the caller's if it brings one, else the server's own, which is the same for all callers.
local function current(given)
  if given ~= '' then
    return tonumber(given)
  end
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A limit from ARGV[first ..]: capacity, tokens, ticks, period (us), with which states of windows end. `more` is what a long life is rounded up to: a
-- sixteenth of the time that an empty bucket takes to fill. `blank` tells states of keys with a long life from others.
local function parse_limit(first)
  local ARGV = ARGV
  local capacity, tokens, ticks = ARGV[first], ARGV[first + 1], ARGV[first + 2]
  local signed = tokens .. '/' .. ticks .. '/' .. capacity
  capacity, tokens, ticks = capacity + 0, tokens + 0, ticks + 0 -- digits all: quicker than tonumber
  return {
    capacity = capacity,
    tokens = tokens,
    ticks = ticks,
    period = ARGV[first + 3] + 0,
    period_text = ARGV[first + 3],
    period_ending = ' ' .. ARGV[first + 3],
    full = capacity * ticks,
    more = ceil_div(capacity * ticks, tokens * 16),
    blank = ' ',
    signed = signed,
    ending = ' ' .. signed,
    ending_at = -1 - #signed,
  }
end

-- The text of a lifetime. Requests that wait for the same window have theirs in common, so the last one is kept.
local lasting, lifetime

-- A state is the text of a string, or the commands that change a collection. Its expiry is set in the same run: when
-- the key is as new, and the margin.
local function write(key, state, reset)
  if reset ~= lasting then
    lasting, lifetime = reset, format(WHOLE, ceil_div(reset, 1000) + MARGIN)
  end
  if not state[1] then -- a text: that it has no first command is seen three times as quickly as its type
    return call('SET', key, state, 'PX', lifetime)
  end
  for _, command in ipairs(state) do
    call(unpack(command))
  end
  call('PEXPIRE', key, lifetime)
end

-- A denial consumes nothing, and writes nothing unless a state had to be migrated; but a key that would live for ever (persisted by hand), or not long enough for what it owes
-- (its window has become longer), is given its time: a long one, as its state may say that it has one.
local function mend_expiry(key, reset, limit)
  local left = call('PTTL', key)
  if left == -1 or (left >= 0 and left < ceil_div(reset, 1000)) then
    call('PEXPIRE', key, format(WHOLE, ceil_div(reset + limit.more, 1000) + MARGIN))
  end
end
