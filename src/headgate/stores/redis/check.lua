-- Decides a batch of requests, each over one or more limits, all or nothing, in one atomic run.
-- KEYS: the keys of all requests, one after the other.
-- ARGV: margin (ms), now (us; empty for the server's clock), number of limits, the limits (see parse_limit), then
-- groups of requests of one shape: requests in the group, cost, lease id, limits per request, the limits' indices
-- from 1. Reply: now (us), then for each key remaining, retry (us, 0 allowed, -1 never), reset (us), delay (us). A
-- key that holds a foreign value answers -1 as its remaining, and its request changes nothing.

local margin, now = tonumber(ARGV[1]), current(ARGV[2])

-- Writes what a verdict changes. A denial changes nothing; but a key that would live for ever (persisted by hand), or not
-- long enough for what it owes (its window has become longer), is given its time.
local function settle(key, reset, state)
  if state then
    write(key, state, reset, margin)
  else
    local left, needed = call('PTTL', key), ceil_div(reset, 1000)
    if left == -1 or (left >= 0 and left < needed) then
      call('PEXPIRE', key, format(WHOLE, needed + margin))
    end
  end
end

-- One request over one limit, by itself on its way: the shortest path, as it has to pay for all of the run.
if #KEYS == 1 then
  local limit, cost = parse_limit(4), tonumber(ARGV[10])
  local remaining, retry, reset, delay, state = JUDGE[limit.algorithm](KEYS[1], now, cost, limit, ARGV[11])
  if not remaining then
    return { now, -1, 0, 0, 0 }
  end
  if cost > 0 then
    settle(KEYS[1], reset, state)
  end
  return { now, remaining, retry, reset, delay }
end

local limits, position = {}, 4
for index = 1, tonumber(ARGV[3]) do
  limits[index] = parse_limit(position)
  position = position + 5
end

-- Several limits: all are judged on the state before the request; then either all are charged or none is.
local function decide_all(first, cost, id, met, reply)
  local states, start, allowed, readable = {}, #reply, true, true
  for index, limit in ipairs(met) do
    local remaining, retry, reset, delay, state = JUDGE[limit.algorithm](KEYS[first + index], now, cost, limit, id)
    local at = start + index * 4
    reply[at - 3], reply[at - 2], reply[at - 1], reply[at] = remaining or -1, retry or 0, reset or 0, delay or 0
    states[index] = state
    readable, allowed = readable and remaining ~= nil, allowed and retry == 0
  end
  for index, limit in ipairs(met) do
    local key, at = KEYS[first + index], start + index * 4
    if not readable then
      reply[at - 3], reply[at - 2] = -1, 0
    elseif not allowed and reply[at - 2] == 0 then
      -- It would have passed here, but nothing is spent: what it says is what a peek says.
      local judge = JUDGE[limit.algorithm]
      reply[at - 3], reply[at - 2], reply[at - 1], reply[at], states[index] = judge(key, now, 0, limit, id)
    end
    if readable and cost > 0 then
      settle(key, reply[at - 1], states[index])
    end
  end
end

local reply, replied, keys_before = { now }, 1, 0
while position <= #ARGV do
  local requests, cost, id = tonumber(ARGV[position]), tonumber(ARGV[position + 1]), ARGV[position + 2]
  local number_met = tonumber(ARGV[position + 3])
  if number_met == 1 then
    -- One limit by itself, the common case: judged and written at once.
    local limit = limits[tonumber(ARGV[position + 4])]
    local judge = JUDGE[limit.algorithm]
    for index = keys_before + 1, keys_before + requests do
      local key = KEYS[index]
      local remaining, retry, reset, delay, state = judge(key, now, cost, limit, id)
      if not remaining then
        remaining, retry, reset, delay = -1, 0, 0, 0
      elseif cost > 0 then
        settle(key, reset, state)
      end
      reply[replied + 1], reply[replied + 2], reply[replied + 3], reply[replied + 4] = remaining, retry, reset, delay
      replied = replied + 4
    end
  else
    local met = {}
    for index = 1, number_met do
      met[index] = limits[tonumber(ARGV[position + 3 + index])]
    end
    for request = 0, requests - 1 do
      decide_all(keys_before + request * number_met, cost, id, met, reply)
    end
    replied = #reply
  end
  keys_before = keys_before + requests * number_met
  position = position + 4 + number_met
end

return reply
