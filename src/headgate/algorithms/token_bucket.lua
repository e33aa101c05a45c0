-- Mirrors token_bucket.py. KEYS: the bucket, a string "ts_us level tokens/ticks/capacity", the level in 1/ticks of
-- a token. In: key, now (us), cost (<= capacity + 1), limit. Out: remaining, retry (us, -1 never), reset (us),
-- delay, new state or nil.

local function token_bucket_load(key, now, limit)
  local te, level, signed = read(key, '^(%d+) (%d+) (.+)')
  if not te then
    return te, now, limit.full
  end
  local changed = signed ~= limit.signed
  local tokens, ticks, full = limit.tokens, limit.ticks, limit.full
  if changed then
    local capacity
    tokens, ticks, capacity = signature(signed)
    if not tokens then
      return false
    end
    full = capacity * ticks
  end
  if now > te then
    -- Beyond 2^53 the product is rounded, but then it is more than enough to fill the bucket.
    local gained = (now - te) * tokens
    level = gained < full - level and level + gained or full
    te = now
  end
  if changed then
    -- Whole tokens first, so that the product stays small; rounding the rest down loses no decision.
    local whole = div(level, ticks)
    level = whole < limit.capacity and whole * limit.ticks + mul_div(level % ticks, limit.ticks, ticks) or limit.full
  end
  return true, te, level, changed
end

local function token_bucket(key, now, cost, limit)
  local known, te, level, write = token_bucket_load(key, now, limit)
  if known == false then
    return nil
  end
  local ticks, full = limit.ticks, limit.full
  local need, retry = cost * ticks, 0
  if need <= level then
    if cost > 0 then
      level, write = level - need, true
    end
  elseif cost > limit.capacity then
    retry = -1
  else
    retry = te - now + ceil_div(need - level, limit.tokens)
  end
  local reset = 0
  if level < full then
    local missing, tokens = full - level, limit.tokens
    reset = te - now + (missing + -missing % tokens) / tokens
  end
  local state
  if write then
    if te ~= limit.instant then -- the requests of a run have most of theirs in common
      limit.instant, limit.text = te, format(WHOLE, te) .. ' ' .. WHOLE .. ' ' .. limit.signed
    end
    state = format(limit.text, level)
  end
  return (level - level % ticks) / ticks, retry, reset, 0, state
end

-- >8 -- scripts that only decide end here

local function token_bucket_refund(key, now, amount, limit)
  local known, te, level = token_bucket_load(key, now, limit)
  if not known or level >= limit.full then
    return nil
  end
  -- Adding before or after the refill comes to the same level, so the instant stays as it is: loaded at 0, nothing
  -- refills. (What was written under another limit has been adopted by now.)
  known, te, level = token_bucket_load(key, 0, limit)
  level = math.min(limit.full, level + amount * limit.ticks)
  return format(SIGNED, te, level, limit.signed)
end
