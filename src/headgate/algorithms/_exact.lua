-- Shared by the scripts: whole numbers, exact below 2^53, which is all that Lua's doubles give. They become text by
-- format: tostring and .. would round them to 14 digits. Where a C long has 64 bits, %d is exact and twice as fast.

local attempt, call, pcall, tonumber = pcall, redis.call, redis.pcall, tonumber
local byte, find, format, gmatch, match, sub =
  string.byte, string.find, string.format, string.gmatch, string.match, string.sub
local WHOLE, TWO, THREE, SIGNED = '%d', '%d %d', '%d %d %d', '%d%s%d %s'
if format(WHOLE, 4503599627370497) ~= '4503599627370497' then
  WHOLE, TWO, THREE, SIGNED = '%.0f', '%.0f %.0f', '%.0f %.0f %.0f', '%.0f%s%.0f %s'
end

-- floor(a / b) of whole numbers: `a - a % b` is a multiple of b, so the division does not round.
local function div(a, b)
  return (a - a % b) / b
end

-- ceil(a / b), a of either sign: what `%` leaves is never negative, so that this is the next multiple of b.
local function ceil_div(a, b)
  return (a + -a % b) / b
end

-- floor(a * b / c) and the remainder, also where the product is beyond 2^53: then bit by bit, by doubling.
local function mul_div(a, b, c)
  local product = a * b
  if product < 9007199254740992 then
    return div(product, c), product % c
  end
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

-- The text of an instant. The requests of a run have most of theirs in common, so the last one is kept.
local said, text
local function instant(us)
  if us ~= said then
    said, text = us, format(WHOLE, us)
  end
  return text
end

-- The first number that was read last, and whether it ends in a tab. What a request meets was mostly charged together
-- before: then all of its limits have their instant in common.
local read_text, read_number, read_tab

-- Whether what should be a number is taken for one, which is quicker than to look, and raises an error where it is none.
-- Who sets this has to begin anew then.
local trusting = false

-- The stored string, which is `text` where that is known; nil for a key that does not exist, false for a foreign value.
local function fetch(key, text)
  text = text or pcall('GET', key)
  if text and text.err then
    return false
  end
  return text or nil
end

-- The numbers, separated by blanks, of a stored string; nil for a key that does not exist, false for a foreign value.
local function read(key, text, pattern)
  text = fetch(key, text)
  if not text then
    return text
  end
  local first, second, third, fourth = match(text, pattern)
  if not first then
    return false
  end
  return first + 0, second + 0, third, fourth -- digits all: adding is three times as quick as tonumber
end

-- The same for two numbers and the signature of the limit under which they were written: mostly the one that asks; and
-- whether its key was given a long life, which a tab behind the first says. That is an instant, which has sixteen digits
-- (from 2001 until 2286). To cut it there takes half the time of a pattern.
local function read_signed(key, text, limit)
  text = text or fetch(key)
  if not text then
    return text
  end
  local signature_at = find(text, limit.ending, limit.ending_at, true)
  if signature_at then
    local first = sub(text, 1, 17)
    if first ~= read_text then
      read_text, read_number, read_tab = first, trusting and first + 0 or tonumber(first), byte(first, 17) == 9
    end
    local second = sub(text, 18, signature_at - 1)
    second = trusting and second + 0 or tonumber(second)
    if read_number and second then
      return read_number, second, limit.signed, read_tab
    end
  end
  return read(key, text, '^(%d+)[ \t](%d+) (.+)')
end

-- The numbers of the limit under which a state was written, from its signature; nothing if it is none.
local function signature(signed)
  local tokens, ticks, capacity = match(signed, '^(%d+)/(%d+)/(%d+)$')
  return tonumber(tokens), tonumber(ticks), tonumber(capacity)
end
