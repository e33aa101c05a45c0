-- Mirrors gcra.py. KEYS: a string "tat_us rest tokens/ticks/capacity": the instant tat_us + rest/tokens, which one
-- double could not hold; a tab instead of the first blank says that the key has a long life (see check.lua).
-- In: key, now (us), cost (<= capacity + 1), limit, nothing, and the stored text where it is known.
-- Out: remaining, retry (us, -1 never), reset (us), delay, new state or nil, and whether the life that the key has is long
-- enough for it.

-- Whether an instant lies further ahead than two times the period, in which an empty bucket fills: the product with the
-- tokens could leave exactness.
local function gcra_is_ahead(ahead, rest, limit)
  local tokens = limit.tokens
  local longest, part = div(limit.full, tokens) * 2, limit.full % tokens
  if part >= tokens - part then
    longest, part = longest + 1, part - (tokens - part)
  else
    part = part * 2
  end
  return ahead > longest or (ahead == longest and rest > part)
end

-- Whether there is an instant (nil for a new key, false for a foreign value), the instant, whether it was migrated, and
-- whether its key has a long life.
local function gcra_load(key, now, limit, text)
  local tat, rest, signed, has_long_life = read_signed(key, text, limit)
  if not tat then
    return tat and true, 0, 0, false
  elseif signed == limit.signed then
    if (tat - now) * limit.tokens > limit.full and gcra_is_ahead(tat - now, rest, limit) then -- the clock was set back
      return true, now + div(limit.full, limit.tokens), limit.full % limit.tokens, true
    end
    return true, tat, rest, false, has_long_life
  end
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
  -- No client waits longer than an empty bucket of the new limit takes to fill.
  local longest = now + div(limit.full, limit.tokens)
  if tat > longest or (tat == longest and rest > limit.full % limit.tokens) then
    tat, rest = longest, limit.full % limit.tokens
  end
  return true, tat, rest, true
end

-- As a queue: the fourth value is how long the request waits for its turn.
local function gcra_queue(key, now, cost, limit, _, text)
  local known, tat, rest, write, has_long_life = gcra_load(key, now, limit, text)
  if known == false then
    return nil
  end
  local due = has_long_life and tat -- when it would have been as new
  local tokens, ticks, full = limit.tokens, limit.ticks, limit.full
  local need, retry, delay = cost * ticks, 0, 0
  -- The debt, in us and 1/tokens of one.
  local ahead, part = tat - now, rest
  if ahead < 0 then
    ahead, part = 0, 0
  end
  local room = full - part - ahead * tokens
  if need <= room or cost == 0 then
    delay = ahead + (part > 0 and 1 or 0)
    if cost > 0 then
      room = room - need
      local debt = full - room
      ahead, part = div(debt, tokens), debt % tokens
      tat, rest, write = now + ahead, part, true
    end
  elseif cost > limit.capacity then
    retry = -1
  else
    retry = ahead + ceil_div(part + need - full, tokens)
  end
  local remaining, reset = room > 0 and div(room, ticks) or 0, ahead + (part > 0 and 1 or 0)
  return remaining, retry, reset, delay, write and format(SIGNED, tat, limit.blank, rest, limit.signed) or nil,
    due and due >= now + reset - (now + reset) % limit.more or false
end

local function gcra(key, now, cost, limit, _, text)
  local remaining, retry, reset, _, state, lasts = gcra_queue(key, now, cost, limit, _, text)
  return remaining, retry, reset, 0, state, lasts
end

-- >8 -- scripts that only decide end here

local function gcra_refund(key, now, amount, limit)
  local known, tat, rest = gcra_load(key, now, limit)
  if not known or tat < now or (tat == now and rest == 0) then
    return nil
  end
  -- In us and 1/tokens, borrowing one us where the rest does not suffice.
  local back = amount * limit.ticks
  tat, rest = tat - div(back, limit.tokens), rest - back % limit.tokens
  if rest < 0 then
    tat, rest = tat - 1, rest + limit.tokens
  end
  if tat < now then
    tat, rest = now, 0
  end
  return format(SIGNED, tat, limit.blank, rest, limit.signed)
end
