-- Decides a batch of requests, each over one or more limits, all or nothing, in one atomic run.
-- KEYS: the keys of all requests, one after the other.
-- ARGV: margin (ms), now (us; empty for the server's clock), number of limits, the limits (see parse_limit), then
-- groups of requests of one shape: requests in the group, cost, lease id, limits per request, the limits' indices
-- from 1. Reply: now (us), then for each key remaining, retry (us, 0 allowed, -1 never), reset (us), delay (us). A
-- key that holds a foreign value answers -1 as its remaining, and its request changes nothing.

local margin, now = tonumber(ARGV[1]), current(ARGV[2])
local limits, position = {}, 4
for index = 1, tonumber(ARGV[3]) do
  local limit = parse_limit(position)
  limit.judge = JUDGE[limit.algorithm]
  limits[index] = limit
  position = position + 5
end

local reply, replied, key_index = { now }, 1, 0

local function answer(remaining, retry, reset, delay)
  reply[replied + 1], reply[replied + 2], reply[replied + 3], reply[replied + 4] = remaining, retry, reset, delay
  replied = replied + 4
end

-- One limit by itself: judged and written at once.
local function decide_one(cost, id, limit)
  key_index = key_index + 1
  local key = KEYS[key_index]
  local remaining, retry, reset, delay, state = limit.judge(key, now, cost, limit, id)
  if not remaining then
    return answer(-1, 0, 0, 0)
  end
  if cost > 0 then
    if state then
      write(key, state, reset, margin)
    elseif retry ~= 0 then
      mend_expiry(key, reset, margin)
    end
  end
  return answer(remaining, retry, reset, delay)
end

-- Several limits: all are judged on the state before the request; then either all are charged or none is.
local function decide_all(cost, id, met)
  local judged, allowed, readable = {}, true, true
  for index, limit in ipairs(met) do
    local remaining, retry, reset, delay, state = limit.judge(KEYS[key_index + index], now, cost, limit, id)
    judged[index] = { remaining or -1, retry, reset, delay, state }
    readable = readable and remaining ~= nil
    allowed = allowed and retry == 0
  end
  for index, limit in ipairs(met) do
    local key, verdict = KEYS[key_index + index], judged[index]
    if not readable then
      verdict = { -1, 0, 0, 0 }
    elseif not allowed and verdict[2] == 0 then
      -- It would have passed here, but nothing is spent: what it says is what a peek says.
      verdict = { limit.judge(key, now, 0, limit, id) }
    end
    if readable and cost > 0 then
      if verdict[5] then
        write(key, verdict[5], verdict[3], margin)
      elseif verdict[2] ~= 0 then
        mend_expiry(key, verdict[3], margin)
      end
    end
    answer(verdict[1], verdict[2], verdict[3], verdict[4])
  end
  key_index = key_index + #met
end

while position <= #ARGV do
  local requests, cost, id = tonumber(ARGV[position]), tonumber(ARGV[position + 1]), ARGV[position + 2]
  local number_met = tonumber(ARGV[position + 3])
  if number_met == 1 then
    local limit = limits[tonumber(ARGV[position + 4])]
    for _ = 1, requests do
      decide_one(cost, id, limit)
    end
  else
    local met = {}
    for index = 1, number_met do
      met[index] = limits[tonumber(ARGV[position + 3 + index])]
    end
    for _ = 1, requests do
      decide_all(cost, id, met)
    end
  end
  position = position + 4 + number_met
end

return reply
