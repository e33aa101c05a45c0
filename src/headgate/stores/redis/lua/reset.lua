-- Forgets all that is known of counters.
-- KEYS: their keys. ARGV: the channel for news, then each counter's name in them.
-- Reply: how many were known.

local forgotten = 0
for index, key in ipairs(KEYS) do
  forgotten = forgotten + call('UNLINK', key)
  -- Denials that are remembered elsewhere hold no longer. Who may not publish may reset all the same.
  pcall('PUBLISH', ARGV[1], format('forget %s', ARGV[index + 1]))
end
return forgotten
