"""The schema of policies: one table from which the loader parses, and from which editors get a JSON Schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from headgate._limit_syntax import WEEK, Phrase, suggest
from headgate.abuse.model import COUNT_SIGNALS, SHARE_SIGNALS, ActionStep
from headgate.algorithms import ALGORITHMS
from headgate.algorithms.fair_share import MAX_WEIGHT
from headgate.calendars import Calendar
from headgate.errors import InvalidConfiguration, InvalidInput, InvalidLimit
from headgate.limits import REGION_MODES
from headgate.overload.gradient import ConcurrencySettings
from headgate.overload.load_shedder import PRIORITIES
from headgate.policy import scalars
from headgate.policy.formats.document import Unreadable
from headgate.policy.model import FairShares, OverloadSettings
from headgate.policy.quota_terms import QuotaTerms, no_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headgate.policy.formats.document import Path
    from headgate.policy.loader import PolicyProblems

__all__ = ["StructValue", "json_schema", "policy"]

JsonSchema: TypeAlias = dict[str, Any]

BROKEN: Final = object()


class FieldType(Protocol):
    def read(self, value: object, path: Path, problems: PolicyProblems) -> Any:
        """The parsed value, or BROKEN if a problem was added."""

    def schema(self) -> JsonSchema: ...


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar; `convert` parses it or raises InvalidInput."""

    convert: Callable[[Any], object]
    form: Mapping[str, object]

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        try:
            return self.convert(value)
        except InvalidInput as error:
            problems.add(path, _about(path, str(error)))
            return BROKEN

    def schema(self) -> JsonSchema:
        return dict(self.form)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A tuple of values of one type, without broken ones; with `or_one`, also from one value, but not empty."""

    inner: FieldType
    example: str
    or_one: bool = False

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is not list:
            if not self.or_one:
                return _mismatch(value, path, problems, f"a list, like {self.example}")
            one = self.inner.read(value, path, problems)
            return one if one is BROKEN else (one,)
        if self.or_one and not value:
            problems.add(path, _about(path, f"the list is empty; write one like {self.example}, or leave it out"))
            return BROKEN
        read, made = self.inner.read, []
        for index, each in enumerate(value):
            if problems.full:
                break
            if (one := read(each, (*path, index), problems)) is not BROKEN:
                made.append(one)
        return tuple(made)

    def schema(self) -> JsonSchema:
        inner = self.inner.schema()
        several = {"type": "array", "items": inner}
        return {"anyOf": [inner, several | {"minItems": 1}]} if self.or_one else several


@dataclass(frozen=True, slots=True)
class LazyList(ListOf):
    """A list of structs that is parsed lazily, as there may be a hundred thousand."""

    inner: Struct

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is not list:
            return ListOf.read(self, value, path, problems)
        return self._entries(value, path, problems)

    def _entries(self, value: list[object], path: Path, problems: PolicyProblems) -> Iterator[StructValue]:
        record = self.inner
        converters = record.converters()
        for index, each in enumerate(value):
            if problems.full:
                break
            where = (*path, index)
            if type(each) is dict:
                # Fast path for valid entries; the others are parsed again to report their problems.
                try:
                    fields = {key: converters[key](content) for key, content in each.items()}
                except (KeyError, InvalidInput):
                    pass
                else:
                    yield StructValue(record, fields, where, each, False, problems)
                    continue
            entry = record.read(each, where, problems)
            if entry is not BROKEN and not entry.broken:
                yield entry


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping from names to values of one type."""

    name: Scalar
    inner: FieldType
    example: str
    is_secret: bool = False
    """True if messages must not show a text in its place."""

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        if type(value) is not dict:
            shown = not (self.is_secret and isinstance(value, str))
            return _mismatch(value, path, problems, f"a mapping, like {self.example}", shown=shown)
        made = {}
        for key, each in value.items():
            if problems.full:
                break
            inner = (*path, key)
            try:
                name = self.name.convert(key)
            except InvalidInput as error:
                problems.add(inner, str(error), at_key=True)
                continue
            read = self.inner.read(each, inner, problems)
            if read is not BROKEN:
                made[name] = read
        return made

    def schema(self) -> JsonSchema:
        return {"type": "object", "propertyNames": self.name.schema(), "additionalProperties": self.inner.schema()}


@dataclass(frozen=True, slots=True)
class OneOf:
    """A union, distinguished by the Python type of the value."""

    kinds: Mapping[type, FieldType]
    wanted: str

    def read(self, value: object, path: Path, problems: PolicyProblems) -> object:
        kind = self.kinds.get(type(value))
        return _mismatch(value, path, problems, self.wanted) if kind is None else kind.read(value, path, problems)

    def schema(self) -> JsonSchema:
        kinds = {id(kind): kind for kind in self.kinds.values()}
        return {"anyOf": [kind.schema() for kind in kinds.values()]}


@dataclass(slots=True, eq=False)
class StructValue:
    """A parsed mapping: its valid fields by their canonical names."""

    record: Struct
    fields: dict[str, Any]
    path: Path
    written: Mapping[str, object]
    broken: bool
    problems: PolicyProblems

    @property
    def unread(self) -> set[str]:
        """The fields that were given but are broken."""
        known = self.record.fields
        return {known[word].means or word for word in self.written if word in known} - self.fields.keys()

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def report(self, name: str, before: str, *, other: Path | None = None, after: str = "") -> None:
        """Add a problem at a field, or at the mapping if the field was not given."""
        self.problems.add(self.at(name), before, other=other, after=after)

    def at(self, name: str) -> Path:
        """The path of a field under the name that was used; that of the mapping if it was not given."""
        given = (key for key in self.written if key in self.record.names(name))
        return next(((*self.path, key) for key in given), self.path)


@dataclass(frozen=True, slots=True)
class Field:
    kind: FieldType
    about: str
    means: str | None = None
    """The canonical name, if this is an alias."""


@dataclass(frozen=True, slots=True)
class Struct:
    """A mapping with a fixed set of fields."""

    what: str
    fields: Mapping[str, Field]
    finish: Callable[[StructValue, PolicyProblems], Any] | None = field(default=None)
    """Converts a valid mapping."""
    others: FieldType | None = None
    """The JSON Schema of fields whose names are defined elsewhere in the policy."""
    example: str | None = None
    remedies: Mapping[str, str] = field(default_factory=dict)
    """The remedies for field names of other limiters."""

    def read(self, value: object, path: Path, problems: PolicyProblems) -> Any:
        if type(value) is not dict:
            form = self.example or f"with fields like {', '.join(list(self.fields)[:3])}"
            wanted = f"{self.what}: a mapping {form}"
            # Not shown, as it could be an API key.
            return _mismatch(value, path, problems, wanted, shown=not isinstance(value, str))
        before = len(problems)
        found: dict[str, Any] = {}
        fields = self.fields
        for key, each in value.items():
            known = fields.get(key)
            if known is None:
                if problems.full:
                    break
                remedy = self.remedies.get(key) or suggest(key[:100], list(fields))
                problems.add((*path, key), f"unknown field {scalars.show(key)}; {remedy}", at_key=True)
                continue
            read = known.kind.read(each, (*path, key), problems)
            if read is BROKEN:
                continue
            name = known.means or key
            if name in found:
                twin = next(each for each in value if each != key and each in self.names(name))
                problems.add((*path, key), f"{key} means the same as {twin}; keep one", at_key=True)
            found[name] = read
        entry = StructValue(self, found, path, value, len(problems) > before, problems)
        if self.finish is None:
            return entry
        return BROKEN if entry.broken else self.finish(entry, problems)

    def converters(self) -> dict[str, Callable[[Any], object]]:
        """The parsers of scalar fields by canonical name."""
        leaves = {
            name: each.kind.kinds.get(str) if isinstance(each.kind, OneOf) else each.kind
            for name, each in self.fields.items()
            if each.means is None
        }
        return {name: leaf.convert for name, leaf in leaves.items() if isinstance(leaf, Scalar)}

    def names(self, name: str) -> set[str]:
        """The canonical name of a field and its aliases."""
        return {word for word, each in self.fields.items() if name == (each.means or word)}

    def schema(self) -> JsonSchema:
        properties = {name: {"description": each.about, **each.kind.schema()} for name, each in self.fields.items()}
        others = False if self.others is None else self.others.schema()
        return {"type": "object", "properties": properties, "additionalProperties": others}


def _mismatch(value: object, path: Path, problems: PolicyProblems, wanted: str, *, shown: bool = True) -> object:
    message = str(scalars.refusal(value, wanted)) if shown else f"a text is not allowed here; write {wanted}"
    problems.add(path, _about(path, message))
    return BROKEN


def _about(path: Path, text: str) -> str:
    """The message, prefixed with the name of the field."""
    name = next((step for step in reversed(path) if isinstance(step, str)), None)
    return text if name is None or text.startswith(f"{name} ") else f"{name}: {text}"


def _text(convert: Callable[[Any], object], *examples: str, **form: object) -> Scalar:
    shown = {"examples": list(examples)} if examples else {}
    return Scalar(convert, {"type": "string", "minLength": 1, **form, **shown})


def _choice(*known: str) -> Scalar:
    return Scalar(scalars.choice(*known), {"enum": list(known)})


def _whole(least: int, most: int | None = None, *, example: int) -> Scalar:
    form = {"type": "integer", "minimum": least, "examples": [example]} | ({} if most is None else {"maximum": most})
    return Scalar(scalars.whole(least, most, example=example), form)


NAME: Final = _text(scalars.name, maxLength=100, pattern=r"^[ !#-\[\]-~]+$")
LABEL: Final = _text(scalars.label, maxLength=500)
FLAG: Final = Scalar(scalars.flag, {"type": "boolean"})
DURATION: Final = _text(scalars.duration, "500 ms", "5 seconds", "2 minutes")
PERIOD: Final = _text(scalars.period, "5 minutes", "day", "month")
FIRST_DAY: Final = Scalar(scalars.first_day, {"type": ["integer", "string"], "examples": [15, "04-01"]})
CLIENT_STARTS: Final = Scalar(scalars.client_starts, FIRST_DAY.form)
TIME_ZONE: Final = _text(scalars.time_zone, "Europe/Berlin", "UTC")
INSTANT: Final = Scalar(
    scalars.instant, {"type": "string", "format": "date-time", "examples": ["2026-05-28T02:01:00Z"]}
)
METHODS: Final = ListOf(_text(scalars.method, "GET", pattern="^[A-Z]{1,20}$"), "[GET, POST]", or_one=True)
ROUTE: Final = _text(scalars.route, "/users/{id}", "/static/*", "GET /search", "*")
IDENTITY: Final = Scalar(scalars.identity, {"type": ["string", "integer"]})
ADDRESS: Final = _text(scalars.address, "203.0.113.9", "203.0.113.0/24", "2001:db8::/48")
COST: Final = _whole(0, example=5)
ALGORITHM: Final = _choice(*ALGORITHMS)
ON_FAILURE: Final = _choice("open", "closed", "local")
RATE: Final = Scalar(scalars.rate, {"type": "number", "exclusiveMinimum": 0, "examples": [16.67]})


_AMOUNT: Final = _whole(0, 10**15, example=200)


def _spelled_out(numbers: StructValue, problems: PolicyProblems) -> Any:
    given, get = numbers.fields.keys() - {"algorithm"}, numbers.get
    is_partial = bool(given) and not {"quota", "period"} <= given
    if not given & {"bucket_size", "refill_rate", "burst"} and (is_partial or given & {"rollover", "pay_as_you_go"}):
        return _quota_terms(numbers)
    if given == {"bucket_size", "refill_rate"}:
        rate = get("refill_rate")
        return Phrase(rate.numerator, timedelta(seconds=rate.denominator), get("bucket_size"), get("algorithm"))
    if {"quota", "period"} <= given <= {"quota", "period", "burst", "starts", "timezone"}:
        try:
            return Phrase(get("quota"), _period(numbers), get("burst"), get("algorithm"))
        except InvalidLimit as error:
            problems.add(numbers.path, str(error))
            return BROKEN
    problems.add(numbers.path, no_rate(given))
    return BROKEN


def _quota_terms(numbers: StructValue) -> Any:
    period, get = numbers.get("period"), numbers.get
    if isinstance(period, timedelta):
        numbers.report("period", "the period of a quota is a calendar day, week, month or year")
        return BROKEN
    if "algorithm" in numbers.fields:
        numbers.report("algorithm", "a quota has no algorithm, as the ledger counts it; leave it out")
        return BROKEN
    return QuotaTerms(get("quota"), period, get("starts"), get("timezone"), get("rollover"), get("pay_as_you_go"))


def _period(numbers: StructValue) -> timedelta | Calendar:
    period, starts, timezone = numbers.get("period"), numbers.get("starts"), numbers.get("timezone")
    is_calendar = starts is not None or timezone is not None
    if isinstance(period, timedelta):
        if is_calendar:
            problem = f"{'starts' if starts is not None else 'timezone'} applies to a calendar period only"
            raise InvalidLimit(f"{problem}; write per: day, week, month or year, or leave it out")
        return period
    if period == "day" and not is_calendar:
        return timedelta(days=1)
    if period == "week" and not is_calendar:
        return WEEK
    return Calendar(period, starts=starts, timezone=timezone or "UTC")


NUMBERS: Final = OneOf(
    {
        str: _text(scalars.numbers, "10/minute", "1000/minute, burst 200", "5/30 s, sliding_window", "1000/month"),
        dict: Struct(
            "numbers",
            {
                "algorithm": Field(ALGORITHM, "The algorithm."),
                "bucket_size": Field(_whole(1, example=200), "The size of the bucket: requests that pass at once."),
                "refill_rate": Field(RATE, "Tokens added per second; decimal numbers are exact."),
                "quota": Field(_whole(1, example=1000), "Requests per period."),
                "period": Field(PERIOD, "In what time: a duration, or a calendar day, week, month or year."),
                "per": Field(PERIOD, "The same as period.", "period"),
                "starts": Field(FIRST_DAY, "The first day of a calendar week (1 to 7), month or year (04-01)."),
                "timezone": Field(TIME_ZONE, "The time zone of a calendar period; UTC by default."),
                "burst": Field(_whole(1, example=200), "Requests that pass at once; the quota by default."),
                "allowance": Field(_whole(1, example=1000), "The same as quota.", "quota"),
                "rollover": Field(_AMOUNT, "Of a quota: the units left at the end of a period that stay for the next."),
                "pay_as_you_go": Field(_AMOUNT, "Of a quota: the units after the allowance and all grants, to bill."),
            },
            _spelled_out,
        ),
    },
    'a limit like "10/minute", or a mapping with bucket_size and refill_rate',
)
BY_NAME: Final = MapOf(NAME, NUMBERS, '{search: "1000/minute"}')
BY_TIER: Final = MapOf(NAME, NUMBERS, '{pro: "1000/minute"}')

_GROWTH: Final = Struct(
    "a raise",
    {
        "factor": Field(_whole(2, 10, example=3), "The most that a limit is raised to, as a multiple of the tier's."),
        "for": Field(
            _text(scalars.duration_between(timedelta(minutes=10), timedelta(days=30), example="24 hours"), "24 hours"),
            "How long a raise lasts.",
        ),
    },
    example="like {factor: 3, for: 24 hours}",
)
TIER: Final = Struct(
    "a tier",
    {
        "limits": Field(BY_NAME, "The numbers of this tier, by the names of limits or of route classes."),
        "raise": Field(_GROWTH, "Raises the limits of its clients for a time when people use them much more."),
    },
)


def _adaptive(settings: StructValue, problems: PolicyProblems) -> Any:
    given = dict(settings.fields)
    others = {name: given.pop(name) for name in ("retry_after", "fair") if name in given}
    try:
        return OverloadSettings(ConcurrencySettings(**given), **others)
    except InvalidConfiguration as error:
        problems.add(settings.path, str(error))
        return BROKEN


_MAX_IN_FLIGHT: Final = 1_000_000
_IN_FLIGHT: Final = _whole(1, _MAX_IN_FLIGHT, example=100)
_FIXED: Final = Scalar(
    lambda value: OverloadSettings(ConcurrencySettings(*[scalars.whole(1, _MAX_IN_FLIGHT, example=100)(value)] * 3)),
    {"type": "integer", "minimum": 1, "maximum": _MAX_IN_FLIGHT},
)
_TOLERANCE: Final = Scalar(scalars.tolerance, {"type": "number", "minimum": 1, "maximum": 10, "examples": [1.5]})
_OVERLOAD_FIELDS: Final = Struct(
    "overload settings",
    {
        "minimum": Field(_IN_FLIGHT, "The lowest limit; 4 by default."),
        "maximum": Field(_IN_FLIGHT, "The highest limit; 1000 by default."),
        "initial": Field(_IN_FLIGHT, "The limit when the process starts; 20 by default."),
        "tolerance": Field(
            _TOLERANCE, "The latency that is accepted, as a multiple of that without a queue; 1.25 by default."
        ),
        "retry_after": Field(DURATION, "The Retry-After of requests that were shed; 1 second by default."),
        "fair": Field(FLAG, "A client with more than its share leaves room to the others; true by default."),
    },
    _adaptive,
    example='like {minimum: 8, retry_after: "2 seconds"}',
    remedies=dict.fromkeys(("limit", "max", "max_concurrency"), "for a fixed limit, write a number: overload: 100"),
)


def _overload(*words: str) -> OneOf:
    """A concurrency limit: the word adaptive, a number for a fixed limit, or settings."""
    named = {"adaptive": OverloadSettings(), "none": "none"}
    choose = scalars.choice(*words)
    word = Scalar(lambda value: named[choose(value)], {"enum": [*words]})
    return OneOf({str: word, int: _FIXED, dict: _OVERLOAD_FIELDS}, f"{' or '.join(words)}, a number, or settings")


ROUTES: Final = ListOf(
    Struct(
        "a route",
        {
            "path": Field(ROUTE, "Which paths it is: a template like /users/{id} or /static/*, or * for all."),
            "endpoint": Field(ROUTE, "The same as path.", "path"),
            "route": Field(ROUTE, "The same as path.", "path"),
            "methods": Field(METHODS, "Which methods; all, if not given."),
            "method": Field(METHODS, "The same as methods.", "methods"),
            "class": Field(NAME, "The class that it belongs to; limits and overrides may name it."),
            "cost": Field(COST, "The cost of a request, unless a limit sets its own; 0 exempts the route."),
            "on_failure": Field(ON_FAILURE, "The failure mode while the store is unavailable."),
            "priority": Field(_choice(*PRIORITIES), "During overload, background is shed first; normal by default."),
            "overload": Field(
                _overload("adaptive", "none"),
                "A limit on the requests in progress of this route, or of its class, instead of the policy's; or none.",
            ),
        },
    ),
    "[{path: /search, class: search, cost: 5}]",
)

_LIST_NAME: Final = _text(scalars.list_name, "firehol", pattern="^[A-Za-z][A-Za-z0-9_-]{0,49}$")
_ONLY_LEASE: Final = scalars.choice("lease")
ON_LEDGER_FAILURE: Final = OneOf(
    {
        str: Scalar(lambda value: len(_ONLY_LEASE(value)) * 0, {"enum": ["lease"]}),
        dict: Struct(
            "settings",
            {"continue_up_to": Field(_AMOUNT, "Units of an account that each process admits without a lease.")},
            lambda settings, problems: settings.get("continue_up_to", 0),
        ),
    },
    "lease, or {continue_up_to: 50}",
)

_PATHS: Final = ListOf(ROUTE, "[/login, /signup]", or_one=True)
_CLASSES: Final = ListOf(NAME, "[search, export]", or_one=True)
_BY: Final = Scalar(
    scalars.by, {"type": ["string", "array"], "items": {"type": "string"}, "examples": ["ip", "tenant+user"]}
)
_UNIT: Final = _choice("requests", "content-bytes", "concurrent-requests", "tokens")
_ELSEWHERE: Final = {
    word: remedy
    for words, remedy in {
        "rate max requests period per window windowMs interval burst capacity": (
            'write the numbers together, like bucket: "1000/minute, burst 200"'
        ),
        "key keys key_func key_by identifier identity scope": "did you mean 'by'?",
        "paths url uri urls match prefix": "did you mean 'path'?",
        "dry_run log_only report_only": "did you mean 'shadow'?",
        "fail fail_open failure_mode": "did you mean 'on_failure'?",
    }.items()
    for word in words.split()
}
"""Remedies for field names of other limiters."""

_WEIGHT: Final = _whole(1, MAX_WEIGHT, example=3)
_FAIR: Final = scalars.choice("fair")
_SHARE_BETWEEN: Final = OneOf(
    {
        str: Scalar(lambda value: FairShares() if _FAIR(value) else None, {"enum": ["fair"]}),
        dict: Struct(
            "fair shares",
            {
                "between": Field(
                    _choice("tenant", "user", "api_key", "ip", "client"),
                    "The clients that share it; tenants by default.",
                ),
                "weights": Field(
                    MapOf(NAME, _WEIGHT, "{pro: 4, free: 1}"), "The weights of tiers; that of others is 1."
                ),
            },
            lambda settings, problems: FairShares(**settings.fields),
        ),
    },
    "fair, or settings like {between: tenant, weights: {pro: 4, free: 1}}",
)

LIMIT: Final = Struct(
    "a limit",
    {
        "name": Field(NAME, "Its name in headers, reasons, overrides and stored keys."),
        "path": Field(
            _PATHS, "The routes that meet it: one template, or a list. All, if neither path nor class is given."
        ),
        "endpoint": Field(_PATHS, "The same as path.", "path"),
        "route": Field(_PATHS, "The same as path.", "path"),
        "class": Field(_CLASSES, "The classes of routes that meet it."),
        "classes": Field(_CLASSES, "The same as class.", "class"),
        "methods": Field(METHODS, "The methods that meet it; all, if not given."),
        "method": Field(METHODS, "The same as methods.", "methods"),
        "by": Field(
            _BY,
            f"The identity to count by: {', '.join(scalars.IDENTITIES)}, global, or the app's own; client by default.",
        ),
        "bucket": Field(NUMBERS, "Quota, period and burst."),
        "limit": Field(NUMBERS, "The same as bucket.", "bucket"),
        "quota": Field(NUMBERS, "In place of a bucket: an allowance per calendar period, charged to the ledger."),
        "on_ledger_failure": Field(
            ON_LEDGER_FAILURE,
            "Of a quota, while the ledger is unavailable: spend the lease, or continue up to a bound.",
        ),
        "algorithm": Field(ALGORITHM, "The algorithm, unless the numbers name one."),
        "tiers": Field(BY_TIER, "Other numbers for the clients of a tier."),
        "cost": Field(COST, "The cost of a request on this limit; the route's cost by default."),
        "reserve": Field(_whole(1, example=500), "An estimate of the cost, which the app corrects afterwards."),
        "count_when": Field(
            _text(scalars.status_test, "status in [401, 403]", "status >= 500"),
            "Counts only requests that the app answers so.",
        ),
        "shadow": Field(FLAG, "Evaluated and reported, but never rejects."),
        "on_failure": Field(ON_FAILURE, "The failure mode while the store is unavailable."),
        "missing": Field(
            _choice("skip", "ip"), "For requests without the identity: leave the limit out, or count by ip."
        ),
        "unit": Field(_UNIT, "The unit that headers report."),
        "lease": Field(_choice("auto", "always", "never"), "Prepaid tokens: when it is busy (auto), always or never."),
        "split": Field(
            _whole(1, 1_000, example=4), "Over how many counters it is spread; its numbers must be multiples of it."
        ),
        "region": Field(_choice(*REGION_MODES), "How the regions share it; each counts its own requests by default."),
        "count": Field(
            _choice("requests", "messages", "bytes"),
            "What it counts: requests by default, or what their connections carry.",
        ),
        "direction": Field(
            _choice("received", "sent", "both"), "Of messages and bytes, those from the client, those to it, or both."
        ),
        "on_excess": Field(
            _choice("wait", "drop", "close"), "What happens to a message over the limit; it waits, if not given."
        ),
        "share": Field(_SHARE_BETWEEN, "Of a limit by global: how clients share it; fair, for fair shares of tenants."),
        "lists": Field(
            ListOf(_LIST_NAME, "[firehol]", or_one=True),
            "Only for addresses in one of these lists; for all, if not given.",
        ),
    },
    example="like {by: ip, bucket: 10/minute}",
    remedies=_ELSEWHERE,
)

LIMITS: Final = OneOf(
    {list: ListOf(LIMIT, "[{by: ip, bucket: 10/minute}]"), dict: BY_NAME},
    "a list of limits, like [{by: ip, bucket: 10/minute}]",
)

# In the settings, fields are renamed as the attributes of the model that they set.
_SUBNET_SETTINGS: Final = Struct(
    "settings",
    {
        "ipv4": Field(_whole(8, 32, example=24), "Bits of an IPv4 address that identify one subnet.", "subnet_ipv4"),
        "ipv6": Field(_whole(16, 128, example=48), "Bits of an IPv6 address that identify one subnet.", "subnet_ipv6"),
    },
)
_UNKNOWN_FACTOR: Final = Scalar(
    scalars.factor_or_off(1_000, example=10),
    {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1_000}, {"enum": ["off", False]}]},
)
_KEY_SETTINGS: Final = Struct(
    "settings",
    {
        "header": Field(
            Scalar(scalars.header, {"type": ["string", "null"]}),
            "The header that holds the key; none for no header.",
            "api_key_header",
        ),
        "bearer": Field(FLAG, "Treat a bearer token as a key, too.", "bearer_token"),
        "known_only": Field(FLAG, "Ignore keys that neither clients nor overrides name.", "known_keys_only"),
        "unknown_factor": Field(
            _UNKNOWN_FACTOR,
            "Requests with unknown keys are also counted by address, at this multiple of each limit by API key, unless "
            "a limit by ip, subnet or global applies to them; 10, if not given, or off.",
            "unknown_key_factor",
        ),
    },
)
SETTINGS: Final = Struct(
    "settings",
    {
        "proxies": Field(
            ListOf(_text(scalars.proxy, "10.0.0.0/8"), "[10.0.0.0/8]"),
            "The networks of your own proxies, whose word on a client's address is taken.",
        ),
        "forwarded_by": Field(_choice("x-forwarded-for", "forwarded"), "The header in which they give it."),
        "ipv6_prefix": Field(_whole(32, 128, example=64), "Bits of an IPv6 address that identify one client."),
        "subnet": Field(_SUBNET_SETTINGS, "The subnets of `by: subnet`."),
        "api_key": Field(_KEY_SETTINGS, "The header fields and query parameters that contain API keys."),
    },
)

_URL: Final = Scalar(scalars.url, {"type": "string", "format": "uri", "pattern": "^https?://"})
ANSWERS: Final = Struct(
    "settings",
    {
        "headers": Field(
            ListOf(_choice("x-ratelimit", "ratelimit"), "[x-ratelimit, ratelimit]"), "Which are sent; [] for none."
        ),
        "jitter": Field(DURATION, "Retry-After is spread over so much more, against herds."),
        "doc_url": Field(_URL, "Where limits are explained."),
        "draft": Field(
            Scalar(scalars.draft, {"enum": [6, 11]}),
            "The version of the IETF draft that RateLimit fields follow: 11, if not given, or 6 for separate fields.",
        ),
    },
)

_SHORTEST: Final = timedelta(milliseconds=1)
_BUDGET: Final = _text(scalars.duration_between(_SHORTEST, timedelta(seconds=60), example="5 ms"), "5 ms")
_SHARE: Final = _text(scalars.share, "20%", pattern=r"^ *[0-9]{1,3}(\.[0-9]{1,3})? ?% *$")
_LEASE: Final = Scalar(
    scalars.duration_between(_SHORTEST, timedelta(seconds=1), example="100 ms", or_off=True),
    {"anyOf": [_text(str, "100 ms").schema(), {"enum": [0, False]}]},
)
STORE: Final = Struct(
    "settings",
    {
        "budget": Field(_BUDGET, "The time that the store may take; 5 ms by default."),
        "share": Field(
            _SHARE, "Of each limit, how much all nodes together allow on routes that fail local; 20%, if not given."
        ),
        "nodes": Field(
            _whole(1, 100_000, example=4),
            "The number of nodes assumed until heartbeats have counted them; 1 by default.",
        ),
        "remember": Field(
            _whole(0, 10_000_000, example=10_000), "The size of each process's denial cache; 0 turns it off."
        ),
        "lease": Field(
            _LEASE, "For how long tokens are good that are prepaid for busy clients; 100 ms, if not given, 0 for none."
        ),
    },
)

_REGION: Final = _text(scalars.region, "eu", maxLength=50)
_OWN: Final = _text(scalars.own_region, "eu", "${REGION}", maxLength=100)
_STORE_URL: Final = _text(scalars.store_url, "redis://:${EU_PASSWORD}@eu.example:6379/0", maxLength=2000)
_STORES: Final = MapOf(_REGION, _STORE_URL, "{eu: redis://eu.example, us: redis://us.example}", is_secret=True)
_CENTRAL_BUDGET: Final = _text(scalars.duration_between(_SHORTEST, timedelta(seconds=60), example="500 ms"), "500 ms")
_SAFE_SHARE: Final = _text(scalars.safe_share, "2%", pattern=r"^ *[0-9]{1,3}(\.[0-9]{1,3})? ?% *$")
_KINDS: Final = ListOf(_text(scalars.kind, "ip", "user"), "[ip, user]", or_one=True)
REGIONS: Final = Struct(
    "settings",
    {
        "own": Field(
            _OWN, "The region of this process, or ${NAME} for an environment variable; HEADGATE_REGION by default."
        ),
        "region": Field(_OWN, "The same as own.", "own"),
        "home": Field(_REGION, "The region that decides central limits and lends the tokens of reserved ones."),
        "stores": Field(
            _STORES, "The store of each region. ${NAME} stands for an environment variable, such as a password."
        ),
        "regions": Field(_STORES, "The same as stores.", "stores"),
        "central_budget": Field(
            _CENTRAL_BUDGET, "The time that the home region may take to decide a central limit; 500 ms by default."
        ),
        "safe_share": Field(
            _SAFE_SHARE, "The part of reserved limits that regions spend without the home region; 2% by default."
        ),
        "identities": Field(
            _choice("hashed", "plain"), "The form in which identities leave a region; hashed by default."
        ),
        "stay": Field(_KINDS, "The kinds of identity that do not leave a region in any form."),
    },
)

_LIST_SOURCE: Final = _text(
    scalars.list_source, "https://iplists.firehol.org/files/firehol_level1.netset", "/etc/headgate/bad.txt"
)
_REFRESH: Final = _text(
    scalars.duration_between(timedelta(seconds=1), timedelta(days=30), example="1 hour"), "1 hour", "10 minutes"
)
LISTS: Final = MapOf(
    _LIST_NAME,
    OneOf(
        {
            str: _LIST_SOURCE,
            dict: Struct(
                "a list",
                {
                    "source": Field(_LIST_SOURCE, "The URL or the path of a file."),
                    "url": Field(_LIST_SOURCE, "The same as source.", "source"),
                    "file": Field(_LIST_SOURCE, "The same as source.", "source"),
                    "format": Field(
                        _choice("plain", "csv", "json", "crowdsec"),
                        "Its format: plain, if not given: one network per line, as .netset of FireHOL.",
                    ),
                    "column": Field(
                        Scalar(scalars.column, {"type": ["string", "integer"], "examples": ["network", 1]}),
                        "The column of CSV: its name in the first line, or its number; 1, if not given.",
                    ),
                    "key": Field(
                        _text(scalars.label, "cidr"), "The field of JSON objects; for an array of texts, leave it out."
                    ),
                    "refresh": Field(
                        _REFRESH,
                        "How often it is checked for a newer version; 1 hour for a URL, 10 seconds for a file.",
                    ),
                    "max_size": Field(
                        _text(scalars.size, "64 MB", pattern="^ *[0-9]+ *[kMG]B *$"),
                        "The most that is read, also after decompression; 64 MB by default.",
                    ),
                    "max_networks": Field(
                        _whole(1, 20_000_000, example=2_000_000),
                        "The most networks that it may have; 2,000,000 by default.",
                    ),
                    "headers": Field(
                        MapOf(
                            _text(scalars.header_name, "X-Api-Key"),
                            _text(scalars.list_header, "${CROWDSEC_KEY}"),
                            '{X-Api-Key: "${CROWDSEC_KEY}"}',
                            is_secret=True,
                        ),
                        "Header fields of requests for it. ${NAME} stands for an environment variable.",
                    ),
                    "secret": Field(
                        _text(scalars.variable, "${LIST_SECRET}"),
                        "The key of its signature: SOURCE.hmac has the HMAC-SHA256 of the file in hexadecimal.",
                    ),
                    "except": Field(
                        ListOf(ADDRESS, "[192.0.2.0/24]", or_one=True), "Networks that never count as listed."
                    ),
                },
                example="like {source: https://lists.example/bad.netset, refresh: 1 hour}",
            ),
        },
        "a URL or a file, or a mapping with source:",
    ),
    "{firehol: https://iplists.firehol.org/files/firehol_level1.netset}",
)
LEDGER: Final = Struct(
    "settings",
    {
        "ledger": Field(
            _text(scalars.ledger_url, "sqlite:///quota.db", "postgresql://ledger:${PASSWORD}@db.example/ledger"),
            "The database of the ledger; that of the gate or its config store by default.",
            "url",
        ),
        "journal": Field(
            _text(scalars.label, "/var/lib/headgate/journal"),
            "The directory for charges that are not yet in the ledger; beside a SQLite file by default.",
        ),
        "budget": Field(_BUDGET, "The time that a request may wait for the ledger; 1 second by default."),
        "idempotency_header": Field(
            Scalar(scalars.header, {"type": ["string", "null"]}),
            "The header that identifies a request and its repetitions, Idempotency-Key by default; none for no header.",
        ),
    },
)

_API_KEY: Final = Scalar(scalars.api_key, {"type": ["string", "integer"]})
_BLOCKED_ADDRESS: Final = Scalar(scalars.address_or_hash, ADDRESS.form)
WHO: Final = {
    "ip": Field(ADDRESS, "An address, or a network."),
    "user": Field(IDENTITY, "A user."),
    "tenant": Field(IDENTITY, "A tenant."),
    "api_key": Field(_API_KEY, "A key as the client sends it, or hmac: and its fingerprint."),
}
VALIDITY: Final = {
    "valid_from": Field(INSTANT, "From when it holds."),
    "valid_until": Field(INSTANT, "Until when it holds."),
    "reason": Field(LABEL, "Why; for those who read the policy, and the decision log."),
}

_MOST_SECONDS: Final = timedelta(days=30)
_STEP_DURATION: Final = _text(
    scalars.duration_between(timedelta(seconds=1), _MOST_SECONDS, example="10 minutes"), "10 minutes", "1 hour"
)
_QUIET: Final = _text(scalars.duration_between(timedelta(), _MOST_SECONDS, example="1 hour"), "1 hour")


def _step(settings: StructValue, problems: PolicyProblems) -> Any:
    fields = dict(settings.fields)
    action = fields.get("action")
    if action is None or "duration" not in fields:
        missing = "an action without a duration; add one like for: 10 minutes"
        problems.add(
            settings.path, 'a step without an action; add one like action: "block"' if action is None else missing
        )
        return BROKEN
    for name, owner in (("factor", "tighten"), ("delay", "delay"), *[(each, "challenge") for each in _CHALLENGE]):
        if name in fields and action != owner:
            settings.report(name, f"{name} is for {owner}, and this step is {action}; leave it out")
            return BROKEN
    if (fields.get("mode") == "redirect") != ("url" in fields):
        settings.report("mode", "mode: redirect and url belong together; write both, or neither")
        return BROKEN
    return ActionStep(**fields)


_CHALLENGE: Final = ("mode", "url", "difficulty")
_STEP: Final = OneOf(
    {
        str: Scalar(
            scalars.action_step,
            {
                "type": "string",
                "examples": ["block for 1 hour", "challenge for 10 minutes", "delay 2 s for 10 minutes"],
            },
        ),
        dict: Struct(
            "a step",
            {
                "action": Field(_choice("tighten", "delay", "challenge", "block"), "What happens to the client."),
                "for": Field(_STEP_DURATION, "For how long; longer, if the client is found again.", "duration"),
                "duration": Field(_STEP_DURATION, "The same as for."),
                "factor": Field(_whole(2, 1000, example=4), "Of tighten: limits are divided by it; 4 by default."),
                "delay": Field(
                    _text(scalars.duration_between(_SHORTEST, timedelta(seconds=10), example="2 seconds"), "2 seconds"),
                    "Of delay: how much is added to each request; 2 seconds by default.",
                ),
                "mode": Field(
                    _choice("page", "redirect", "app"),
                    "Of challenge: a page with a proof of work (default), a redirect, or a header for the app.",
                ),
                "url": Field(_text(scalars.challenge_url, "/captcha"), "Of a challenge by redirect: where to."),
                "difficulty": Field(_whole(8, 24, example=17), "Of a challenge: the bits of its proof of work."),
            },
            _step,
            example="like {action: block, for: 1 hour}",
        ),
    },
    'an action and its duration, like "block for 1 hour"',
)
_THRESHOLDS: Final = Struct(
    "thresholds",
    {
        **{
            name: Field(_whole(1, 10_000_000, example=20), f"At least so many {name} per window.")
            for name in COUNT_SIGNALS
        },
        **{
            name: Field(
                _text(scalars.signal_share, "50%"),
                f"At least such a share of the requests is {name}: see docs/abuse.md.",
            )
            for name in SHARE_SIGNALS
        },
    },
    example="like {accounts: 20, refused: 50%}",
)
SCENARIO_FIELDS: Final = Struct(
    "a scenario",
    {
        "path": Field(_PATHS, "The routes that it looks at: one template, or a list; all by default."),
        "endpoint": Field(_PATHS, "The same as path.", "path"),
        "route": Field(_PATHS, "The same as path.", "path"),
        "class": Field(_CLASSES, "The classes of routes that it looks at."),
        "classes": Field(_CLASSES, "The same as class.", "class"),
        "methods": Field(METHODS, "The methods that it looks at; all by default."),
        "method": Field(METHODS, "The same as methods.", "methods"),
        "status": Field(
            _text(scalars.status_test, "status in [401, 403]"), "Counts only requests that are answered so."
        ),
        "by": Field(_text(scalars.scenario_group, "ip", "agent"), "Whose requests are taken together."),
        "group_by": Field(_text(scalars.scenario_group, "ip"), "The same as by.", "by"),
        "when": Field(_THRESHOLDS, "The thresholds, all of which must be reached within the window."),
        "each": Field(
            _THRESHOLDS,
            "Of the addresses in a group by agent, asn, endpoint or global: those that count, and are found.",
        ),
        "window": Field(
            _text(
                scalars.duration_between(timedelta(seconds=10), timedelta(hours=1), example="5 minutes"), "5 minutes"
            ),
            "The time in which signals are counted; 5 minutes by default.",
        ),
        "account": Field(
            _text(scalars.kind, "account"), "The kind of identity that accounts: counts; account by default."
        ),
        "steps": Field(
            ListOf(_STEP, '["challenge for 10 minutes", "block for 1 hour"]', or_one=True),
            "What happens to a client that is found, and to one that is found again.",
        ),
        "action": Field(ListOf(_STEP, '"block for 1 hour"', or_one=True), "The same as steps.", "steps"),
        "shadow": Field(FLAG, "Reported only: no step applies."),
        "decay": Field(_QUIET, "The quiet time after which a client loses a step; 1 hour by default."),
        "longest": Field(_STEP_DURATION, "To which the duration of repeated actions grows; 1 day by default."),
        "grace": Field(_QUIET, "The time without actions after an operator has undone one; 1 hour by default."),
    },
    example="like {by: ip, when: {accounts: 20}}",
    remedies={
        "signal": "write the signal and its threshold as when: {accounts: 20}",
        "threshold": "write the signal and its threshold as when: {accounts: 20}",
        "filter": "name routes with path: or class:, and methods with methods:",
        "duration": "for the time in which signals are counted, write window:",
    },
)
_SWITCH: Final = Scalar(scalars.switch, {"enum": ["on", "off", "shadow", True, False]})
_SWITCHES: Final[Mapping[type, FieldType]] = dict.fromkeys((str, bool, Unreadable), _SWITCH)
_SCENARIOS: Final = MapOf(
    NAME,
    OneOf({**_SWITCHES, dict: SCENARIO_FIELDS}, "on, off, shadow, or a mapping with the fields of a scenario"),
    "{credential-stuffing: on}",
)


def _abuse(who: Mapping[str, Field]) -> OneOf:
    settings = Struct(
        "settings",
        {
            "scenarios": Field(
                OneOf(
                    {**_SWITCHES, list: ListOf(NAME, "[credential-stuffing, scraping]"), dict: _SCENARIOS},
                    "on, shadow, a list of names, or a mapping by name",
                ),
                "The scenarios in force: all that are shipped, some of them by name, or your own.",
            ),
            "allow": Field(
                ListOf(Struct("a client", who, example="like {ip: 192.0.2.0/24}"), "[{ip: 192.0.2.0/24}]"),
                "Clients against whom no action is taken.",
            ),
            "networks": Field(
                _text(scalars.text, "/var/lib/GeoIP/GeoLite2-ASN.mmdb"),
                "A MaxMind DB file with the autonomous systems of addresses, for scenarios by asn.",
            ),
        },
        example="like {scenarios: {credential-stuffing: on}}",
    )
    return OneOf({**_SWITCHES, dict: settings}, "on, shadow, or settings")


def policy(kinds: Iterable[str] = ()) -> Struct:
    """The schema of a policy with these custom kinds of identity."""
    own = {kind: Field(IDENTITY, f"A {kind}, as the app supplies it.") for kind in kinds}
    client = {
        **WHO,
        **own,
        "tier": Field(NAME, "The tier that the client is in."),
        "label": Field(LABEL, "A name for people."),
        "timezone": Field(TIME_ZONE, "The time zone of the client's calendar periods; that of the limit by default."),
        "weight": Field(_WEIGHT, "The client's weight in limits with fair shares; that of its tier by default."),
        "starts": Field(CLIENT_STARTS, "The first day of the client's months (1 to 31) or years (04-01)."),
    }
    override = {
        **WHO,
        "subnet": Field(_text(scalars.subnet, "203.0.113.0/24"), "A subnet."),
        **own,
        "limit": Field(NAME, "The name of the limit whose numbers change."),
        "class": Field(NAME, "Only on routes of this class."),
        "bucket": Field(NUMBERS, "The other numbers."),
        "quota": Field(NUMBERS, "The same as bucket.", "bucket"),
        "algorithm": Field(ALGORITHM, "The algorithm; the limit's by default."),
        **VALIDITY,
    }
    block = {
        **WHO,
        "ip": Field(_BLOCKED_ADDRESS, "An address, a network, or hmac: and the keyed hash of an address."),
        **own,
        "list": Field(_LIST_NAME, "All addresses in a reputation list."),
        **VALIDITY,
    }

    def entries(what: str, fields: dict[str, Field], example: str) -> LazyList:
        return LazyList(Struct(what, fields, others=IDENTITY), example)

    overrides = entries("an override", override, "[{tenant: acme, limit: search, bucket: 10000/minute}]")
    return Struct(
        "a policy",
        {
            "name": Field(NAME, "The name of the policy."),
            "tier": Field(NAME, "The tier of everybody whom `clients` does not place."),
            "on_failure": Field(ON_FAILURE, "The failure mode of routes and limits that do not set one."),
            "identity": Field(SETTINGS, "Where identities come from."),
            "answers": Field(ANSWERS, "Headers and rejections."),
            "store": Field(STORE, "Budget, denial cache, prepaid tokens, and behaviour during outages."),
            "quotas": Field(LEDGER, "The ledger that quotas are charged to."),
            "regions": Field(REGIONS, "The stores of all regions, and the identities that may leave a region."),
            "abuse": Field(
                _abuse({**WHO, **own}),
                "Scenarios that detect attacks, with actions against those found: on, or settings.",
            ),
            "lists": Field(LISTS, "Reputation lists: networks from files and URLs, for blocked and limits."),
            "overload": Field(
                _overload("adaptive"), "A limit on the requests in progress in each process: adaptive, or a number."
            ),
            "routes": Field(ROUTES, "Classes, costs and priorities of routes."),
            "limits": Field(
                LIMITS,
                "The limits: the requests that they apply to, the clients that are counted, and how many may pass.",
            ),
            "tiers": Field(
                MapOf(NAME, TIER, '{pro: {limits: {search: "1000/minute"}}}'),
                "Numbers by tier, written from the tier's side.",
            ),
            "clients": Field(
                entries("a client", client, "[{tenant: acme, tier: pro}]"), "Clients that are known by name."
            ),
            "overrides": Field(overrides, "Other numbers for one client, perhaps for a time."),
            "blocked": Field(
                entries("a block", block, "[{ip: 203.0.113.0/24, reason: scraping}]"), "Blocked clients and networks."
            ),
        },
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a policy, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Headgate policy",
        "description": "The limits that apply to a request.",
        **policy().schema(),
    }
