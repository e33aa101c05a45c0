-- What wrk asks for: many items with many API keys, round and round. At the end, one line of JSON for serving.py.
local MANY = 1000
local requests, last = {}, 0

function init()
  for n = 1, MANY do
    requests[n] = wrk.format("GET", "/items/" .. n, { ["X-API-Key"] = "sk_live_" .. n })
  end
end

function request()
  last = last % MANY + 1
  return requests[last]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "refused": %d, "broken": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write + errors.timeout
  ))
end
