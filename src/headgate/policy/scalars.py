"""Parsers of scalar policy values. Each returns the value or raises InvalidInput with the remedy."""

from __future__ import annotations

import operator
import re
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from headgate import _limit_syntax
from headgate._limit_syntax import Phrase, suggest
from headgate.abuse.model import ADDRESS_GROUPS, ActionStep
from headgate.calendars import UNITS, Calendar
from headgate.errors import InvalidInput, InvalidLimit
from headgate.local.networks import NAT64
from headgate.policy.formats.document import Unreadable
from headgate.policy.model import StatusTest
from headgate.policy.routes import Template
from headgate.stores import REDIS_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HORIZON", "IDENTITIES", "VARIABLE", "OutOfRange", "action_step", "address", "address_or_hash", "api_key", "by",
    "challenge_url", "choice", "client_starts", "column", "draft", "duration", "duration_between", "factor_or_off",
    "first_day", "flag", "foreign_limit", "header", "header_name", "identity", "instant", "kind", "label", "ledger_url",
    "list_header", "list_name", "list_source", "method", "name", "numbers", "own_region", "period", "proxy", "rate",
    "refusal", "region", "route", "safe_share", "scenario_group", "share", "show", "signal_share", "size",
    "status_test", "store_url", "subnet", "switch", "text", "time_zone", "tolerance", "url", "variable", "whole",
]  # fmt: skip

IDENTITIES: Final = ("ip", "subnet", "user", "api_key", "tenant", "endpoint", "client")
"""The built-in kinds of identity; "client" is the first of CLIENT_KINDS that a request has."""

LONGEST_LABEL: Final = 500

EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
HORIZON: Final = datetime(2200, 1, 1, tzinfo=UTC)
"""A later time is a typing error, or means no end, for which valid_until is left out."""

STATUSES: Final = range(100, 600)

LONGEST_REGION: Final = 50
VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]{0,99})\}")
"""An environment variable in the settings of regions."""

_NAME: Final = re.compile(r"[ !#-\[\]-~]{1,100}")
_KIND: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_STATUS: Final = re.compile(
    r"\s*status\s*(?P<sign>==|!=|<=|>=|<|>|\bnot\s+in\b|\bin\b)\s*(?P<operand>.*?)\s*", re.DOTALL
)
_STATUS_FORM: Final = 'write it like "status in [401, 403]", "status not in [2xx, 404]" or "status >= 500"'
_COMPARISONS: Final = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "QUERY")

_SPELLINGS: Final = {re.sub("[-_]", "", kind): kind for kind in (*IDENTITIES, "global")} | {"address": "ip"}

_FIELDS: Final = frozenset(
    [
        *("limit", "class", "bucket", "quota", "algorithm", "tier", "label", "timezone", "starts", "reason"),
        *("valid_from", "valid_until", "list", "lists"),
    ]
)
"""Fields of clients and overrides, which cannot be kinds of identity."""

_Network: TypeAlias = IPv4Network | IPv6Network

_PRIVATE_IPV6: Final = IPv6Network("fc00::/7")
"""Private, as 10.0.0.0/8 is: no request from the internet has such an address."""

_TYPES: Final = {
    str: "text",
    int: "a number",
    Decimal: "a decimal number",
    bool: "a truth value",
    type(None): "nothing",
}


def show(value: object) -> str:
    """A value as shown in messages: short, on one line, in the syntax of policies."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= 60 else f"{value[:57]}...")
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case datetime() | date() | time():
            return value.isoformat()
    return str(value)


def refusal(value: object, wanted: str) -> InvalidInput:
    """The error for a value of the wrong type."""
    if isinstance(value, Unreadable):
        return InvalidInput(value.remedy)
    if isinstance(value, str) and not value:
        return InvalidInput(f"the text is empty; write {wanted}, or leave the field out")
    if isinstance(value, (dict, list)):
        return InvalidInput(f"{show(value)} is not allowed here; write {wanted}")
    return InvalidInput(f"{show(value)} is {_TYPES.get(type(value), 'a time of day')}; write {wanted}")


def text(value: object) -> str:
    if type(value) is str and value and value.isprintable():
        return value
    if isinstance(value, str) and value:
        raise InvalidInput(f"{show(value)} contains characters that cannot be printed; remove them")
    if isinstance(value, (int, Decimal)) or value is None:
        raise refusal(value, f'text in quotes: "{show(value)}"')
    raise refusal(value, "text")


def name(value: object) -> str:
    """Parse a name that can be quoted in headers, reasons and on the command line."""
    if type(value) is str and _NAME.fullmatch(value):
        return value
    raise InvalidInput(f"{show(text(value))}: use 1 to 100 printable ASCII characters, no quote and no backslash")


def label(value: object) -> str:
    if type(value) is str and 0 < len(value) <= LONGEST_LABEL and value.isprintable():
        return value
    raise InvalidInput(f"{show(text(value))} has too many characters; use at most {LONGEST_LABEL}")


def flag(value: object) -> bool:
    if type(value) is bool:
        return value
    raise refusal(value, "true or false")


def whole(least: int, most: int | None = None, *, example: int) -> Callable[[object], int]:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(value: object) -> int:
        if type(value) is not int:
            raise refusal(value, f"a whole number {bounds}, like {example}")
        if value < least or (most is not None and value > most):
            raise InvalidInput(f"{value} is out of bounds; write a whole number {bounds}, like {example}")
        return value

    return read


def choice(*known: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if type(value) is not str:
            raise refusal(value, f"one of {', '.join(known)}")
        if value not in known:
            raise InvalidInput(f"unknown word {show(value)}; {suggest(value, list(known))}")
        return value

    return read


def numbers(value: object) -> Phrase:
    if type(value) is not str:
        raise refusal(value, 'a limit like "10/minute" or "1000/minute, burst 200"')
    try:
        return _phrase(value)
    except InvalidLimit:
        if len(parts := _limit_syntax.separated(value)) > 1:
            written = " and ".join(f'"{part}"' for part in parts)
            raise InvalidInput(
                f"{show(value)} holds {len(parts)} limits; write one entry under limits for each, with a name of its "
                f"own: {written}"
            ) from None
        if (remedy := foreign_limit(value)) is not None:
            raise InvalidInput(f"cannot read the limit {show(value)}: {remedy}") from None
        raise


# A hundred thousand overrides contain only a few different texts.
_phrase: Final = lru_cache(maxsize=8192)(_limit_syntax.parse)


def tolerance(value: object) -> float:
    """Parse the latency that an adaptive concurrency limit accepts, as a multiple of the latency without a queue."""
    wanted = "a number from 1 to 10, like 1.5"
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise refusal(value, wanted)
    if not 1 <= value <= 10:
        raise InvalidInput(f"{value} is out of bounds; write {wanted}")
    return float(value)


def instant(value: object) -> datetime:
    if type(value) is str:
        return _moment(value)
    if isinstance(value, datetime):
        return _zoned(value)
    if isinstance(value, date):
        raise InvalidInput(f"{value} is a date without a time; write it like {value}T00:00:00Z")
    raise refusal(value, "a time, like 2026-05-28T02:01:00Z")


@lru_cache(maxsize=1024)
def _moment(written: str) -> datetime:
    try:
        found = datetime.fromisoformat(written)
    except ValueError:
        raise InvalidInput(f"{show(written)} is not a time; write it like 2026-05-28T02:01:00Z") from None
    if len(written) < len("20260528T02Z"):
        raise InvalidInput(f"{written} is a date without a time; write it like {found.date()}T00:00:00Z")
    return _zoned(found)


class OutOfRange(InvalidInput):
    """A time outside the supported range."""


def _zoned(moment: datetime) -> datetime:
    if moment.utcoffset() is None:
        remedy = f"write {moment.isoformat()}Z for UTC, or add an offset like +02:00"
        raise InvalidInput(f"{moment} has no time zone; {remedy}")
    if not EARLIEST <= moment < HORIZON:
        raise OutOfRange(
            f"{moment.isoformat()} is out of range: times are from {EARLIEST.year} to {HORIZON.year - 1}; "
            "for no end, leave valid_until out"
        )
    return moment


def status_test(value: object) -> StatusTest:
    """Parse a condition like `status in [401, 403]`."""
    if type(value) is not str:
        raise refusal(value, 'a test in quotes, like "status in [401, 403]"')
    match = _STATUS.fullmatch(value)
    if match is None:
        raise InvalidInput(f"cannot read {show(value)}; {_STATUS_FORM}")
    sign, operand = " ".join(match["sign"].split()), match["operand"]
    items = [operand]
    if sign.endswith("in"):
        if not (operand.startswith("[") and operand.endswith("]")):
            raise InvalidInput(f"cannot read {show(value)}; {_STATUS_FORM}")
        items = operand[1:-1].split(",")
    found = frozenset[int]().union(*[_statuses(item.strip(), value) for item in items])
    if sign in _COMPARISONS:
        if len(found) > 1:
            raise InvalidInput(f"{show(value)}: {sign} needs one status, like 500")
        (bound,) = found
        found = frozenset([status for status in STATUSES if _COMPARISONS[sign](status, bound)])
    elif sign in ("!=", "not in"):
        found = frozenset(STATUSES) - found
    if not 0 < len(found) < len(STATUSES):
        raise InvalidInput(f"{show(value)} is true for {'every answer' if found else 'no answer'}; {_STATUS_FORM}")
    return StatusTest(value, found)


def _statuses(item: str, value: str) -> frozenset[int]:
    if re.fullmatch(r"[1-5][0-9][0-9]", item):
        return frozenset([int(item)])
    if re.fullmatch(r"[1-5]xx", item):
        return frozenset(range(int(item[0]) * 100, int(item[0]) * 100 + 100))
    raise InvalidInput(f"{show(value)}: {show(item)} is not a status; write 100 to 599, or 4xx for all of its kind")


def by(value: object) -> tuple[str, ...]:
    """Parse kinds of identity; empty for a global counter."""
    words = value.split("+") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or not words:
        odd = next((word for word in words if not isinstance(word, str)), value) if isinstance(words, list) else value
        raise refusal(odd, 'kinds of identity, like ip, "tenant+user" or [tenant, user]')
    kinds = [word.strip() for word in words]
    for kind in kinds:
        meant = _SPELLINGS.get(re.sub("[-_]", "", kind.lower()), kind)
        if meant != kind:
            raise InvalidInput(f"unknown identity {show(kind)}; did you mean {meant!r}?")
        if not _KIND.fullmatch(kind) or kind in _FIELDS:
            raise InvalidInput(f"{show(kind)} cannot name an identity; use letters, digits, _ and -, like device_id")
    if len(set(kinds)) < len(kinds):
        raise InvalidInput(f"{'+'.join(kinds)} names the same identity twice; keep one")
    if "global" in kinds and len(kinds) > 1:
        rule = "global is one counter for all, and cannot be combined"
        raise InvalidInput(f"{'+'.join(kinds)}: {rule}; leave out one or the other")
    return () if kinds == ["global"] else tuple(kinds)


def identity(value: object) -> str:
    """Parse an identity of the app: text or an integer."""
    if type(value) is str:
        return label(value)
    if type(value) is int:
        return str(value)
    raise refusal(value, "an identity, as text or a whole number")


def api_key(value: object) -> str:
    """Parse an API key or its fingerprint. Messages never contain it."""
    if isinstance(value, Unreadable) or type(value) not in (str, int):
        raise InvalidInput("this is not an API key; write it as text in quotes")
    found = str(value)
    if not (found.isascii() and found.isprintable() and 0 < len(found) <= 4096) or " " in found or "," in found:
        remedy = "write up to 4096 printable ASCII characters, no blanks or commas"
        raise InvalidInput(f"no client can send this key; {remedy}")
    if found.startswith("hmac:") and not re.fullmatch(r"hmac:[0-9a-f]{32}", found):
        raise InvalidInput("this is not a fingerprint; write hmac: and 32 hexadecimal digits, or the key itself")
    return found


def address(value: object) -> str:
    """Parse an address or a network into its canonical spelling."""
    found = _network(value, "203.0.113.9 or 203.0.113.0/24", unwraps_nat64=True)
    return str(found.network_address) if found.prefixlen == found.max_prefixlen else str(found)


def address_or_hash(value: object) -> str:
    """Parse an address, a network, or the keyed hash of an address."""
    return api_key(value) if type(value) is str and value.startswith("hmac:") else address(value)


def subnet(value: object) -> str:
    return str(_network(value, "203.0.113.0/24", unwraps_nat64=True))


def proxy(value: object) -> str:
    """Parse the network of a proxy, which must be narrow enough to be trusted."""
    found = _network(value, "10.0.0.0/8")
    least = 8 if found.version == 4 else 16
    if found.prefixlen < least and not (found.version == 6 and found.subnet_of(_PRIVATE_IPV6)):
        remedy = f"name the network of the proxies, /{least} or narrower"
        raise InvalidInput(f"{found} would let clients choose their address; {remedy}")
    return str(found)


def _network(value: object, example: str, *, unwraps_nat64: bool = False) -> _Network:
    """The network; for an IPv4-mapped or NAT64 one, that of IPv4. All of IPv4 behind NAT64 is refused."""
    if type(value) is not str:
        raise refusal(value, f"an address or a network, like {example}")
    written, _, prefix = value.partition("/")
    try:
        start = given = ip_address(written)
        width = int(prefix) if "/" in value else start.max_prefixlen
        if "%" in written or (prefix and str(width) != prefix):
            raise ValueError
        embedded = start.ipv4_mapped if isinstance(start, IPv6Address) else None
        is_nat64 = unwraps_nat64 and width >= 96 and start.packed.startswith(NAT64)
        if is_nat64 or embedded is not None:
            start, width = embedded or IPv4Address(start.packed[12:]), width - 96
        found = (IPv4Network if start.version == 4 else IPv6Network)((int(start), width), strict=False)
    except ValueError:
        raise InvalidInput(f"{show(value)} is not an address; write it like {example}") from None
    if is_nat64 and width == 0:
        raise InvalidInput(f"{given}/96 is every IPv4 address behind NAT64; name networks of IPv4 addresses")
    if found.network_address != start:
        raise InvalidInput(f"{show(value)} starts in the middle of its network; write {found}")
    return found


def method(value: object) -> str:
    if type(value) is not str:
        raise refusal(value, "a method, like GET")
    if value.upper() == "HEAD":
        raise InvalidInput("HEAD counts as GET; write GET")
    if value not in _METHODS:
        near = get_close_matches(value.upper(), _METHODS, n=1, cutoff=0.7)
        if near:
            raise InvalidInput(f"unknown method {show(value)}; did you mean {near[0]!r}?")
        if not re.fullmatch(r"[A-Z]{1,20}", value):
            raise InvalidInput(f"{show(value)} is not a method; write one like GET, in capital letters")
    return value


def route(value: object) -> tuple[str | None, Template]:
    """Parse the path of a route with an optional method: "GET /users/{id}"."""
    found = text(value)
    verb, _, path = found.partition(" ")
    if verb.isalpha() and path:
        return method(verb), Template.parse(path.strip())
    return None, Template.parse(found)


def header(value: object) -> str | None:
    """Parse the name of a header, in lower case; None for no header."""
    if value is None or value == "none":
        return None
    if type(value) is not str:
        raise refusal(value, "the name of a header, like x-api-key, or none")
    if not _TOKEN.fullmatch(value):
        raise InvalidInput(f"{show(value)} cannot name a header; write it like x-api-key, or none")
    return value.lower()


def draft(value: object) -> int:
    if type(value) is not int or value not in (6, 11):
        raise refusal(value, "a draft that is supported: 11, or 6 for separate fields")
    return value


def url(value: object) -> str:
    wanted = "an address like https://example.com/limits"
    if type(value) is not str:
        raise refusal(value, wanted)
    try:
        parts = urlsplit(value)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc or not re.fullmatch(r"[!-~]{1,2000}", value):
        raise InvalidInput(f"{show(value)} is not an HTTP URL; write {wanted}")
    return value


def list_name(value: object) -> str:
    """Parse the name of a reputation list."""
    if type(value) is not str or not _KIND.fullmatch(value):
        raise refusal(value, "the name of a list: letters, digits, _ and -, like firehol")
    return value


def list_source(value: object) -> str:
    """Parse the source of a reputation list: an HTTP URL, or the path of a file."""
    wanted = "a URL like https://lists.example/bad.netset, or a file like /etc/headgate/bad.txt"
    found = text(value)
    if "://" not in found:
        if not found.strip() or "\0" in found:
            raise refusal(value, wanted)
        return found
    try:
        parts = urlsplit(found)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not re.fullmatch(r"[!-~]{1,2000}", found):
        raise InvalidInput(f"not an HTTP URL or a file; write {wanted}")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput('a URL must not contain a password; write headers: {Authorization: "${NAME}"}')
    return found


def header_name(value: object) -> str:
    """Parse the name of a header field that is sent."""
    if type(value) is not str or not _TOKEN.fullmatch(value):
        raise refusal(value, "the name of a header, like X-Api-Key")
    return value


def column(value: object) -> str | int:
    """Parse the name of a column, or its number from 1."""
    if type(value) is int and 1 <= value <= 1000:
        return value
    if type(value) is str:
        return label(value)
    raise refusal(value, "the name of a column, or its number from 1")


def size(value: object) -> int:
    """Parse a number of bytes, like "64 MB"."""
    found = re.fullmatch(r"\s*([0-9]{1,6})\s*(k|M|G)B\s*", value) if type(value) is str else None
    amount = int(found[1]) * {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}[found[2]] if found else 0
    if not 1024 <= amount <= 1 << 32:
        raise refusal(value, 'a size from 1 kB to 4 GB, like "64 MB"')
    return amount


def list_header(value: object) -> str:
    """Parse the value of a header field, which may contain ${NAME}. Messages do not show it: it may be a password."""
    if type(value) is not str or not re.fullmatch(r"[ -~]{1,2000}", value):
        raise InvalidInput("this is not a header value; write up to 2000 printable ASCII characters")
    if "${" in VARIABLE.sub("x", value):
        raise InvalidInput("an environment variable is not written like ${LIST_TOKEN}; use letters, digits and _")
    return value


def variable(value: object) -> str:
    """Parse ${NAME}: the secret itself does not belong in a policy."""
    if type(value) is not str or not VARIABLE.fullmatch(value):
        raise InvalidInput("a secret is the name of an environment variable, written like ${LIST_SECRET}")
    return value


def region(value: object) -> str:
    """Parse the name of a region."""
    if len(found := name(value)) > LONGEST_REGION or "$" in found:
        raise InvalidInput(f"{show(found)} cannot name a region; use up to {LONGEST_REGION} characters, like eu-west-1")
    return found


def own_region(value: object) -> str:
    """Parse the name of a region, or ${NAME} for that in an environment variable."""
    return value if isinstance(value, str) and VARIABLE.fullmatch(value) else region(value)


def store_url(value: object) -> str:
    """Parse the URL of a shared store, which may contain ${NAME}. Messages do not show it: it may have a password."""
    wanted = "write one like redis://eu.example:6379/0"
    if type(value) is not str:
        raise refusal(value, "a URL like redis://eu.example:6379/0")
    plain = VARIABLE.sub("x", value)
    if "${" in plain:
        raise InvalidInput("an environment variable is not written like ${EU_PASSWORD}; use letters, digits and _")
    if not re.fullmatch(r"[!-~]{1,2000}", value):
        raise InvalidInput(f"the text is not a URL; {wanted}")
    scheme, separator, rest = plain.partition("://")
    if plain.startswith("memory:"):
        raise InvalidInput("a store in memory cannot be reached from other regions; write one like redis://eu.example")
    if plain != "x" and (scheme not in REDIS_SCHEMES or not separator or not rest):
        known = ", ".join(f"{scheme}://" for scheme in REDIS_SCHEMES)
        raise InvalidInput(f"the URL starts with none of {known}; {wanted}")
    return value


def ledger_url(value: object) -> str:
    """Parse the URL of a ledger, which may contain ${NAME}. Messages do not show it: it may have a password."""
    wanted = "write one like sqlite:///quota.db or postgresql://host/name"
    if type(value) is not str:
        raise refusal(value, "a URL like sqlite:///quota.db or postgresql://host/name")
    plain = VARIABLE.sub("x", value)
    scheme, separator, rest = plain.partition("://")
    is_known = scheme in ("sqlite", "postgresql", "postgres") and separator and rest
    if "${" in plain or not re.fullmatch(r"[!-~]{1,2000}", value) or not (is_known or plain == "x"):
        raise InvalidInput(f"the text is not the URL of a ledger; {wanted}")
    return value


def client_starts(value: object) -> int | str:
    """Parse the first day of a client's months, or of its years."""
    day = first_day(value)
    try:
        Calendar("month" if isinstance(day, int) else "year", starts=day)
    except InvalidLimit:
        raise InvalidInput(
            f'{show(value)} is neither a day of a month nor of a year; write 1 to 31, or one like "04-01"'
        ) from None
    return day


def kind(value: object) -> str:
    """Parse one kind of identity."""
    wanted = "a kind of identity: ip, subnet, user, api_key, tenant, or the app's own"
    if type(value) is not str:
        raise refusal(value, wanted)
    kinds = by(value)
    if len(kinds) != 1 or kinds[0] in ("client", "endpoint"):
        raise InvalidInput(f"{show(value)} is not one kind of identity; write {wanted}")
    return kinds[0]


_STEP: Final = re.compile(
    r"\s*(?P<action>[a-z]+)(?:\s+(?P<amount>[0-9]+\s*[a-z]*))?\s+for\s+(?P<duration>[0-9]*\s*[A-Za-z]+)\s*"
)
_STEP_FORM: Final = (
    'write it like "tighten 4 for 10 minutes", "delay 2 seconds for 10 minutes", "challenge for 10 minutes" or '
    '"block for 1 hour"'
)
_LONGEST_STEP: Final = timedelta(days=30)


def action_step(value: object) -> ActionStep:
    """Parse an action against a client with its duration, like "block for 1 hour"."""
    if type(value) is not str:
        raise refusal(value, 'an action and its duration, like "block for 1 hour"')
    match = _STEP.fullmatch(value)
    if match is None:
        raise InvalidInput(f"cannot read {show(value)}; {_STEP_FORM}")
    action, amount = match["action"], match["amount"]
    if action not in ("tighten", "delay", "challenge", "block"):
        raise InvalidInput(f"unknown action {show(action)}; {_STEP_FORM}")
    duration = _duration(match["duration"], "a duration from 1 second to 30 days", timedelta(seconds=1), _LONGEST_STEP)
    if amount is None:
        return ActionStep(action, duration)  # type: ignore[arg-type]
    if action == "delay":
        wanted = "a delay from 1 ms to 10 seconds"
        delay = _duration(amount, wanted, timedelta(milliseconds=1), timedelta(seconds=10))
        return ActionStep("delay", duration, delay=delay)
    if action != "tighten" or not amount.isdecimal():
        raise InvalidInput(f"cannot read {show(amount)} in {show(value)}; {_STEP_FORM}")
    if not 2 <= int(amount) <= 1000:
        raise InvalidInput(f"{amount} is out of bounds; limits are divided by 2 to 1000")
    return ActionStep("tighten", duration, factor=int(amount))


def challenge_url(value: object) -> str:
    """Parse the target of a redirect: a path of the app, or a URL."""
    if type(value) is str and value.startswith("/") and not value.startswith("//") and _is_plain(value):
        return value
    return url(value)


def _is_plain(written: str) -> bool:
    return written.isascii() and written.isprintable() and not set(written) & set(' "<>\\')


def signal_share(value: object) -> float:
    """Parse the threshold of a share of the requests."""
    return float(_percentage(value, "a share from 1% to 100%, like 50%", Fraction(1, 100), Fraction(1)))


def scenario_group(value: object) -> str:
    """Parse the group whose requests a scenario takes together."""
    wanted = f"a kind of identity, or one of {', '.join(ADDRESS_GROUPS)}"
    if type(value) is str and value in ADDRESS_GROUPS:
        return value
    kinds = by(value)
    if len(kinds) != 1 or kinds[0] == "client":
        raise InvalidInput(f"{show(value)} is not one group; write {wanted}")
    return kinds[0]


def switch(value: object) -> str:
    """Parse "on", "off" or "shadow", also where a format reads truth values."""
    word = _word(value)
    if word is True or word in ("on", "On", "ON"):
        return "on"
    if _is_off(word):
        return "off"
    if word == "shadow":
        return "shadow"
    if isinstance(word, str):
        raise InvalidInput(f"unknown word {show(word)}; {suggest(word, ['on', 'off', 'shadow'])}")
    raise refusal(value, "on, off or shadow")


_FOREIGN: Final = re.compile(
    r"\s*(?P<quota>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<times>[km]?)\s*(?:(?:r|reqs?|requests?|calls?|hits?|tokens?)\s*)?"
    r"(?:/|per)\s*(?P<count>[1-9][0-9]{0,8})?\s*(?P<unit>[a-z]+)(?:\W+burst\W+(?P<burst>[0-9]{1,9}))?\s*",
    re.IGNORECASE,
)
_AT_ONCE: Final = re.compile(r"\s*([1-9][0-9]{0,8})\s+(?:concurrent|parallel|at once|in parallel|in flight)\b.*")

_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%")


def duration(value: object) -> timedelta:
    return _duration(value, 'a duration, like "500 ms", "5 seconds" or "2 minutes"')


def period(value: object) -> timedelta | str:
    """Parse the period of a quota: a duration, or the unit of a calendar period."""
    word = value.strip().lower() if type(value) is str else ""
    return word if word in UNITS else _duration(value, 'a period, like "5 minutes", day or month')


def first_day(value: object) -> int | str:
    """Parse the first day of a calendar period; its calendar checks the range."""
    if type(value) not in (int, str):
        raise refusal(value, 'the first day of a period, like 15 or "04-01"')
    return int(value) if isinstance(value, str) and value.isdecimal() else value  # type: ignore[return-value]


def time_zone(value: object) -> str:
    if type(value) is not str:
        raise refusal(value, "a time zone, like Europe/Berlin")
    try:
        return Calendar("day", timezone=value).timezone
    except InvalidLimit as error:
        raise InvalidInput(str(error)) from None


def duration_between(
    least: timedelta, most: timedelta, *, example: str, or_off: bool = False
) -> Callable[[object], timedelta]:
    """A parser of durations in a range; with `or_off`, also of 0 or "off" for zero."""
    wanted = f'a duration from {_spelled(least)} to {_spelled(most)}, like "{example}"{", or 0 for none" * or_off}'

    def read(value: object) -> timedelta:
        word = _word(value) if or_off else value
        if or_off and (_is_off(word) or (type(word) is int and word == 0)):
            return timedelta()
        return _duration(word, wanted, least, most)

    return read


def _word(value: object) -> object:
    """The value, or the word that YAML parsers may read as a boolean."""
    return value.word if isinstance(value, Unreadable) and value.word is not None else value


def _is_off(word: object) -> bool:
    return word is False or word in ("off", "Off", "OFF")


def factor_or_off(most: int, *, example: int) -> Callable[[object], int | None]:
    """A parser of integers from 1, or "off" for None."""
    wanted = f"a whole number from 1 to {most:,}, like {example}, or off"

    def read(value: object) -> int | None:
        if _is_off(_word(value)):
            return None
        if type(value) is not int:
            raise refusal(value, wanted)
        if not 1 <= value <= most:
            raise InvalidInput(f"{value} is out of bounds; write {wanted}")
        return value

    return read


def rate(value: object) -> Fraction:
    """Parse tokens per second, exactly as written."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise refusal(value, "a number of tokens per second, like 16.67")
    found = Fraction(value)
    if found <= 0:
        raise InvalidInput(f"{value} refills nothing; write a number above 0, like 16.67")
    if found.denominator > 10**9:
        raise InvalidInput(f"{value} has too many digits; at most nine may follow the point")
    return found


def foreign_limit(text: str) -> str | None:
    """The remedy for the syntax of other limiters; None if it is not one.

    >>> foreign_limit("10k requests/minute"), foreign_limit("1.5 r/s"), foreign_limit("1.5/month")
    ('write "10000/minute"', 'write "3/2 s"', None)
    """
    if re.fullmatch(r"\s*(unlimited|infinite|infinity|none|off)\s*", text, re.IGNORECASE):
        return 'write a number that no client reaches, like "1000000/second", or leave the limit out'
    if found := _AT_ONCE.fullmatch(text):
        return f'write "{found[1]}/60 s, concurrency"; a lease ends after the 60 s, unless it is renewed'
    if (found := _FOREIGN.fullmatch(text)) and Fraction(found["quota"]):
        times = {"": 1, "k": 1_000, "m": 1_000_000}[found["times"].lower()]
        quota = Fraction(found["quota"]) * times
        count = int(found["count"] or 1) * quota.denominator
        burst = f", burst {found['burst']}" if found["burst"] else ""
        period = found["unit"] if count == 1 else f"{count} {found['unit']}"
        meant = f"{quota.numerator}/{period}{burst}"
        with suppress(InvalidLimit):
            _limit_syntax.parse(meant)
            return f'write "{meant}"'
    return None


def share(value: object) -> Fraction:
    """Parse the part of each limit that nodes allow while the store is away."""
    return _percentage(value, "a share from 1% to 100%, like 20%", Fraction(1, 100), Fraction(1))


def safe_share(value: object) -> Fraction:
    """Parse the part of reserved limits that regions spend without the home region."""
    return _percentage(value, "a share from 0.1% to 50%, like 2%", Fraction(1, 1000), Fraction(1, 2))


def _percentage(value: object, wanted: str, least: Fraction, most: Fraction) -> Fraction:
    """Parse a percentage, exactly as written."""
    if type(value) is not str:
        raise refusal(value, wanted)
    match = _PERCENT.fullmatch(value.strip())
    if match is None:
        raise InvalidInput(f"cannot read {show(value)}; write {wanted}")
    found = Fraction(match[1]) / 100
    if not least <= found <= most:
        raise InvalidInput(f"{value.strip()} is out of bounds; write {wanted}")
    return found


def _duration(
    value: object, wanted: str, least: timedelta = timedelta.min, most: timedelta = timedelta.max
) -> timedelta:
    if type(value) is not str or not value:
        raise refusal(value, wanted)
    found: timedelta | None = None
    if re.fullmatch(r"\s*[0-9]*\s*[A-Za-z]+\s*", value):
        with suppress(InvalidLimit):
            period = _limit_syntax.parse(f"1/{value}").period_for("token_bucket")
            found = period if isinstance(period, timedelta) else None
    if found is None:
        raise InvalidInput(f"cannot read {show(value)}; write {wanted}")
    if not least <= found <= most:
        raise InvalidInput(f"{value.strip()} is out of bounds; write {wanted}")
    return found


def _spelled(length: timedelta) -> str:
    spelled = _limit_syntax.spell(length)
    return (spelled if spelled[0].isdigit() else f"1 {spelled}").replace("millisecond", "ms").replace("mss", "ms")
