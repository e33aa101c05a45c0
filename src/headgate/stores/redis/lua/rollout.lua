-- The rollout of a version of the scripts: one record, the status of the nodes, and the stored formats in use.
-- KEYS: a hash with the fields "revision", "record", and for each stored format, such as "gcra.1", the instant of its last
--   use (us); and a hash in the same slot: node -> its status.
-- ARGV: the verb, then to
--   "join": nothing, and forgets nodes that have been silent for long;
--   "poll": the revision that the node knows, its name, its status, and the formats it uses;
--   "read": nothing;
--   "set": the expected revision and the new record;
--   "forget": formats.
-- Reply: to "join", now (us), then format and instant in turn; to "poll", the revision and the record, which is empty if the
--   revision is the known one; to "read", now (us), revision, record, then node, instant of its status and status in turn;
--   to "set", the new revision, or -1 if the revision is not the expected one; to "forget", how many were forgotten.

local MAX_SILENCE_US = 60000000
local hash, nodes, verb = KEYS[1], KEYS[2], ARGV[1]
local now = current_us('')
local revision = call('HGET', hash, 'revision') or '0'

if verb == 'join' then
  local statuses = call('HGETALL', nodes)
  for index = 1, #statuses, 2 do
    local at = tonumber(match(statuses[index + 1], '^%d+') or '0')
    if now - at > MAX_SILENCE_US then call('HDEL', nodes, statuses[index]) end
  end
  local fields, reply = call('HGETALL', hash), { format(INT, now) }
  for index = 1, #fields, 2 do
    if match(fields[index], '^[%l_]+%.%d+$') then
      reply[#reply + 1], reply[#reply + 2] = fields[index], fields[index + 1]
    end
  end
  return reply
elseif verb == 'poll' then
  call('HSET', nodes, ARGV[3], format('%s %s', format(INT, now), ARGV[4]))
  for index = 5, #ARGV do
    call('HSET', hash, ARGV[index], format(INT, now))
  end
  return { revision, revision ~= ARGV[2] and call('HGET', hash, 'record') or '' }
elseif verb == 'read' then
  local statuses, reply = call('HGETALL', nodes), { format(INT, now), revision, call('HGET', hash, 'record') or '' }
  for index = 1, #statuses, 2 do
    local at, status = match(statuses[index + 1], '^(%d+) (.*)$')
    if at then
      local last = #reply
      reply[last + 1], reply[last + 2], reply[last + 3] = statuses[index], at, status
    end
  end
  return reply
elseif verb == 'set' then
  if revision ~= ARGV[2] then return -1 end
  call('HSET', hash, 'record', ARGV[3])
  return call('HINCRBY', hash, 'revision', 1)
end
local forgotten = 0
for index = 2, #ARGV do
  forgotten = forgotten + call('HDEL', hash, ARGV[index])
end
return forgotten
