-- Mirrors gcra.py. KEYS: a string "tat_us rest tokens/ticks/capacity": the instant tat_us + rest/tokens, which one
-- double could not hold. In: key, now (us), cost (<= capacity + 1), limit. Out: remaining, retry (us, -1 never),
-- reset (us), delay, new state or nil.

-- How far ahead of now the instant lies, in us and 1/tokens of one; 0, 0 if it is past. Then whether it was adopted.
local function gcra_load(key, now, limit)
  local tat, rest, signed = read(key, '^(%d+) (%d+) (.+)')
  if not tat then
    return tat, 0, 0
  end
  local changed = signed ~= limit.signed
  if changed then
    local tokens, left = signature(signed), nil
    if not tokens then
      return false
    end
    rest, left = mul_div(rest, limit.tokens, tokens)
    if left > 0 then -- rounding up loses no decision
      rest = rest + 1
    end
    if rest >= limit.tokens then
      tat, rest = tat + 1, rest - limit.tokens
    end
    -- Nobody waits for longer than an empty bucket of the new limit takes to fill.
    local longest = now + div(limit.full, limit.tokens)
    if tat > longest or (tat == longest and rest > limit.full % limit.tokens) then
      tat, rest = longest, limit.full % limit.tokens
    end
  end
  if tat < now then
    return true, 0, 0, changed
  end
  return true, tat - now, rest, changed
end

local function gcra_state(now, ahead, rest, limit)
  return format(SIGNED, now + ahead, rest, limit.signed)
end

-- As a queue: the fourth value is how long the request waits for its turn.
local function gcra_queue(key, now, cost, limit)
  local known, ahead, rest, write = gcra_load(key, now, limit)
  if known == false then
    return nil
  end
  local tokens, ticks, full = limit.tokens, limit.ticks, limit.full
  local need, retry, delay = cost * ticks, 0, 0
  -- A clock that went far back can take ahead * tokens beyond 2^53: rounded, but still larger than any room.
  local room = full - rest - ahead * tokens
  if need <= room or cost == 0 then
    delay = ahead + (rest > 0 and 1 or 0)
    if cost > 0 then
      room = room - need
      local debt = full - room
      ahead, rest, write = div(debt, tokens), debt % tokens, true
    end
  elseif cost > limit.capacity then
    retry = -1
  else
    retry = ahead + ceil_div(rest + need - full, tokens)
  end
  local remaining = room > 0 and div(room, ticks) or 0
  return remaining, retry, ahead + (rest > 0 and 1 or 0), delay,
    write and gcra_state(now, ahead, rest, limit) or nil
end

local function gcra(key, now, cost, limit)
  local remaining, retry, reset, _, state = gcra_queue(key, now, cost, limit)
  return remaining, retry, reset, 0, state
end

-- >8 -- scripts that only decide end here

local function gcra_refund(key, now, amount, limit)
  local known, ahead, rest = gcra_load(key, now, limit)
  if not known or (ahead == 0 and rest == 0) then
    return nil
  end
  -- In us and 1/tokens, borrowing one us where the rest does not suffice.
  local back = amount * limit.ticks
  ahead, rest = ahead - div(back, limit.tokens), rest - back % limit.tokens
  if rest < 0 then
    ahead, rest = ahead - 1, rest + limit.tokens
  end
  if ahead < 0 then
    ahead, rest = 0, 0
  end
  return gcra_state(now, ahead, rest, limit)
end
