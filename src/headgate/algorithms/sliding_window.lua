-- Mirrors sliding_window.py. KEYS: a string "ts_us current previous".
-- In: key, now (us), cost (<= quota + 1), limit, nothing, and the stored text where it is known. Out: remaining,
-- retry (us, -1 never), reset (us), delay, new state or nil.

local function sliding_window(key, now, cost, limit, _, text)
  local ts, current, previous = read(key, text, '^(%d+) (%d+) (%d+)$')
  if ts == false then
    return nil
  end
  local quota, period = limit.capacity, limit.period
  local te = ts and math.max(now, ts) or now
  local window = div(te, period)
  local age = ts and window - div(ts, period) or 2
  if age == 0 then
    previous = tonumber(previous)
  else
    current, previous = 0, age == 1 and current or 0
  end
  local start, retry, state = window * period, 0, nil
  local share, part = mul_div(previous, period - (te - start), period)
  if part > 0 then -- compared with whole numbers, rounding up changes nothing
    share = share + 1
  end
  if current + share + cost <= quota or cost == 0 then
    if cost > 0 then
      current = current + cost
      state = instant(te) .. ' ' .. format(TWO, current, previous)
    end
  elseif cost > quota then
    retry = -1
  elseif current + cost <= quota then -- it passes while this window lasts, when enough of the last one has slid out
    retry = start + period - mul_div(quota - current - cost, period, previous) - now
  else -- it passes in the next window, when enough of this one has slid out
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

-- An undo also reaches into the window before: it is over, but it still weighs.
local function sliding_window_refund(key, now, amount, limit, at, _, undo)
  local ts, current, previous = read(key, nil, '^(%d+) (%d+) (%d+)$')
  if not ts then
    return nil
  end
  previous = tonumber(previous)
  local counted, window = div(ts, limit.period), div(math.max(now, ts), limit.period)
  local charged = at and div(at, limit.period) or window
  if charged == counted and (charged == window or undo) and current > 0 then
    current = math.max(0, current - amount)
  elseif charged == counted - 1 and undo then
    previous = math.max(0, previous - amount)
  else
    return nil
  end
  return format(THREE, ts, current, previous)
end
