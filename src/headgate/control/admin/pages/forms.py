"""Forms that change something: what was entered is kept until it is taken, and what is dangerous is asked for twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.control.admin.problems import of_error
from headgate.control.admin.sessions import CSRF_FIELD
from headgate.control.config import ConfigUnavailable, Conflict
from headgate.control.service import ChangeContext, ClientRef
from headgate.control.service.errors import NeedsConfirmation, NotAllowed, NotFound
from headgate.errors import HeadgateError, InvalidInput, InvalidPolicy
from headgate.limits import Limit
from headgate.policy import scalars
from headgate.telemetry.human_time import coming, end_in_words, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.config.history import Version
    from headgate.control.service import Change
    from headgate.control.service.errors import Risk

__all__ = [
    "Entered",
    "Mistake",
    "attempt",
    "bucket",
    "change_context",
    "confirmation",
    "reason",
    "sentence",
    "until",
    "until_text",
    "until_us",
]

LONGEST_REASON: Final = 500
MOST_CHANGES: Final = 8
"""Versions that are listed when somebody else was quicker."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SHOWN: Final = {
    "limit": "Limit",
    "bucket": "Allow",
    "client": "Client",
    "tier": "Tier",
    "path": "Route",
    "cost": "Cost",
    "class": "Class",
    "until": "Until",
    "reason": "Reason",
}
"""Fields that a confirmation shows."""
LATEST_US: Final = 253_402_000_000_000_000
"""Near the end of the year 9999, the last that Python can represent."""


class Mistake(HeadgateError):
    """A field that cannot be taken as it is."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class Entered(NamedTuple):
    """A form that was not taken yet: what was in it, and what to say about that."""

    form: str
    values: Mapping[str, str]
    errors: Mapping[str, str] = {}
    """By field."""
    problems: tuple[str, ...] = ()
    """What is about no single field."""
    changes: tuple[Version, ...] = ()
    """What others have changed meanwhile."""
    status: int = 422

    @property
    def first(self) -> str | None:
        """The field that the cursor goes to."""
        return next(iter(self.errors), None)


def attempt(
    visit: Visit,
    form: str,
    do: Callable[[], Change],
    *,
    question: str,
    said: str,
    back: str,
    again: Callable[[Entered], Response],
) -> Response:
    """Do what a form asks for, and go `back` to say so; or show it `again` with what is wrong; or ask if it is meant.

    `question` is what is asked then, and `said` what is told when it is done.
    """
    entered = Entered(form, visit.form)
    if "again" in visit.form:  # back from the question, to change something
        return again(entered._replace(status=200))
    try:
        change = do()
    except Mistake as mistake:
        return again(entered._replace(errors={mistake.field: f"{mistake}"}))
    except NeedsConfirmation as doubt:
        return confirmation(visit, question=question, dangers=doubt.risks)
    except Conflict as conflict:
        return again(entered._replace(changes=_since(visit, conflict), status=409))
    except InvalidPolicy as invalid:
        return again(entered._replace(problems=tuple(f"{invalid}".splitlines())))
    except (NotAllowed, NotFound, ConfigUnavailable):
        raise
    except HeadgateError as error:
        return again(entered._replace(problems=(of_error(error).detail,)))
    number = "" if change.version is None else f" Version {change.version.number}."
    return visit.go(back, f"{said}{number}", change.notes)


def confirmation(visit: Visit, *, question: str, dangers: Sequence[Risk]) -> Response:
    """The page that asks before a change. It sends the form again with the dangers confirmed, and with the end that it
    has shown."""
    left_out = (CSRF_FIELD, "confirm", "again", "until_us")
    end_us = until_us(visit)
    return visit.page(
        "confirm.html",
        status=409,
        question=question,
        dangers=dangers,
        kept=[
            *((name, value) for name, value in visit.form.pairs if name not in left_out),
            *([] if end_us is None else [("until_us", str(end_us))]),
        ],
        facts=[*_facts(visit)],
        path=visit.request.url.path,
    )


def _facts(visit: Visit) -> Iterator[tuple[str, str]]:
    """The fields of a form for people: clients by their names, the end as a date."""
    form = visit.form
    if form.get("kind") and form.get("value"):
        yield "Client", visit.name_of(ClientRef(form["kind"], form["value"]))
    for name, title in SHOWN.items():
        if form.get(name):
            yield title, until_text(visit).removeprefix(" until ") or form[name] if name == "until" else form[name]


def change_context(visit: Visit) -> ChangeContext:
    """The actor, reason, confirmed risks and base version of a submitted form."""
    return ChangeContext(
        visit.actor,
        reason(visit),
        confirmed=frozenset(visit.form.all("confirm")),
        based_on=visit.form.number("based_on"),
    )


def reason(visit: Visit) -> str:
    written = visit.form.get("reason", "")
    if not written:
        raise Mistake("reason", "Enter a reason. It is recorded in the audit log.")
    if len(written) > LONGEST_REASON:
        raise Mistake("reason", f"Too long: {len(written)} characters, at most {LONGEST_REASON} are allowed.")
    return written


def bucket(visit: Visit) -> str:
    """The numbers of a limit, as policies write them."""
    written = visit.form.get("bucket", "")
    if not written:
        raise Mistake("bucket", 'Enter a limit, for example "1000/minute" or "1000/minute, burst 200".')
    try:
        Limit.parse(written, name="check")
    except HeadgateError as error:
        if not written.startswith("0"):  # what to do instead of a limit of 0, the service says
            raise Mistake("bucket", f"{error}") from None
    return written


def until(visit: Visit, field: str = "until") -> datetime | None:
    """The future time that was entered, of a day its end; None for none. A confirmation sends the time that it has
    shown, so that "in 1 hour" doesn't move while somebody reads."""
    written = visit.form.get(field, "")
    if not written:
        return None
    shown_us = visit.form.number(f"{field}_us")
    now = EPOCH + timedelta(microseconds=visit.now_us)
    try:
        if shown_us is not None:
            return scalars.instant(EPOCH + timedelta(microseconds=min(shown_us, LATEST_US)))
        return scalars.instant(coming(written, now=now, zone=visit.zone, at_its_end=True))
    except scalars.OutOfRange:
        raise Mistake(
            field, f"The latest possible year is {scalars.HORIZON.year - 1}. Leave empty for no end date."
        ) from None
    except InvalidInput as error:
        raise Mistake(field, f"{error}") from None


def until_us(visit: Visit) -> int | None:
    """The time that was entered as the end, in microseconds."""
    end = until(visit)
    return None if end is None else microseconds(end)


def until_text(visit: Visit) -> str:
    """The end that was entered, for a message: " until Friday 20 November 2026, 18:00 Europe/Berlin". Empty for none,
    and for one that can't be read, which the form itself complains about."""
    try:
        end = until(visit)
    except Mistake:
        return ""
    return "" if end is None else f" until {end_in_words(end, visit.zone)}"


def sentence(text: str) -> str:
    """A text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _since(visit: Visit, conflict: Conflict) -> tuple[Version, ...]:
    based_on = visit.form.number("based_on") or 0
    found = visit.service.policy.versions(most=MOST_CHANGES)
    return tuple(version for version in found if version.number > based_on)
