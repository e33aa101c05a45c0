"""What the overview shows: the fleet as it is now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.control.desk.basics import View
from headgate.telemetry.gathered import ClientCount, HotKey, Near, Series, Totals
from headgate.telemetry.gathered import Node as NodeView

if TYPE_CHECKING:
    from headgate.control.steps import StepChange

__all__ = ["ClientCount", "HotKey", "Near", "NodeView", "Overview", "Series", "Totals"]


@dataclass(frozen=True, slots=True)
class Overview(View):
    """What the fleet is doing."""

    at_us: int
    version: int | None
    """The newest of the configuration; None if the config store cannot be asked."""
    nodes: tuple[NodeView, ...]
    series: Series | None
    """None if there is no board to read it from."""
    totals: Totals
    top_denied: tuple[ClientCount, ...]
    near: tuple[Near, ...]
    hot: tuple[HotKey, ...]
    steps: tuple[StepChange, ...]
    troubles: tuple[str, ...]
    """What could not be found out, and why."""
