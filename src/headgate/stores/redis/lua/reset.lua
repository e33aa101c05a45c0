-- Deletes counters.
-- KEYS: their keys. ARGV: the channel for notifications, then each counter's name in them.
-- Reply: the number of keys that existed.

local deleted = 0
for index, key in ipairs(KEYS) do
  deleted = deleted + call('UNLINK', key)
  -- Invalidates cached denials. Without permission to publish, the reset still applies.
  pcall('PUBLISH', ARGV[1], format('forget %s', ARGV[index + 1]))
end
return deleted
