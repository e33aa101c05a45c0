"""Conditions on the result of a replay, as in `rejected.pro > 0.1%`: a small language for builds, without code.

    condition   comparison { ("and" | "or") comparison }, "and" before "or"
    comparison  metric operator number ["%"]
    operator    > >= < <= == !=
    metric      rejected, allowed, requests or blocked, optionally of a part: rejected.pro, requests.limit.search,
                rejected.client."203.0.113.9"; also clients, rejected_clients, found_clients (by scenarios),
                newly_rejected, newly_allowed

A percentage compares the share of the requests of the same part. A part is a tier, a limit, a class, a route or a
client; its kind may precede the name. `paying` is all tiers except the default one, unless a tier has this name.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import suggest
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["Condition", "parse_condition"]

PAYING: Final = "paying"
COUNTS: Final = ("rejected", "allowed", "requests", "blocked")
TOTALS: Final = ("clients", "rejected_clients", "found_clients", "newly_rejected", "newly_allowed")
KINDS: Final = ("tier", "limit", "class", "route", "client")
OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
EXAMPLE: Final = 'write it like "rejected.pro > 0" or "rejected > 0.1%"'
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?\s*%?)|(?P<operator>>=|<=|==|!=|>|<)"""
    r"""|(?P<metric>[A-Za-z_]\w*(?:\.(?:"[^"]*"|'[^']*'|[\w/{}*:+-]+))*))"""
)
_PART: Final = re.compile(r"""\."([^"]*)"|\.'([^']*)'|\.([^."']+)""")


@dataclass(frozen=True, slots=True)
class _Comparison:
    text: str
    metric: str
    kind: str | None
    """The kind of the part; None to look for it."""
    name: str | None
    operator: str
    number: float
    is_share: bool

    def holds(self, report: Mapping[str, Any]) -> bool:
        return OPERATORS[self.operator](self.value(report), self.number)

    def value(self, report: Mapping[str, Any]) -> float:
        if self.metric in TOTALS:
            return float(_total(report, self.metric))
        part = _find_part(report, self)
        value: float = part["requests"] - part["rejected"] if self.metric == "allowed" else part.get(self.metric, 0)
        if not self.is_share:
            return value
        return 100 * value / part["requests"] if part["requests"] else 0.0


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition."""

    text: str
    _alternatives: tuple[tuple[_Comparison, ...], ...]

    def holds(self, report: Mapping[str, Any]) -> bool:
        """True if the condition holds for a report as a dict; InvalidInput if it names an unknown part."""
        # All comparisons are evaluated, so that an unknown name is an error whatever the numbers are.
        results = [[each.holds(report) for each in comparisons] for comparisons in self._alternatives]
        return any(map(all, results))

    def explain(self, report: Mapping[str, Any]) -> str:
        """The condition with the values that it compares."""
        values = [
            f"{each.text} is {each.value(report):.4g}{' %' if each.is_share else ''}"
            for comparisons in self._alternatives
            for each in comparisons
        ]
        return f"{self.text}: {', '.join(values)}"


def parse_condition(text: str) -> Condition:
    """Parse a condition; InvalidInput names the mistake and its place.

    >>> parse_condition("rejected.pro > 0 and rejected > 0.1%").text
    'rejected.pro > 0 and rejected > 0.1%'
    >>> parse_condition("rejectd > 0")
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidInput: --fail-if 'rejectd > 0': unknown metric 'rejectd'; did you mean 'rejected'?
    """
    tokens = _tokens(text)
    alternatives: list[list[_Comparison]] = [[]]
    while True:
        alternatives[-1].append(_comparison(tokens, text))
        if not tokens:
            return Condition(text, tuple(map(tuple, alternatives)))
        kind, word, at = tokens.pop(0)
        if kind != "metric" or word not in ("and", "or"):
            raise _error(text, f"expected 'and' or 'or' instead of {word!r} at character {at + 1}")
        if word == "or":
            alternatives.append([])


def _tokens(text: str) -> list[tuple[str, str, int]]:
    tokens, at = [], 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None:
            rest = text[at:].strip()
            raise _error(text, f"cannot read {rest[:20]!r} at character {text.index(rest, at) + 1}; {EXAMPLE}")
        kind = found.lastgroup or ""
        tokens.append((kind, found[kind].strip(), found.start(kind)))
        at = found.end()
    return tokens


def _comparison(tokens: list[tuple[str, str, int]], text: str) -> _Comparison:
    if len(tokens) < 3 or [kind for kind, _, _ in tokens[:3]] != ["metric", "operator", "number"]:
        shown = " ".join([word for _, word, _ in tokens[:3]])
        raise _error(
            text, f"{shown!r} is not a comparison; {EXAMPLE}" if shown else f"a comparison is missing; {EXAMPLE}"
        )
    (_, metric, _), (_, sign, _), (_, number, _) = tokens[:3]
    del tokens[:3]
    base, _, rest = metric.partition(".")
    if base not in (*COUNTS, *TOTALS):
        raise _error(text, f"unknown metric {base!r}; {suggest(base, [*COUNTS, *TOTALS])}")
    is_share = number.endswith("%")
    if base in TOTALS and (rest or is_share):
        raise _error(text, f"{base} is a number of clients and has no parts or shares; write {base} {sign} 0")
    if base == "requests" and is_share:
        raise _error(text, "a share of all requests is always 100 %; compare rejected or allowed")
    kind, name = None, None
    parts = [next(filter(None, groups), "") for groups in _PART.findall(metric[len(base) :])]
    if parts:
        kind, name = (
            (parts[0], ".".join(parts[1:])) if parts[0] in KINDS and len(parts) > 1 else (None, ".".join(parts))
        )
    return _Comparison(metric, base, kind, name, sign, float(number.rstrip("% ")), is_share)


def _error(text: str, problem: str) -> InvalidInput:
    return InvalidInput(f"--fail-if {text!r}: {problem}")


def _total(report: Mapping[str, Any], metric: str) -> int:
    if metric in ("clients", "rejected_clients", "found_clients"):
        number: int = report[metric]
        return number
    against = report.get("against")
    if against is None:
        raise InvalidInput(f"--fail-if: {metric} compares two policies; give --against")
    return int(against[f"{metric}_clients"])


def _find_part(report: Mapping[str, Any], comparison: _Comparison) -> Mapping[str, Any]:
    name = comparison.name
    if name is None:
        return report
    tables: dict[str, Any] = {
        "tier": report["by_tier"],
        "limit": report["by_limit"],
        "class": report["by_class"],
        "route": report["by_route"],
        "client": report["all_clients"],
    }
    if name == PAYING and comparison.kind in (None, "tier") and name not in tables["tier"]:
        others = [part for tier, part in tables["tier"].items() if tier not in (report["default_tier"], "none")]
        return _sum(others)
    kinds = [comparison.kind] if comparison.kind is not None else [kind for kind in KINDS if name in tables[kind]]
    found = [tables[kind][name] for kind in kinds if name in tables[kind]]
    if len(found) > 1:
        raise InvalidInput(
            f"--fail-if: {name!r} is a {' and a '.join(kinds)}; write {comparison.metric}.{kinds[0]}.{name}"
        )
    if found:
        part: Mapping[str, Any] = found[0]
        return part
    if comparison.kind == "client":  # without requests in the log
        return {"requests": 0, "rejected": 0}
    known = [each for kind in ("tier", "limit", "class", "route") for each in tables[kind]]
    raise InvalidInput(f"--fail-if: {name!r} is not a tier, limit, class, route or client; {suggest(name, known)}")


def _sum(parts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    total = {"requests": 0, "rejected": 0, "blocked": 0}
    for part in parts:
        for name in total:
            total[name] += part.get(name, 0)
    return total
