-- Mirrors gcra.py. KEYS: a string "tat_us rest tokens/ticks/capacity": the instant tat_us + rest/tokens, which one
-- double could not represent; a tab instead of the first space marks a key with a long TTL (see check_batch.lua).
-- In: key, now (us), cost (<= capacity + 1), limit, nil, and the stored text if known.
-- Out: remaining, retry (us, -1 never), reset (us), delay, new state or nil, and whether the TTL of the key suffices for it.

-- True if an instant is further ahead than twice the time to fill an empty bucket; that times tokens may be inexact.
local function gcra_is_too_far(ahead, rest, limit)
  local tokens = limit.tokens
  local longest, part = div(limit.full, tokens) * 2, limit.full % tokens
  if part >= tokens - part then
    longest, part = longest + 1, part - (tokens - part)
  else
    part = part * 2
  end
  return ahead > longest or (ahead == longest and rest > part)
end

-- True if there is an instant (nil for a new key, false for a foreign value), the instant, true if it was migrated, and
-- true if the key has a long TTL.
local function gcra_load(key, now, limit, text)
  local tat, rest, signature, has_long_ttl = read_signed(key, text, limit)
  if not tat then
    return tat and true, 0, 0, false
  elseif signature == limit.signature then
    if (tat - now) * limit.tokens > limit.full and gcra_is_too_far(tat - now, rest, limit) then -- the clock was set back
      return true, now + div(limit.full, limit.tokens), limit.full % limit.tokens, true
    end
    return true, tat, rest, false, has_long_ttl
  end
  local tokens, left = parse_signature(signature), nil
  if not tokens then return false end
  rest, left = mul_div(rest, limit.tokens, tokens)
  if left > 0 then -- rounding up loses no decision
    rest = rest + 1
  end
  if rest >= limit.tokens then tat, rest = tat + 1, rest - limit.tokens end
  -- No client waits longer than an empty bucket of the new limit takes to fill.
  local longest = now + div(limit.full, limit.tokens)
  if tat > longest or (tat == longest and rest > limit.full % limit.tokens) then
    tat, rest = longest, limit.full % limit.tokens
  end
  return true, tat, rest, true
end

-- As a queue: the fourth value is the delay of the request.
local function gcra_queue(key, now, cost, limit, _, text)
  local exists, tat, rest, must_write, has_long_ttl = gcra_load(key, now, limit, text)
  if exists == false then return nil end
  local full_at = has_long_ttl and tat -- when the bucket would have been full
  local tokens, ticks, full = limit.tokens, limit.ticks, limit.full
  local need, retry, delay = cost * ticks, 0, 0
  -- The debt, in us and 1/tokens of one.
  local ahead, part = tat - now, rest
  if ahead < 0 then ahead, part = 0, 0 end
  local room = full - part - ahead * tokens
  if need <= room or cost == 0 then
    delay = ahead + (part > 0 and 1 or 0)
    if cost > 0 then
      room = room - need
      local debt = full - room
      ahead, part = div(debt, tokens), debt % tokens
      tat, rest, must_write = now + ahead, part, true
    end
  elseif cost > limit.capacity then
    retry = -1
  else
    retry = ahead + ceil_div(part + need - full, tokens)
  end
  local remaining, reset = room > 0 and div(room, ticks) or 0, ahead + (part > 0 and 1 or 0)
  local state = must_write and format(SIGNED_STATE, tat, limit.separator, rest, limit.signature) or nil
  return remaining, retry, reset, delay, state,
    full_at and full_at >= now + reset - (now + reset) % limit.ttl_step or false
end

local function gcra(key, now, cost, limit, _, text)
  local remaining, retry, reset, _, state, ttl_suffices = gcra_queue(key, now, cost, limit, _, text)
  return remaining, retry, reset, 0, state, ttl_suffices
end

-- >8 -- scripts that only decide end here

local function gcra_refund(key, now, amount, limit)
  local exists, tat, rest = gcra_load(key, now, limit)
  if not exists or tat < now or (tat == now and rest == 0) then return nil end
  -- In us and 1/tokens, borrowing one us if the rest does not suffice.
  local back = amount * limit.ticks
  tat, rest = tat - div(back, limit.tokens), rest - back % limit.tokens
  if rest < 0 then tat, rest = tat - 1, rest + limit.tokens end
  if tat < now then tat, rest = now, 0 end
  return format(SIGNED_STATE, tat, limit.separator, rest, limit.signature)
end

local function gcra_overdraw(key, now, amount, limit)
  local _, tat, rest = gcra_load(key, now, limit)
  if tat < now then tat, rest = now, 0 end
  local moved, longest = rest + amount * limit.ticks, now + div(limit.full, limit.tokens) * 2
  tat, rest = tat + div(moved, limit.tokens), moved % limit.tokens
  if tat >= longest then tat, rest = longest, 0 end
  return format(SIGNED_STATE, tat, limit.separator, rest, limit.signature)
end
