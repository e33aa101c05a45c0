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
local COLLECTIONS = { sliding_log = true, concurrency = true } -- no strings: they are written at once
local BUSY = 32 -- keys
local KEYS, ARGV = KEYS, ARGV
local now, limits, groups_at, collecting = current(ARGV[1]), {}, 4, false
for index = 1, tonumber(ARGV[3]) do
  local limit, algorithm = parse_limit(groups_at + 1), ARGV[groups_at]
  limit.judge = JUDGES[algorithm]
  limit.collects = COLLECTIONS[algorithm]
  limits[index] = limit
  collecting = collecting or limit.collects
  groups_at = groups_at + 5
end

-- Strings are read together, and written together at the end, which is quicker than one by one.
-- What was read, what to write, and what to tell (remaining and reset in turns), by the places of the keys.
local texts, states, told = {}, nil, nil
-- Where requests meet at a key, each finds what the last has left, and not what was read: what is known of such keys, and
-- the place at which it waits to be written.
local meeting, known, places = ARGV[2] ~= '', nil, nil
local unusual, agains -- the other lists of the reply

if #KEYS <= MOST_AT_ONCE then
  local found = pcall('MGET', unpack(KEYS))
  texts = found.err and texts or found -- who may not read together reads one by one
end

-- Whether there is no key without a lifetime: else one of those below could have been persisted by hand.
local function all_end()
  local databases = pcall('INFO', 'keyspace')
  if databases.err then
    return false
  end
  for keys, ending in gmatch(databases, 'keys=(%d+),expires=(%d+)') do
    if keys ~= ending then
      return false
    end
  end
  return true
end

-- Nothing that is done to a key takes as long as to set its lifetime. So where there are many, they get a long life, by the
-- server's clock: until they are as new, on to the next multiple of `more`, and the margin. A tab in the state says so, and
-- while the states that follow need no longer one, it is left as it is. By the places of the keys: states of those that
-- have it already, and limits of those that are to get it.
local busy, kept, longer = ARGV[1] == '' and not meeting and #texts >= BUSY and all_end(), nil, nil
for _, limit in ipairs(limits) do
  limit.blank = busy and '\t' or ' '
end

local function keep(at, state)
  local key = KEYS[at]
  if state[1] then -- a collection
    return write(key, state, told[at * 2])
  end
  if meeting then
    states[places[key] or at] = false
    known[key], places[key] = state, at
  end
  states[at] = state
end

local function mend(at, limit)
  local key = KEYS[at]
  if not places[key] then
    mend_expiry(key, told[at * 2], limit)
  end
end

-- What changes in keys that live long enough: in place, which is quicker, where its length is the same and it is allowed.
local function write_kept()
  for at = 1, #KEYS do
    local state = kept[at]
    if state then
      local key, length = KEYS[at], #state
      if length ~= #texts[at] or pcall('SETRANGE', key, '0', state) ~= length then
        call('SET', key, state, 'KEEPTTL')
      end
    end
  end
end

-- The instant (us) at which a key may be forgotten, but for the margin.
local function ending_of(at)
  local ending, limit = now + told[at * 2], longer[at]
  return limit and ending - ending % limit.more + limit.more or ending
end

local function write_one_by_one()
  for at = 1, #KEYS do
    if states[at] then
      write(KEYS[at], states[at], ending_of(at) - now)
    end
  end
end

local function write_together()
  local written, last = {}, 0 -- keys and states in turns
  for at = 1, #KEYS do
    local state = states[at]
    if state then
      written[last + 1] = KEYS[at]
      last = last + 2
      written[last] = state
    end
  end
  if last > MOST_AT_ONCE * 2 or (last > 0 and pcall('MSET', unpack(written)).err) then
    return write_one_by_one()
  end
  -- By the server's clock it is known when a life ends, which is quicker to say than how long it is.
  local is_server_time, last_ending, text = ARGV[1] == '', nil, nil
  for at = 1, #KEYS do
    if states[at] then
      local key, ending = KEYS[at], ending_of(at)
      if ending ~= last_ending then
        last_ending, text = ending, format(WHOLE, ceil_div(ending, 1000) + MARGIN)
      end
      if not is_server_time or pcall('PEXPIREAT', key, text) ~= 1 then
        call('PEXPIRE', key, format(WHOLE, ceil_div(ending - now, 1000) + MARGIN))
      end
    end
  end
end

local function tell_unusual(index, retry, delay)
  local at = #unusual
  unusual[at + 1], unusual[at + 2], unusual[at + 3] = index - 1, retry, delay
end

-- Of requests that have just taken what they would need to pass again. Not of those that hold a lease: it ends when its
-- holder likes.
local function tell_again(request, again)
  agains[#agains + 1], agains[#agains + 2] = request, again
end

-- Several limits: all are judged on the state before the request; then either all are charged or none is. What is
-- `plain` (strings that nobody else meets, all at some cost) needs no more than to wait among the states.
local function charge_all(first, costs)
  for index = 1, #costs do
    local at = first + index
    local state = states[at]
    states[at] = false
    if state and costs[index] > 0 then
      keep(at, state)
    end
  end
end

local function tell_all_again(request, first, id, met, costs)
  local longest = 0
  for index = 1, #met do
    local limit, cost, at = met[index], costs[index], first + index
    if limit.judge == JUDGES.concurrency then
      return
    end
    if told[at * 2 - 1] < cost then
      local _, again = limit.judge(KEYS[at], now, cost, limit, id, states[at])
      longest = math.max(longest, again)
    end
  end
  tell_again(request, longest)
end

local function deny_all(first, id, met, costs, retries, delays)
  for index = 1, #met do
    local at, limit = first + index, met[index]
    local state = states[at]
    states[at] = false
    if (retries[index] or 0) == 0 then
      -- It would have passed here, but nothing is spent: what it says is what a peek says.
      local key = KEYS[at]
      told[at * 2 - 1], retries[index], told[at * 2], delays[index], state =
        limit.judge(key, now, 0, limit, id, meeting and known[key] or texts[at])
    end
    if state and costs[index] > 0 then
      keep(at, state)
    else
      mend(at, limit)
    end
  end
end

local function decide_all(request, first, id, met, costs, plain)
  local allowed, exhausted, retries, delays = true, false, nil, nil
  for index = 1, #met do
    local at, limit, cost = first + index, met[index], costs[index]
    local key = KEYS[at]
    local remaining, retry, reset, delay, state, lasts =
      limit.judge(key, now, cost, limit, id, meeting and known[key] or texts[at])
    if not remaining then
      for each = first + 1, first + #met do
        told[each * 2 - 1], told[each * 2], states[each] = -1, 0, false
      end
      return
    end
    -- One by one: assigned together, they would be moved twice.
    told[at * 2 - 1] = remaining
    told[at * 2] = reset
    states[at] = state
    if busy and lasts ~= nil then
      longer[at] = limit
    end
    if retry ~= 0 or delay ~= 0 then
      retries, delays = retries or {}, delays or {}
      retries[index], delays[index] = retry, delay
      allowed = allowed and retry == 0
    end
    if remaining < cost then
      exhausted = true
    end
  end
  if not allowed then
    deny_all(first, id, met, costs, retries, delays)
  else
    if not plain then
      charge_all(first, costs)
    end
    if exhausted then
      tell_all_again(request, first, id, met, costs)
    end
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

-- The same for what is `plain`, as long as it passes everywhere and nothing else has to be told; else false.
local function pass_all(first, id, met, costs)
  for index = 1, #met do
    local at, limit, cost = first + index, met[index], costs[index]
    local remaining, retry, reset, delay, state, lasts = limit.judge(KEYS[at], now, cost, limit, id, texts[at])
    if not remaining or remaining < cost or retry ~= 0 or delay ~= 0 then
      for each = first + 1, at do
        kept[each] = nil
      end
      return false
    end
    told[at * 2 - 1] = remaining
    told[at * 2] = reset
    if busy and lasts then
      kept[at] = state
    else
      states[at] = state
      longer[at] = busy and lasts ~= nil and limit
    end
  end
  return true
end

local function decide_groups()
  states, told, known, places, unusual, agains = {}, {}, {}, {}, {}, {}
  kept, longer = {}, {}
  local position, keys_before, requests_before = groups_at, 0, 0
  while position <= #ARGV do
    local requests, id, number_met = tonumber(ARGV[position]), ARGV[position + 1], tonumber(ARGV[position + 2])
    if number_met == 1 then
      -- One limit by itself: judged and kept at once.
      local limit, cost = limits[tonumber(ARGV[position + 3])], tonumber(ARGV[position + 4])
      local judge, plain = limit.judge, cost > 0 and not meeting and not limit.collects
      for at = keys_before + 1, keys_before + requests do
        local key = KEYS[at]
        local remaining, retry, reset, delay, state, lasts =
          judge(key, now, cost, limit, id, meeting and known[key] or texts[at])
        if not remaining then
          remaining, reset, retry, delay = -1, 0, 0, 0
        end
        told[at * 2 - 1] = remaining
        told[at * 2] = reset
        if busy and lasts ~= nil then
          longer[at] = limit
        end
        if busy and lasts then
          kept[at] = state
        elseif plain then
          states[at] = state
        elseif state and cost > 0 then
          keep(at, state)
        end
        if remaining < cost and state and retry == 0 and judge ~= JUDGES.concurrency then
          local _, again = judge(key, now, cost, limit, id, state)
          tell_again(requests_before + at - keys_before - 1, again)
        end
        if retry ~= 0 or delay ~= 0 then
          if retry ~= 0 and not state then
            mend(at, limit)
          end
          tell_unusual(at, retry, delay)
        end
      end
    else
      local met, costs, plain = {}, {}, not meeting
      for index = 1, number_met do
        local at = position + 1 + index * 2
        met[index], costs[index] = limits[tonumber(ARGV[at])], tonumber(ARGV[at + 1])
        plain = plain and costs[index] > 0 and not met[index].collects
      end
      for request = 0, requests - 1 do
        local first = keys_before + request * number_met
        if not plain or not pass_all(first, id, met, costs) then
          decide_all(requests_before + request, first, id, met, costs, plain)
        end
      end
    end
    keys_before, requests_before = keys_before + requests * number_met, requests_before + requests
    position = position + 3 + number_met * 2
  end
end

-- Where there are no collections, nothing is written before all is decided: then it may be decided anew.
trusting = true
if collecting or not attempt(decide_groups) then
  trusting = false
  decide_groups()
end
if busy then
  write_kept()
end
write_together()
return { now, told, unusual, agains }
