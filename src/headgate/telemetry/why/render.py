"""Renders the answer to "why was this client rejected?": a mail to the customer, details for colleagues, and JSON.

The mail can be sent as it is: it names no hashes, algorithms or internal reasons, and no other client.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import spell
from headgate.policy.addresses import canonical
from headgate.policy.api_keys import PREFIX
from headgate.policy.snapshot import UNMATCHED
from headgate.telemetry.human_time import clock_in_words, period_in_words, shown, shown_span
from headgate.telemetry.why.report import peak_width_us

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.telemetry.decision_log.record import LimitDenial
    from headgate.telemetry.why.report import LimitDenials, RejectionReport

__all__ = ["DETAILS_TITLE", "details", "mail", "plain"]

SECOND_US: Final = 1_000_000

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
_RETRY: Final = "After a response with status 429, wait as long as its Retry-After header says before you try again."
_MORE: Final = "If you need a higher limit, please let us know."


def mail(answer: RejectionReport, *, zone: tzinfo | None) -> list[str]:
    """The paragraphs of a mail to the customer: what was rejected, when, by which limit, and how to avoid it."""
    about = (
        f"This is about {_whose(answer)} {period_in_words(answer.span.since, answer.span.until, zone)}. "
        f"{_summary(answer)}"
    )
    if not answer.rejected:
        return [about, *_nearest(answer, zone)]
    enforced = [each for each in answer.limits if not each.shadow]
    return [
        about,
        *_blocked_and_unavailable(answer),
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
        *(_limit_details(each, zone) for each in answer.limits),
        *_reliability(answer),
    ]


def plain(answer: RejectionReport) -> dict[str, Any]:
    """The answer for programs; times are UTC."""
    span = answer.span
    return {
        "asked": answer.asked,
        "since": _iso(span.since_us),
        "until": _iso(span.until_us),
        **{
            name: getattr(answer, name)
            for name in (
                "labels", "rejected", "denied", "blocked", "block_notes", "unavailable", "passed", "degraded",
                "degraded_by", "nodes", "lost", "is_cut",
            )
        },
        "limits": [
            {
                "name": each.denial.limit,
                "by": each.denial.by,
                "quota": each.denial.quota,
                "period_us": each.denial.period_us,
                "burst": each.denial.burst,
                "algorithm": each.denial.algorithm,
                "origin": each.denial.origin or None,
                "denied": each.count - each.shadow,
                "would_have_denied": each.shadow,
                "cost": each.cost,
                "peak": each.peak,
                "degraded": each.degraded,
                "first": _iso(each.first_us),
                "last": _iso(each.last_us),
                "worst": {
                    "at": _iso(each.at_us),
                    "cost": each.denial.cost,
                    "remaining": each.denial.remaining,
                    "over": each.over,
                    "retry_after_us": each.denial.retry_us,
                },
                "routes": dict(each.routes),
                "override": each.remedy.line,
                "override_note": each.remedy.note,
            }
            for each in answer.limits
        ],
        "rejected_before": _iso(answer.before_us),
        "rejected_after": _iso(answer.after_us),
    }  # fmt: skip


# ------------------------------------------------------------------ the mail


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


def _summary(answer: RejectionReport) -> str:
    accepted = f"about {answer.passed:,.0f}" if answer.passed else ""
    if not answer.rejected:
        return f"We rejected none of them{f', and accepted {accepted}' if accepted else ''}."
    least = "at least " if answer.is_cut else ""
    return f"We rejected {least}{answer.rejected:,} of them{f', and accepted {accepted}' if accepted else ''}."


def _nearest(answer: RejectionReport, zone: tzinfo | None) -> Iterator[str]:
    for at_us, which in ((answer.before_us, "last rejected request before"), (answer.after_us, "next one after")):
        if at_us is not None:
            which = which.replace("one", "rejected request") if answer.before_us is None else which
            yield f"The {which} that was at {shown(_moment(at_us), zone)}."
    if answer.lost:
        yield MISSING_RECORDS


def _blocked_and_unavailable(answer: RejectionReport) -> Iterator[str]:
    if answer.blocked:
        yield (
            f"{_number_of(answer.blocked, answer.rejected)} rejected with status 403, because access was blocked at "
            "that time. If you think this is a mistake, please let us know."
        )
    if answer.unavailable:
        yield (
            f"{_number_of(answer.unavailable, answer.rejected)} rejected with status 503, because of a temporary "
            "problem on our side. You did nothing wrong, and we are sorry."
        )


def _exceeded(found: LimitDenials, answer: RejectionReport, zone: tzinfo | None) -> str:
    """The paragraph on one limit."""
    denial = found.denial
    if found.count == answer.rejected:
        which = "The request" if found.count == 1 else "Both" if found.count == 2 else f"All {found.count:,}"
    else:
        which = "One of them" if found.count == 1 else f"{found.count:,} of them"

    def clock(at_us: int) -> str:
        return clock_in_words(_moment(at_us), zone, within=answer.span)

    first, last, worst = clock(found.first_us), clock(found.last_us), clock(found.at_us)
    when = "" if first == last else f", between {first} and {last}"
    sentences = [f"{which}{_places(found)} exceeded the limit of {_limit_in_words(found)}{when}."]
    request = f"At {worst} {'the' if found.count == 1 else 'a'} request"
    needed = f"{request} needed {_tokens(denial.cost)} and {_left(denial.remaining)}"
    if denial.algorithm == "concurrency":
        others = denial.quota - denial.remaining
        sentences.append(
            f"{request} arrived while {others:,} {'other was' if others == 1 else 'others were'} in progress."
        )
    elif denial.retry_us is None:
        sentences.append(f"{needed}; the limit never allows so many at once, so it could not succeed.")
    else:
        sentences.append(f"{needed}; it would have succeeded {_seconds(denial.retry_us)} later.")
    if found.count > 1 and denial.algorithm != "concurrency":
        sentences.append(_excess(found))
    if found.degraded:
        which = _number_of(found.degraded, found.count)
        sentences.append(f"{which} rejected during a temporary problem on our side, by a stricter limit than usual.")
    return " ".join(sentences)


def _excess(found: LimitDenials) -> str:
    within = _within(found.denial)
    if _uses_tokens(found):
        return f"At the busiest time, requests needed {_tokens(found.peak)} more than the limit allows {within}."
    return (
        f"At the busiest time, there {_were(found.peak)} {_requests(found.peak)} more than the limit allows {within}."
    )


def _advice(limits: Sequence[LimitDenials]) -> Iterator[str]:
    """Advice on avoiding the rejections."""
    own = [each for each in limits if each.degraded < each.count]
    if not own:
        if limits:
            yield "You do not have to change anything."
        return
    sentences: list[str] = []
    if any(each.denial.retry_us is None for each in own):
        sentences.append("To avoid this, split requests that need more than the limit allows into smaller ones.")
    elif all(each.denial.by in SHARED for each in own):
        sentences.append("All clients share this limit, so it can be exceeded through no fault of your own.")
    elif len(own) == 1:
        sentences.append(f"To avoid this, {_keep_to(own[0])}.")
    else:
        sentences.append("To avoid this, keep to these limits.")
    yield " ".join([*sentences, _RETRY, _MORE])


def _keep_to(found: LimitDenials) -> str:
    denial = found.denial
    cost = denial.cost if _is_uniform(found) else None
    if denial.algorithm == "concurrency":
        return f"wait for responses before you send more: keep at most {_requests(denial.quota)} open at the same time"
    if cost is not None and 1 <= cost <= denial.quota:
        such = "" if cost == 1 else " of these"
        many = denial.quota // cost
        most = f"{many:,}{such} {'request' if many == 1 else 'requests'} {_per(denial)}"
        at_once = denial.burst // cost
    else:
        most, at_once = "requests for " + f"{_tokens(denial.quota)} {_per(denial)}", 0
    burst = f", and no more than {at_once:,} at once" if denial.burst != denial.quota and at_once else ""
    return f"send no more than {most}{burst}"


def _limit_in_words(found: LimitDenials) -> str:
    """ "60 requests per minute for each API key"."""
    denial = found.denial
    if denial.algorithm == "concurrency":
        return f"{_requests(denial.quota)} at the same time{_counted_by(denial.by)}"
    number = _tokens(denial.quota) if _uses_tokens(found) else _requests(denial.quota)
    burst = f" (at most {denial.burst:,} at once)" if denial.burst != denial.quota else ""
    return f"{number} {_per(denial)}{burst}{_counted_by(denial.by)}"


def _counted_by(by: str) -> str:
    if by == "global":
        return " for all clients together"
    kinds = [_COUNTED.get(each, each.replace("_", " ").replace("-", " ")) for each in by.split("+")]
    return f" for each {' and '.join(kinds)}"


def _places(found: LimitDenials) -> str:
    named = [route for route, _ in found.routes if not route.endswith(f" {UNMATCHED}")]
    others = ["other paths"] if named and len(named) < len(found.routes) else []
    return f" ({_listed([*named, *others])})" if named else ""


def _is_uniform(found: LimitDenials) -> bool:
    """True if all of the requests have cost the same."""
    return found.cost == found.count * found.denial.cost


def _uses_tokens(found: LimitDenials) -> bool:
    """True if requests cost more or less than one, so that the limit cannot be told in requests."""
    return not (_is_uniform(found) and found.denial.cost == 1)


def _per(denial: LimitDenial) -> str:
    return f"per {spell(timedelta(microseconds=denial.period_us))}"


def _within(denial: LimitDenial) -> str:
    """The time over which the excess was added up."""
    period = spell(timedelta(microseconds=peak_width_us(denial)))
    return f"in {period}" if period[0].isdigit() else f"in one {period}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def _left(count: int) -> str:
    return "none were left" if count == 0 else "1 was left" if count == 1 else f"{count:,} were left"


def _number_of(count: int, of: int) -> str:
    if count == of:
        return "The request was" if count == 1 else "Both were" if count == 2 else f"All {count:,} were"
    return "One of them was" if count == 1 else f"{count:,} of them were"


# ------------------------------------------------------------------ the details


def _limit_details(found: LimitDenials, zone: tzinfo | None) -> str:
    denial = found.denial
    source = {"override": ", from an override", "tier": ", from the tier"}.get(denial.origin, "")
    mode = ", shadow mode: not enforced" if found.shadow else ""
    denied = f"would have denied {_requests(found.count)}" if found.shadow else f"denied {_requests(found.count)}"
    if shown(_moment(found.first_us), zone) == shown(_moment(found.last_us), zone):
        when = f"at {shown(_moment(found.first_us), zone)}"
    else:
        when = f"between {shown_span(_moment(found.first_us), _moment(found.last_us), zone=zone)}"
    where = _listed([f"{route} ({count})" for route, count in found.routes])
    retry = "it can never pass" if denial.retry_us is None else f"passes after {_seconds(denial.retry_us)}"
    sentences = [
        f'Limit "{denial.limit}" ({denial.allows}, by {denial.by}{source}{mode}) {denied} {when}, on {where}.',
        f"Furthest over: cost {denial.cost}, {denial.remaining} left, {found.over} over, {retry}.",
    ]
    if found.count > 1:
        sentences.append(f"Peak demand over the limit: {found.peak:,} {_within(denial)}.")
    return " ".join([*sentences, *([] if found.shadow else _remedy(found))])


def _remedy(found: LimitDenials) -> Iterator[str]:
    remedy = found.remedy
    if remedy.line is not None:
        note = f" ({remedy.note})" if remedy.note else ""
        yield f"With this entry under overrides: in the policy, all of them would have passed{note}:\n  - {remedy.line}"
    elif remedy.limit is not None:
        yield f"With {remedy.limit}, all of them would have passed, but {remedy.note}."


def _reliability(answer: RejectionReport) -> Iterator[str]:
    if answer.degraded:
        yield (
            f"{answer.degraded:,} of the rejections {_were(answer.degraded)} decided without the store: "
            f"{'; '.join(answer.degraded_by)}."
        )
    elif answer.denied:
        yield "These figures are exact: the store made all of the decisions."
    if not answer.rejected and not answer.passed:
        yield "The log has no record of this client in that time. If there should be one, check how it is spelled."
    if answer.passed:
        yield "The number of accepted requests is an estimate from the sample that is logged."
    if answer.is_cut:
        yield "There are more records than are read at once: ask for a shorter time."
    if answer.lost:
        yield (
            f"{answer.lost:,} {'decision' if answer.lost == 1 else 'decisions'} of all clients in that time could not "
            "be logged."
        )


# ------------------------------------------------------------------ words


def _listed(words: Any) -> str:
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


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
