-- Mirrors pool.py. KEYS: a string, "expires_us tokens spent" of each batch, separated by spaces, the first to expire first.
-- In: key, now (us), cost (<= quota + 1), limit, nil, and the stored text if known. Out: remaining, retry (us, -1 never),
-- reset (us), time until the first of several spent tokens expires (us), new state or nil.

local POOL_MAX_BATCHES, POOL_RETRY_US = 16, 100000

-- The batches that count, as { expires, tokens, spent, stored text }, and their tokens; nil for a foreign value. The text
-- is dropped from a batch that is changed: numbers are slow to format.
local function pool_load(key, now, limit, text)
  text = fetch(key, text)
  if text == false then return nil end
  local batches, available, length, latest = {}, 0, 0, now + limit.period
  for batch, expires, tokens, spent in gmatch(text or '', '((%d+) (%d+) (%d+))') do
    length, expires = length + #batch + 1, tonumber(expires)
    if now < expires and expires <= latest then
      tokens = tonumber(tokens)
      batches[#batches + 1] = { expires, tokens, tonumber(spent), batch }
      available = available + tokens
    end
  end
  if text and length ~= #text + 1 and text ~= '' then return nil end
  return batches, available
end

local function pool_text(batches)
  local texts = {}
  for index, batch in ipairs(batches) do
    texts[index] = batch[4] or format(INT_TRIPLE, batch[1], batch[2], batch[3])
  end
  return table.concat(texts, ' ')
end

local function pool_slow(key, now, cost, limit, text)
  local batches, available = pool_load(key, now, limit, text)
  if not batches then return nil end
  local retry, expires, state = 0, 0, nil
  if cost > 0 then
    if cost <= available then
      local left = cost
      for _, batch in ipairs(batches) do
        local part = math.min(batch[2], left)
        if part > 0 then
          if expires == 0 and cost > 1 then expires = batch[1] - now end
          left, batch[2], batch[3], batch[4] = left - part, batch[2] - part, batch[3] + part, nil
          if left == 0 then break end
        end
      end
      available, state = available - cost, pool_text(batches)
    else
      retry = cost > limit.capacity and -1 or POOL_RETRY_US
    end
  end
  local last = batches[#batches]
  return available, retry, last and last[1] - now or 0, expires, state
end

-- The common case without tables: the first batch that has tokens pays for all, and only batches before it have expired.
local function pool(key, now, cost, limit, _, text)
  text = fetch(key, text)
  if text and cost > 0 then
    local available, length, latest, last, live, from = 0, 0, now + limit.period, 0, nil, nil
    local past, expires, tokens, spent
    for at, its_expires, its_tokens, its_spent, its_past in gmatch(text, '()(%d+) (%d+) (%d+)()') do
      length = length + its_past - at + 1
      local expires_at = tonumber(its_expires)
      if now < expires_at then
        its_tokens, live, last = tonumber(its_tokens), live or at, expires_at
        if its_tokens > 0 and not from then
          from, past, expires, tokens, spent = at, its_past, expires_at, its_tokens, its_spent
        end
        available = available + its_tokens
      end
    end
    if from and tokens >= cost and last <= latest and length == #text + 1 then
      local before, after = string.sub(text, live, from - 1), string.sub(text, past)
      local state = format('%s%.0f %.0f %.0f%s', before, expires, tokens - cost, spent + cost, after)
      return available - cost, 0, last - now, cost > 1 and expires - now or 0, state
    end
  end
  return pool_slow(key, now, cost, limit, text)
end

-- >8 -- scripts that only decide end here

-- The new state, and the accepted tokens.
local function pool_expiry(now, ttl, limit)
  if ttl == 0 then return now - now % limit.period + limit.period end
  return now + math.min(ttl, limit.period)
end

local function pool_deposit(key, now, tokens, ttl, limit)
  local batches, available = pool_load(key, now, limit)
  local accepted, expires = math.min(tokens, limit.capacity - available), pool_expiry(now, ttl, limit)
  if accepted <= 0 then return pool_text(batches), 0 end
  local at = #batches + 1
  while at > 1 and batches[at - 1][1] > expires do
    at = at - 1
  end
  table.insert(batches, at, { expires, accepted, 0 })
  if #batches > POOL_MAX_BATCHES then
    local at = 1
    if batches[2][1] % limit.period == 0 then
      at = 3
    elseif batches[1][1] % limit.period == 0 then
      at = 2
    end
    local first, second = batches[at], table.remove(batches, at + 1)
    first[2], first[3], first[4] = first[2] + second[2], first[3] + second[3], nil
  end
  return pool_text(batches), accepted
end

-- The new state, and the tokens taken.
local function pool_take_back(key, now, amount, within, limit)
  local kept, left = {}, amount
  for _, batch in ipairs((pool_load(key, now, limit))) do
    local is_returnable = batch[1] <= now + within and batch[1] % limit.period ~= 0
    local part = is_returnable and math.min(batch[2], left) or 0
    if part > 0 then left, batch[2], batch[4] = left - part, batch[2] - part, nil end
    if batch[2] > 0 or batch[3] > 0 then kept[#kept + 1] = batch end
  end
  return pool_text(kept), amount - left
end

local function pool_refund(key, now, amount, limit)
  local batches = pool_load(key, now, limit)
  local left = amount
  for _, batch in ipairs(batches) do
    local part = math.min(batch[3], left)
    left, batch[2], batch[3], batch[4] = left - part, batch[2] + part, batch[3] - part, nil
  end
  return left == 0 and pool_text(batches) or nil
end
