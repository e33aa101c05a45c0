"""Each decision as one line, as it is made."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.adapters import Admission, RequestInfo
    from headgate.policy.snapshot import Resolution

__all__ = ["BOLD", "DIM", "GREEN", "MARK", "RED", "YELLOW", "line", "paint", "show"]

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"

MARK = "x-crowd"
"""The header field by which the shop knows the visitors that it sends itself."""

WIDEST = 120
"""Columns that a whole line takes; a narrower terminal gets one without the time, the tier and the cost."""


def show(arrival: RequestInfo, admission: Admission) -> None:
    """Print a decision: what `on_decision=` calls. The crowd would drown all others."""
    if arrival.header(MARK):
        return
    # One write for each line: several workers share the terminal.
    sys.stdout.write(line(arrival, admission, datetime.now().astimezone()) + "\n")
    sys.stdout.flush()


def line(arrival: RequestInfo, admission: Admission, now: datetime) -> str:
    """When, what was decided, on what, whose it was, what it cost, and what is left."""
    answer, style = _answer(admission)
    answer = paint(f"{answer:<22}", style)
    method, path = _safe(arrival.method, 6), _safe(arrival.path, 14)
    who = tier = cost = left = ""
    resolution, decision = admission.resolution, admission.decision
    if resolution is not None:
        who, tier = _who(resolution), resolution.tier or "-"
    if decision is not None and resolution is not None and not _is_unknown(admission):
        tightest = min(decision.outcomes, key=lambda outcome: outcome.remaining / outcome.limit.capacity)
        cost = f"cost {next(met.cost for met in resolution.applied_limits if met.key == tightest.key)}"
        left = f"{tightest.remaining:>5} left of {tightest.limit.name}"
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDEST:
        return f"{answer} {f'{method} {path}':<14} {who:<11} {left}".rstrip()
    return f"{now:%H:%M:%S}  {answer}  {method:<4} {path:<14}  {tier:<10} {who:<15}  {cost:<8}  {left}".rstrip()


def paint(text: str, style: str) -> str:
    """In colour where somebody looks, and plain where a file or a pipe does."""
    coloured = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\x1b[{style}m{text}\x1b[0m" if coloured else text


def _answer(admission: Admission) -> tuple[str, str]:
    decision, refusal = admission.decision, admission.refusal
    if refusal is not None:
        if decision is None:
            return f"{refusal.status} blocked", RED
        why = "store is away" if _is_unknown(admission) else ", ".join(decision.denied_by)
        return f"{refusal.status} {why}", RED
    if decision is not None and decision.degraded is not None:
        return "allowed, store is away", YELLOW
    watched = [shadow.met.rule.name for shadow in admission.shadows if not shadow.decision.allowed]
    return (f"allowed, not by {watched[0]}", YELLOW) if watched else ("allowed", GREEN)


def _is_unknown(admission: Admission) -> bool:
    """Whether the store is away, and nobody counts in its place: then there is nothing to say of what is left."""
    resolution, decision = admission.resolution, admission.decision
    is_counted_here = resolution is not None and resolution.route.on_failure == "local"
    return decision is not None and decision.degraded is not None and not is_counted_here


def _who(resolution: Resolution) -> str:
    """What the client is known by. Of a key there is only a hash, and of that a piece is enough."""
    who = resolution.who
    return f"key {who['api_key'][-6:]}" if "api_key" in who else _safe(who.get("user") or who["ip"], 15)


def _safe(text: str, width: int) -> str:
    """What a client has sent, fit for a terminal: short, and without anything that would move its cursor."""
    shown = "".join([letter if letter.isprintable() else "?" for letter in text])
    return shown if len(shown) <= width else f"{shown[: width - 2]}.."
