-- Mirrors calendar_window.py. KEYS: a string "since_us ends_us used series".
-- In: key, now (us), cost (<= quota + 1), limit with edges around now, nil, and the state of this request if known. Out:
-- remaining, retry (us, -1 never), reset (us), delay, new state or nil: { text, lifetime = us }, as it outlives its window.

local CALENDAR_ZONE_TOLERANCE = 93600000000

-- The last edge at that instant or before it, and the next one.
local function calendar_window_around(limit, at)
  local edges, index = limit.edges, 2
  while edges[index] <= at do
    index = index + 1
  end
  return edges[index - 1], edges[index]
end

local function calendar_window_state(count, used, now, limit)
  local text = format('%s %s', format(INT_TRIPLE, count.since, count.ends, used), count.series)
  return { text, lifetime = used > 0 and math.max(0, count.ends + limit.period - now) or 0 }
end

-- The state that counts now, the end of its window in the calendar that is in force, what was used in it, and true if it
-- was migrated to the current window. Nil for a foreign value.
local function calendar_window_load(key, now, limit, known)
  local text = fetch(key, known and known[1])
  if text == false then return nil end
  local first, last = calendar_window_around(limit, now)
  local current = { since = first, ends = last, series = limit.series }
  if not text then return current, last, 0, false end
  local since, ends, used, series = match(text, '^(%-?%d+) (%-?%d+) (%d+) (%a+%S*)$')
  if not since then return nil end
  since, ends, used = since + 0, ends + 0, used + 0
  if ends <= first then return current, last, 0, false end
  local unit = match(series, '^%a+')
  if unit ~= match(limit.series, '^%a+') then return current, last, now < ends and used or 0, true end
  if ends - now > 2 * limit.period then return current, last, used, true end -- the clock was set back
  local count = { since = since, ends = ends, series = series }
  local edge, following = calendar_window_around(limit, ends)
  local tolerance = series == limit.series and unit ~= 'day' and CALENDAR_ZONE_TOLERANCE or 0
  if ends - edge > tolerance then ends = following end
  if now >= ends then return current, last, 0, false end
  return count, ends, used, false
end

local function calendar_window(key, now, cost, limit, _, known)
  local count, ends, used, is_migrated = calendar_window_load(key, now, limit, known)
  if not count then return nil end
  local quota, retry, state = limit.capacity, 0, nil
  local to_next = ends - now
  if used + cost <= quota or cost == 0 then
    used = used + cost
  else
    retry = cost > quota and -1 or to_next
  end
  if used > 0 and (is_migrated or (cost > 0 and retry == 0)) then
    state = calendar_window_state(count, used, now, limit)
  end
  return math.max(0, quota - used), retry, used > 0 and to_next or 0, 0, state
end

-- >8 -- scripts that only decide end here

local function calendar_window_refund(key, now, amount, limit, at)
  local count, ends, used = calendar_window_load(key, now, limit)
  if not count or used == 0 then return nil end
  if not at or at - now > 2 * limit.period then at = count.since end -- charged before the clock was set back
  if at < count.since or at >= ends then return nil end
  return calendar_window_state(count, math.max(0, used - amount), now, limit)
end
