-- Mirrors concurrency.py. KEYS: a hash, lease id -> "cost expiry_us before_us ttl_us": before_us is what an undo goes back
-- to, the instant at which the lease was taken, or the expiry that it had before a check renewed it.
-- In: key, now (us), cost (<= quota + 1), limit, id. Out: remaining, retry (us, -1 never), reset (us), 0, commands or nil.

local function concurrency_text(cost, expiry, before, ttl)
  return format(INT_PAIR, cost, expiry) .. ' ' .. format(INT_PAIR, before, ttl)
end

-- The current leases, as { id, cost, expiry, before, ttl }, their total cost, the last expiry, the ids of expired ones, and
-- commands that re-date leases: one taken more than its ttl in the future, because the clock was set back, is treated as
-- taken now.
local function concurrency_load(key, now)
  local fields = pcall('HGETALL', key)
  if fields.err then return nil end
  local leases, held, last, expired, redated = {}, 0, now, {}, {}
  for index = 1, #fields, 2 do
    local cost, expiry, before, ttl = match(fields[index + 1], '^(%d+) (%d+) (%d+) (%d+)$')
    if not cost then return nil end
    cost, expiry, before, ttl = tonumber(cost), tonumber(expiry), tonumber(before), tonumber(ttl)
    if expiry > now then
      if expiry - 2 * ttl > now then
        expiry = now + ttl
        redated[#redated + 1] = { 'HSET', key, fields[index], concurrency_text(cost, expiry, before, ttl) }
      end
      leases[#leases + 1] = { fields[index], cost, expiry, before, ttl }
      held, last = held + cost, math.max(last, expiry)
    else
      expired[#expired + 1] = fields[index]
    end
  end
  return leases, held, last, expired, redated
end

local function concurrency_find(leases, id)
  for _, lease in ipairs(leases) do
    if lease[1] == id then return lease end
  end
end

-- Commands that delete expired leases, after those that re-date others. They come first: the lease written next may be one
-- of them.
local function concurrency_delete(key, expired, commands)
  for first = 1, #expired, 1000 do -- Lua passes some thousand arguments at most
    commands[#commands + 1] = { 'HDEL', key, unpack(expired, first, math.min(first + 999, #expired)) }
  end
  return commands
end

local function concurrency_write(key, id, cost, expiry, before, ttl, expired, redated)
  local commands = concurrency_delete(key, expired, redated)
  commands[#commands + 1] = { 'HSET', key, id, concurrency_text(cost, expiry, before, ttl) }
  return commands
end

-- The expiry and ttl of a renewed lease, which never ends earlier than before.
local function concurrency_extend(lease, now, limit)
  if now + limit.period > lease[3] then return now + limit.period, limit.period end
  return lease[3], lease[5]
end

-- When leases worth `needed` will have expired.
local function concurrency_freed_at(leases, needed)
  table.sort(leases, function(one, other) return one[3] < other[3] end)
  for _, lease in ipairs(leases) do
    needed = needed - lease[2]
    if needed <= 0 then return lease[3] end
  end
end

local function concurrency(key, now, cost, limit, id)
  local leases, held, last, expired, redated = concurrency_load(key, now)
  if not leases then return nil end
  local quota, retry, commands = limit.capacity, 0, redated[1] and redated
  if cost > 0 then
    local mine = concurrency_find(leases, id)
    if mine then
      local expiry, ttl = concurrency_extend(mine, now, limit)
      commands = concurrency_write(key, id, mine[2], expiry, mine[3], ttl, expired, redated)
      last = math.max(last, expiry)
    elseif held + cost <= quota then
      local expiry = now + limit.period
      commands = concurrency_write(key, id, cost, expiry, now, limit.period, expired, redated)
      held, last = held + cost, math.max(last, expiry)
    elseif cost > quota then
      retry = -1
    else
      retry = concurrency_freed_at(leases, held + cost - quota) - now
    end
  end
  return math.max(0, quota - held), retry, last - now, 0, commands
end

-- >8 -- scripts that only decide end here

local function concurrency_renew(key, now, limit, id)
  local leases, _, _, expired, redated = concurrency_load(key, now)
  local mine = concurrency_find(leases, id)
  if not mine then return nil end
  local expiry, ttl = concurrency_extend(mine, now, limit)
  return concurrency_write(key, id, mine[2], expiry, mine[4], ttl, expired, redated)
end

local function concurrency_leave(key, now, id)
  local leases, _, _, expired, redated = concurrency_load(key, now)
  if not concurrency_find(leases, id) then return nil end
  local commands = concurrency_delete(key, expired, redated)
  commands[#commands + 1] = { 'HDEL', key, id }
  return commands
end

-- Undoes a check of that instant: a lease that it took is released, and one that it renewed gets its previous expiry. One
-- that was renewed since then stays.
local function concurrency_refund(key, now, _, limit, at, id)
  local mine = concurrency_find(concurrency_load(key, now), id)
  if not mine then return nil end
  local before = mine[4]
  if before == at then return { { 'HDEL', key, id } } end
  if before > at and mine[3] == math.max(before, at + limit.period) then
    return { { 'HSET', key, id, concurrency_text(mine[2], before, before, mine[5]) } }
  end
  return nil
end
