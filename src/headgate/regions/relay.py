"""Reports of a region's usage that pass through the store of another region. Pure.

A report has the name of its region, the epoch of that region's data, and the field in its own store. Its value is a
total that only grows, so that it may arrive on several ways, late or repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_REPORTS", "Outbox", "parse_relayed", "relayed_field", "relayed_prefix"]

MAX_REPORTS: Final = 500
"""Reports in one call: the server is busy with them for about two milliseconds."""
_SEPARATOR: Final = "\n"  # neither in names of regions nor in fields


def relayed_prefix(region: str) -> str:
    """The beginning of the names of all reports of a region."""
    return f"{region}{_SEPARATOR}"


def relayed_field(region: str, epoch: str, field: str) -> str:
    """The name of a report in the stores of other regions.

    >>> parse_relayed(relayed_field("eu", "7f3a", "%time"))
    ('eu', '7f3a', '%time')
    """
    return f"{region}{_SEPARATOR}{epoch}{_SEPARATOR}{field}"


def parse_relayed(field: str) -> tuple[str, str, str] | None:
    """Region, epoch and field of a report; None for a field of the store's own region."""
    if _SEPARATOR not in field:
        return None
    region, _, rest = field.partition(_SEPARATOR)
    epoch, _, name = rest.partition(_SEPARATOR)
    return region, epoch, name


class Outbox:
    """Reports for the store of one region that it has not confirmed; of each field the latest.

    >>> outbox = Outbox({"a": "1 0", "b": "1 0"})
    >>> sent = outbox.take()
    >>> outbox.add({"a": "2 0"})
    >>> outbox.put_back()
    >>> outbox.reports
    {'a': '2 0', 'b': '1 0'}
    """

    def __init__(self, reports: Mapping[str, str] | None = None) -> None:
        self._waiting = dict(reports or {})
        self._sent: dict[str, str] = {}

    @property
    def reports(self) -> dict[str, str]:
        """All that is not confirmed."""
        return {**self._sent, **self._waiting}

    def add(self, reports: Mapping[str, str]) -> None:
        self._waiting.update(reports)

    def take(self) -> dict[str, str]:
        """The reports to send now."""
        self._sent, self._waiting = self._waiting, {}
        return self._sent

    def confirm(self) -> None:
        """Those that were taken have arrived."""
        self._sent = {}

    def put_back(self) -> None:
        """Those that were taken may not have arrived."""
        self._waiting, self._sent = self.reports, {}
