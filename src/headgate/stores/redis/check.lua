-- Decides a batch of requests, each over one or more limits, all or nothing, in one atomic run.
-- KEYS: the keys of all requests, one after the other.
-- ARGV: now (us; empty for the server's clock), number of limits, for each its algorithm and the limit (see parse_limit),
--   then groups of requests of one shape: requests in the group, lease id, limits per request, and for each of these the
--   limit's index and the cost on it.
-- Reply: now (us), then for each key remaining, retry (us, 0 allowed, -1 never), reset (us), delay (us).
--   A key that holds a foreign value answers -1 as its remaining, and its request changes nothing.
--   Last, for each allowed request that leaves a limit with less than its own cost: its index in the batch, from 0, and
--   how long until the same request would pass again (us).

local now, limits, judges, position = current(ARGV[1]), {}, {}, 3
for index = 1, tonumber(ARGV[2]) do
  judges[index], limits[index] = JUDGES[ARGV[position]], parse_limit(position + 1)
  position = position + 5
end

-- Each key is read once and written once, at the end: many requests of a batch may meet the same.
local resets = {}

local function keep(key, state, reset)
  if type(state) ~= 'string' then
    return write(key, state, reset)
  end
  known[key], resets[key] = state, reset
end

local function mend(key, reset)
  if not resets[key] then
    mend_expiry(key, reset)
  end
end

-- Pairs of index and wait, of requests that have just taken what they would need to pass again. Not of those that hold a
-- lease: it ends when its holder likes.
local agains = {}

local function tell_again(request, again)
  agains[#agains + 1], agains[#agains + 2] = request, again
end

-- Several limits: all are judged on the state before the request; then either all are charged or none is.
local function decide_all(request, first, id, met, costs, reply)
  local states, start, allowed, readable, exhausted = {}, #reply, true, true, false
  for index, which in ipairs(met) do
    local remaining, retry, reset, delay, state = judges[which](KEYS[first + index], now, costs[index], limits[which], id)
    local at = start + index * 4
    reply[at - 3], reply[at - 2], reply[at - 1], reply[at] = remaining or -1, retry or 0, reset or 0, delay or 0
    states[index] = state
    readable, allowed = readable and remaining ~= nil, allowed and retry == 0
  end
  for index, which in ipairs(met) do
    local key, at = KEYS[first + index], start + index * 4
    if not readable then
      reply[at - 3], reply[at - 2] = -1, 0
    else
      if not allowed and reply[at - 2] == 0 then
        -- It would have passed here, but nothing is spent: what it says is what a peek says.
        local judge, limit = judges[which], limits[which]
        reply[at - 3], reply[at - 2], reply[at - 1], reply[at], states[index] = judge(key, now, 0, limit, id)
      end
      if states[index] and costs[index] > 0 then
        keep(key, states[index], reply[at - 1])
        exhausted = exhausted or reply[at - 3] < costs[index]
      elseif not allowed then
        mend(key, reply[at - 1])
      end
    end
  end
  if exhausted and allowed then
    local longest = 0
    for index, which in ipairs(met) do
      local judge = judges[which]
      if judge == JUDGES.concurrency then
        return
      end
      if reply[start + index * 4 - 3] < costs[index] then
        local _, again = judge(KEYS[first + index], now, costs[index], limits[which], id)
        longest = math.max(longest, again)
      end
    end
    tell_again(request, longest)
  end
end

local reply, replied, keys_before, requests_before = { now }, 1, 0, 0
while position <= #ARGV do
  local requests, id, number_met = tonumber(ARGV[position]), ARGV[position + 1], tonumber(ARGV[position + 2])
  if number_met == 1 then
    -- One limit by itself: judged and written at once.
    local which, cost = tonumber(ARGV[position + 3]), tonumber(ARGV[position + 4])
    local judge, limit = judges[which], limits[which]
    for index = keys_before + 1, keys_before + requests do
      local key = KEYS[index]
      local remaining, retry, reset, delay, state = judge(key, now, cost, limit, id)
      if not remaining then
        remaining, retry, reset, delay = -1, 0, 0, 0
      elseif state and cost > 0 then
        keep(key, state, reset)
        if remaining < cost and retry == 0 and judge ~= JUDGES.concurrency then
          local _, again = judge(key, now, cost, limit, id)
          tell_again(requests_before + index - keys_before - 1, again)
        end
      elseif retry ~= 0 then
        mend(key, reset)
      end
      reply[replied + 1], reply[replied + 2], reply[replied + 3], reply[replied + 4] = remaining, retry, reset, delay
      replied = replied + 4
    end
  else
    local met, costs = {}, {}
    for index = 1, number_met do
      local at = position + 1 + index * 2
      met[index], costs[index] = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    end
    for request = 0, requests - 1 do
      decide_all(requests_before + request, keys_before + request * number_met, id, met, costs, reply)
    end
    replied = #reply
  end
  keys_before, requests_before = keys_before + requests * number_met, requests_before + requests
  position = position + 3 + number_met * 2
end

for key, reset in pairs(resets) do
  write(key, known[key], reset)
end
for index, number in ipairs(agains) do
  reply[replied + index] = number
end
return reply
