-- Decides a batch of requests, each over one or more limits, all or nothing, in one atomic run.
-- KEYS: the keys of all requests, one after the other.
-- ARGV: now (us; empty for the server's clock), whether keys are met more than once (or empty), number of limits, for each
--   its algorithm and the limit (see parse_limit), then groups of requests of one shape: requests in the group, lease id,
--   limits per request, and for each of these the limit's index and the cost on it.
-- Reply: now (us), and three lists:
--   for each key remaining and reset (us); a key that holds a foreign value has -1 remaining, and its request changes nothing;
--   for each key that denies or delays its index, from 0, retry (us, -1 never) and delay (us): they are 0 for all others;
--   for each allowed request that leaves a limit with less than its own cost its index, from 0, and how long until the same
--   request would pass again (us).

local MOST_AT_ONCE = 3000 -- keys: a call of Lua's takes 8,000 values, and MSET two for each
local KEYS, ARGV = KEYS, ARGV
local now, limits, position = current(ARGV[1]), {}, 4
for index = 1, tonumber(ARGV[3]) do
  local limit = parse_limit(position + 1)
  limit.judge = JUDGES[ARGV[position]]
  limits[index] = limit
  position = position + 5
end

-- Strings are read together, and written together at the end, which is quicker than one by one.
-- What was read, by its place among the keys; what to write, keys and states in turns, and how long each shall live (us).
local texts, written, resets = {}, {}, {}
-- Where requests meet at a key, each finds what the last has left, and not what was read: what is known of such keys, and
-- their place in `written`.
local meeting, known, places = ARGV[2] ~= '', {}, {}

if #KEYS <= MOST_AT_ONCE then
  local found = pcall('MGET', unpack(KEYS))
  texts = found.err and texts or found -- who may not read together reads one by one
end

local function keep(key, state, reset)
  if state[1] then -- a collection
    return write(key, state, reset)
  end
  local at = places[key] or #resets + 1
  written[at * 2 - 1] = key
  written[at * 2] = state
  resets[at] = reset
  if meeting then
    known[key], places[key] = state, at
  end
end

local function mend(key, reset)
  if not places[key] then
    mend_expiry(key, reset)
  end
end

local function write_together()
  if #resets > MOST_AT_ONCE or (resets[1] and pcall('MSET', unpack(written)).err) then
    for index = 1, #resets do
      write(written[index * 2 - 1], written[index * 2], resets[index])
    end
    return
  end
  -- By the server's clock it is known when a life ends, which is quicker to say than how long it is.
  local last, ending
  for index = 1, #resets do
    local key, reset = written[index * 2 - 1], resets[index]
    if reset ~= last then
      last, ending = reset, format(WHOLE, ceil_div(now + reset, 1000) + MARGIN)
    end
    if ARGV[1] ~= '' or pcall('PEXPIREAT', key, ending) ~= 1 then
      call('PEXPIRE', key, format(WHOLE, ceil_div(reset, 1000) + MARGIN))
    end
  end
end

local told, unusual, agains = {}, {}, {}

local function tell_unusual(index, retry, delay)
  local at = #unusual
  unusual[at + 1], unusual[at + 2], unusual[at + 3] = index - 1, retry, delay
end

-- Of requests that have just taken what they would need to pass again. Not of those that hold a lease: it ends when its
-- holder likes.
local function tell_again(request, again)
  agains[#agains + 1], agains[#agains + 2] = request, again
end

-- Several limits: all are judged on the state before the request; then either all are charged or none is.
local states = {}

local function charge_all(request, first, id, met, costs, exhausted)
  for index = 1, #costs do
    local state = states[index]
    if state and costs[index] > 0 then
      local at = first + index
      keep(KEYS[at], state, told[at * 2])
    end
  end
  if not exhausted then
    return
  end
  local longest = 0
  for index = 1, #met do
    local limit, cost, at = met[index], costs[index], first + index
    if limit.judge == JUDGES.concurrency then
      return
    end
    if told[at * 2 - 1] < cost then
      local _, again = limit.judge(KEYS[at], now, cost, limit, id, states[index])
      longest = math.max(longest, again)
    end
  end
  tell_again(request, longest)
end

local function deny_all(first, id, met, costs, retries, delays)
  for index = 1, #met do
    local at, limit, state = first + index, met[index], states[index]
    if (retries[index] or 0) == 0 then
      -- It would have passed here, but nothing is spent: what it says is what a peek says.
      local key = KEYS[at]
      told[at * 2 - 1], retries[index], told[at * 2], delays[index], state =
        limit.judge(key, now, 0, limit, id, meeting and known[key] or texts[at])
    end
    if state and costs[index] > 0 then
      keep(KEYS[at], state, told[at * 2])
    else
      mend(KEYS[at], told[at * 2])
    end
  end
end

local function decide_all(request, first, id, met, costs)
  local allowed, exhausted, retries, delays = true, false, nil, nil
  for index = 1, #met do
    local at, limit, cost = first + index, met[index], costs[index]
    local key = KEYS[at]
    local remaining, retry, reset, delay, state = limit.judge(key, now, cost, limit, id, meeting and known[key] or texts[at])
    if not remaining then
      for each = first + 1, first + #met do
        told[each * 2 - 1], told[each * 2] = -1, 0
      end
      return
    end
    -- One by one: assigned together, they would be moved twice.
    told[at * 2 - 1] = remaining
    told[at * 2] = reset
    states[index] = state
    if retry ~= 0 or delay ~= 0 then
      retries, delays = retries or {}, delays or {}
      retries[index], delays[index] = retry, delay
      allowed = allowed and retry == 0
    end
    if remaining < cost then
      exhausted = true
    end
  end
  if allowed then
    charge_all(request, first, id, met, costs, exhausted)
  else
    deny_all(first, id, met, costs, retries, delays)
  end
  if not retries then
    return
  end
  for number = 1, #met do
    local retry, delay = retries[number] or 0, delays[number] or 0
    if retry ~= 0 or delay ~= 0 then
      tell_unusual(first + number, retry, delay)
    end
  end
end

local keys_before, requests_before = 0, 0
while position <= #ARGV do
  local requests, id, number_met = tonumber(ARGV[position]), ARGV[position + 1], tonumber(ARGV[position + 2])
  if number_met == 1 then
    -- One limit by itself: judged and written at once.
    local limit, cost = limits[tonumber(ARGV[position + 3])], tonumber(ARGV[position + 4])
    local judge = limit.judge
    for index = keys_before + 1, keys_before + requests do
      local key = KEYS[index]
      local remaining, retry, reset, delay, state = judge(key, now, cost, limit, id, meeting and known[key] or texts[index])
      if not remaining then
        remaining, reset = -1, 0
      elseif state and cost > 0 then
        keep(key, state, reset)
        if remaining < cost and retry == 0 and judge ~= JUDGES.concurrency then
          local _, again = judge(key, now, cost, limit, id, state)
          tell_again(requests_before + index - keys_before - 1, again)
        end
      elseif retry ~= 0 then
        mend(key, reset)
      end
      told[index * 2 - 1], told[index * 2] = remaining, reset
      if remaining >= 0 and (retry ~= 0 or delay ~= 0) then
        tell_unusual(index, retry, delay)
      end
    end
  else
    local met, costs = {}, {}
    for index = 1, number_met do
      local at = position + 1 + index * 2
      met[index], costs[index] = limits[tonumber(ARGV[at])], tonumber(ARGV[at + 1])
    end
    for request = 0, requests - 1 do
      decide_all(requests_before + request, keys_before + request * number_met, id, met, costs)
    end
  end
  keys_before, requests_before = keys_before + requests * number_met, requests_before + requests
  position = position + 3 + number_met * 2
end

write_together()
return { now, told, unusual, agains }
