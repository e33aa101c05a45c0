"""Responses: RateLimit header templates, and refusals with their bodies. See docs/http.md.

Independent of frameworks: names and values of header fields are bytes, names in lower case, as in ASGI. Responses are
public: they contain what a client can act on, but no identities, reasons of blocks or internal errors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from headgate.abuse.challenge import page_policy
from headgate.algorithms import NEVER
from headgate.clock import SECOND_US
from headgate.errors import InvalidConfiguration
from headgate.gate.headers import LARGEST, Header, Pace, RateLimitHeaders, SeparateFields
from headgate.policy.model import NET_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.algorithms import Verdict
    from headgate.decisions import Decision
    from headgate.limits import Limit
    from headgate.policy.model import AnswerSettings

__all__ = [
    "Header", "HeaderTemplate", "Rejection", "RejectionBody", "RejectionInfo", "ResponseBuilder", "health_response",
]  # fmt: skip

logger = logging.getLogger("headgate")

UNKNOWN_RETRY_US: Final = SECOND_US
"""Retry-After if the wait is unknown."""

PROBLEM_TYPES: Final = "https://iana.org/assignments/http-problem-types#"
QUOTA_EXCEEDED: Final = f"{PROBLEM_TYPES}quota-exceeded", "Quota Exceeded"
REDUCED_CAPACITY: Final = f"{PROBLEM_TYPES}temporary-reduced-capacity", "Temporary Reduced Capacity"
ABNORMAL_USAGE: Final = f"{PROBLEM_TYPES}abnormal-usage-detected", "Abnormal Usage Detected"
FORBIDDEN: Final = "about:blank", "Forbidden"
"""The title of a problem of type about:blank is the phrase of its status (RFC 9457)."""

SEPARATE_FIELDS_DRAFT: Final = 6

SHED_HEADER: Final = b"headgate-shed"
"""In the response to a request that was shed: its priority."""

CHALLENGE_HEADER: Final = b"headgate-challenge"
"""In the response to a request that has to pass a challenge."""


class Rejection(NamedTuple):
    """A response that is sent instead of the app's. Send it to HEAD without the body."""

    status: int
    headers: list[Header]
    body: bytes
    message: str = ""
    """The reason and when to retry, as in the default body."""


@dataclass(frozen=True, slots=True)
class RejectionInfo:
    """The facts for the body of a refusal. Everything but `decision` may be shown to the client."""

    status: int
    error: str
    """Error code: "rate_limit_exceeded", "limiter_unavailable", "overloaded", "blocked", "challenge_required" or
    "slowed_down"."""
    message: str
    """The reason and when to retry, for people."""
    retry_after_seconds: int | None
    """As in Retry-After; None if that is omitted."""
    violated_policies: tuple[str, ...] = ()
    """The names of the limits that denied."""
    decision: Decision | None = None
    """Contains keys and identities; None if no limit was checked."""


RejectionBody: TypeAlias = Callable[[RejectionInfo], tuple[bytes | str | dict[str, Any], str | None]]
"""Returns a custom body and its content type; None for the default of bytes, text or JSON."""


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """Header fields of requests with the same limits and costs, created by `ResponseBuilder.header_template`."""

    names: tuple[str, ...]
    headers: Callable[[Sequence[Verdict], int], list[Header]]
    """Formats the header fields, given the verdict of each limit in the order of the names, and their time."""


class ResponseBuilder:
    """Builds header fields and refusals from decisions, as configured under `answers:` in the policy.

    >>> from datetime import timedelta
    >>> from headgate import Limit
    >>> from headgate.policy.model import AnswerSettings
    >>> responses = ResponseBuilder(AnswerSettings(x_ratelimit=False))
    >>> search = responses.header_template([Limit(1000, timedelta(minutes=1), name="search")], ["requests"])
    >>> search.headers([(50, 0, 57_000_000, 0)], 0)
    [(b'ratelimit-policy', b'"search";q=1000;w=60'), (b'ratelimit', b'"search";r=50;t=57')]
    """

    def __init__(
        self,
        settings: AnswerSettings,
        *,
        body: RejectionBody | None = None,
        chance: Callable[[], float] = random,
        expected_wait_us: Callable[[Limit, int], int] | None = None,
    ) -> None:
        """`body` builds custom bodies; `chance` returns a random number in [0, 1) for the jitter; `expected_wait_us`
        estimates the time until places of a concurrency limit are free, for which a decision has only a bound."""
        if settings.jitter < timedelta():
            raise InvalidConfiguration(f"jitter {settings.jitter} is negative; use 0 or more")
        self._settings = settings
        self._jitter_us = settings.jitter // timedelta(microseconds=1)
        self._body = body
        self._body_failed = False
        self._chance = chance
        self._expected_wait_us = expected_wait_us

    def header_template(
        self, limits: Sequence[Limit], units: Sequence[str], costs: Sequence[int] | None = None
    ) -> HeaderTemplate:
        """The header template for limits, with the unit of each and the cost of a request on each (1 by default)."""
        names = [_quoted(limit.name) for limit in limits]
        items = [name + _allowance(limit, unit) for name, limit, unit in zip(names, limits, units, strict=True)]
        make = SeparateFields if self._settings.draft == SEPARATE_FIELDS_DRAFT else RateLimitHeaders
        if make is SeparateFields:
            items = [f"{pace.quota};w={pace.window}" for pace in map(_pace, limits) if pace.window]
        fields = make(
            tuple([name.encode("ascii") for name in names]),
            tuple([(b"x-ratelimit-limit", b"%d" % limit.quota) for limit in limits]),
            tuple([_refill_us(limit) for limit in limits]),
            (1,) * len(limits) if costs is None else tuple(costs),
            tuple(map(_pace, limits)),
            (b"ratelimit-policy", ", ".join(items).encode("ascii")),
            self._settings.x_ratelimit,
            self._settings.ratelimit,
        )
        return HeaderTemplate(tuple([limit.name for limit in limits]), fields.headers)

    def denied(self, decision: Decision, template: HeaderTemplate) -> Rejection:
        """429, for a request that exceeds a limit; `template` is that of the decision's limits, in their order."""
        verdicts = self._estimate_waits(decision)
        waits = [(name, verdict[1]) for name, verdict in zip(template.names, verdicts, strict=True) if verdict[1]]
        violated = tuple([name for name, _ in waits])
        retry = None
        if beyond := [name for name, wait_us in waits if wait_us == NEVER]:
            message = f"This request costs more than {_limits(beyond)} can ever allow: waiting does not help."
        else:
            retry = self._seconds(max([wait_us for _, wait_us in waits], default=0))
            subject, has = _limits(violated), "has" if len(violated) < 2 else "have"
            message = f"{subject[0].upper()}{subject[1:]} {has} been reached. {_advice(retry)}"
        facts = RejectionInfo(429, "rate_limit_exceeded", message, retry, violated, decision)
        return self._refuse(facts, template.headers(verdicts, decision.at_us))

    def _estimate_waits(self, decision: Decision) -> Sequence[Verdict]:
        """The verdicts of a denial, with an estimated wait of concurrency limits instead of its upper bound: leases are
        released long before they expire."""
        expected_wait_us = self._expected_wait_us
        if expected_wait_us is None or "concurrency" not in [key.limit.algorithm for key in decision.keys]:
            return decision.verdicts
        costs = decision.cost if isinstance(decision.cost, tuple) else (decision.cost,) * len(decision.keys)
        verdicts = []
        for key, cost, verdict in zip(decision.keys, costs, decision.verdicts, strict=True):
            remaining, wait_us, reset_us, delay_us = verdict
            if key.limit.algorithm == "concurrency" and wait_us > 0:
                wait_us = min(wait_us, expected_wait_us(key.limit, max(1, cost - remaining)))
                verdict = remaining, wait_us, min(reset_us, wait_us), delay_us
            verdicts.append(verdict)
        return verdicts

    def unavailable(self, decision: Decision | None = None) -> Rejection:
        """503, for a request on a route that fails closed while the store is unavailable."""
        retry = self._seconds((decision is not None and decision.retry_after_us) or UNKNOWN_RETRY_US)
        message = f"This request cannot be checked right now. {_advice(retry)}"
        return self._refuse(RejectionInfo(503, "limiter_unavailable", message, retry, decision=decision))

    def overloaded(self, retry_us: int, priority: str) -> Rejection:
        """503, for a request that was shed, or whose handler has made a call that was shed."""
        retry = self._seconds(retry_us)
        facts = RejectionInfo(503, "overloaded", f"The service is overloaded. {_advice(retry)}", retry)
        return self._refuse(facts, [(SHED_HEADER, priority.encode("ascii"))])

    def blocked(self, retry_us: int | None = None) -> Rejection:
        """403, for a blocked client; `retry_us` is the time until the block ends, if it does. Omits the reason."""
        retry = None if retry_us is None else self._seconds(retry_us)
        message = "Access is blocked." if retry is None else f"Access is blocked. {_advice(retry)}"
        return self._refuse(RejectionInfo(403, "blocked", message, retry))

    def challenged(self, challenge: str) -> Rejection:
        """403, for a client without a browser that has to pass a challenge, which a header describes."""
        message = "Unusual requests came from this client: open this URL in a browser to continue."
        facts = RejectionInfo(403, "challenge_required", message, None)
        return self._refuse(facts, [(CHALLENGE_HEADER, challenge.encode("ascii"))])

    def challenge_page(self, page: bytes) -> Rejection:
        """403, with a page that solves a challenge in a browser."""
        headers = [(CHALLENGE_HEADER, b"page"), (b"content-security-policy", page_policy())]
        headers += [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"same-origin")]
        message = "This request needs a challenge to be solved in a browser."
        return Rejection(403, [*headers, *_describe(b"text/html; charset=utf-8", page)], page, message)

    def redirect(self, url: str) -> Rejection:
        """303, to the page of the app that presents a challenge."""
        headers = [(CHALLENGE_HEADER, b"redirect"), (b"location", url.encode("ascii", "ignore"))]
        return Rejection(303, [*headers, *_describe(b"text/plain", b"")], b"", "This request needs a challenge.")

    def slowed_down(self, retry_us: int) -> Rejection:
        """429, for a request that would have to be held back while too many others are."""
        retry = self._seconds(retry_us)
        message = f"Unusual requests came from this client, so it is slowed down. {_advice(retry)}"
        return self._refuse(RejectionInfo(429, "slowed_down", message, retry))

    def _seconds(self, wait_us: int) -> int:
        """The wait in seconds, rounded up, at least 1, with jitter."""
        later_us = int(self._jitter_us * self._chance()) if self._jitter_us else 0
        return max(1, -((wait_us + later_us) // -SECOND_US))

    def _refuse(self, facts: RejectionInfo, headers: Sequence[Header] = ()) -> Rejection:
        content_type, body = self._content(facts)
        retry = [] if facts.retry_after_seconds is None else [(b"retry-after", b"%d" % facts.retry_after_seconds)]
        return Rejection(facts.status, [*headers, *retry, *_describe(content_type, body)], body, facts.message)

    def _content(self, facts: RejectionInfo) -> tuple[bytes, bytes]:
        if self._body is not None:
            try:
                return _encoded(*self._body(facts))
            except Exception:
                # Logged once: a flood of refusals must not flood the log.
                if not self._body_failed:
                    self._body_failed = True
                    logger.exception("refusal_body failed for status %d; using the default body", facts.status)
        return b"application/problem+json", _problem(facts, self._settings.doc_url)


def health_response(facts: Mapping[str, object], *, ready: bool) -> Rejection:
    """200 or 503, at `health_path`."""
    body = json.dumps(facts, indent=2).encode("ascii") + b"\n"
    return Rejection(200 if ready else 503, _describe(b"application/json", body), body)


def _describe(content_type: bytes, body: bytes) -> list[Header]:
    length = b"%d" % len(body)
    return [(b"cache-control", b"no-store"), (b"content-type", content_type), (b"content-length", length)]


def _refill_us(limit: Limit) -> int:
    is_steady = limit.implementation.SHAPES_BURST
    return -((1 - limit.capacity) * limit.ticks // limit.tokens) if is_steady else 0


def _problem(facts: RejectionInfo, doc_url: str | None) -> bytes:
    kind, title = _type_and_title(facts)
    members: dict[str, object] = {"type": kind, "title": title, "status": facts.status, "detail": facts.message}
    if facts.violated_policies:
        members["violated-policies"] = facts.violated_policies
    members |= {"error": facts.error, "message": facts.message}
    members |= {"retry_after_seconds": facts.retry_after_seconds, "doc_url": doc_url}
    return json.dumps(members).encode("ascii")


def _type_and_title(facts: RejectionInfo) -> tuple[str, str]:
    if facts.error in ("challenge_required", "slowed_down"):
        return ABNORMAL_USAGE
    if facts.status == 403:
        return FORBIDDEN
    is_degraded = facts.decision is not None and facts.decision.degraded is not None
    if facts.status == 503 or is_degraded:  # no decision, or one by the share of this node
        return REDUCED_CAPACITY
    if facts.violated_policies and all(name.endswith(NET_SUFFIX) for name in facts.violated_policies):
        return ABNORMAL_USAGE  # many unknown API keys from one address
    return QUOTA_EXCEEDED


def _encoded(content: bytes | str | dict[str, Any], content_type: str | None) -> tuple[bytes, bytes]:
    """The content type and body of the result of `refusal_body`."""
    if isinstance(content, bytes):
        kind, body = "application/octet-stream", content
    elif isinstance(content, str):
        kind, body = "text/plain; charset=utf-8", content.encode("utf-8")
    else:
        kind, body = "application/json", json.dumps(content, allow_nan=False).encode("ascii")
    if content_type is not None:
        kind = content_type
    if not kind.isprintable():
        raise ValueError(f"content type {kind!r} cannot be used in a header; use printable ASCII characters")
    return kind.encode("ascii"), body


def _allowance(limit: Limit, unit: str) -> str:
    """The parameters of a limit in RateLimit-Policy.

    Windows are whole seconds. Other periods are rounded up and their quotas scaled, rounded down, so that the stated
    rate never exceeds the actual one. Concurrency is not a rate and has no window.
    """
    pace = _pace(limit)
    if not pace.window and unit == "requests":
        unit = "concurrent-requests"
    window = f";w={pace.window}" if pace.window else ""
    counted = "" if unit == "requests" else f";qu={_quoted(unit)}"
    return f";q={pace.quota}{window}{counted}"


def _pace(limit: Limit) -> Pace:
    if limit.algorithm == "concurrency":
        return Pace(min(limit.quota, LARGEST), 0, ends_at_once=False)
    seconds = -(limit.period_us // -SECOND_US)
    quota = limit.quota * seconds * SECOND_US // limit.period_us
    return Pace(min(quota, LARGEST), seconds, limit.algorithm == "fixed_window")


def _quoted(text: str) -> str:
    if not (text and text.isascii() and text.isprintable()):
        raise InvalidConfiguration(f"{text!r} cannot be used in a header; use printable ASCII characters")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _limits(names: Sequence[str]) -> str:
    """'the limits "a", "b" and "c"'."""
    quoted = [f'"{name}"' for name in names]
    if len(quoted) < 2:
        return f"the limit {quoted[0]}" if quoted else "a limit"
    return f"the limits {', '.join(quoted[:-1])} and {quoted[-1]}"


def _advice(seconds: int) -> str:
    """When to retry, for people, rounded up."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"Try again in {-(seconds // -size)} {unit}."
    return f"Try again in {seconds} second{'' if seconds == 1 else 's'}."
