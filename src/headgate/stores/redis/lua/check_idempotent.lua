-- Decides a request with an idempotency key, at most once: the answer is recorded next to each counter that it charges, in
-- the same run, and repeated while the record is valid. Mirrors MemoryStore._decide_once.
-- KEYS: the counters, then the records of those that do not count leases, in the same order.
-- ARGV: those of check_batch.lua for this request, then the validity of a new record (us).
-- Reply: as check_batch.lua, with an empty last list; then the cost on each key: the recorded one, if there is a record.

local group, validity = 4 + 5 * ARGV[3], table.remove(ARGV) + 0
local count, names_at = ARGV[group + 2] + 0, ARGV[group + 2] + 0
local now = current_us(ARGV[1])
local keys, names, records, costs, is_repeated = {}, {}, {}, {}, true
for index = 1, count do
  local cost_at = group + 2 + 2 * index
  keys[index], costs[index] = KEYS[index], ARGV[cost_at] + 0
  if ARGV[4 + 5 * (ARGV[cost_at - 1] - 1)] == 'concurrency' then
    is_repeated = false
  else
    names_at = names_at + 1
    names[index] = KEYS[names_at]
    local record = read_record(names[index], now)
    if record == false then
      for each = 1, count do
        costs[each * 2 - 1], costs[each * 2] = -1, 0
      end
      return { now, costs, {}, {}, {} }
    elseif record and record.holders > 0 then
      -- Already charged: the other keys decide, as if this one cost nothing.
      records[index], costs[index], ARGV[cost_at] = record, record.cost, '0'
    else
      is_repeated = false
    end
  end
end

local results, unusual, is_allowed, at = {}, {}, true, 0
local retries, delays = {}, {}
if is_repeated then
  for index = 1, count do
    at = math.max(at, records[index].at)
  end
else
  local reply = decide_batch(keys, ARGV)
  if reply.err then return reply end
  at, results = reply[1], reply[2]
  if results[1] < 0 then return { at, results, {}, {}, {} } end
  for place = 1, #reply[3], 3 do
    local index = reply[3][place] + 1
    retries[index], delays[index] = reply[3][place + 1], reply[3][place + 2]
    is_allowed = is_allowed and retries[index] == 0
  end
end

for index = 1, count do
  local record = records[index]
  if record then
    results[index * 2 - 1], results[index * 2], delays[index] = record.remaining, record.reset, record.delay
    if is_allowed then
      record.holders = record.holders + 1
      write_record(names[index], record)
    end
  elseif names[index] and is_allowed then
    write_record(names[index], {
      until_us = at + validity, at = at, cost = costs[index], left = costs[index], holders = 1,
      remaining = results[index * 2 - 1], reset = results[index * 2], delay = delays[index] or 0,
    }, validity)
  end
  local retry, delay = retries[index] or 0, delays[index] or 0
  if retry ~= 0 or delay ~= 0 then
    local last = #unusual
    unusual[last + 1], unusual[last + 2], unusual[last + 3] = index - 1, retry, delay
  end
end
return { at, results, unusual, {}, costs }
