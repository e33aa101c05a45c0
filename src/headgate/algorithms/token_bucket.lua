-- Mirrors token_bucket.py. KEYS: the bucket, a string "ts_us level tokens/ticks/capacity", the level in 1/ticks of
-- a token; a tab instead of the first blank says that the key has a long life (see check.lua).
-- In: key, now (us), cost (<= capacity + 1), limit, nothing, and the stored text where it is known.
-- Out: remaining, retry (us, -1 never), reset (us), delay, new state or nil, and whether the life that the key has is long
-- enough for it.

-- Converts a state that was written under other numbers: it is refilled until now at the old rate, and what is used then
-- stays used. Returns nothing if the state is foreign.
local function token_bucket_adopt(te, level, signed, now, limit)
  local tokens, ticks, capacity = signature(signed)
  if not tokens then
    return nil
  end
  local used = capacity * ticks - level
  if now > te then
    used, te = math.max(0, used - (now - te) * tokens), now
  end
  -- Whole tokens first, so that the product stays small; rounding the rest up loses no decision.
  local whole = div(used, ticks)
  if whole >= limit.capacity then
    return te, 0
  end
  local part, left = mul_div(used % ticks, limit.ticks, ticks)
  if left > 0 then
    part = part + 1
  end
  return te, limit.full - whole * limit.ticks - part
end

local function token_bucket(key, now, cost, limit, _, text)
  local te, level, signed, has_long_life = read_signed(key, text, limit)
  local tokens, ticks, full, write, due = limit.tokens, limit.ticks, limit.full, false, nil
  if te == nil then
    te, level = now, full
  elseif not te then
    return nil
  elseif signed ~= limit.signed then
    te, level = token_bucket_adopt(te, level, signed, now, limit)
    if not te then
      return nil
    end
    write = true
  elseif now > te then
    if has_long_life then
      due = te + (full - level) / tokens -- when it would have been as new
    end
    -- Beyond 2^53 the product is rounded, but then it is more than enough to fill the bucket.
    local gained = (now - te) * tokens
    level = gained < full - level and level + gained or full
    te = now
  end
  if (te - now) * tokens > full then -- the clock was set back by more than a period
    te, write = now, true
  end
  local need, retry = cost * ticks, 0
  if need <= level then
    if cost > 0 then
      level, write = level - need, true
    end
  elseif cost > limit.capacity then
    retry = -1
  else
    retry = te - now + ceil_div(need - level, tokens)
  end
  local reset, lasts = 0, false
  if level < full then
    local missing = full - level
    local ending = te + (missing + -missing % tokens) / tokens
    reset = ending - now
    lasts = due and due >= ending - ending % limit.more or false
  end
  local state
  if write then
    if te ~= limit.instant then -- the requests of a run have most of theirs in common
      limit.instant, limit.text = te, format(WHOLE, te) .. limit.blank .. WHOLE .. ' ' .. limit.signed
    end
    state = format(limit.text, level)
  end
  return (level - level % ticks) / ticks, retry, reset, 0, state, lasts
end

-- >8 -- scripts that only decide end here

local function token_bucket_refund(key, now, amount, limit)
  -- (What was written under another limit has been adopted by now.)
  local te, level = read_signed(key, nil, limit)
  if not te or math.max(now - te, 0) * limit.tokens >= limit.full - level then
    return nil
  end
  -- Adding before or after the refill comes to the same level, so the instant stays as it is.
  return format(SIGNED, te, limit.blank, math.min(limit.full, level + amount * limit.ticks), limit.signed)
end
