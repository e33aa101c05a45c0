-- Mirrors fixed_window.py. KEYS: a string "ts_us used period_us".
-- In: key, now (us), cost (<= quota + 1), limit, nil, and the stored text if known. Out: remaining,
-- retry (us, -1 never), reset (us), delay, new state or nil.

-- The instant of the last admitted request (nil if none), the effective instant, its window, the count in that window, and,
-- if the state was migrated, the count at the first instant.
local function fixed_window_load(key, now, limit, text)
  local ts, used, old = read(key, text, '^(%d+) (%d+) (%d+)$')
  if not ts then return ts, now, div(now, limit.period), 0 end
  local migrated = false
  if old ~= limit.period_text then -- a count whose window is over stays forgotten
    old, migrated = old + 0, true
    if now > ts and div(now, old) ~= div(ts, old) then used = 0 end
  end
  if ts - now > limit.period then -- the clock was set back by more than a period
    ts, migrated = now, true
  end
  local te = now > ts and now or ts
  local window = div(te, limit.period)
  return ts, te, window, window == div(ts, limit.period) and used or 0, migrated and used
end

local function fixed_window(key, now, cost, limit, _, text)
  local ts, te, window, used, migrated = fixed_window_load(key, now, limit, text)
  if ts == false then return nil end
  local quota, retry, state = limit.capacity, 0, nil
  local to_next = (window + 1) * limit.period - now
  if used + cost <= quota or cost == 0 then
    if cost > 0 then
      used = used + cost
      state = instant(te) .. ' ' .. format(INT, used) .. limit.period_suffix
    end
  else
    retry = cost > quota and -1 or to_next
  end
  if migrated and not state then state = format(INT_PAIR, ts, migrated) .. limit.period_suffix end
  return math.max(0, quota - used), retry, used > 0 and to_next or 0, 0, state
end

-- >8 -- scripts that only decide end here

local function fixed_window_refund(key, now, amount, limit, at)
  local ts, _, window, used = fixed_window_load(key, now, limit)
  if at and at - now > limit.period then -- charged before the clock was set back, and re-dated since
    at = nil
  end
  if not ts or used == 0 or (at and div(at, limit.period) ~= window) then return nil end
  used = math.max(0, used - amount)
  return format(INT_PAIR, ts, used) .. limit.period_suffix
end
