"""The numbers of quotas in a policy, which tiers and overrides give only in part."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate.calendars import UNITS, Calendar
from headgate.errors import InvalidLimit
from headgate.limits import QuotaLimit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate._limit_syntax import Phrase

__all__ = ["QuotaTerms", "no_rate", "terms_of"]

EXAMPLE: Final = 'write it like "1000/month", or {allowance: 1000, per: month, rollover: 200}'


class QuotaTerms(NamedTuple):
    """The numbers of a quota; None for those that are not given, which are then those of the limit itself."""

    allowance: int | None = None
    per: str | None = None
    """The unit of the calendar period."""
    starts: int | str | None = None
    timezone: str | None = None
    rollover: int | None = None
    pay_as_you_go: int | None = None

    def named(self) -> dict[str, object]:
        """The terms by their names in a policy."""
        return dict(zip(("quota", "period", *self._fields[2:]), self, strict=True))

    def or_else(self, base: QuotaTerms) -> QuotaTerms:
        """These terms, with those of `base` where none is given. The start day of another period is not used."""
        if self.per not in (None, base.per):
            base = base._replace(starts=None)
        pairs = zip(self, base, strict=True)
        return QuotaTerms(*[other if own is None else own for own, other in pairs])  # type: ignore[arg-type]

    def limit(self, name: str) -> QuotaLimit:
        """The limit with these numbers; raises InvalidLimit if some are missing."""
        if self.allowance is None or self.per is None:
            missing = "allowance" if self.allowance is None else "period"
            raise InvalidLimit(f"the quota has no {missing}; {EXAMPLE}")
        calendar = Calendar(self.per, starts=self.starts, timezone=self.timezone or "UTC")
        rollover, pay_as_you_go = self.rollover or 0, self.pay_as_you_go or 0
        return QuotaLimit(self.allowance, calendar, name=name, rollover=rollover, pay_as_you_go=pay_as_you_go)


def no_rate(given: Iterable[str]) -> str:
    """The message about numbers that are not those of a rate."""
    found = ", ".join(sorted(given))
    form = "numbers need bucket_size and refill_rate, or quota and period (and burst, if you like)"
    return f"{form}; here is {found or 'neither'}"


def terms_of(phrase: Phrase) -> QuotaTerms:
    """The terms that a text like "1000/month" gives; raises InvalidLimit for numbers that only a rate has."""
    for what, value in (("burst", phrase.burst), ("algorithm", phrase.algorithm)):
        if value is not None:
            raise InvalidLimit(f"{what} {value} means nothing to a quota, which the ledger counts; leave it out")
    period = phrase.period
    if isinstance(period, timedelta):
        units = {timedelta(days=1): "day", timedelta(weeks=1): "week"}
        if period not in units:
            kinds = ", ".join(UNITS)
            raise InvalidLimit(f"a quota is per calendar period ({kinds}), not per {period}; {EXAMPLE}, or use bucket:")
        return QuotaTerms(phrase.quota, units[period])
    is_first = period == Calendar(period.unit, timezone=period.timezone)
    timezone = None if period.timezone == "UTC" else period.timezone
    return QuotaTerms(phrase.quota, period.unit, None if is_first else period.starts, timezone)
