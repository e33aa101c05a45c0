"""The canary on the policy pages: its comparison, and the form that starts one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from headgate.control.admin.pages.filters import latency
from headgate.control.admin.pages.forms import FieldError
from headgate.control.config import CanarySpec, Difference, PolicyDocument
from headgate.errors import InvalidInput
from headgate.policy.scalars import duration

if TYPE_CHECKING:
    from datetime import timedelta

    from headgate.control.admin.pages.base import Visit
    from headgate.control.canaries.comparison import Measure
    from headgate.control.service.models import CanaryStatus

__all__ = ["MEASURES", "canary_spec", "canary_values", "format_measure"]

DEFAULTS: Final = CanarySpec(percent=10)
_NUMBER: Final = re.compile(r"\+?([0-9]{1,4}(?:\.[0-9]{1,2})?) ?(?:%|x)?")
MEASURES: Final = {"rejections": "Rejections", "errors": "Errors", "latency": "Latency (p99)"}


def canary_values(visit: Visit) -> dict[str, Any]:
    """The values of the template `canary.html`."""
    status = visit.service.canaries.status(visit.actor)
    return {"canary_status": status, "candidate_difference": _difference(visit, status)}


def _difference(visit: Visit, status: CanaryStatus) -> Difference | None:
    """The changes of the candidate that is running."""
    canary = status.canary
    if canary is None or canary.state != "running":
        return None
    now = visit.service.policy.get()
    before, after = (PolicyDocument(each.text, each.format, each.name) for each in (now, canary))
    return Difference("documents", 1, before, after)


def format_measure(measure: Measure, value: float | None) -> str:
    """A value of a comparison with its unit."""
    if measure.name == "latency":
        return latency(value)
    return "–" if value is None else f"{value:.1f} %"


def canary_spec(visit: Visit) -> CanarySpec:
    """The nodes and thresholds that were entered. Raises FieldError."""
    form = visit.form
    nodes = tuple([name.strip() for name in form.get("nodes", "").split(",") if name.strip()])
    percent = form.number("percent") if form.get("percent") else None
    if form.get("percent") and (percent is None or not 1 <= percent <= 100):
        raise FieldError("percent", "Enter a whole number from 1 to 100.")
    if nodes:
        percent = None
    elif percent is None:
        raise FieldError("percent", "Enter a share of the nodes, or names of nodes.")
    rejections, errors = _number(visit, "max_rejections", 0, 100), _number(visit, "max_errors", 0, 100)
    times, run_for = _number(visit, "max_latency", 1, 1000), _run_for(visit)
    if "promote" in form and run_for is None:
        raise FieldError("for", "Enter the time after which the candidate is promoted.")
    try:
        return CanarySpec(percent, nodes, rejections, errors, times, run_for, "promote" in form)
    except InvalidInput as error:
        raise FieldError("nodes" if nodes else "percent", f"{error}") from None


def _number(visit: Visit, field: str, least: float, most: float) -> float:
    text = visit.form.get(field, "")
    match = _NUMBER.fullmatch(text)
    if not text:
        return float(getattr(DEFAULTS, field))
    if match is None or not least <= float(match[1]) <= most:
        raise FieldError(field, f"Enter a number from {least:g} to {most:g}.")
    return float(match[1])


def _run_for(visit: Visit) -> timedelta | None:
    text = visit.form.get("for", "")
    if not text:
        return None
    try:
        return duration(text)
    except InvalidInput as error:
        raise FieldError("for", f"{error}") from None
