"""Log formats: parsers that turn one line of an access log into a logged request.

`detect` finds the parser for a log by its first lines. Parsers hash API keys at once, so that no key is kept.
"""

from __future__ import annotations

import csv
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate._limit_syntax import suggest
from headgate.clock import SECOND_US
from headgate.errors import InvalidInput
from headgate.policy.snapshot import AMBIGUOUS
from headgate.replay.times import SECONDS_US, CommonTimes, parse_duration, parse_time
from headgate.telemetry.decision_log.record import ENVOY_METHODS, LOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.policy.api_keys import ApiKeyHasher

__all__ = [
    "AGENT", "FORMATS", "NAMES", "WEIGHT", "CsvLines", "DecisionLines", "FieldMap", "LogFormat", "LoggedRequest",
    "ParserSettings", "Sender", "decision_request", "detect", "make_parser",
]  # fmt: skip

Sender: TypeAlias = tuple[str | None, str | None, tuple[tuple[str, str], ...]]
"""The sender of a request: address of the peer, forwarding header, and other identities by kind, with `WEIGHT`."""

LoggedRequest: TypeAlias = tuple[int, str, str, int, Sender, int | None]
"""Time in microseconds, method, raw target, status (0 if unknown), sender, and duration in microseconds, if logged.

A plain tuple of built-in types, as millions of them are sorted and written to temporary files."""

WEIGHT: Final = "headgate.weight"
"""In place of a kind: the number of requests that a record of a decision log represents, if it is not 1; 0 for those of
blocked clients, which no limit decided."""
AGENT: Final = "headgate.agent"
"""In place of a kind: the user agent."""
NO_SENDER: Final[Sender] = (None, None, ())
MAX_SENDERS: Final = 16_384
MAX_WEIGHT: Final = 1_000_000
BLOCKED: Final = "blocked"
MAX_DETECTED_LINES: Final = 50
REDACTED: Final = frozenset({"", "-", "redacted", "[redacted]", "***", "null"})
"""Values that stand for none, in lower case. Caddy writes REDACTED for credentials."""

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "time": (
        *("time", "timestamp", "ts", "@timestamp", "time_local", "time_iso8601", "msec", "start_time", "datetime"),
        *("date", "at", "at_us"),
    ),
    "request": ("request", "request_line", "http_request"),
    "method": ("method", "request_method", "http_method", "verb", "request.method", "http.request.method"),
    "path": (
        *("path", "uri", "request_uri", "url", "request_path", "target", "request.uri", "request.path", "endpoint"),
        *("url.original", "url.path"),
    ),
    "status": ("status", "status_code", "response_code", "code", "http.response.status_code"),
    "ip": (
        *("ip", "remote_addr", "remote_ip", "request.remote_ip", "client_ip", "peer", "address", "remote_host"),
        *("downstream_remote_address", "request.remote_addr", "clientip", "remote", "source.address", "client"),
    ),
    "forwarded": ("http_x_forwarded_for", "x_forwarded_for", "forwarded_for", "x-forwarded-for", "forwarded"),
    "duration": ("duration", "request_time", "duration_ms", "request_time_ms", "latency", "response_time"),
    "agent": ("agent", "user_agent", "http_user_agent", "useragent", "user_agent.original", "user-agent"),
    "user": ("user", "remote_user", "user_id", "username"),
    "tenant": ("tenant", "tenant_id"),
    "tier": ("tier",),
    "api_key": ("api_key", "apikey"),
}
"""The fields of JSON logs and CSV files in which each part of a request is looked for; dots lead into objects."""

MILLISECONDS: Final = frozenset({"duration_ms", "request_time_ms"})
NOT_IDENTITIES: Final = ("time", "request", "method", "path", "status", "ip", "forwarded", "duration", "agent")

_QUOTED: Final = r'"((?:[^"\\]|\\.)*)"'
_REQUEST: Final = r'"(\S+) (\S+)(?: HTTP/[\d.]+)?"'
_ANY_REQUEST: Final = r'"([^\s"\\]+) ((?:[^"\\]|\\.)*?)(?: HTTP/[\d.]+)?"'
_PEER: Final = r"(\S+) \S+ (\S+) "
_TIME: Final = r"\[([^\]]{17}):(\d\d) ([^\]]*)\] "
_TAIL: Final = rf' (\d{{3}}) \S+(?: "(?:[^"\\]|\\.)*" {_QUOTED}(?: {_QUOTED})?)?'
_ENVOY: Final = re.compile(rf'\[([^\]]+)\] {_ANY_REQUEST} (\d+) \S+ \d+ \d+ (\d+) \S+ {_QUOTED} "([^"]*)"')
_ISTIO: Final = re.compile(
    rf'\[([^\]]+)\] {_ANY_REQUEST} (\d+) \S+ \S+ \S+ "[^"]*" \d+ \d+ (\d+) \S+ {_QUOTED} '
    r'"([^"]*)" "[^"]*" "[^"]*" "[^"]*" \S+ \S+ \S+ (\S+)'
)
_ALB: Final = re.compile(
    rf"(?:http|https|h2|grpcs|ws|wss) (\S+) \S+ (\S+) \S+ (\S+) (\S+) (\S+) (\d+|-) \S+ \S+ \S+ {_ANY_REQUEST}"
    rf"(?: {_QUOTED})?"
)


class ParserSettings(NamedTuple):
    """Settings of parsers that depend on the policy and on the options of the command."""

    hasher: ApiKeyHasher
    reads_forwarded: bool = False
    """True if the policy trusts proxies, so that forwarding headers count."""
    forwarded_by: str = "x-forwarded-for"
    api_key_header: str | None = "x-api-key"
    bearer_token: bool = True
    kinds: frozenset[str] = frozenset()
    """The kinds of identity that matter, beside the address."""
    fields: Mapping[str, str] = {}
    """Names of fields by the part of a request, which take precedence over `NAMES`."""
    headers: Mapping[str, str] = {}
    """Headers by the kind of identity that they contain."""
    reads_agents: bool = False
    """True if the policy has scenarios, which may count user agents: they become identities of the sender."""


class LogFormat:
    """A parser of one log."""

    def __init__(self, settings: ParserSettings) -> None:
        self.settings = settings

    def parse(self, line: str) -> LoggedRequest | None:
        """The request of a line; None if the line is not of this format."""
        raise NotImplementedError

    def parse_block(self, text: str) -> tuple[list[LoggedRequest], int]:
        """The requests of several lines, and the number of lines that are not empty."""
        requests = [self.parse(line) for line in text.split("\n") if line and not line.isspace()]
        return [each for each in requests if each is not None], len(requests)


class CommonLines(LogFormat):
    """Common and combined log formats of nginx, Apache and Caddy, with or without a virtual host, and with the
    forwarding header that nginx's `main` format appends."""

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__(settings)
        self._has_user = "user" in settings.kinds
        self._reads_forwarded, self._reads_agents = settings.reads_forwarded, settings.reads_agents
        tail = _TAIL if settings.reads_forwarded or settings.reads_agents else r" (\d{3})"
        # The first two are fast; the third accepts escaped quotes and spaces in targets, and spaces in names of users.
        forms = (_PEER, _REQUEST), (r"\S+:\d+ " + _PEER, _REQUEST), (r"(?:\S+:\d+ )?(\S+) \S+ (.+?) ", _ANY_REQUEST)
        self._patterns = [re.compile(rf"^{peer}{_TIME}{request}{tail}.*$", re.MULTILINE) for peer, request in forms]
        self._block_pattern = self._patterns[0]
        self._times = CommonTimes()
        self._senders: dict[Any, Sender] = {}

    def parse(self, line: str) -> LoggedRequest | None:
        for pattern in self._patterns:
            if (found := pattern.match(line)) is not None:
                self._block_pattern = self._patterns[1] if pattern is self._patterns[1] else self._block_pattern
                try:
                    return self._requests([found.groups("")])[0]
                except ValueError:
                    return None
        return None

    def parse_block(self, text: str) -> tuple[list[LoggedRequest], int]:
        found = self._block_pattern.findall(text)
        if len(found) == text.count("\n") + 1:  # one for each line
            try:
                return self._requests(found), len(found)
            except ValueError:
                pass
        return super().parse_block(text)

    def _requests(self, found: Sequence[tuple[str, ...]]) -> list[LoggedRequest]:
        """The requests of matched lines, in one loop without calls for most of them."""
        requests: list[LoggedRequest] = []
        senders, starts_us, add = self._senders, self._times.minutes_us, requests.append
        for peer, user, minute, second, zone, method, target, status, *more in found:
            sent = (peer, user, *more) if more else (peer, user)
            sender = senders.get(sent) or self._make_sender(sent)
            start_us = starts_us.get((minute, zone))
            at_us = self._times.at(minute, second, zone) if start_us is None else start_us + SECONDS_US[second]
            add((at_us, method, target, int(status), sender, None))
        return requests

    def _make_sender(self, sent: tuple[str, ...]) -> Sender:
        peer, user, agent, forwarded = sent if len(sent) == 4 else (*sent, "", "")
        header = forwarded if self._reads_forwarded and forwarded not in ("-", "") else None
        identities: tuple[tuple[str, str], ...] = (
            (("user", user),) if self._has_user and user not in ("-", '""') else ()
        )
        if self._reads_agents:
            identities += _agent_identity(agent)
        if len(self._senders) >= MAX_SENDERS:
            self._senders.clear()
        sender = self._senders[sent] = peer, header, identities
        return sender


class EnvoyLines(LogFormat):
    """The default text format of Envoy, and that of Istio.

    The default format has no peer: it is the last hop of X-Forwarded-For, which Envoy has appended.
    """

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__(settings)
        self._times = CommonTimes()
        self._reads_agents = settings.reads_agents

    def parse(self, line: str) -> LoggedRequest | None:
        found = _ENVOY.match(line) or _ISTIO.match(line)
        if found is None:
            return None
        time, method, target, status, duration, forwarded, agent, *peers = found.groups()
        try:
            at_us = parse_time(time, self._times)
        except ValueError:
            return None
        before, _, last = forwarded.rpartition(",")
        more = _agent_identity(agent) if self._reads_agents else ()
        sender: Sender = (last.strip(), before or None, more)
        if peers and forwarded in ("-", ""):
            sender = _without_port(peers[0]), None, more
        elif forwarded in ("-", ""):
            sender = NO_SENDER
        return at_us, method, target, int(status), sender, int(duration) * 1000


class AlbLines(LogFormat):
    """Access logs of AWS Application Load Balancers."""

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__(settings)
        self._times = CommonTimes()
        self._reads_agents = settings.reads_agents

    def parse(self, line: str) -> LoggedRequest | None:
        found = _ALB.match(line)
        if found is None:
            return None
        time, client, *durations, status, method, target, agent = found.groups("")
        try:
            at_us = parse_time(time, self._times)
        except ValueError:
            return None
        parts = [parse_duration(each, SECOND_US) for each in durations]
        duration_us = None if None in parts else sum(filter(None, parts))
        more = _agent_identity(agent) if self._reads_agents else ()
        sender: Sender = (_without_port(client), None, more)
        return at_us, method, target, 0 if status == "-" else int(status), sender, duration_us


class FieldMap:
    """Extracts a request from a record with named fields."""

    def __init__(self, settings: ParserSettings) -> None:
        self._settings = settings
        self._times = CommonTimes()
        self._names: dict[str, tuple[str, ...]] = {}
        for part, names in NAMES.items():
            self._names[part] = (settings.fields[part],) if part in settings.fields else names
        kinds = settings.kinds | settings.fields.keys() | {"tier"}
        self._kinds = [each for each in sorted(kinds) if each not in (*NOT_IDENTITIES, "api_key", "subnet", "endpoint")]
        for kind in self._kinds:
            own = (settings.fields[kind],) if kind in settings.fields else (kind,)
            self._names.setdefault(kind, own)
        self._headers = {kind: _header_names(header) for kind, header in settings.headers.items()}
        self._senders: dict[Any, Sender] = {}

    def request(self, record: dict[str, Any]) -> LoggedRequest | None:
        """The request of a record; None if it has no time or path."""
        time, path, method = self.find(record, "time"), self.find(record, "path"), self.find(record, "method")
        if time is None:
            return None
        if path is None or method is None:
            line = self.find(record, "request")
            words = line.split() if isinstance(line, str) else []
            if len(words) >= 2:
                method, path = method or words[0], path or words[1]
        if not isinstance(path, str) or not path:
            return None
        try:
            at_us = parse_time(time, self._times)
        except ValueError:
            return None
        status = f"{self.find(record, 'status') or 0}"
        number = int(status) if status.isdecimal() else 0
        return at_us, f"{method or 'GET'}", path, number, self._sender(record), self._duration(record)

    def find(self, record: dict[str, Any], part: str) -> Any:
        """The first field of a part that is not empty."""
        for name in self._names[part]:
            value = record.get(name)
            if value is None and "." in name:
                value = _descend(record, name)
            if value is not None and value != "" and (not isinstance(value, dict) or part == "request"):
                return value
        return None

    def _duration(self, record: dict[str, Any]) -> int | None:
        for name in self._names["duration"]:
            if (value := record.get(name)) is not None:
                return parse_duration(value, 1000 if name in MILLISECONDS else SECOND_US)
        return None

    def _sender(self, record: dict[str, Any]) -> Sender:
        settings = self._settings
        peer, forwarded = _text(self.find(record, "ip")), None
        if settings.reads_forwarded:
            names = self._names["forwarded"]
            forwarded = _text(self.find(record, "forwarded")) or _find_header(record, _header_names(names[0]))
            forwarded = forwarded or _find_header(record, _header_names(settings.forwarded_by))
        identities = [(kind, text) for kind in self._kinds if (text := _text(self.find(record, kind))) is not None]
        for kind, names in self._headers.items():
            if kind != "api_key" and (text := _find_header(record, names)) is not None:
                identities.append((kind, text))
        if "api_key" in settings.kinds and (key := self._api_key(record)) is not None:
            identities.append(("api_key", key))
        if settings.reads_agents:
            agent = _text(self.find(record, "agent")) or _find_header(record, AGENT_FIELDS)
            identities += _agent_identity(agent or "")
        made: Sender = (peer and _without_port(peer), forwarded, tuple(identities))
        if len(self._senders) >= MAX_SENDERS:
            self._senders.clear()
        return self._senders.setdefault(made, made)

    def _api_key(self, record: dict[str, Any]) -> str | None:
        """The hash of the API key of a record; a value that is a hash already is returned as is."""
        settings, hasher = self._settings, self._settings.hasher
        sent = _text(self.find(record, "api_key"))
        header = settings.headers.get("api_key") or settings.api_key_header
        if sent is None and header is not None:
            sent = _find_header(record, _header_names(header))
        if sent is not None:
            if sent == AMBIGUOUS:
                return AMBIGUOUS
            return hasher.fingerprint(sent) if sent.startswith("hmac:") else hasher.hashed(sent)
        if settings.bearer_token:
            authorization = _find_header(record, _header_names("authorization"))
            return None if authorization is None else hasher.from_bearer(authorization)
        return None


class JsonLines(LogFormat):
    """JSON objects, one per line: of Caddy, or with fields whose names are configured in nginx, Apache or Envoy."""

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__(settings)
        self._fields = FieldMap(settings)
        self._decode = json.JSONDecoder(parse_float=str).decode

    def parse(self, line: str) -> LoggedRequest | None:
        try:
            record = self._decode(line)
        except (ValueError, RecursionError):
            return None
        return self._fields.request(record) if isinstance(record, dict) else None


class DecisionLines(LogFormat):
    """Headgate's decision log as JSON lines."""

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__(settings)
        self.sampled = 0
        """Records that represent more than one request."""
        self.lost = 0.0
        """Decisions that the log could not record."""

    def parse(self, line: str) -> LoggedRequest | None:
        try:
            found = json.loads(line)
            request = decision_request(found)
            self.lost += found["weight"] if found["outcome"] == LOST else 0
            self.sampled += request is not None and found["weight"] > 1
            return request
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


class CsvLines(LogFormat):
    """Comma-separated values with a header; without one if a field is given as the number of a column, from 1."""

    def __init__(self, settings: ParserSettings) -> None:
        super().__init__(settings)
        self._fields = FieldMap(settings)
        has_header = not any(name.isdecimal() for name in settings.fields.values())
        self._header: list[str] | None = None if has_header else []
        self._has_new_header = False

    def parse(self, line: str) -> LoggedRequest | None:
        try:
            row = next(csv.reader([line]))
        except (csv.Error, StopIteration):
            return None
        if self._header is None:
            self._header = [cell.strip().lstrip("\ufeff") for cell in row]
            self._has_new_header = True
            return None
        record: dict[str, Any] = dict(zip(self._header, row, strict=False))
        record |= {str(number): cell for number, cell in enumerate(row, start=1)}
        return self._fields.request(record)

    def take_header(self) -> bool:
        """True once after the header, which is not a request, was parsed."""
        had_header, self._has_new_header = self._has_new_header, False
        return had_header


FORMATS: Final[dict[str, Any]] = {
    "common": CommonLines,
    "decisions": DecisionLines,
    "json": JsonLines,
    "envoy": EnvoyLines,
    "alb": AlbLines,
    "csv": CsvLines,
}
"""Parsers by the names of the option --format."""


def make_parser(name: str, settings: ParserSettings) -> LogFormat:
    """The parser of a format by its name; "combined" is "common"."""
    kind = FORMATS.get("common" if name == "combined" else name)
    if kind is None:
        raise InvalidInput(f"unknown log format {name!r}; {suggest(name, [*FORMATS])}")
    parser: LogFormat = kind(settings)
    return parser


def detect(lines: Sequence[str], settings: ParserSettings, file: str) -> LogFormat:
    """The parser of the format that most of the first lines have; InvalidInput if none has any of them."""
    sample = [line for line in lines if line.strip()][:MAX_DETECTED_LINES]
    best, most = "", 0
    for name in FORMATS:
        parser = make_parser(name, settings)
        parsed = sum(parser.parse(line) is not None for line in sample)
        if parsed > most:
            best, most = name, parsed
    if not most and sample:
        shown = "".join([char if char.isprintable() else "?" for char in sample[0][:80]])
        known = "common, combined, JSON, Envoy, ALB, CSV and the decision log"
        raise InvalidInput(
            f"{file}: its format is not known, the first line being {shown!r}; known are {known}. Name the fields of "
            "JSON and CSV with --field, as in --field path=route --field time=when"
        )
    return make_parser(best or "common", settings)


def decision_request(found: Mapping[str, Any]) -> LoggedRequest | None:
    """The request of a record of the decision log, as a mapping; None for one that stands for lost records, and for
    those of Envoy's rate limit service, which have no route."""
    if found["outcome"] == LOST or found["method"] in ENVOY_METHODS:
        return None
    identities = [(kind, key) for kind, key in zip(found["kinds"], found["clients"], strict=True) if kind != "label"]
    address = next((key for kind, key in identities if kind == "ip"), None)
    if found["tier"]:
        identities.append(("tier", found["tier"]))
    weight = 0 if found["outcome"] == BLOCKED else round(min(found["weight"], MAX_WEIGHT))
    if weight != 1:
        identities.append((WEIGHT, f"{weight}"))
    route = found["route"] if found["route"].startswith("/") else "/~unmatched"
    return (
        int(found["at_us"]),
        found["method"],
        route,
        0,
        (address, None, tuple(dict(reversed(identities)).items())),
        None,
    )


def _header_names(header: str) -> tuple[str, ...]:
    """The fields that may contain a request header: Caddy's, that of nginx's variable, and the plain name."""
    title = "-".join([word.capitalize() for word in header.split("-")])
    snake = header.lower().replace("-", "_")
    return f"request.headers.{title}", f"http_{snake}", snake, header


AGENT_FIELDS: Final = _header_names("user-agent")


def _agent_identity(agent: str) -> tuple[tuple[str, str], ...]:
    return () if agent in ("", "-") else ((AGENT, agent),)


def _find_header(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = record.get(name)
        if value is None and "." in name:
            value = _descend(record, name)
        if isinstance(value, list) and len(value) > 1 and name.endswith(("Key", "Authorization")):
            return AMBIGUOUS
        if (text := _text(value)) is not None:
            return text
    return None


def _descend(record: dict[str, Any], name: str) -> Any:
    value: Any = record
    for word in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(word)
    return value


def _text(value: Any) -> str | None:
    """A value as a text; None for missing and redacted ones. Several lines of a header are joined."""
    if isinstance(value, list):
        value = ", ".join([each for each in value if isinstance(each, str)])
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = f"{value}".strip()
    return None if text.lower() in REDACTED else text


def _without_port(address: str) -> str:
    """An address without its port: 192.0.2.1:2817, [2001:db8::1]:443.

    >>> _without_port("192.0.2.1:2817"), _without_port("[2001:db8::1]:443"), _without_port("2001:db8::1")
    ('192.0.2.1', '2001:db8::1', '2001:db8::1')
    """
    if address[:1] == "[":
        return address[1:].partition("]")[0]
    host, colon, port = address.rpartition(":")
    return host if colon and port.isdecimal() and ":" not in host else address
