-- Asks Headgate whether a request may pass. A rejection is sent to the client as it is.
local url = os.getenv("HEADGATE_URL") or "http://127.0.0.1:8080/auth"
local timeout_ms = 250

core.register_action("headgate", { "http-req" }, function(txn)
  local headers = {}
  for name, values in pairs(txn.http:req_get_headers()) do
    headers[name] = {}
    for _, value in pairs(values) do
      table.insert(headers[name], value)
    end
  end
  headers["content-length"], headers["transfer-encoding"] = nil, nil
  headers["x-forwarded-for"] = { txn.f:src() }
  headers["x-forwarded-method"] = { txn.f:method() }
  headers["x-forwarded-uri"] = { txn.f:pathq() }

  local answer = core.httpclient():get({ url = url, headers = headers, timeout = timeout_ms })
  local function first(name)
    local values = answer and answer.headers and answer.headers[name]
    return values and (values[0] or values[1])
  end
  if answer == nil or (answer.status ~= 200 and first("cache-control") ~= "no-store") then
    return -- not an answer of Headgate, but HAProxy's own 503 or 504: the request passes
  end
  if answer.status == 200 then
    if first("ratelimit") then
      txn:set_var("txn.ratelimit", first("ratelimit"))
      txn:set_var("txn.ratelimit_policy", first("ratelimit-policy"))
    end
    return
  end
  local reply = txn:reply({ status = answer.status })
  for _, name in ipairs({ "content-type", "retry-after", "ratelimit", "ratelimit-policy", "cache-control" }) do
    if first(name) then
      reply:add_header(name, first(name))
    end
  end
  reply:set_body(answer.body or "")
  txn:done(reply)
end)
