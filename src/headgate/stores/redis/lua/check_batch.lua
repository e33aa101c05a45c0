-- Decides a batch of requests, each over one or more limits, all or nothing, in one atomic run.
-- KEYS: the keys of all requests, one after the other.
-- ARGV: now (us; empty for the server's clock), not empty if there are duplicate keys, number of limits, for each its
--   algorithm and the limit (see parse_limit), then groups of requests of one shape: number of requests, lease id, limits
--   per request, and for each of these the index of the limit and the cost.
-- Reply: now (us), and three lists:
--   remaining and reset (us) of each key; remaining is -1 for a foreign value, whose request changes nothing;
--   index from 0, retry (us, -1 never) and delay (us) of each key that denies or delays: both are 0 for all others;
--   index from 0 of each allowed request that leaves a limit with less than its own cost, and the time until the same
--   request would be allowed again (us).

local MAX_KEYS_AT_ONCE = 3000 -- a call in Lua takes 8,000 values, and MSET two for each key
-- Written immediately, unlike strings.
local COLLECTIONS = { calendar_window = true, concurrency = true, fair_share = true, sliding_log = true }
local MIN_BUSY_KEYS = 32
local KEYS, ARGV = KEYS, ARGV
local now, limits, position_of_groups, has_collections = current_us(ARGV[1]), {}, 4, false
for index = 1, tonumber(ARGV[3]) do
  local limit, algorithm = parse_limit(position_of_groups + 1), ARGV[position_of_groups]
  local unknown = edges_error(limit, now)
  if unknown then return unknown end
  limit.decide = ALGORITHMS[algorithm]
  limit.is_collection = COLLECTIONS[algorithm]
  limits[index] = limit
  has_collections = has_collections or limit.is_collection
  position_of_groups = position_of_groups + 5
end

-- Strings are read together, and written together at the end, which is faster than one by one.
-- By the positions of the keys: texts read, states to write, and results (remaining and reset in turn).
local texts, states, results = {}, nil, nil
-- With duplicate keys, each request starts from the state that the last one left: the new states by key, and the
-- positions at which they are to be written.
local has_duplicates, new_states, new_state_at = ARGV[2] ~= '', nil, nil
local unusual, next_allowed -- the other lists of the reply

if #KEYS <= MAX_KEYS_AT_ONCE then
  local reply = pcall('MGET', unpack(KEYS))
  texts = reply.err and texts or reply -- without permission for MGET, keys are read one by one
end

-- True if all keys of the server expire; otherwise one of those below may have been persisted by hand.
local function all_keys_expire()
  local databases = pcall('INFO', 'keyspace')
  if databases.err then return false end
  for keys, expiring in gmatch(databases, 'keys=(%d+),expires=(%d+)') do
    if keys ~= expiring then return false end
  end
  return true
end

-- Setting the TTL is the most expensive operation on a key. So large batches, by the server's clock, set a long one: until
-- the key is as new, rounded up to a multiple of `ttl_step`, and the margin. A tab in the state marks it, and the TTL is
-- left as it is while it suffices for the states that follow. By the positions of the keys: states of those whose TTL
-- suffices, and limits of those that get a long one.
local is_busy = ARGV[1] == '' and not has_duplicates and #texts >= MIN_BUSY_KEYS and all_keys_expire()
local in_place, long_ttl_limits
for _, limit in ipairs(limits) do
  limit.separator = is_busy and '\t' or ' '
end

local function store_state(at, state)
  local key = KEYS[at]
  if state[1] then -- a collection
    return write(key, state, results[at * 2])
  end
  if has_duplicates then
    states[new_state_at[key] or at] = false
    new_states[key], new_state_at[key] = state, at
  end
  states[at] = state
end

local function repair(at, limit)
  local key = KEYS[at]
  if not new_state_at[key] then repair_ttl(key, results[at * 2], limit) end
end

-- States of keys whose TTL suffices: in place, which is faster, if the length is the same and SETRANGE is permitted.
local function write_in_place()
  for at = 1, #KEYS do
    local state = in_place[at]
    if state then
      local key, length = KEYS[at], #state
      if length ~= #texts[at] or pcall('SETRANGE', key, '0', state) ~= length then
        call('SET', key, state, 'KEEPTTL')
      end
    end
  end
end

-- The instant (us) at which a key may expire, without the margin.
local function expiry_of(at)
  local expiry, limit = now + results[at * 2], long_ttl_limits[at]
  return limit and expiry - expiry % limit.ttl_step + limit.ttl_step or expiry
end

local function write_one_by_one()
  for at = 1, #KEYS do
    if states[at] then write(KEYS[at], states[at], expiry_of(at) - now) end
  end
end

local function write_batch()
  local written, last = {}, 0 -- keys and states in turn
  for at = 1, #KEYS do
    local state = states[at]
    if state then
      written[last + 1] = KEYS[at]
      last = last + 2
      written[last] = state
    end
  end
  if last > MAX_KEYS_AT_ONCE * 2 or (last > 0 and pcall('MSET', unpack(written)).err) then return write_one_by_one() end
  -- By the server's clock, PEXPIREAT is faster: many keys expire at the same instant.
  local is_server_time, last_expiry, text = ARGV[1] == '', nil, nil
  for at = 1, #KEYS do
    if states[at] then
      local key, expiry = KEYS[at], expiry_of(at)
      if expiry ~= last_expiry then
        last_expiry, text = expiry, format(INT, ceil_div(expiry, 1000) + MARGIN_MS)
      end
      if not is_server_time or pcall('PEXPIREAT', key, text) ~= 1 then
        call('PEXPIRE', key, format(INT, ceil_div(expiry - now, 1000) + MARGIN_MS))
      end
    end
  end
end

local function add_unusual(index, retry, delay)
  local at = #unusual
  unusual[at + 1], unusual[at + 2], unusual[at + 3] = index - 1, retry, delay
end

-- Not for leases, which end when their holders release them.
local function add_next_allowed(request, wait)
  next_allowed[#next_allowed + 1], next_allowed[#next_allowed + 2] = request, wait
end

-- Several limits: all are decided on the state before the request; then either all are charged or none is. Plain requests
-- (strings, no duplicate keys, a cost on each limit) are charged by their entries in `states` alone.
local function charge_all(first, costs)
  for index = 1, #costs do
    local at = first + index
    local state = states[at]
    states[at] = false
    if state and costs[index] > 0 then store_state(at, state) end
  end
end

local function add_next_allowed_of_all(request, first, id, request_limits, costs)
  local longest = 0
  for index = 1, #request_limits do
    local limit, cost, at = request_limits[index], costs[index], first + index
    if limit.decide == ALGORITHMS.concurrency then return end
    if results[at * 2 - 1] < cost then
      local _, wait = limit.decide(KEYS[at], now, cost, limit, id, states[at])
      longest = math.max(longest, wait)
    end
  end
  add_next_allowed(request, longest)
end

local function deny_all(first, id, request_limits, costs, retries, delays)
  for index = 1, #request_limits do
    local at, limit = first + index, request_limits[index]
    local state = states[at]
    states[at] = false
    if (retries[index] or 0) == 0 then
      -- This limit would have allowed the request, but is not charged: it replies as to a peek.
      local key = KEYS[at]
      results[at * 2 - 1], retries[index], results[at * 2], delays[index], state =
        limit.decide(key, now, 0, limit, id, has_duplicates and new_states[key] or texts[at])
    end
    if state and costs[index] > 0 then
      store_state(at, state)
    else
      repair(at, limit)
    end
  end
end

local function decide_all(request, first, id, request_limits, costs, is_plain)
  local is_allowed, is_exhausted, retries, delays = true, false, nil, nil
  for index = 1, #request_limits do
    local at, limit, cost = first + index, request_limits[index], costs[index]
    local key = KEYS[at]
    local remaining, retry, reset, delay, state, ttl_suffices =
      limit.decide(key, now, cost, limit, id, has_duplicates and new_states[key] or texts[at])
    if not remaining then
      for each = first + 1, first + #request_limits do
        results[each * 2 - 1], results[each * 2], states[each] = -1, 0, false
      end
      return
    end
    -- One by one: a multiple assignment would copy them twice.
    results[at * 2 - 1] = remaining
    results[at * 2] = reset
    states[at] = state
    if is_busy and ttl_suffices ~= nil then long_ttl_limits[at] = limit end
    if retry ~= 0 or delay ~= 0 then
      retries, delays = retries or {}, delays or {}
      retries[index], delays[index] = retry, delay
      is_allowed = is_allowed and retry == 0
    end
    if remaining < cost then is_exhausted = true end
  end
  if not is_allowed then
    deny_all(first, id, request_limits, costs, retries, delays)
  else
    if not is_plain then charge_all(first, costs) end
    if is_exhausted then add_next_allowed_of_all(request, first, id, request_limits, costs) end
  end
  if not retries then return end
  for number = 1, #request_limits do
    local retry, delay = retries[number] or 0, delays[number] or 0
    if retry ~= 0 or delay ~= 0 then add_unusual(first + number, retry, delay) end
  end
end

-- The same for a plain request that all limits allow, with nothing unusual to report; else false.
local function try_allow_all(first, id, request_limits, costs)
  for index = 1, #request_limits do
    local at, limit, cost = first + index, request_limits[index], costs[index]
    local remaining, retry, reset, delay, state, ttl_suffices = limit.decide(KEYS[at], now, cost, limit, id, texts[at])
    if not remaining or remaining < cost or retry ~= 0 or delay ~= 0 then
      for each = first + 1, at do
        in_place[each] = nil
      end
      return false
    end
    results[at * 2 - 1] = remaining
    results[at * 2] = reset
    if is_busy and ttl_suffices then
      in_place[at] = state
    else
      states[at] = state
      long_ttl_limits[at] = is_busy and ttl_suffices ~= nil and limit
    end
  end
  return true
end

local function decide_groups()
  states, results, new_states, new_state_at, unusual, next_allowed = {}, {}, {}, {}, {}, {}
  in_place, long_ttl_limits = {}, {}
  local position, keys_before, requests_before = position_of_groups, 0, 0
  while position <= #ARGV do
    local requests, id, limit_count = tonumber(ARGV[position]), ARGV[position + 1], tonumber(ARGV[position + 2])
    if limit_count == 1 then
      -- A single limit: decided and stored at once.
      local limit, cost = limits[tonumber(ARGV[position + 3])], tonumber(ARGV[position + 4])
      local decide, is_plain = limit.decide, cost > 0 and not has_duplicates and not limit.is_collection
      for at = keys_before + 1, keys_before + requests do
        local key = KEYS[at]
        local remaining, retry, reset, delay, state, ttl_suffices =
          decide(key, now, cost, limit, id, has_duplicates and new_states[key] or texts[at])
        if not remaining then remaining, reset, retry, delay = -1, 0, 0, 0 end
        results[at * 2 - 1] = remaining
        results[at * 2] = reset
        if is_busy and ttl_suffices ~= nil then long_ttl_limits[at] = limit end
        if is_busy and ttl_suffices then
          in_place[at] = state
        elseif is_plain then
          states[at] = state
        elseif state and cost > 0 then
          store_state(at, state)
        end
        if remaining < cost and state and retry == 0 and decide ~= ALGORITHMS.concurrency then
          local _, wait = decide(key, now, cost, limit, id, state)
          add_next_allowed(requests_before + at - keys_before - 1, wait)
        end
        if retry ~= 0 or delay ~= 0 then
          if retry ~= 0 and not state then repair(at, limit) end
          add_unusual(at, retry, delay)
        end
      end
    else
      local request_limits, costs, is_plain = {}, {}, not has_duplicates
      for index = 1, limit_count do
        local at = position + 1 + index * 2
        request_limits[index], costs[index] = limits[tonumber(ARGV[at])], tonumber(ARGV[at + 1])
        is_plain = is_plain and costs[index] > 0 and not request_limits[index].is_collection
      end
      for request = 0, requests - 1 do
        local first = keys_before + request * limit_count
        if not is_plain or not try_allow_all(first, id, request_limits, costs) then
          decide_all(requests_before + request, first, id, request_limits, costs, is_plain)
        end
      end
    end
    keys_before, requests_before = keys_before + requests * limit_count, requests_before + requests
    position = position + 3 + limit_count * 2
  end
end

-- Without collections, nothing is written before all is decided, so that it can be decided again.
skip_validation = true
if has_collections or not protected_call(decide_groups) then
  skip_validation = false
  decide_groups()
end
if is_busy then write_in_place() end
write_batch()
return { now, results, unusual, next_allowed }
