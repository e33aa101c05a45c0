"""Renders the answer to "why was this client rejected?": a mail to the customer, details for colleagues, and JSON.

The mail can be sent as it is: it names no hashes, algorithms or internal reasons, and no other client.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import spell
from headgate.clock import SECOND_US
from headgate.policy.addresses import canonical
from headgate.policy.api_keys import PREFIX
from headgate.policy.snapshot import UNMATCHED
from headgate.telemetry.decision_log.record import ENVOY_METHODS
from headgate.telemetry.human_time import clock_in_words, period_in_words, shown, shown_span
from headgate.telemetry.why.report import peak_width_us

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.telemetry.decision_log.record import LimitDenial
    from headgate.telemetry.why.report import LimitDenials, RejectionReport

__all__ = ["DETAILS_TITLE", "details", "mail", "plain"]


SOURCES: Final = {"override": ", from an override", "tier": ", from the tier", "action": ", tightened by an action"}

DETAILS_TITLE: Final = "For colleagues, not part of the mail"

_LABEL: Final = re.compile(r"(?P<kind>api_key|ip|subnet|tenant|user) (?P<value>\S+)")
"""A label that the decision log has made: "tenant acme", "ip 203.0.113.*", "api_key hmac:1ee8fae3"."""

_YOURS: Final = {
    "api_key": "requests with your API key",
    "ip": "requests from your IP address",
    "tenant": "requests from your account",
    "user": "requests from your user account",
}
SHARED: Final = ("global", "endpoint")
"""Values of `by:` that all clients share."""
_COUNTED: Final = {
    "api_key": "API key",
    "ip": "IP address",
    "subnet": "network",
    "tenant": "account",
    "user": "user",
    "client": "client",
    "endpoint": "endpoint",
}
"""Kinds of identity in the words of customers."""

MISSING_RECORDS: Final = "Some records of that time are missing, so there may have been more rejected requests."
BLOCKED: Final = "403, because access was blocked at that time. If you think this is a mistake, please let us know."
CHALLENGED: Final = (
    "403 or 429, because unusual requests came from the same client or network, and a check in the browser was needed. "
    "If you think this is a mistake, please let us know."
)
UNAVAILABLE: Final = "503, because of a temporary problem on our side. You did nothing wrong, and we are sorry."
_RETRY: Final = "After a response with status 429, wait as long as its Retry-After header says before you try again."
_MORE: Final = "If you need a higher limit, please let us know."


def mail(answer: RejectionReport, *, zone: tzinfo | None) -> list[str]:
    """The paragraphs of a mail to the customer: what was rejected, when, by which limit, and how to avoid it."""
    when = period_in_words(answer.span.since, answer.span.until, zone)
    rejected = f"{'at least ' if answer.is_cut else ''}{answer.rejected:,}" if answer.rejected else "none"
    accepted = f", and accepted about {answer.passed:,.0f}" if answer.passed else ""
    about = f"This is about {_whose(answer)} {when}. We rejected {rejected} of them{accepted}."
    enforced = [each for each in answer.limits if not each.shadow]
    return [
        about,
        *(_rejections(answer) if answer.rejected else _nearest(answer, zone)),
        *(_exceeded(each, answer, zone) for each in enforced),
        *_advice(enforced),
        *([MISSING_RECORDS] if answer.lost else []),
    ]


def details(answer: RejectionReport, *, zone: tzinfo | None) -> list[str]:
    """The paragraphs for colleagues: limits with their algorithms, overrides that would have helped, and exactness."""
    client = _listed(answer.labels) or answer.asked
    asked = f" (asked for: {answer.asked})" if answer.asked not in ("", client) else ""
    return [
        *([f"Client: {client}{asked}."] if client else []),
        *([f"Reason of the block: {_listed(answer.block_notes)}."] if answer.block_notes else []),
        *([f"Actions: {' '.join(answer.action_notes)}"] if answer.action_notes else []),
        *([_shed(answer)] if answer.overloaded else []),
        *(_limit_details(each, zone) for each in answer.limits),
        *_reliability(answer),
    ]


def plain(answer: RejectionReport) -> dict[str, Any]:
    """The answer for programs; times are UTC."""
    return {
        "asked": answer.asked,
        "since": _iso(answer.span.since_us),
        "until": _iso(answer.span.until_us),
        **{name: getattr(answer, name) for name in _PLAIN},
        "limits": [_plain_limit(each, each.denial) for each in answer.limits],
        "rejected_before": _iso(answer.before_us),
        "rejected_after": _iso(answer.after_us),
    }


_PLAIN: Final = (
    "labels", "rejected", "denied", "blocked", "block_notes", "challenged", "action_notes", "unavailable",
    "overloaded", "overload_notes", "passed", "degraded", "degraded_by", "nodes", "lost", "is_cut",
)  # fmt: skip
"""The fields of a report that need no conversion."""


def _plain_limit(found: LimitDenials, denial: LimitDenial) -> dict[str, Any]:
    worst = {"at": _iso(found.at_us), "cost": denial.cost, "remaining": denial.remaining, "over": found.over}
    return {
        "name": denial.limit,
        **{name: getattr(denial, name) for name in ("by", "quota", "period_us", "burst", "algorithm")},
        "origin": denial.origin or None,
        "denied": found.count - found.shadow,
        "would_have_denied": found.shadow,
        **{name: getattr(found, name) for name in ("cost", "peak", "degraded")},
        "first": _iso(found.first_us),
        "last": _iso(found.last_us),
        "worst": {**worst, "retry_after_us": denial.retry_us},
        "routes": dict(found.routes),
        "override": found.remedy.line,
        "override_note": found.remedy.note,
    }


def _whose(answer: RejectionReport) -> str:
    """Whose requests these are, as the customer knows it. An address is named in full if it was asked for in full; the
    names of clients only if there is one, as others must not learn who shares an address."""
    kind, sign, value = answer.asked.partition("=")
    if not sign:
        kind, value = ("ip", answer.asked) if canonical(answer.asked) is not None else ("", "")
    if kind in ("ip", "subnet") and not value.startswith(PREFIX):
        return _sent_by(kind, value)
    names = [each for each in answer.labels if each]
    label = _LABEL.fullmatch(names[0]) if len(names) == 1 else None
    if len(names) == 1 and label is None:
        return f"requests from {names[0]}"
    if label is not None and (not value or value.startswith(PREFIX)):
        return _sent_by(label["kind"], label["value"])
    return _sent_by(kind, value)


def _sent_by(kind: str, value: str) -> str:
    """Requests of one client, without the hash or the part of an address that may be all that is known of it."""
    if not value or value.startswith(PREFIX) or value.endswith("*") or kind == "api_key":
        return _YOURS.get(kind, "your requests")
    return f"requests from {'' if kind in ('ip', 'subnet') else f'{_COUNTED.get(kind, kind)} '}{value}"


def _nearest(answer: RejectionReport, zone: tzinfo | None) -> Iterator[str]:
    if answer.before_us is not None:
        yield f"The last rejected request before that was at {shown(_moment(answer.before_us), zone)}."
    if answer.after_us is not None:
        which = "rejected request" if answer.before_us is None else "one"
        yield f"The next {which} after that was at {shown(_moment(answer.after_us), zone)}."


def _rejections(answer: RejectionReport) -> Iterator[str]:
    """The paragraphs on rejections that are not by a limit."""
    blocked = answer.blocked - answer.challenged
    counts = (blocked, BLOCKED), (answer.challenged, CHALLENGED), (answer.unavailable, UNAVAILABLE)
    for count, reason in counts:
        if count:
            yield f"{_share(count, answer.rejected)} {_were(count)} rejected with status {reason}"


def _exceeded(found: LimitDenials, answer: RejectionReport, zone: tzinfo | None) -> str:
    denial = found.denial

    def clock(at_us: int) -> str:
        return clock_in_words(_moment(at_us), zone, within=answer.span)

    first, last, worst = clock(found.first_us), clock(found.last_us), clock(found.at_us)
    when = "" if first == last else f", between {first} and {last}"
    which = f"{_share(found.count, answer.rejected)}{_places(found)}"
    sentences = [f"{which} exceeded the limit of {_limit_in_words(found)}{when}."]
    request = f"At {worst} {'the' if found.count == 1 else 'a'} request"
    left = denial.remaining
    needed = f"{request} needed {_number(denial.cost, 'token')} and {f'{left:,}' if left else 'none'} "
    needed += "was left" if left == 1 else "were left"
    if denial.algorithm == "concurrency":
        others = denial.quota - left
        sentences.append(f"{request} arrived while {_number(others, 'other')} {_were(others)} in progress.")
    elif denial.retry_us is None:
        sentences.append(f"{needed}; the limit never allows so many at once, so it could not succeed.")
    else:
        sentences.append(f"{needed}; it would have succeeded {_seconds(denial.retry_us)} later.")
    if found.count > 1 and denial.algorithm != "concurrency":
        peak, needs = found.peak, "requests needed" if _uses_tokens(found) else f"there {_were(found.peak)}"
        extra = f"{needs} {_number(peak, 'token' if _uses_tokens(found) else 'request')}"
        sentences.append(f"At the busiest time, {extra} more than the limit allows {_within(denial)}.")
    if found.degraded:
        which = f"{_share(found.degraded, found.count)} {_were(found.degraded)}"
        sentences.append(f"{which} rejected during a temporary problem on our side, by a stricter limit than usual.")
    return " ".join(sentences)


def _shed(answer: RejectionReport) -> str:
    which = f"{_share(answer.overloaded, answer.rejected)} {_were(answer.overloaded)}"
    return f"{which} rejected because the service was overloaded: {_listed(answer.overload_notes)}."


def _advice(limits: Sequence[LimitDenials]) -> list[str]:
    own = [each for each in limits if each.degraded < each.count]
    if not own:
        return ["You do not have to change anything."] if limits else []
    if any(each.denial.retry_us is None for each in own):
        avoid = "To avoid this, split requests that need more than the limit allows into smaller ones."
    elif all(each.denial.by in SHARED for each in own):
        avoid = "All clients share this limit, so it can be exceeded through no fault of your own."
    else:
        avoid = f"To avoid this, {_keep_to(own[0]) if len(own) == 1 else 'keep to these limits'}."
    return [f"{avoid} {_RETRY} {_MORE}"]


def _keep_to(found: LimitDenials) -> str:
    denial, quota = found.denial, found.denial.quota
    if denial.algorithm == "concurrency":
        most = _number(quota, "request")
        return f"wait for responses before you send more: keep at most {most} open at the same time"
    if not _is_uniform(found) or not 1 <= denial.cost <= quota:
        return f"send no more than requests for {_number(quota, 'token')} {_per(denial)}"
    most = _number(quota // denial.cost, "request" if denial.cost == 1 else "of these request")
    at_once = denial.burst // denial.cost
    burst = f", and no more than {at_once:,} at once" if denial.burst != quota and at_once else ""
    return f"send no more than {most} {_per(denial)}{burst}"


def _limit_in_words(found: LimitDenials) -> str:
    """ "60 requests per minute for each API key"."""
    denial = found.denial
    if denial.algorithm == "concurrency":
        return f"{_number(denial.quota, 'request')} at the same time{_counted_by(denial.by)}"
    number = _number(denial.quota, "token" if _uses_tokens(found) else "request")
    burst = f" (at most {denial.burst:,} at once)" if denial.burst != denial.quota else ""
    return f"{number} {_per(denial)}{burst}{_counted_by(denial.by)}"


def _counted_by(by: str) -> str:
    if by == "global":
        return " for all clients together"
    kinds = [_COUNTED.get(each, each.replace("_", " ").replace("-", " ")) for each in by.split("+")]
    return f" for each {' and '.join(kinds)}"


def _places(found: LimitDenials) -> str:
    routes = [route for route, _ in found.routes if route.partition(" ")[0] not in ENVOY_METHODS]
    named = [route for route in routes if not route.endswith(f" {UNMATCHED}")]
    others = ["other paths"] if named and len(named) < len(routes) else []
    return f" ({_listed([*named, *others])})" if named else ""


def _is_uniform(found: LimitDenials) -> bool:
    return found.cost == found.count * found.denial.cost


def _uses_tokens(found: LimitDenials) -> bool:
    """True if requests cost more or less than one, so that the limit cannot be expressed in requests."""
    return found.denial.cost != 1 or not _is_uniform(found)


def _per(denial: LimitDenial) -> str:
    return f"per {spell(denial.allows.period)}"


def _within(denial: LimitDenial) -> str:
    """The time over which the excess was added up."""
    period = spell(timedelta(microseconds=peak_width_us(denial)))
    return f"in {period}" if period[0].isdigit() else f"in one {period}"


def _share(count: int, of: int) -> str:
    if count == of:
        return "The request" if count == 1 else "Both" if count == 2 else f"All {count:,}"
    return "One of them" if count == 1 else f"{count:,} of them"


def _limit_details(found: LimitDenials, zone: tzinfo | None) -> str:
    denial = found.denial
    source = {"override": ", from an override", "tier": ", from the tier", "action": ", tightened by an action"}.get(
        denial.origin, ""
    )
    mode = ", shadow mode: not enforced" if found.shadow else ""
    denied = f"{'would have denied' if found.shadow else 'denied'} {_number(found.count, 'request')}"
    first, last = _moment(found.first_us), _moment(found.last_us)
    is_one = shown(first, zone) == shown(last, zone)
    when = f"at {shown(first, zone)}" if is_one else f"between {shown_span(first, last, zone=zone)}"
    where = _listed([f"{route} ({count})" for route, count in found.routes])
    retry = "it can never pass" if denial.retry_us is None else f"passes after {_seconds(denial.retry_us)}"
    sentences = [
        f'Limit "{denial.limit}" ({denial.allows}, by {denial.by}{source}{mode}) {denied} {when}, on {where}.',
        f"Furthest over: cost {denial.cost}, {denial.remaining} left, {found.over} over, {retry}.",
    ]
    if found.count > 1:
        sentences.append(f"Peak demand over the limit: {found.peak:,} {_within(denial)}.")
    limit, line, note = found.remedy
    if denial.origin == "action":
        return " ".join(sentences)  # with other numbers, the action would divide those
    if not found.shadow and line is not None:
        note = f" ({note})" if note else ""
        entry = f"With this entry under overrides: in the policy, all of them would have passed{note}:\n  - {line}"
        sentences.append(entry)
    elif not found.shadow and limit is not None:
        sentences.append(f"With {limit}, all of them would have passed, but {note}.")
    return " ".join(sentences)


def _reliability(answer: RejectionReport) -> Iterator[str]:
    if answer.degraded:
        which = f"{answer.degraded:,} of the rejections {_were(answer.degraded)}"
        yield f"{which} decided without the store: {'; '.join(answer.degraded_by)}."
    elif answer.denied:
        yield "These figures are exact: the store made all of the decisions."
    if not answer.rejected and not answer.passed:
        yield "The log has no record of this client in that time. If there should be one, check how it is spelled."
    if answer.passed:
        yield "The number of accepted requests is an estimate from the sample that is logged."
    if answer.is_cut:
        yield "There are more records than are read at once: ask for a shorter time."
    if answer.lost:
        yield f"{_number(answer.lost, 'decision')} of all clients in that time could not be logged."


def _listed(words: Any) -> str:
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _seconds(us: int) -> str:
    """A wait, rounded up: after it, the request passes."""
    if us <= SECOND_US // 10:
        return "less than 0.1 s"
    if us < 10 * SECOND_US:
        return f"{-(-us // (SECOND_US // 10)) / 10:g} s"
    seconds = -(-us // SECOND_US)
    if seconds < 120:
        return f"{seconds} s"
    minutes = -(-seconds // 60)
    return f"{minutes} minutes" if minutes < 120 else f"{-(-minutes // 60)} hours"


def _moment(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / SECOND_US, UTC)


def _iso(at_us: int | None) -> str | None:
    return None if at_us is None else _moment(at_us).isoformat().replace("+00:00", "Z")
