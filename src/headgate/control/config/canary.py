"""Canaries of the policy: a candidate document, the nodes that apply it first, and the thresholds of its rollback."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from headgate.control.config.rows import CanaryRow
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Collection

    from headgate.control.config.rows import PolicyDocument

__all__ = ["CanaryPart", "CanarySpec", "canary_row"]

MAX_NODES: Final = 200
MAX_NODE_LENGTH: Final = 200
MAX_RUN: Final = timedelta(days=30)
MIN_RUN: Final = timedelta(seconds=1)
MAX_ATTEMPTS: Final = 300
"""Seeds that are tried for a share of the known nodes."""


class CanaryPart(NamedTuple):
    """The part of one node in the running canary."""

    canary: str
    """Identifies the canary."""
    role: Literal["candidate", "stable"]
    """The document that the node applies: the candidate, or the current one."""
    error: str | None = None
    """The reason why the node should apply the candidate, but cannot."""


@dataclass(frozen=True, slots=True)
class CanarySpec:
    """The nodes of a canary, either `percent` of them or `nodes` by name, and the thresholds of its rollback."""

    percent: int | None = None
    nodes: tuple[str, ...] = ()
    max_rejections: float = 5.0
    """Percentage points by which the share of rejections may exceed that of the other nodes."""
    max_errors: float = 1.0
    """Percentage points by which the share of requests that a failure mode answered may exceed it."""
    max_latency: float = 2.0
    """The permitted 99th percentile of latency, as a multiple of that of the other nodes."""
    run_for: timedelta | None = None
    """The time of observation; None without a limit."""
    promote: bool = False
    """True to promote the candidate after `run_for`, unless it was rolled back."""

    def __post_init__(self) -> None:
        if (self.percent is None) == (not self.nodes):
            raise InvalidInput("give either a percentage of nodes or the names of nodes")
        if self.percent is not None and (type(self.percent) is not int or not 1 <= self.percent <= 100):
            raise InvalidInput(f"percent {self.percent}: give a whole number from 1 to 100")
        for node in self.nodes:
            if not node or len(node) > MAX_NODE_LENGTH or not node.isprintable() or "," in node or node != node.strip():
                raise InvalidInput(f"node {node!r}: give the name of a node as `headgate top` shows it, without ':PID'")
        if len(self.nodes) > MAX_NODES:
            raise InvalidInput(f"{len(self.nodes)} nodes: name at most {MAX_NODES}, or give a percentage")
        _check_number("max_rejections", self.max_rejections, 0, 100)
        _check_number("max_errors", self.max_errors, 0, 100)
        _check_number("max_latency", self.max_latency, 1, 1000)
        if self.run_for is not None and not MIN_RUN <= self.run_for <= MAX_RUN:
            raise InvalidInput(f"a canary is observed for {MIN_RUN.seconds} second to {MAX_RUN.days} days")
        if self.promote and self.run_for is None:
            raise InvalidInput("give the time after which the candidate is promoted")


def canary_row(
    document: PolicyDocument, spec: CanarySpec, known_nodes: Collection[str], *, begun_us: int, author: str, reason: str
) -> CanaryRow:
    """The row of a canary that starts now. A percentage selects at least one of the known nodes, but never all of
    several, so that there are nodes to compare."""
    run_us = None if spec.run_for is None else spec.run_for // timedelta(microseconds=1)
    row = CanaryRow(
        secrets.token_hex(4),
        "running",
        *document,
        percent=spec.percent,
        nodes=",".join(dict.fromkeys(spec.nodes)) or None,
        max_rejections_bp=round(spec.max_rejections * 100),
        max_errors_bp=round(spec.max_errors * 100),
        max_latency_percent=round(spec.max_latency * 100),
        run_us=run_us,
        promotes=int(spec.promote),
        begun_us=begun_us,
        author=author,
        reason=reason,
    )
    if spec.percent in (None, 100) or not known_nodes:
        return row
    # A hash alone would select none of a few nodes in most cases: choose the seed with the nearest share.
    wanted = min(max(round(len(known_nodes) * (spec.percent or 0) / 100), 1), max(len(known_nodes) - 1, 1))
    rows = (row._replace(canary=secrets.token_hex(4)) for _ in range(MAX_ATTEMPTS))
    best, distance = row, len(known_nodes)
    for each in rows:
        missed = abs(sum(map(each.includes, known_nodes)) - wanted)
        if missed < distance:
            best, distance = each, missed
        if not missed:
            break
    return best


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidInput(f"{name} {value}: give a number from {least} to {most}")
