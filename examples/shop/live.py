"""Each decision as one line, as it is made."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.adapters.way import Admission, Arrival
    from headgate.policy.snapshot import Resolution

__all__ = ["BOLD", "DIM", "GREEN", "RED", "YELLOW", "line", "paint", "show"]

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def show(arrival: Arrival, admission: Admission) -> None:
    """Print a decision: what `on_decision=` calls."""
    # One write for each line: several workers share the terminal.
    sys.stdout.write(line(arrival, admission, datetime.now().astimezone()) + "\n")
    sys.stdout.flush()


def line(arrival: Arrival, admission: Admission, now: datetime) -> str:
    """When, what was decided, on what, whose it was, what is left, and what it cost."""
    answer, style = _answer(admission)
    resolution, decision = admission.resolution, admission.decision
    cells = [
        f"{now:%H:%M:%S}",
        paint(f"{answer:<22}", style),
        f"{_safe(arrival.method, 6):<4} {_safe(arrival.path, 14):<14}",
        f"{_who(resolution) if resolution else '':<26}",
    ]
    if decision is not None and resolution is not None:
        tightest = min(decision.outcomes, key=lambda outcome: outcome.remaining / outcome.limit.capacity)
        cost = next(met.cost for met in resolution.met if met.key == tightest.key)
        cells.append(f"cost {cost:<3}  {tightest.remaining:>5} left of {tightest.limit.name}")
    return "  ".join(cells).rstrip()


def paint(text: str, style: str) -> str:
    """In colour where somebody looks, and plain where a file or a pipe does."""
    coloured = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\x1b[{style}m{text}\x1b[0m" if coloured else text


def _answer(admission: Admission) -> tuple[str, str]:
    decision, refusal = admission.decision, admission.refusal
    if refusal is not None:
        why = "blocked" if decision is None else ", ".join(decision.denied_by) or "store is away"
        return f"{refusal.status} {why}", RED
    if decision is not None and decision.degraded is not None:
        return "allowed, store is away", YELLOW
    watched = [shadow.met.rule.name for shadow in admission.shadows if not shadow.decision.allowed]
    return (f"allowed, not by {watched[0]}", YELLOW) if watched else ("allowed", GREEN)


def _who(resolution: Resolution) -> str:
    """The tier, and what the client is known by. Of a key there is only a hash, and of that a piece is enough."""
    who = resolution.who
    name = f"key {who['api_key'][-6:]}" if "api_key" in who else _safe(who.get("user") or who["ip"], 15)
    return f"{resolution.tier or '-':<10} {name}"


def _safe(text: str, width: int) -> str:
    """What a client has sent, fit for a terminal: short, and without anything that would move its cursor."""
    shown = "".join([letter if letter.isprintable() else "?" for letter in text])
    return shown if len(shown) <= width else f"{shown[: width - 2]}.."
