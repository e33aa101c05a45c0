"""Sums by label values, with a bounded number of series."""

from __future__ import annotations

from typing import Final, TypeAlias

__all__ = ["MAX_SERIES", "OTHER", "LabeledTotals", "Labels"]

OTHER: Final = "other"
MAX_SERIES: Final = 500

Labels: TypeAlias = tuple[str, ...]


class LabeledTotals:
    """Sums by label values; what is beyond `MAX_SERIES` is added under "other"."""

    def __init__(self, *known: Labels) -> None:
        """`known` series exist from the start: Prometheus sees no increase in a series that begins with 1."""
        self._known = known
        self.clear()

    def clear(self) -> None:
        self._sums: dict[Labels, float] = dict.fromkeys(self._known, 0)

    def add(self, labels: Labels, amount: float = 1) -> None:
        if labels not in self._sums and len(self._sums) >= MAX_SERIES:
            labels = (OTHER,) * len(labels)
        self._sums[labels] = self._sums.get(labels, 0) + amount

    def items(self) -> list[tuple[Labels, float]]:
        return list(self._sums.items())
