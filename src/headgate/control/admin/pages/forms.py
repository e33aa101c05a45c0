"""Forms that change something: input is kept until it is valid, and risky changes need a confirmation."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.responses import Response

from headgate.clock import EPOCH
from headgate.control.admin.pages.filters import client_url
from headgate.control.admin.problems import of_error
from headgate.control.admin.sessions import CSRF_FIELD
from headgate.control.config import ConfigUnavailable, Conflict
from headgate.control.service import ChangeContext, ClientRef
from headgate.control.service.dependencies import MAX_REASON_LENGTH
from headgate.control.service.errors import NeedsConfirmation, NotAllowed, NotFound
from headgate.errors import HeadgateError, InvalidInput, InvalidPolicy
from headgate.limits import Limit
from headgate.policy import scalars
from headgate.telemetry.human_time import coming, end_in_words, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from headgate.control.admin.pages.base import Visit
    from headgate.control.config.history import Version
    from headgate.control.service import Change
    from headgate.control.service.errors import Risk

__all__ = ["FieldError", "Submission", "bucket", "change_context", "reason", "submit", "until", "until_us"]

MAX_CONFLICTS: Final = 8
"""Versions listed when the configuration was changed in the meantime."""
FIELD_TITLES: Final = {
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
"""Fields shown in a confirmation."""
MAX_TIME_US: Final = 253_402_000_000_000_000
"""Near the end of the year 9999, the last year of `datetime`."""


class FieldError(HeadgateError):
    """A form field with an invalid value."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class Submission(NamedTuple):
    """A submitted form that was not accepted, with its values and errors."""

    form: str
    values: Mapping[str, str]
    errors: Mapping[str, str] = {}
    """By field; the first one is focused."""
    problems: tuple[str, ...] = ()
    """Errors of the form as a whole."""
    conflicts: tuple[Version, ...] = ()
    """Versions written by others since the form was opened."""
    status: int = 422


def submit(
    visit: Visit,
    form: str,
    change: Callable[[], Change | Response],
    *,
    question: str = "",
    done: str = "",
    page: Callable[[Visit, Submission], Response],
    who: ClientRef | None = None,
    redirect: str = "",
) -> Response:
    """Apply a form, and redirect with the message `done`, by default to the page of the client.

    A change may return a response instead, such as a preview.
    If the form is invalid, render its `page` again; if the change is risky, ask the `question`. Both texts may contain
    names of fields, and {name}, {Name}, {until}, {end} and {limits}, as in "Block {name}{until}?".
    """
    submission = Submission(form, visit.form)
    if "again" in visit.form:  # back from the confirmation
        return page(visit, submission._replace(status=200))
    texts = _texts(visit, who)
    try:
        result = change()
    except FieldError as error:
        return page(visit, submission._replace(errors={error.field: f"{error}"}))
    except NeedsConfirmation as confirmation:
        return _confirm(visit, question=question.format_map(texts), risks=confirmation.risks)
    except Conflict:
        return page(visit, submission._replace(conflicts=_versions_since(visit), status=409))
    except InvalidPolicy as invalid:
        return page(visit, submission._replace(problems=tuple(f"{invalid}".splitlines())))
    except (NotAllowed, NotFound, ConfigUnavailable):
        raise
    except HeadgateError as error:
        return page(visit, submission._replace(problems=(of_error(error).detail,)))
    if isinstance(result, Response):
        return result
    number = "" if result.version is None else f" Version {result.version.number}."
    url = redirect if who is None else redirect or client_url(*who)
    return visit.redirect(url, f"{done.format_map(texts)}{number}", result.notes)


def _texts(visit: Visit, who: ClientRef | None) -> Mapping[str, str]:
    """The fields of a form, the name of its client, and its end."""
    name, end = "" if who is None else visit.name_of(who), _end_in_words(visit)
    texts = defaultdict(str, visit.form)
    texts |= {
        "name": name,
        "Name": name[:1].upper() + name[1:],
        "until": f" until {end}" if end else "",
        "end": f" until {end}" if end else ", with no end date",
        "limits": visit.form.get("limit") or "all limits",
    }
    return texts


def _confirm(visit: Visit, *, question: str, risks: Sequence[Risk]) -> Response:
    """The confirmation page. It submits the form again, with the risks confirmed and the end time that it showed."""
    excluded = (CSRF_FIELD, "confirm", "again", "until_us")
    fields = [(name, value) for name, value in visit.form.pairs if name not in excluded]
    if (end_us := until_us(visit)) is not None:
        fields.append(("until_us", str(end_us)))
    path, facts = visit.request.url.path, [*_facts(visit)]
    return visit.page(
        "confirm.html", status=409, question=question, risks=risks, hidden_fields=fields, facts=facts, path=path
    )


def _facts(visit: Visit) -> Iterator[tuple[str, str]]:
    """The fields of a form, with the client's name and the end as a date."""
    form = visit.form
    if form.get("kind") and form.get("value"):
        yield "Client", visit.name_of(ClientRef(form["kind"], form["value"]))
    for name, title in FIELD_TITLES.items():
        if form.get(name):
            yield title, _end_in_words(visit) or form[name] if name == "until" else form[name]


def change_context(visit: Visit) -> ChangeContext:
    """The actor, reason, confirmed risks and base version of a submitted form."""
    confirmed = frozenset(visit.form.all("confirm"))
    return ChangeContext(visit.actor, reason(visit), confirmed=confirmed, based_on=visit.form.number("based_on"))


def reason(visit: Visit) -> str:
    text = visit.form.get("reason", "")
    if not text:
        raise FieldError("reason", "Enter a reason. It is recorded in the audit log.")
    if len(text) > MAX_REASON_LENGTH:
        raise FieldError("reason", f"Too long: {len(text)} characters, at most {MAX_REASON_LENGTH} are allowed.")
    return text


def bucket(visit: Visit) -> str:
    """A limit in policy syntax."""
    text = visit.form.get("bucket", "")
    if not text:
        raise FieldError("bucket", 'Enter a limit, for example "1000/minute" or "1000/minute, burst 200".')
    try:
        Limit.parse(text, name="check")
    except HeadgateError as error:
        if not text.startswith("0"):  # the service explains what to do instead of a limit of 0
            raise FieldError("bucket", f"{error}") from None
    return text


def until(visit: Visit) -> datetime | None:
    """The end time that was entered, or None; a day means its end.

    A confirmation sends the time that it showed, so that "in 1 hour" does not move meanwhile.
    """
    text = visit.form.get("until", "")
    if not text:
        return None
    confirmed_us = visit.form.number("until_us")
    now = EPOCH + timedelta(microseconds=visit.now_us)
    try:
        if confirmed_us is not None:
            return scalars.instant(EPOCH + timedelta(microseconds=min(confirmed_us, MAX_TIME_US)))
        return scalars.instant(coming(text, now=now, zone=visit.zone, at_its_end=True))
    except scalars.OutOfRange:
        latest = scalars.HORIZON.year - 1
        raise FieldError("until", f"The latest possible year is {latest}. Leave empty for no end date.") from None
    except InvalidInput as error:
        raise FieldError("until", f"{error}") from None


def until_us(visit: Visit) -> int | None:
    """The end time that was entered, in microseconds."""
    end = until(visit)
    return None if end is None else microseconds(end)


def _end_in_words(visit: Visit) -> str:
    """The end for a message, like "Friday 20 November 2026, 18:00 Europe/Berlin".

    Empty without an end, and for an invalid one, which the form reports itself.
    """
    try:
        end = until(visit)
    except FieldError:
        return ""
    return "" if end is None else end_in_words(end, visit.zone)


def _versions_since(visit: Visit) -> tuple[Version, ...]:
    based_on = visit.form.number("based_on") or 0
    found = visit.service.policy.versions(most=MAX_CONFLICTS)
    return tuple(version for version in found if version.number > based_on)
