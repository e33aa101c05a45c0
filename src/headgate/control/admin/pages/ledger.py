"""The page of one account of the ledger: balance, grants, statement, and the forms that grant and adjust."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from uuid import uuid4

from headgate.clock import EPOCH
from headgate.control.admin.pages import charts
from headgate.control.admin.pages.forms import FieldError, change_context, submit, until
from headgate.control.admin.pages.lists import show_list
from headgate.control.service.ledger import month_of
from headgate.errors import InvalidInput
from headgate.quotas.statement_page import line_cells, statement_sums
from headgate.telemetry.human_time import microseconds

if TYPE_CHECKING:
    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit
    from headgate.control.admin.pages.forms import Submission
    from headgate.control.service import Change
    from headgate.quotas.statement import Statement

__all__ = ["account", "adjust", "grant"]

MAX_LINES: Final = 100

_MONTH: Final = re.compile(r"([12]\d{3})-(0[1-9]|1[0-2])")
_AMOUNT: Final = re.compile(r"[+-]?\d{1,16}")


def account(visit: Visit, submission: Submission | None = None) -> Response:
    name = (visit.form or visit.query).get("account", "")
    if not name:
        raise InvalidInput("no account given: choose one on the page of the ledger")
    view = visit.service.ledger.account(name)
    since, end = _month(visit)
    statement = visit.service.ledger.statement(
        name, microseconds(since), microseconds(end), zone=visit.zone, most=MAX_LINES
    )
    days = [day for day in statement.days if day.day <= f"{_local(visit, visit.now_us):%Y-%m-%d}"]
    has_next = end <= EPOCH + timedelta(microseconds=visit.now_us)
    return visit.page(
        "account.html",
        "/ledger",
        submission=submission,
        view=view,
        statement=statement,
        sums=statement_sums(statement),
        lines=[line_cells(line, visit.zone) for line in statement.lines],
        chart=_chart(statement),
        days=[(day.day, f"{day.charged:,}", f"{day.granted:+,}", f"{day.owned:,}") for day in days],
        month=f"{since:%B %Y}",
        months={
            "Previous month": _url(name, since - timedelta(days=1)),
            "Next month": _url(name, end) if has_next else None,
        },
        entry_id=uuid4().hex,
    )


def grant(visit: Visit) -> Response:
    def change() -> Change:
        name = visit.form.get("account", "")
        if not name:
            raise FieldError("account", "Enter the name of an account. The first grant creates it.")
        return visit.service.ledger.grant(
            change_context(visit),
            name,
            _amount(visit, least=1),
            id=visit.form.get("entry_id") or None,
            expires_at=until(visit),
            source=visit.form.get("source") or "grant",
            reference=visit.form.get("reference", ""),
        )

    is_list = visit.form.get("from") == "list"
    page: Any = _list if is_list else account
    return submit(visit, "grant", change, done="Granted {amount} to {account}.", redirect=_back(visit), page=page)


def adjust(visit: Visit) -> Response:
    def change() -> Change:
        amount = _amount(visit)
        if not amount:
            raise FieldError("amount", "An adjustment of 0 has no effect.")
        return visit.service.ledger.adjust(
            change_context(visit),
            visit.form.get("account", ""),
            amount,
            id=visit.form.get("entry_id") or None,
            reference=visit.form.get("reference", ""),
        )

    return submit(visit, "adjust", change, done="Adjusted {account} by {amount}.", redirect=_back(visit), page=account)


def _list(visit: Visit, submission: Submission) -> Response:
    return show_list(visit, submission)


def _back(visit: Visit) -> str:
    return f"/ledger/account?{urlencode({'account': visit.form.get('account', '')})}"


def _url(account: str, day: datetime) -> str:
    return f"/ledger/account?{urlencode({'account': account, 'month': f'{day:%Y-%m}'})}#h-statement"


def _month(visit: Visit) -> tuple[datetime, datetime]:
    """The month in the query, in the visitor's time zone; the current one by default."""
    found = _MONTH.fullmatch((visit.form or visit.query).get("month", ""))
    if found is None:
        return month_of(visit.now_us, visit.zone)
    return month_of(microseconds(datetime(int(found[1]), int(found[2]), 15, tzinfo=UTC)), visit.zone)


def _local(visit: Visit, at_us: int) -> datetime:
    return (EPOCH + timedelta(microseconds=at_us)).astimezone(visit.zone)


def _amount(visit: Visit, *, least: int | None = None) -> int:
    """The amount that was entered, with or without separators of thousands."""
    text = visit.form.get("amount", "").replace(",", "").replace(" ", "")
    if not _AMOUNT.fullmatch(text) or (least is not None and int(text) < least):
        expected = "a whole number" if least is None else f"a whole number of at least {least}"
        raise FieldError("amount", f"Enter {expected}.")
    return int(text)


def _chart(statement: Statement) -> charts.Chart:
    bands = [charts.Band("Charged", "allowed", [day.charged for day in statement.days])]
    labels = [day.day for day in statement.days]
    return charts.bars(bands, labels, id="charged", title="Charged by day", empty="nothing charged")
