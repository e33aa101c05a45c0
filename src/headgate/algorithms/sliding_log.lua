-- Mirrors sliding_log.py. KEYS: a sorted set, score = us of an admitted request, member = "total:cost", the running
-- total padded to 16 digits, so that requests of one microsecond stay apart and in order. In: key, now (us), cost
-- (<= quota + 1), limit. Out: remaining, retry (us, -1 never), reset (us), delay, commands or nil.

local function sliding_log_entry(member)
  local total, cost = match(member, '^(%d+):(%d+)$')
  return tonumber(total), tonumber(cost)
end

local function sliding_log_member(total, cost)
  return format('%016.0f:%.0f', total, cost)
end

-- When the entry was made that frees enough: the first whose running total reaches `wanted`, by bisection.
local function sliding_log_freeing(key, first, wanted)
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

-- Commands that write the live entries anew with totals from 1 on, before the totals leave exactness; and the new total.
local function sliding_log_renumber(key, after)
  local log = call('ZRANGEBYSCORE', key, '(' .. after, '+inf', 'WITHSCORES')
  local commands, total = { { 'DEL', key } }, 0
  for index = 1, #log, 2 do
    local _, cost = sliding_log_entry(log[index])
    total = total + cost
    commands[#commands + 1] = { 'ZADD', key, log[index + 1], sliding_log_member(total, cost) }
  end
  return commands, total
end

local function sliding_log(key, now, cost, limit)
  local quota, period = limit.capacity, limit.period
  local newest = pcall('ZREVRANGE', key, 0, 1, 'WITHSCORES')
  if newest.err then
    return nil
  end
  local te, total, used, last, first = now, 0, 0, now, nil
  local worthless = false
  if newest[1] then
    te = math.max(now, tonumber(newest[2]))
    first = call('ZRANGEBYSCORE', key, '(' .. format(WHOLE, te - period), '+inf', 'LIMIT', 0, 1)[1]
    if first then
      local newest_cost
      total, newest_cost = sliding_log_entry(newest[1])
      local first_total, first_cost = sliding_log_entry(first)
      if not total or not first_total then
        return nil
      end
      used = total - (first_total - first_cost)
      worthless = newest_cost == 0
      last = tonumber(newest[worthless and 4 or 2])
    end
  end
  local retry, commands = 0, nil
  if used + cost <= quota or cost == 0 then
    if cost > 0 then
      used, last = used + cost, te
      commands = {}
      if total + cost >= 4503599627370496 then
        commands, total = sliding_log_renumber(key, format(WHOLE, te - period))
      elseif newest[1] then
        commands[1] = { 'ZREMRANGEBYSCORE', key, '-inf', format(WHOLE, te - period) }
      end
      if worthless then
        commands[#commands + 1] = { 'ZREM', key, newest[1] }
      end
      commands[#commands + 1] = { 'ZADD', key, format(WHOLE, te), sliding_log_member(total + cost, cost) }
    end
  elseif cost > quota then
    retry = -1
  else
    retry = sliding_log_freeing(key, first, total + cost - quota) + period - now
  end
  return math.max(0, quota - used), retry, used > 0 and last + period - now or 0, 0, commands
end

-- >8 -- scripts that only decide end here

local function sliding_log_refund(key, now, amount, limit, at)
  local log = call('ZRANGE', key, 0, -1, 'WITHSCORES')
  if #log == 0 then
    return nil
  end
  local te = math.max(now, tonumber(log[#log]))
  local kept, left = {}, amount
  for index = #log - 1, 1, -2 do
    local _, cost = sliding_log_entry(log[index])
    local us = tonumber(log[index + 1])
    if te - us < limit.period then
      local taken = (not at or us <= at) and math.min(cost, left) or 0
      left = left - taken
      -- The newest entry stays even when it is worth nothing: it holds the instant that time may not fall behind.
      if taken < cost or index == #log - 1 then
        kept[#kept + 1] = { us, cost - taken }
      end
    end
  end
  if left == amount then
    return nil
  end
  -- In a sorted set, a worthless entry would stand before one of the same instant and total; that one holds the
  -- instant as well.
  if #kept > 1 and kept[1][2] == 0 and kept[1][1] == kept[2][1] then
    table.remove(kept, 1)
  end
  local commands, total = { { 'DEL', key } }, 0
  for index = #kept, 1, -1 do
    local us, cost = kept[index][1], kept[index][2]
    total = total + cost
    commands[#commands + 1] = { 'ZADD', key, format(WHOLE, us), sliding_log_member(total, cost) }
  end
  return commands
end
