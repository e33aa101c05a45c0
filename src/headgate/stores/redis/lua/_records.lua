-- Idempotency records, for the scripts that read or write them. Mirrors IdRecord in idempotency.py.
-- A record is a string beside its counter, in the same slot: "until at cost left holders remaining reset delay", times in
-- us. Without holders it is that of a refund whose id no check had.

-- The record of that name, if it is still valid; nil if there is none, false for a foreign value.
local function read_record(name, now)
  local text = pcall('GET', name)
  if not text then
    return nil
  end
  if text.err then
    return false
  end
  local fields = {}
  for field in gmatch(text, '%d+') do
    fields[#fields + 1] = tonumber(field)
  end
  if #fields ~= 8 or not match(text, '^[%d ]+$') then
    return false
  end
  if now >= fields[1] then
    return nil
  end
  return {
    until_us = fields[1],
    at = fields[2],
    cost = fields[3],
    left = fields[4],
    holders = fields[5],
    remaining = fields[6],
    reset = fields[7],
    delay = fields[8],
  }
end

-- Writes a record: a new one, which is valid for so long (us), or one that keeps its lifetime.
local function write_record(name, record, validity)
  local text = table.concat({
    format(THREE, record.until_us, record.at, record.cost),
    format(THREE, record.left, record.holders, record.remaining),
    format(TWO, record.reset, record.delay),
  }, ' ')
  if validity then
    call('SET', name, text, 'PX', format(WHOLE, ceil_div(validity, 1000) + MARGIN))
  else
    call('SET', name, text, 'KEEPTTL')
  end
end
