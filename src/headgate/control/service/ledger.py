"""The accounts of the quota ledger: balances, statements, grants and adjustments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Final

from headgate.clock import DAY_US
from headgate.control.service.dependencies import ServiceDependencies, TopicService
from headgate.control.service.errors import NotFound
from headgate.control.service.models import Change, ChangeContext, Page, View
from headgate.quotas.charges import explain_charges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.control.service.models import ClientRef
    from headgate.quotas import Ledger
    from headgate.quotas.charges import ChargeReport
    from headgate.quotas.ledger import AccountSummary
    from headgate.quotas.statement import Statement, StatementDay
    from headgate.quotas.usage_alerts import UsageAlert

__all__ = ["AccountRow", "AccountView", "Forecast", "LedgerService", "forecast", "month_of"]

NO_LEDGER: Final = "the admin server was started without --ledger"
FORECAST_DAYS: Final = 7
MAX_FORECAST_US: Final = 3650 * DAY_US
MAX_LINES: Final = 1000


@dataclass(frozen=True, slots=True)
class AccountRow(View):
    """An account in a list."""

    account: str
    available: int
    held: int
    charged: int


@dataclass(frozen=True, slots=True)
class Forecast(View):
    """When the balance of an account is used up if it is charged as in the last days."""

    days: int
    """The number of days that it is based on, up to seven."""
    per_day: float
    """Charged per day."""
    exhausted_us: int | None
    """None if nothing was charged, or if the balance lasts for more than ten years."""


@dataclass(frozen=True, slots=True)
class AccountView(View):
    """An account: its totals, its open grants in the order in which they are spent, a forecast, and usage alerts."""

    summary: AccountSummary
    forecast: Forecast
    alerts: tuple[UsageAlert, ...]
    """The thresholds of its allowance that it has reached, newest first."""


class LedgerService(TopicService):
    """Reads accounts of the ledger, and adds grants and adjustments. Every change is also in the audit log."""

    def __init__(self, deps: ServiceDependencies, ledger: Ledger | None) -> None:
        super().__init__(deps)
        self._ledger = ledger

    @property
    def is_available(self) -> bool:
        """False if the admin server has no ledger."""
        return self._ledger is not None

    @property
    def ledger(self) -> Ledger:
        """The ledger; raise NotFound if there is none."""
        if self._ledger is None:
            raise NotFound(NO_LEDGER)
        return self._ledger

    def list(self, *, search: str = "", after: str | None = None, most: int = 50) -> Page[AccountRow]:
        """The accounts whose names begin with `search`, in alphabetical order."""
        names = self.ledger.accounts(prefix=search, after=after or "", most=most + 1)
        summaries = [self.ledger.summary(name) for name in names[:most]]
        rows = [AccountRow(each.account, each.available, each.held, each.charged) for each in summaries]
        return Page(tuple(rows), names[most - 1] if len(names) > most else None)

    def account(self, account: str) -> AccountView:
        """One account; raise NotFound if it has no entries."""
        summary = self._summary(account)
        now_us = self._deps.now_us()
        since_us = now_us - FORECAST_DAYS * DAY_US
        days = self.statement(account, since_us, now_us, zone=UTC, most=0).days
        alerts = tuple(self.ledger.usage_alerts(account))
        return AccountView(summary, forecast(days, summary.available, now_us), alerts)

    def statement(self, account: str, since_us: int, until_us: int, *, zone: tzinfo, most: int = 100) -> Statement:
        """The sums, days and first lines of an account in a period; raise NotFound if it has no entries."""
        self._summary(account)
        return self.ledger.statement(account, since_us, until_us, most=min(most, MAX_LINES), zone=zone)

    def charges(self, client: ClientRef, since_us: int, until_us: int) -> Sequence[ChargeReport]:
        """Reports on the accounts of a client in a period; none without a ledger."""
        if self._ledger is None:
            return ()
        found = self._deps.lookup.resolve(client)
        names = {found.value, *self._deps.resolve(found).facts.log_keys}
        return explain_charges(self._ledger, names, since_us, until_us)

    def _summary(self, account: str) -> AccountSummary:
        summary = self.ledger.summary(account)
        if not summary.entries:  # the name is not repeated: it may be an API key
            raise NotFound("there is no such account; the first grant creates one")
        return summary

    def grant(
        self,
        change: ChangeContext,
        account: str,
        amount: int,
        *,
        id: str | None = None,
        expires_at: datetime | None = None,
        priority: int | None = None,
        source: str = "grant",
        reference: str = "",
    ) -> Change:
        """Add to the balance of an account, which the first grant creates."""
        change.actor.require("operator", "grant to accounts")
        self._deps.require_future(expires_at)
        options = {} if priority is None else {"priority": priority}
        end = "" if expires_at is None else f" until {expires_at.astimezone(UTC).isoformat()}"
        self._deps.lookup.refuse_keys(change.reason, account, source, reference, id or "")
        self.ledger.grant(
            account, amount, id=id, expires_at=expires_at, source=source, author=change.actor.name,
            reason=change.reason, reference=reference, **options,
        )  # fmt: skip
        return self._audit(change, "granted", f"{amount:,} to account {account}{end}")

    def adjust(
        self, change: ChangeContext, account: str, amount: int, *, id: str | None = None, reference: str = ""
    ) -> Change:
        """Correct the balance of an account, up or down."""
        change.actor.require("operator", "adjust accounts")
        self._deps.lookup.refuse_keys(change.reason, account, reference, id or "")
        self.account(account)  # a mistyped name must not create an account
        self.ledger.adjust(account, amount, id=id, reason=change.reason, author=change.actor.name, reference=reference)
        return self._audit(change, "adjusted", f"account {account} by {amount:+,}")

    def _audit(self, change: ChangeContext, action: str, subject: str) -> Change:
        """Record a change that the ledger has accepted, with its author and reason: both may be in one SQLite file, so
        that one transaction must end before the other begins."""
        with self._deps.audited(change.actor, action, subject, reason=change.reason):
            pass
        return Change(None, what=f"{action} {subject}")


def forecast(days: tuple[StatementDay, ...], available: int, now_us: int) -> Forecast:
    """The forecast from the last days, without those before the account was first used."""
    used = list(days)
    while used and not (used[0].granted or used[0].charged or used[0].owned):
        del used[0]
    charged, count = sum(day.charged for day in used), min(max(1, len(used)), FORECAST_DAYS)
    per_day = charged / count
    if not charged:
        return Forecast(count, 0.0, None)
    left_us = int(available / per_day * DAY_US)
    return Forecast(count, per_day, now_us + left_us if left_us <= MAX_FORECAST_US else None)


def month_of(at_us: int, zone: tzinfo, *, offset: int = 0) -> tuple[datetime, datetime]:
    """The begin and end of the local month of an instant, or of the month `offset` months away."""
    local = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_us)).astimezone(zone)
    number = local.year * 12 + local.month - 1 + offset
    starts = [datetime(each // 12, each % 12 + 1, 1, tzinfo=zone) for each in (number, number + 1)]
    return starts[0], starts[1]
