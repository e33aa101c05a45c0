-- Mirrors fair_share.py. KEYS: a hash. Its field "g" has the numbers of the state in the order of `Shares`, the ends of a
-- queue, and the signature of the limit; "m" and a tenant its record; "q" and a number the epoch and name of a tenant that
-- was counted in that epoch, in the order in which they were. Tenants that are no longer active are deleted from there.
-- In: key, now (us), cost (<= capacity + 1), limit with member and weight. Out: remaining, retry (us, -1 never), reset (us),
-- 0, commands or nil.

local FAIR_LEVEL_SCALE, FAIR_UNKNOWN = 64, -1
local FAIR_NUMBERS = {
  'start', 'epoch', 'level_at', 'level', 'clock_at', 'clock', 'weight', 'present', 'span', 'floor', 'surplus',
  'borrowed', 'borrowed_light', 'heavy_weight', 'borrower_weight', 'head', 'tail',
}

-- Adds the numbers of the algorithm to a limit, once for each run.
local function fair_share_limit(limit)
  if limit.scale then return end
  local scale = 1048576
  while scale * (limit.full + limit.tokens) > 2251799813685248 do
    scale = scale / 2
  end
  limit.scale, limit.epoch = scale, ceil_div(limit.full, limit.tokens)
end

local function fair_share_fresh(now, epoch, limit, head, tail)
  return {
    start = now, epoch = epoch, level_at = now, level = limit.full, clock_at = now, clock = 0, weight = 0, present = 0,
    span = 0, floor = 0, surplus = FAIR_UNKNOWN, borrowed = 0, borrowed_light = 0, heavy_weight = 0, borrower_weight = 0,
    head = head, tail = tail,
  }
end

local function fair_share_level(s, te, limit)
  local gained = (te - s.level_at) * limit.tokens
  return gained < limit.full - s.level and s.level + gained or limit.full
end

local function fair_share_cap(weight, limit)
  return div(limit.scale * limit.capacity, 2 * math.max(1, weight))
end

local function fair_share_reading(s, te, limit)
  if s.weight == 0 then return s.clock end
  return s.clock + div(div(limit.scale * limit.tokens * (te - s.clock_at), limit.ticks), s.weight)
end

local function fair_share_floor(s, reading, limit)
  return math.max(s.floor, reading - fair_share_cap(s.weight, limit))
end

local function fair_share_reserve(s, limit)
  return ceil_div((s.weight - limit.member_weight) * fair_share_cap(s.weight, limit), limit.scale)
end

-- The state, dated now if it lies too far in the future, and the time that applies; nil for a foreign value. A state that
-- was written under another limit is converted.
local function fair_share_load(text, now, limit)
  local s, numbers, signature = {}, match(text, '^(.+) (%S+)$')
  if not numbers then return nil end
  local index = 0
  for number in gmatch(numbers, '%S+') do
    index = index + 1
    local value = tonumber(number)
    if not value or index > #FAIR_NUMBERS then return nil end
    s[FAIR_NUMBERS[index]] = value
  end
  if index ~= #FAIR_NUMBERS then return nil end
  if signature ~= limit.signature then
    local tokens, ticks, capacity = parse_signature(signature)
    if not tokens then return nil end
    local te = math.max(now, s.level_at, s.clock_at)
    local old = { tokens = tokens, ticks = ticks, full = capacity * ticks }
    local used = old.full - fair_share_level(s, te, old)
    local whole, part, left = div(used, ticks), mul_div(used % ticks, limit.ticks, ticks)
    local fresh = fair_share_fresh(te, s.epoch + 2, limit, s.head, s.tail)
    if left > 0 then part = part + 1 end
    fresh.level = whole >= limit.capacity and 0 or math.max(0, limit.full - whole * limit.ticks - part)
    fresh.is_migrated = true
    s = fresh
  end
  local latest = math.max(s.level_at, s.clock_at)
  if latest <= now then return s, now end
  local ahead = latest - now
  if ahead <= 2 * limit.epoch then return s, latest end
  s.start, s.clock_at, s.level_at, s.is_migrated = s.start - ahead, s.clock_at - ahead, s.level_at - ahead, true
  return s, now
end

local function fair_share_next_epoch(s, limit)
  local start, weight = s.start + limit.epoch, s.present
  local span, surplus = fair_share_reading(s, start, limit), FAIR_UNKNOWN
  if s.heavy_weight > 0 then
    surplus = div((s.borrowed - s.borrowed_light) * FAIR_LEVEL_SCALE, s.heavy_weight)
  elseif s.borrower_weight > 0 then
    surplus = div(s.borrowed * FAIR_LEVEL_SCALE, s.borrower_weight)
  end
  return {
    start = start, epoch = s.epoch + 1, level_at = s.level_at, level = s.level, clock_at = start, clock = 0,
    weight = weight, present = 0, span = span,
    floor = math.max(fair_share_floor(s, span, limit) - span, -fair_share_cap(weight, limit)),
    surplus = surplus, borrowed = 0, borrowed_light = 0, heavy_weight = 0, borrower_weight = 0,
    head = s.head, tail = s.tail,
  }
end

local function fair_share_rotate(s, te, limit)
  if te >= s.start + 2 * limit.epoch then return fair_share_fresh(te, s.epoch + 2, limit, s.head, s.tail) end
  return te >= s.start + limit.epoch and fair_share_next_epoch(s, limit) or s
end

-- The tenant's record in a state in which it is active: { reading at which its bucket was empty, tokens that it borrowed in
-- this epoch, true if it was not counted in this epoch }.
local function fair_share_enter(s, text, te, limit)
  local weight, reading = limit.member_weight, fair_share_reading(s, te, limit)
  local seen, empty, before, taken = match(text or '', '^(%d+) (%-?%d+) (%d+) (%d+)$')
  local counted
  if not seen or seen + 0 < s.epoch - 1 then
    empty, taken, before, counted = reading, 0, 0, 0
  else
    empty, before, taken = empty + 0, before + 0, taken + 0
    counted = before
    if seen + 0 < s.epoch then
      empty, taken, counted = empty - s.span, 0, 0
    end
    if weight > before then empty = reading end
  end
  if weight ~= before then
    s.floor = fair_share_floor(s, reading, limit)
    s.clock_at, s.clock, s.weight = te, reading, s.weight + weight - before
  end
  s.present = s.present + weight - counted
  return { empty = empty, taken = taken, is_new = weight ~= counted }
end

local function fair_share_surplus(s, mine, limit)
  return div(s.surplus * limit.member_weight, FAIR_LEVEL_SCALE) - mine.taken
end

-- The tokens in the tenant's bucket, and the most that it can borrow.
local function fair_share_available(s, mine, te, limit)
  local reading, left = fair_share_reading(s, te, limit), div(fair_share_level(s, te, limit), limit.ticks)
  local empty = math.max(mine.empty, fair_share_floor(s, reading, limit))
  local own = div(limit.member_weight * (reading - empty), limit.scale)
  local reserve = fair_share_reserve(s, limit)
  local light = left - reserve
  if s.surplus ~= FAIR_UNKNOWN then
    light = math.max(left - reserve - div(reserve, 2), math.min(light, fair_share_surplus(s, mine, limit)))
  end
  return math.min(own, left), math.max(0, light)
end

local function fair_share_is_heavy(s, taken, limit)
  return s.surplus ~= FAIR_UNKNOWN and taken * 4 * FAIR_LEVEL_SCALE > 3 * s.surplus * limit.member_weight
end

local function fair_share_charge(s, mine, te, cost, limit, borrows)
  local reading, weight = fair_share_reading(s, te, limit), limit.member_weight
  s.level, s.level_at = fair_share_level(s, te, limit) - cost * limit.ticks, te
  if not borrows then
    mine.empty = math.max(mine.empty, fair_share_floor(s, reading, limit)) + ceil_div(cost * limit.scale, weight)
    return
  end
  if mine.taken == 0 then s.borrower_weight = s.borrower_weight + weight end
  if not fair_share_is_heavy(s, mine.taken + cost, limit) then
    s.borrowed_light = s.borrowed_light + cost
  elseif not fair_share_is_heavy(s, mine.taken, limit) then
    s.borrowed_light, s.heavy_weight = s.borrowed_light - mine.taken, s.heavy_weight + weight
  end
  s.borrowed, mine.empty, mine.taken = s.borrowed + cost, reading, mine.taken + cost
end

local function fair_share_earliest(s, mine, from, cost, limit)
  local at, need = nil, ceil_div(cost * limit.scale, limit.member_weight)
  if need <= fair_share_cap(s.weight, limit) then
    local empty = math.max(mine.empty, fair_share_floor(s, fair_share_reading(s, from, limit), limit))
    at = s.clock_at + ceil_div((empty + need - s.clock) * s.weight * limit.ticks, limit.scale * limit.tokens)
  end
  local reserve = fair_share_reserve(s, limit)
  if s.surplus ~= FAIR_UNKNOWN and cost > fair_share_surplus(s, mine, limit) then reserve = reserve + div(reserve, 2) end
  if cost + reserve <= limit.capacity then
    local other = s.level_at + ceil_div((cost + reserve) * limit.ticks - s.level, limit.tokens)
    at = at and math.min(at, other) or other
  end
  return at and math.max(from, at)
end

local function fair_share_passes(s, mine, te, cost, limit)
  local at = fair_share_earliest(s, mine, te, cost, limit)
  if at and at < s.start + limit.epoch then return at end
  local later = fair_share_next_epoch(s, limit)
  at = fair_share_earliest(later, { empty = mine.empty - later.span, taken = 0 }, later.start, cost, limit)
  local last = later.start + limit.epoch
  return at and math.min(at, last) or last
end

local function fair_share_text(s, limit)
  local numbers = {}
  for index, name in ipairs(FAIR_NUMBERS) do
    numbers[index] = format(INT, s[name])
  end
  numbers[#numbers + 1] = limit.signature
  return table.concat(numbers, ' ')
end

-- Commands that store the state with the tenant's record. A tenant that is counted in an epoch for the first time joins the
-- queue, and up to two that are not active any more leave it: more leave than join, so the hash stays as small as they are.
local function fair_share_store(key, s, mine, limit)
  local commands, epoch = {}, format(INT, s.epoch)
  local record = format('%s %s %s %s', epoch, format(INT, mine.empty), format(INT, limit.member_weight), format(INT, mine.taken))
  if mine.is_new then
    commands[1] = { 'HSET', key, 'q' .. format(INT, s.tail), format('%s %s', epoch, limit.member) }
    s.tail = s.tail + 1
    for _ = 1, 2 do
      local name = 'q' .. format(INT, s.head)
      local seen, member = match(call('HGET', key, name) or '', '^(%d+) (.*)$')
      if not seen or seen + 0 >= s.epoch - 1 then break end
      commands[#commands + 1] = { 'HDEL', key, name }
      if member ~= limit.member then
        local its_epoch = match(call('HGET', key, format('m%s', member)) or '', '^(%d+)')
        if its_epoch == seen then commands[#commands + 1] = { 'HDEL', key, format('m%s', member) } end
      end
      s.head = s.head + 1
    end
  end
  commands[#commands + 1] = { 'HSET', key, 'g', fair_share_text(s, limit), format('m%s', limit.member), record }
  return commands
end

local function fair_share_read(key, now, limit)
  fair_share_limit(limit)
  local stored = pcall('HMGET', key, 'g', format('m%s', limit.member))
  if stored.err then return nil end
  if not stored[1] then return {}, now, nil, nil end
  local s, te = fair_share_load(stored[1], now, limit)
  if not s then return nil end
  return stored, te, s, stored[2]
end

local function fair_share(key, now, cost, limit)
  local stored, te, loaded, record = fair_share_read(key, now, limit)
  if not stored then return nil end
  local first = loaded and loaded.start
  local s = loaded and fair_share_rotate(loaded, te, limit) or fair_share_fresh(te, 0, limit, 0, 0)
  -- Unlike in Python, the states share their tables: what is only looked at is a copy.
  if s == loaded then
    s = {}
    for name, value in pairs(loaded) do
      s[name] = value
    end
  end
  local mine = fair_share_enter(s, record, te, limit)
  local own, borrowable = fair_share_available(s, mine, te, limit)
  local remaining, retry, commands = math.max(own, borrowable), 0, nil
  if cost > limit.capacity then
    retry = -1
  elseif cost > remaining then
    retry = fair_share_passes(s, mine, te, cost, limit) - now
    if mine.is_new then commands, first = fair_share_store(key, s, mine, limit), s.start end
  elseif cost > 0 then
    fair_share_charge(s, mine, te, cost, limit, cost > own)
    commands, first = fair_share_store(key, s, mine, limit), s.start
    own, borrowable = fair_share_available(s, mine, te, limit)
    remaining = math.max(own, borrowable)
  end
  if not commands and loaded and loaded.is_migrated then
    commands = { { 'HSET', key, 'g', fair_share_text(loaded, limit) } }
  end
  return remaining, retry, first and math.max(0, first + 2 * limit.epoch - now) or 0, 0, commands
end

-- >8 -- scripts that only decide end here

local function fair_share_refund(key, now, amount, limit)
  local stored, te, loaded, record = fair_share_read(key, now, limit)
  if not stored or not loaded then return nil end
  local s = fair_share_rotate(loaded, te, limit)
  local level = fair_share_level(s, te, limit)
  if level == limit.full then return nil end
  s.level, s.level_at = math.min(limit.full, level + amount * limit.ticks), te
  local before = fair_share_text(s, limit)
  local mine = fair_share_enter(s, record, te, limit)
  if mine.is_new then return { { 'HSET', key, 'g', before } } end
  mine.empty = mine.empty - div(amount * limit.scale, limit.member_weight)
  return fair_share_store(key, s, mine, limit)
end
