"""Prints each decision as a line in the terminal."""

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
"""The header field that marks simulated clients, whose decisions are not printed."""

WIDEST = 120
"""Width of a complete line; narrower terminals get one without time, tier and cost."""


def show(request: RequestInfo, admission: Admission) -> None:
    """Print a decision, as `on_decision=`; those of simulated clients are left out."""
    if request.header(MARK):
        return
    # One write per line, as several workers share the terminal.
    sys.stdout.write(line(request, admission, datetime.now().astimezone()) + "\n")
    sys.stdout.flush()


def line(request: RequestInfo, admission: Admission, now: datetime) -> str:
    """A line with time, decision, request, client, cost and remaining quota."""
    answer, style = _answer(admission)
    answer = paint(f"{answer:<22}", style)
    method, path = _safe(request.method, 6), _safe(request.path, 14)
    who = tier = cost = left = ""
    resolution, decision = admission.resolution, admission.decision
    if resolution is not None:
        who, tier = _who(resolution), resolution.tier or "-"
    if decision is not None and resolution is not None and not _is_unknown(admission):
        tightest = min(decision.outcomes, key=lambda outcome: outcome.remaining / outcome.limit.capacity)
        cost = f"cost {next(each.cost for each in resolution.applied_limits if each.key == tightest.key)}"
        left = f"{tightest.remaining:>5} left of {tightest.limit.name}"
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDEST:
        return f"{answer} {f'{method} {path}':<14} {who:<11} {left}".rstrip()
    return f"{now:%H:%M:%S}  {answer}  {method:<4} {path:<14}  {tier:<10} {who:<15}  {cost:<8}  {left}".rstrip()


def paint(text: str, style: str) -> str:
    """The text in colour at a terminal, plain elsewhere."""
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
    watched = [shadow.applied.rule.name for shadow in admission.shadows if not shadow.decision.allowed]
    return (f"allowed, not by {watched[0]}", YELLOW) if watched else ("allowed", GREEN)


def _is_unknown(admission: Admission) -> bool:
    """True if the store is unavailable and no local share counts: the remaining quota is unknown."""
    resolution, decision = admission.resolution, admission.decision
    is_counted_here = resolution is not None and resolution.route.on_failure == "local"
    return decision is not None and decision.degraded is not None and not is_counted_here


def _who(resolution: Resolution) -> str:
    """The client in short; for an API key, the beginning of its hash."""
    who = resolution.who
    return f"key {who['api_key'][-6:]}" if "api_key" in who else _safe(who.get("user") or who["ip"], 15)


def _safe(text: str, width: int) -> str:
    """A text from a client, shortened and without control characters."""
    shown = "".join([letter if letter.isprintable() else "?" for letter in text])
    return shown if len(shown) <= width else f"{shown[: width - 2]}.."
