-- Mirrors sliding_log.py. KEYS: a sorted set, score = us of an admitted request, member = "total:cost:period_us", the
-- running total padded to 16 digits, so that requests of one microsecond stay apart and in order; the period of the newest
-- is that under which the log was written. In: key, now (us), cost (<= quota + 1), limit. Out: remaining, retry (us, -1
-- never), reset (us), delay, commands or nil.

local function sliding_log_entry(member)
  local total, cost, period = match(member, '^(%d+):(%d+):(%d+)$')
  return tonumber(total), tonumber(cost), tonumber(period)
end

local function sliding_log_member(total, cost, limit)
  return format('%016.0f:%.0f:%s', total, cost, limit.period_text)
end

-- The instant of the entry that frees enough: the first whose running total reaches `wanted`, by bisection.
local function sliding_log_find_freeing(key, first, wanted)
  local low, high = call('ZRANK', key, first), call('ZCARD', key) - 1
  while low < high do
    local middle = div(low + high, 2)
    if sliding_log_entry(call('ZRANGE', key, middle, middle)[1]) < wanted then
      low = middle + 1
    else
      high = middle
    end
  end
  return tonumber(call('ZRANGE', key, low, low, 'WITHSCORES')[2])
end

-- Commands that renumber the current entries from 1, before totals become inexact; and the new total.
local function sliding_log_renumber(key, after, limit)
  local log = call('ZRANGEBYSCORE', key, '(' .. after, '+inf', 'WITHSCORES')
  local commands, total = { { 'DEL', key } }, 0
  for index = 1, #log, 2 do
    local _, cost = sliding_log_entry(log[index])
    total = total + cost
    commands[#commands + 1] = { 'ZADD', key, log[index + 1], sliding_log_member(total, cost, limit) }
  end
  return commands, total
end

-- Commands that mark the log with the period of the limit, and delete expired entries.
local function sliding_log_sign(key, newest, after, limit)
  local total, cost = sliding_log_entry(newest[1])
  return {
    { 'ZREMRANGEBYSCORE', key, '-inf', after },
    { 'ZREM', key, newest[1] },
    { 'ZADD', key, newest[2], sliding_log_member(total, cost, limit) },
  }
end

local function sliding_log(key, now, cost, limit)
  local quota, period = limit.capacity, limit.period
  local newest = pcall('ZREVRANGE', key, 0, 1, 'WITHSCORES')
  if newest.err then return nil end
  local te, total, used, last, first = now, 0, 0, now, nil
  local is_zero, commands, after, is_redated = false, nil, nil, false
  if newest[1] then
    local newest_total, newest_cost, old = sliding_log_entry(newest[1])
    if not newest_total then return nil end
    te = math.max(now, tonumber(newest[2]))
    -- Expired entries do not count again when the period becomes longer.
    after = format(INT, te - math.min(period, old))
    first = call('ZRANGEBYSCORE', key, '(' .. after, '+inf', 'LIMIT', 0, 1)[1]
    if first then
      local first_total, first_cost = sliding_log_entry(first)
      if not first_total then return nil end
      total = newest_total
      used = total - (first_total - first_cost)
      is_zero = newest_cost == 0
      last = tonumber(newest[is_zero and 4 or 2])
    end
    if te - now > period then -- the clock was set back by more than a period: everything was used now
      te, total, last, is_redated, is_zero = now, used, now, true, false
      commands = { { 'DEL', key }, { 'ZADD', key, format(INT, now), sliding_log_member(used, used, limit) } }
    elseif old ~= period then
      commands = first and sliding_log_sign(key, newest, after, limit) or { { 'DEL', key } }
    end
  end
  local retry = 0
  if used + cost <= quota or cost == 0 then
    if cost > 0 then
      used, last = used + cost, te
      if not is_redated then -- the new entry has the period of the limit
        commands = {}
        if total + cost >= 4503599627370496 then
          commands, total = sliding_log_renumber(key, after, limit)
        elseif newest[1] then
          commands[1] = { 'ZREMRANGEBYSCORE', key, '-inf', after }
        end
        if is_zero then commands[#commands + 1] = { 'ZREM', key, newest[1] } end
      end
      commands[#commands + 1] = { 'ZADD', key, format(INT, te), sliding_log_member(total + cost, cost, limit) }
    end
  elseif cost > quota then
    retry = -1
  elseif is_redated then
    retry = period
  else
    retry = sliding_log_find_freeing(key, first, total + cost - quota) + period - now
  end
  return math.max(0, quota - used), retry, used > 0 and last + period - now or 0, 0, commands
end

-- >8 -- scripts that only decide end here

local function sliding_log_refund(key, now, amount, limit, at)
  local log = call('ZRANGE', key, 0, -1, 'WITHSCORES')
  if #log == 0 then return nil end
  local te = math.max(now, tonumber(log[#log]))
  local kept, left = {}, amount
  for index = #log - 1, 1, -2 do
    local _, cost = sliding_log_entry(log[index])
    local us = tonumber(log[index + 1])
    if te - us < limit.period then
      local taken = (not at or us <= at) and math.min(cost, left) or 0
      left = left - taken
      -- The newest entry stays even if its cost is 0: it holds the instant before which time may not fall.
      if taken < cost or index == #log - 1 then kept[#kept + 1] = { us, cost - taken } end
    end
  end
  if left == amount then return nil end
  -- In a sorted set, an entry of cost 0 would come before one of the same instant and total, which holds the instant too.
  if #kept > 1 and kept[1][2] == 0 and kept[1][1] == kept[2][1] then table.remove(kept, 1) end
  local commands, total = { { 'DEL', key } }, 0
  for index = #kept, 1, -1 do
    local us, cost = kept[index][1], kept[index][2]
    total = total + cost
    commands[#commands + 1] = { 'ZADD', key, format(INT, us), sliding_log_member(total, cost, limit) }
  end
  return commands
end
