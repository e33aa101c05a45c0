-- Mirrors leaky_bucket.py; needs gcra.lua, whose state and admission it shares.
-- In: key, now (us), cost (<= capacity + 1), limit, nil, and the stored text if known. Out: remaining,
-- retry (us, -1 never), reset (us), delay (us), new state or nil.

local leaky_bucket = gcra_queue

-- >8 -- scripts that only decide end here

local leaky_bucket_refund = gcra_refund
local leaky_bucket_overdraw = gcra_overdraw
