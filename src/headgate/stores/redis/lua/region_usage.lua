-- Usage that a region shares with the others, and its record of what it has imported from them.
-- KEYS: a hash, and, to "add", "post", "read" and "exchange", a sorted set in the same slot: field -> number of its last change.
-- ARGV: the verb, then to
--   "add": epoch for a new hash, process, number of its flush, then field, admitted and refunded of each;
--   "post": epoch for a new hash, field, text;
--   "read": nothing, the epoch and number of the last change that the reader knows, and the most fields to read;
--   "exchange": epoch for a new hash, then as to "read", then the prefix of the reader's own fields, which it does not
--     read, then field and text of each report of the reader: the larger one of two totals counts;
--   "load": nothing;
--   "save": for each field, its name and values as "admitted refunded charged returned", which never decrease;
--   "note": field, text;
--   "drop": fields.
-- Reply: to "read" and "exchange", epoch, number of the last change, "%more" and 1 if there are more changes, then field
--   and value in turn; to "load", field and value in turn; else the number of changed fields.

local DAY_MS = '86400000'
local MAX_FIELDS = 1000 -- a call in Lua takes 8,000 values
local hash, changes, verb = KEYS[1], KEYS[2], ARGV[1]

local function number_of(field)
  return tonumber(call('HGET', hash, field) or '0')
end

local function publish(fields)
  if not call('HGET', hash, '%epoch') then call('HSET', hash, '%epoch', ARGV[2]) end
  local number = number_of('%number')
  for _, field in ipairs(fields) do
    number = number + 1
    call('ZADD', changes, format(INT, number), field)
  end
  call('HSET', hash, '%number', format(INT, number))
  call('PEXPIRE', hash, DAY_MS)
  call('PEXPIRE', changes, DAY_MS)
  return #fields
end

-- The latest of two reports on a field, whatever their order: totals only grow.
local function latest(old, new)
  local old_admitted, old_refunded = match(old, '^(%d+) (%d+)$')
  local admitted, refunded = match(new, '^(%d+) (%d+)$')
  if not (admitted and old_admitted) then return new end
  return format(INT_PAIR, math.max(admitted, old_admitted), math.max(refunded, old_refunded))
end

if verb == 'add' then
  local process, flush = format('%%flush:%s', ARGV[3]), tonumber(ARGV[4])
  if number_of(process) >= flush then return 0 end -- carried out before, and its reply was lost
  local fields = {}
  for index = 5, #ARGV, 3 do
    local field = ARGV[index]
    local admitted, refunded = match(call('HGET', hash, field) or '0 0', '^(%d+) (%d+)$')
    call('HSET', hash, field, format(INT_PAIR, admitted + ARGV[index + 1], refunded + ARGV[index + 2]))
    fields[#fields + 1] = field
  end
  call('HSET', hash, process, format(INT, flush))
  return publish(fields)
elseif verb == 'post' then
  call('HSET', hash, ARGV[3], ARGV[4])
  return publish({ ARGV[3] })
elseif verb == 'read' or verb == 'exchange' then
  local reported = {}
  for index = 7, #ARGV, 2 do
    local field = ARGV[index]
    local old = call('HGET', hash, field)
    local text = latest(old or '', ARGV[index + 1])
    if text ~= old then
      call('HSET', hash, field, text)
      reported[#reported + 1] = field
    end
  end
  if #reported > 0 then publish(reported) end
  local epoch, since, most, own = call('HGET', hash, '%epoch') or '', tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] or ''
  if epoch ~= ARGV[3] then since = 0 end
  local changed = call('ZRANGEBYSCORE', changes, format('(%.0f', since), '+inf', 'WITHSCORES', 'LIMIT', '0', ARGV[5])
  local has_more = #changed == 2 * most
  local reply = { epoch, changed[#changed] or format(INT, since), '%more', has_more and '1' or '0' }
  for index = 1, #changed, 2 do
    local field = changed[index]
    if own == '' or sub(field, 1, #own) ~= own then
      reply[#reply + 1], reply[#reply + 2] = field, call('HGET', hash, field) or ''
    end
  end
  return reply
elseif verb == 'load' then
  return call('HGETALL', hash)
elseif verb == 'save' then
  for index = 2, #ARGV, 2 do
    local old, values = {}, {}
    for number in gmatch(call('HGET', hash, ARGV[index]) or '', '%d+') do
      old[#old + 1] = tonumber(number)
    end
    for number in gmatch(ARGV[index + 1], '%d+') do
      values[#values + 1] = format(INT, math.max(tonumber(number), old[#values + 1] or 0))
    end
    call('HSET', hash, ARGV[index], table.concat(values, ' '))
  end
  call('PEXPIRE', hash, DAY_MS)
  return (#ARGV - 1) / 2
elseif verb == 'note' then
  call('HSET', hash, ARGV[2], ARGV[3])
  call('PEXPIRE', hash, DAY_MS)
  return 1
end
for first = 2, #ARGV, MAX_FIELDS do
  local last = math.min(first + MAX_FIELDS - 1, #ARGV)
  call('HDEL', hash, unpack(ARGV, first, last))
  if changes then call('ZREM', changes, unpack(ARGV, first, last)) end
end
return #ARGV - 1
