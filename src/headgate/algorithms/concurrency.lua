-- Mirrors concurrency.py. KEYS: a hash, lease id -> "cost expiry_us before_us": before_us is what an undo goes back to,
-- the instant at which the lease was taken, or the expiry that it had before a check renewed it.
-- In: key, now (us), cost (<= quota + 1), limit, id. Out: remaining, retry (us, -1 never), reset (us), delay,
-- commands or nil.

-- The leases that are held, as { id, cost, expiry, before }, their costs together, the last expiry, and a command
-- that drops the others.
local function concurrency_load(key, now)
  local fields = pcall('HGETALL', key)
  if fields.err then
    return nil
  end
  local leases, held, last, expired = {}, 0, now, {}
  for index = 1, #fields, 2 do
    local cost, expiry, before = match(fields[index + 1], '^(%d+) (%d+) (%d+)$')
    if not cost then
      return nil
    end
    cost, expiry = tonumber(cost), tonumber(expiry)
    if expiry > now then
      leases[#leases + 1] = { fields[index], cost, expiry, tonumber(before) }
      held, last = held + cost, math.max(last, expiry)
    else
      expired[#expired + 1] = fields[index]
    end
  end
  return leases, held, last, expired
end

local function concurrency_find(leases, id)
  for _, lease in ipairs(leases) do
    if lease[1] == id then
      return lease
    end
  end
end

-- Commands that forget the expired. They come first: the lease that is written then may be one of them, come back.
local function concurrency_forget(key, expired)
  local commands = {}
  for first = 1, #expired, 1000 do -- Lua passes some thousand arguments at most
    commands[#commands + 1] = { 'HDEL', key, unpack(expired, first, math.min(first + 999, #expired)) }
  end
  return commands
end

local function concurrency_write(key, id, cost, expiry, before, expired)
  local commands = concurrency_forget(key, expired)
  commands[#commands + 1] = { 'HSET', key, id, format(THREE, cost, expiry, before) }
  return commands
end

-- When leases worth `needed` will have expired.
local function concurrency_freed(leases, needed)
  table.sort(leases, function(one, other) return one[3] < other[3] end)
  for _, lease in ipairs(leases) do
    needed = needed - lease[2]
    if needed <= 0 then
      return lease[3]
    end
  end
end

local function concurrency(key, now, cost, limit, id)
  local leases, held, last, expired = concurrency_load(key, now)
  if not leases then
    return nil
  end
  local quota, retry, commands = limit.capacity, 0, nil
  if cost > 0 then
    local expiry = now + limit.period
    local mine = concurrency_find(leases, id)
    if mine then
      expiry = math.max(expiry, mine[3])
      commands = concurrency_write(key, id, mine[2], expiry, mine[3], expired)
      last = math.max(last, expiry)
    elseif held + cost <= quota then
      commands = concurrency_write(key, id, cost, expiry, now, expired)
      held, last = held + cost, math.max(last, expiry)
    elseif cost > quota then
      retry = -1
    else
      retry = concurrency_freed(leases, held + cost - quota) - now
    end
  end
  return math.max(0, quota - held), retry, last - now, 0, commands
end

-- >8 -- scripts that only decide end here

local function concurrency_renew(key, now, limit, id)
  local leases, _, _, expired = concurrency_load(key, now)
  local mine = concurrency_find(leases, id)
  if not mine then
    return nil
  end
  return concurrency_write(key, id, mine[2], math.max(mine[3], now + limit.period), mine[4], expired)
end

local function concurrency_leave(key, now, id)
  local leases, _, _, expired = concurrency_load(key, now)
  if not concurrency_find(leases, id) then
    return nil
  end
  local commands = concurrency_forget(key, expired)
  commands[#commands + 1] = { 'HDEL', key, id }
  return commands
end

-- Undoes what a check did at that instant: what it took is left, and what it renewed ends when it would have. What was
-- renewed since then stays.
local function concurrency_refund(key, now, _, limit, at, id)
  local mine = concurrency_find(concurrency_load(key, now), id)
  if not mine then
    return nil
  end
  local before = mine[4]
  if before == at then
    return { { 'HDEL', key, id } }
  end
  if before > at and mine[3] == math.max(before, at + limit.period) then
    return { { 'HSET', key, id, format(THREE, mine[2], before, before) } }
  end
  return nil
end
