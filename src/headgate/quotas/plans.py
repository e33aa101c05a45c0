"""Quota plans: an allowance for each calendar period, then grants, then pay-as-you-go up to a cap.

The waterfall needs no logic of its own when it is spent: a period is opened with grants whose priorities put them in
order, before and after those that were bought or given, and whose expiry is the end of the period.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from headgate.calendars import Calendar
from headgate.errors import InvalidInput
from headgate.quotas.account import ALLOWANCE, PERIOD_PREFIX
from headgate.quotas.entries import EntryDraft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.quotas.account import AccountState

__all__ = ["PAY_AS_YOU_GO", "ROLLOVER", "QuotaPlan"]

ROLLOVER: Final = "rollover"
PAY_AS_YOU_GO: Final = "pay as you go"
PRIORITIES: Final = {ROLLOVER: 0, ALLOWANCE: 1, PAY_AS_YOU_GO: 1_000_000}
"""Other grants have 100, unless they are given another one."""

MAX_PLAN_AMOUNT: Final = 10**15
MAX_ACCOUNT_LENGTH: Final = 150


@dataclass(frozen=True, slots=True)
class QuotaPlan:
    """The terms of a quota.

    >>> plan = QuotaPlan("exports", 1000, Calendar("month"), rollover=200, pay_as_you_go=500)
    >>> plan.account("acme")
    'exports/acme'

    In each period of the calendar, an account has the `allowance`; before it, up to `rollover` units that were left of
    the allowance of the last period; after it and all other grants, `pay_as_you_go` units.
    """

    name: str
    allowance: int
    period: Calendar
    rollover: int = 0
    pay_as_you_go: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or len(self.name) > 80 or not self.name.isprintable():
            raise InvalidInput(f"the name of a plan must have 1 to 80 printable characters, got {self.name!r:.100}")
        if not isinstance(self.period, Calendar):
            raise InvalidInput(f"the period of plan {self.name!r} must be a Calendar, got {self.period!r:.100}")
        for field in ("allowance", "rollover", "pay_as_you_go"):
            value: Any = getattr(self, field)
            if type(value) is not int or not 0 <= value <= MAX_PLAN_AMOUNT:
                problem = f"{field} of plan {self.name!r} must be a whole number from 0 to {MAX_PLAN_AMOUNT}"
                raise InvalidInput(f"{problem}, got {value!r:.100}")

    def account(self, identity: str) -> str:
        """The name of a client's account. Long identities are hashed."""
        name = f"{self.name}/{identity}"
        return name if len(name) <= MAX_ACCOUNT_LENGTH else f"{self.name}/{sha256(identity.encode()).hexdigest()}"

    def grants_due(self, state: AccountState, now_us: int) -> Iterator[EntryDraft]:
        """The grants that open the current period of an account, or raise its allowance to that of the plan."""
        if now_us < state.period_end_us:
            missing = self.allowance - state.period_allowance
            if missing > 0:
                yield self._grant(state, ALLOWANCE, missing, state.period_end_us, f":{self.allowance}")
            return
        start_us, end_us = self.period.window(now_us)
        if start_us < state.period_end_us:
            # The calendar was changed, and the rest of this period was granted with the last one.
            end_us = self.period.window(end_us)[1]
        amounts = {
            ROLLOVER: min(self.rollover, state.period_unused),
            ALLOWANCE: self.allowance,
            PAY_AS_YOU_GO: self.pay_as_you_go,
        }
        for source, amount in amounts.items():
            if amount:
                yield self._grant(state, source, amount, end_us)

    def _grant(self, state: AccountState, source: str, amount: int, end_us: int, suffix: str = "") -> EntryDraft:
        id = f"{PERIOD_PREFIX}{state.account}:{end_us}:{source}{suffix}"
        return EntryDraft(
            id,
            "grant",
            amount,
            expires_us=end_us,
            priority=PRIORITIES[source],
            source=source,
            author="headgate",
            reason=f"plan {self.name}",
        )
