-- Idempotency records. Mirrors IdRecord in memory.py.
-- A record is a string in the slot of its counter: "until at cost left holders remaining reset delay", times in us. A
-- record without holders is that of a refund whose id no check had.

-- The record of that name; nil if there is none or it has expired, false for a foreign value.
local function read_record(name, now)
  local text = pcall('GET', name)
  if not text then return nil end
  if text.err then return false end
  local fields = {}
  for field in gmatch(text, '%d+') do
    fields[#fields + 1] = tonumber(field)
  end
  if #fields ~= 8 or not match(text, '^[%d ]+$') then return false end
  if now >= fields[1] then return nil end
  return {
    until_us = fields[1], at = fields[2], cost = fields[3], left = fields[4], holders = fields[5],
    remaining = fields[6], reset = fields[7], delay = fields[8],
  }
end

-- Writes a record: a new one with its validity (us), or a changed one, which keeps its TTL.
local function write_record(name, record, validity)
  local text = table.concat({
    format(INT_TRIPLE, record.until_us, record.at, record.cost),
    format(INT_TRIPLE, record.left, record.holders, record.remaining),
    format(INT_PAIR, record.reset, record.delay),
  }, ' ')
  if validity then
    call('SET', name, text, 'PX', format(INT, ceil_div(validity, 1000) + MARGIN_MS))
  else
    call('SET', name, text, 'KEEPTTL')
  end
end
