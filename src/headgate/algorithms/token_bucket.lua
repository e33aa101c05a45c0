-- Mirrors token_bucket.py. KEYS: the bucket, a string "ts_us level tokens/ticks/capacity", the level in 1/ticks of
-- a token; a tab instead of the first space marks a key with a long TTL (see check_batch.lua).
-- In: key, now (us), cost (<= capacity + 1), limit, nil, and the stored text if known.
-- Out: remaining, retry (us, -1 never), reset (us), delay, new state or nil, and whether the TTL of the key suffices for it.

-- Migrates a state that was written under another limit: it is refilled until now at the old rate, and what is used then
-- stays used. Returns nil for a foreign value.
local function token_bucket_migrate(te, level, signature, now, limit)
  local tokens, ticks, capacity = parse_signature(signature)
  if not tokens then return nil end
  local used = capacity * ticks - level
  if now > te then used, te = math.max(0, used - (now - te) * tokens), now end
  -- Whole tokens first, so that the product stays small; rounding the rest up loses no decision.
  local whole = div(used, ticks)
  if whole >= limit.capacity then return te, 0 end
  local part, left = mul_div(used % ticks, limit.ticks, ticks)
  if left > 0 then part = part + 1 end
  return te, limit.full - whole * limit.ticks - part
end

local function token_bucket(key, now, cost, limit, _, text)
  local te, level, signature, has_long_ttl = read_signed(key, text, limit)
  local tokens, ticks, full, must_write, full_at = limit.tokens, limit.ticks, limit.full, false, nil
  if te == nil then
    te, level = now, full
  elseif not te then
    return nil
  elseif signature ~= limit.signature then
    te, level = token_bucket_migrate(te, level, signature, now, limit)
    if not te then return nil end
    must_write = true
  elseif now > te then
    if has_long_ttl then
      full_at = te + (full - level) / tokens -- when the bucket would have been full
    end
    -- Beyond 2^53 the product is rounded, but then it is more than enough to fill the bucket.
    local gained = (now - te) * tokens
    level = gained < full - level and level + gained or full
    te = now
  end
  if (te - now) * tokens > full then -- the clock was set back by more than a period
    te, must_write = now, true
  end
  local need, retry = cost * ticks, 0
  if need <= level then
    if cost > 0 then level, must_write = level - need, true end
  elseif cost > limit.capacity then
    retry = -1
  else
    retry = te - now + ceil_div(need - level, tokens)
  end
  local reset, ttl_suffices = 0, false
  if level < full then
    local missing = full - level
    local full_again_at = te + (missing + -missing % tokens) / tokens
    reset = full_again_at - now
    ttl_suffices = full_at and full_at >= full_again_at - full_again_at % limit.ttl_step or false
  end
  local state
  if must_write then
    if te ~= limit.instant then -- most requests of a run have the same
      limit.instant, limit.text = te, format(INT, te) .. limit.separator .. INT .. ' ' .. limit.signature
    end
    state = format(limit.text, level)
  end
  return (level - level % ticks) / ticks, retry, reset, 0, state, ttl_suffices
end

-- >8 -- scripts that only decide end here

local function token_bucket_refund(key, now, amount, limit)
  -- A state of another limit has been migrated before.
  local te, level = read_signed(key, nil, limit)
  if not te or math.max(now - te, 0) * limit.tokens >= limit.full - level then return nil end
  -- Adding before or after the refill gives the same level, so the instant stays as it is.
  return format(SIGNED_STATE, te, limit.separator, math.min(limit.full, level + amount * limit.ticks), limit.signature)
end

local function token_bucket_overdraw(key, now, amount, limit)
  local te, level = read_signed(key, nil, limit)
  if not te then te, level = now, limit.full end
  if now > te then
    local gained = (now - te) * limit.tokens
    te, level = now, gained < limit.full - level and level + gained or limit.full
  end
  local need = amount * limit.ticks
  local taken = math.min(level, need)
  local ahead = math.min(te - now + ceil_div(need - taken, limit.tokens), div(limit.full, limit.tokens))
  return format(SIGNED_STATE, now + ahead, limit.separator, level - taken, limit.signature)
end
