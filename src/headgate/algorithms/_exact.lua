-- Shared by all scripts: integers, which Lua's doubles represent exactly below 2^53. They are converted to text by format:
-- tostring and .. would round them to 14 digits. If a C long has 64 bits, %d is exact and twice as fast.

local protected_call, call, pcall, tonumber = pcall, redis.call, redis.pcall, tonumber
local byte, find, format, gmatch, match, sub =
  string.byte, string.find, string.format, string.gmatch, string.match, string.sub
local INT, INT_PAIR, INT_TRIPLE, SIGNED_STATE = '%d', '%d %d', '%d %d %d', '%d%s%d %s'
if format(INT, 4503599627370497) ~= '4503599627370497' then
  INT, INT_PAIR, INT_TRIPLE, SIGNED_STATE = '%.0f', '%.0f %.0f', '%.0f %.0f %.0f', '%.0f%s%.0f %s'
end

-- floor(a / b): `a - a % b` is a multiple of b, so the division does not round.
local function div(a, b)
  return (a - a % b) / b
end

-- ceil(a / b), for a of either sign: `%` is never negative, so this is the next multiple of b.
local function ceil_div(a, b)
  return (a + -a % b) / b
end

-- floor(a * b / c) and the remainder. If the product exceeds 2^53, it is computed bit by bit.
local function mul_div(a, b, c)
  local product = a * b
  if product < 9007199254740992 then return div(product, c), product % c end
  local whole, part = div(a, c), a % c
  local quotient, rest, bit = 0, 0, 4503599627370496
  while bit >= 1 do
    quotient = quotient * 2
    if rest >= c - rest then
      quotient, rest = quotient + 1, rest - (c - rest)
    else
      rest = rest * 2
    end
    if b >= bit then
      b = b - bit
      quotient = quotient + whole
      if rest >= c - part then
        quotient, rest = quotient + 1, rest - (c - part)
      else
        rest = rest + part
      end
    end
    bit = bit / 2
  end
  return quotient, rest
end

-- The text of an instant. Most requests of a run have the same, so the last one is cached.
local last_us, last_text
local function instant(us)
  if us ~= last_us then last_us, last_text = us, format(INT, us) end
  return last_text
end

-- The first number read last, and whether a tab follows it: limits that were charged together have the same instant.
local last_prefix, last_number, last_has_tab

-- If true, numbers are parsed by arithmetic, which is faster than tonumber but raises an error for a foreign value: the
-- script must then start again without it.
local skip_validation = false

-- The stored string, which is `text` if that is given; nil if the key does not exist, false for a foreign value.
local function fetch(key, text)
  text = text or pcall('GET', key)
  if text and text.err then return false end
  return text or nil
end

-- The space-separated numbers of a stored string; nil if the key does not exist, false for a foreign value.
local function read(key, text, pattern)
  text = fetch(key, text)
  if not text then return text end
  local first, second, third, fourth = match(text, pattern)
  if not first then return false end
  return first + 0, second + 0, third, fourth -- adding is three times as fast as tonumber
end

-- The same for two numbers and the signature of the limit under which they were written, usually the current one; and
-- whether the key has a long TTL, marked by a tab after the first number. That is an instant, which has sixteen digits
-- (from 2001 until 2286): cutting there takes half the time of matching a pattern.
local function read_signed(key, text, limit)
  text = text or fetch(key)
  if not text then return text end
  local signature_at = find(text, limit.signature_suffix, limit.suffix_at, true)
  if signature_at then
    local first = sub(text, 1, 17)
    if first ~= last_prefix then
      last_prefix, last_number, last_has_tab = first, skip_validation and first + 0 or tonumber(first), byte(first, 17) == 9
    end
    local second = sub(text, 18, signature_at - 1)
    second = skip_validation and second + 0 or tonumber(second)
    if last_number and second then return last_number, second, limit.signature, last_has_tab end
  end
  return read(key, text, '^(%d+)[ \t](%d+) (.+)')
end

-- The numbers in the signature of a limit; nil if it is not one.
local function parse_signature(signature)
  local tokens, ticks, capacity = match(signature, '^(%d+)/(%d+)/(%d+)$')
  return tonumber(tokens), tonumber(ticks), tonumber(capacity)
end
