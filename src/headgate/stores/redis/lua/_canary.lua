-- Runs the stable and the candidate version of a script on the same keys, arguments and instant, and compares them.
-- Neither writes at first: what they would write is recorded. Then the writes of one version are carried out: those of the
-- candidate, or those of the stable version if the candidate fails, or differs and TOLERATES_DIFFERENCES is false.
-- Before this file: run_stable and run_candidate, functions of redis, KEYS and ARGV.
-- Reply: the reply of that version, and the time (us) that the stable version and the candidate took. If they differ, also
--   what differs ("answer", "state", "expiry" or "error"), the index of the key (0 if unknown), the value of the stable
--   version and of the candidate, and the stored text before.

local READS = {
  GET = true, MGET = true, PTTL = true, INFO = true, HGET = true, HGETALL = true, HLEN = true, HEXISTS = true, ZCARD = true,
  ZRANGE = true, ZRANGEBYSCORE = true, ZRANK = true, ZREVRANGE = true, ZSCORE = true, ZCOUNT = true, EXISTS = true,
}
local format, insert, upper = string.format, table.insert, string.upper
local real_call, time = redis.call, redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000

-- A stopwatch (us): CPU time where the server offers it; else the time of day, which Redis 7.2 stops during a script.
local has_cpu_clock, cpu_clock = pcall(function() return os.clock end)
local function stopwatch_us()
  if has_cpu_clock then return cpu_clock() * 1000000 end
  local current = real_call('TIME')
  return current[1] * 1000000 + current[2]
end

-- A version's view of the server: reads see its own writes, which are only recorded.
local function new_view(name)
  local view = { log = {}, texts = {}, changes = {}, expiries = {} }
  local pending, copies = {}, {}

  -- The key to read: a copy with the version's writes, if there are any.
  local function key_to_read(key)
    local commands = pending[key]
    if not commands then return copies[key] or key end
    local copy = copies[key]
    if not copy then
      copy = format('{%s}:%s', key, name)
      real_call('UNLINK', copy)
      real_call('COPY', key, copy)
      copies[key] = copy
    end
    for _, command in ipairs(commands) do
      local args = { unpack(command) }
      args[2] = copy
      real_call(unpack(args))
    end
    pending[key] = nil
    return copy
  end

  local function read(call, verb, key, ...)
    if not key or verb == 'INFO' then return call(verb, key, ...) end
    if verb == 'GET' and view.texts[key] ~= nil then return view.texts[key] end
    if verb ~= 'MGET' then return call(verb, key_to_read(key), ...) end
    local keys = { key, ... }
    local found = call('MGET', unpack(keys))
    for index, each in ipairs(keys) do
      if view.texts[each] ~= nil then found[index] = view.texts[each] end
    end
    return found
  end

  local function record(command)
    local verb, key = command[1], command[2]
    insert(view.log, command)
    if verb == 'MSET' then
      for index = 2, #command, 2 do
        view.texts[command[index]] = command[index + 1]
        pending[command[index]] = { { 'SET', command[index], command[index + 1] } }
      end
      return { ok = 'OK' }
    end
    if verb ~= 'PUBLISH' then
      pending[key] = pending[key] or {}
      insert(pending[key], command)
    end
    if verb == 'SET' then
      view.texts[key] = command[3]
      if command[4] == 'PX' then view.expiries[key] = command[5] + 0 end
      return { ok = 'OK' }
    elseif verb == 'SETRANGE' and command[3] == '0' then
      view.texts[key] = command[4]
      return #command[4]
    elseif verb == 'PEXPIRE' then
      view.expiries[key] = command[3] + 0
    elseif verb == 'PEXPIREAT' then
      view.expiries[key] = command[3] - now_ms
    elseif verb == 'DEL' or verb == 'UNLINK' then
      view.texts[key] = false
    else
      view.changes[key] = view.changes[key] or {}
      insert(view.changes[key], table.concat(command, ' '))
    end
    return 1
  end

  local function execute(call, verb, ...)
    verb = upper(verb)
    if verb == 'TIME' then return time end
    if READS[verb] then return read(call, verb, ...) end
    return record({ verb, ... })
  end

  view.redis = setmetatable({
    call = function(...) return execute(redis.call, ...) end,
    pcall = function(...) return execute(redis.pcall, ...) end,
  }, { __index = redis })

  function view.clean()
    for _, copy in pairs(copies) do
      real_call('UNLINK', copy)
    end
  end

  function view.write()
    for _, command in ipairs(view.log) do
      real_call(unpack(command))
    end
  end

  return view
end

-- Runs a version; `failed` is its error, if it raises one.
local function run(version, name)
  local args = {}
  for index, value in ipairs(ARGV) do
    args[index] = value
  end
  local view = new_view(name)
  local start = stopwatch_us()
  local is_done, reply = pcall(version, view.redis, KEYS, args)
  view.us = math.floor(stopwatch_us() - start)
  view.clean()
  if is_done then
    view.reply = reply
  else
    view.failed = type(reply) == 'table' and reply.err or reply
  end
  return view
end

-- The first difference of two values, as text, with the positions that lead to it.
local function find_difference(one, other, path)
  if type(one) ~= 'table' or type(other) ~= 'table' then
    if one == other then return nil end
    return { cjson.encode({ one }), cjson.encode({ other }), path }
  end
  for index = 1, math.max(#one, #other) do
    local inner = { unpack(path) }
    insert(inner, index)
    local found = find_difference(one[index], other[index], inner)
    if found then return found end
  end
  return nil
end

local function time_to_live(view, key)
  local ms = view.expiries[key] or real_call('PTTL', key)
  return ms < 0 and math.huge or ms
end

local function index_of(key)
  for index, each in ipairs(KEYS) do
    if each == key then return index end
  end
  return 0
end

-- What differs, the index of the key, and the values of both versions; nil if nothing does.
local function compare(stable, candidate)
  if candidate.failed or stable.failed then
    if candidate.failed and stable.failed then return nil end
    return 'error', 0, stable.failed or '', candidate.failed or ''
  end
  local found = find_difference(stable.reply, candidate.reply, {})
  if found then
    local path, index = found[3], 0
    if #KEYS == 1 then
      index = 1
    elseif path[1] == 2 and path[2] then
      index = math.ceil(path[2] / 2)
    end
    return 'answer', index, found[1], found[2]
  end
  for _, pair in ipairs({ { stable, candidate }, { candidate, stable } }) do
    local one, other = pair[1], pair[2]
    for key, text in pairs(one.texts) do
      if other.texts[key] ~= text then
        return 'state', index_of(key), cjson.encode({ stable.texts[key] }), cjson.encode({ candidate.texts[key] })
      end
    end
    for key, changes in pairs(one.changes) do
      local difference = find_difference(stable.changes[key] or {}, candidate.changes[key] or {}, {})
      if difference then return 'state', index_of(key), difference[1], difference[2] end
    end
    -- A key that lives longer only occupies memory.
    for key in pairs(one.expiries) do
      local expected, actual = time_to_live(stable, key), time_to_live(candidate, key)
      if actual < expected - 1 then
        return 'expiry', index_of(key), format('%.0f ms', expected), format('%.0f ms', actual)
      end
    end
  end
  return nil
end

local stable, candidate = run(run_stable, 'stable'), run(run_candidate, 'candidate')
local what, index, expected, actual = compare(stable, candidate)
local is_candidate = not candidate.failed and (not what or TOLERATES_DIFFERENCES)
local decided = is_candidate and candidate or stable
if decided.failed then decided = candidate end
if decided.failed then return redis.error_reply(decided.failed) end
local before = ''
if what and index > 0 then
  before = redis.pcall('GET', KEYS[index]) or ''
  if type(before) == 'table' then before = '' end
end
decided.write()
if not what then return { decided.reply, stable.us, candidate.us } end
return { decided.reply, stable.us, candidate.us, what, index, expected, actual, before }
