-- Mirrors sliding_window.py. KEYS: a string "ts_us current previous period_us".
-- In: key, now (us), cost (<= quota + 1), limit, nil, and the stored text if known. Out: remaining,
-- retry (us, -1 never), reset (us), delay, new state or nil.

-- The instant of the last admitted request (nil if none), its counts, and, if they were migrated, the state as text.
local function sliding_window_load(key, now, limit, text)
  local ts, current, previous, old = read(key, text, '^(%d+) (%d+) (%d+) (%d+)$')
  if not ts then return ts end
  previous = previous + 0
  local migrated = false
  if old ~= limit.period_text then -- counts that no longer weigh stay forgotten
    old, migrated = old + 0, true
    local age = now > ts and div(now, old) - div(ts, old) or 0
    if age > 0 then current, previous = age == 1 and current or 0, 0 end
  end
  if ts - now > limit.period then -- the clock was set back by more than a period
    ts, migrated = now, true
  end
  return ts, current, previous, migrated and format(INT_TRIPLE, ts, current, previous) .. limit.period_suffix or nil
end

local function sliding_window(key, now, cost, limit, _, text)
  local ts, current, previous, state = sliding_window_load(key, now, limit, text)
  if ts == false then return nil end
  local quota, period = limit.capacity, limit.period
  local te = ts and math.max(now, ts) or now
  local window = div(te, period)
  local age = ts and window - div(ts, period) or 2
  if age ~= 0 then current, previous = 0, age == 1 and current or 0 end
  local start, retry = window * period, 0
  local share, part = mul_div(previous, period - (te - start), period)
  if part > 0 then -- compared with whole numbers, rounding up changes nothing
    share = share + 1
  end
  if current + share + cost <= quota or cost == 0 then
    if cost > 0 then
      current = current + cost
      state = instant(te) .. ' ' .. format(INT_PAIR, current, previous) .. limit.period_suffix
    end
  elseif cost > quota then
    retry = -1
  elseif current + cost <= quota then -- allowed within this window, when enough of the last one has slid out
    retry = start + period - mul_div(quota - current - cost, period, previous) - now
  else -- allowed in the next window, when enough of this one has slid out
    retry = start + 2 * period - mul_div(quota - cost, period, current) - now
  end
  local reset = 0
  if current > 0 then
    reset = start + 2 * period - now
  elseif previous > 0 then
    reset = start + period - now
  end
  return math.max(0, quota - current - share), retry, reset, 0, state
end

-- >8 -- scripts that only decide end here

-- An undo also applies to the previous window: it is over, but still weighs.
local function sliding_window_refund(key, now, amount, limit, at, _, undo)
  local ts, current, previous = sliding_window_load(key, now, limit)
  if not ts then return nil end
  if at and at - now > limit.period then -- charged before the clock was set back, and re-dated since
    at = nil
  end
  local counted, window = div(ts, limit.period), div(math.max(now, ts), limit.period)
  local charged = at and div(at, limit.period) or window
  if charged == counted and (charged == window or undo) and current > 0 then
    current = math.max(0, current - amount)
  elseif charged == counted - 1 and undo then
    previous = math.max(0, previous - amount)
  else
    return nil
  end
  return format(INT_TRIPLE, ts, current, previous) .. limit.period_suffix
end
