"""The answer to "why was I blocked?", in words that can be pasted into a mail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final

from headgate._grammar import spell
from headgate.telemetry.moments import shown, shown_span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.telemetry.why import Answer, LimitDenials

__all__ = ["letter", "plain"]

SECOND_US: Final = 1_000_000


def letter(answer: Answer, *, zone: tzinfo | None) -> list[str]:
    """The paragraphs, in this order: what happened, by which limits, what else is to know."""
    return [*_happened(answer, zone), *(_limit(each, zone) for each in answer.limits), *_besides(answer, zone)]


def plain(answer: Answer) -> dict[str, Any]:
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


def _happened(answer: Answer, zone: tzinfo | None) -> Iterator[str]:
    who = _listed(answer.labels) or answer.asked or "this client"
    when = f"Between {shown_span(answer.span.since, answer.span.until, zone=zone)}"
    if not answer.rejected:
        yield f"{when}, no request of {who} was rejected{_nothing_else(answer)}."
        for at_us, order in ((answer.before_us, "last one before"), (answer.after_us, "first one after")):
            if at_us is not None:
                yield f"The {order} that was rejected at {shown(_moment(at_us), zone)}."
        return
    about = f"; about {answer.passed:.0f} passed, by the sample that is kept of those" if answer.passed else ""
    yield f"{when}, {_requests(answer.rejected)} of {who} {_were(answer.rejected)} rejected{about}."
    if answer.blocked:
        notes = f" ({_listed(answer.block_notes)})" if answer.block_notes else ""
        yield (
            f"{answer.blocked} of them {_were(answer.blocked)} answered 403, because the client is blocked{notes}: "
            "no limit was looked at, and none would have helped."
        )
    if answer.unavailable:
        yield (
            f"{answer.unavailable} of them {_were(answer.unavailable)} answered 503, because the store could not be "
            "asked, and the route fails closed: the client had done nothing wrong."
        )


def _limit(found: LimitDenials, zone: tzinfo | None) -> str:
    """One limit's paragraph."""
    denial, single = found.denial, found.count == 1
    verb = "would have been" if found.shadow else _were(found.count)
    source = {"override": ", by an override", "tier": ", by its tier", "": ""}[denial.origin]
    start = (
        f'{found.count} {verb} denied by the limit "{denial.limit}", which allows {denial.allows}{source}, '
        f"and is counted by {denial.by}"
    )
    if single:
        when = f", at {shown(_moment(found.first_us), zone)}"
    else:
        when = f", between {shown_span(_moment(found.first_us), _moment(found.last_us), zone=zone)}"
    where = _listed([f"{route} ({count})" if len(found.routes) > 1 else route for route, count in found.routes])
    told = [f"{start}{when}, on {where}.", _worst(found, zone)]
    if found.shadow:
        told.append("The limit is only watched, so that they passed.")
        return " ".join(told)
    if not single:
        period = spell(timedelta(microseconds=denial.period_us))
        told.append(f"At most, {found.peak} more {_were(found.peak)} asked for than the limit had in one {period}.")
    if found.degraded:
        told.append(
            f"{found.degraded} of these {_were(found.degraded)} decided without the store, by a share of the limit."
        )
    return " ".join([*told, *_remedy(found)])


def _worst(found: LimitDenials, zone: tzinfo | None) -> str:
    denial = found.denial
    which = "It" if found.count == 1 else f"The one furthest over, at {shown(_moment(found.at_us), zone)},"
    numbers = f"{which} cost {denial.cost} while {denial.remaining} {_were(denial.remaining)} left"
    if denial.retry_us is None:
        return f"{numbers}: more than the whole limit, so that it could never pass."
    return f"{numbers}: {found.over} over. It would have passed {_seconds(denial.retry_us)} later."


def _remedy(found: LimitDenials) -> Iterator[str]:
    remedy = found.remedy
    if remedy.line is not None:
        note = f" ({remedy.note})" if remedy.note else ""
        yield f"With this line under overrides: in the policy, all of them would have passed{note}:\n  - {remedy.line}"
    elif remedy.limit is not None:
        yield f"With {remedy.limit} all of them would have passed; but {remedy.note}."


def _besides(answer: Answer, zone: tzinfo | None) -> Iterator[str]:
    if answer.degraded:
        yield (
            f"{answer.degraded} of the rejections {_were(answer.degraded)} decided while the store was away: "
            f"{'; '.join(answer.degraded_by)}."
        )
    elif answer.denied:
        yield "All of this was decided by the store, exactly."
    if answer.is_cut:
        yield "There was more than is looked at here: ask for a shorter time."
    if answer.lost:
        yield (
            f"In this time {answer.lost} decisions on requests of all clients could not be logged: "
            "there may have been more."
        )


def _nothing_else(answer: Answer) -> str:
    if answer.passed:
        return f"; about {answer.passed:.0f} passed, by the sample that is kept of those"
    return ", and nothing else is logged of it there"


def _listed(words: Any) -> str:
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _seconds(us: int) -> str:
    seconds = us / SECOND_US
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


def _moment(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / SECOND_US, UTC)


def _iso(at_us: int | None) -> str | None:
    return None if at_us is None else _moment(at_us).isoformat().replace("+00:00", "Z")
