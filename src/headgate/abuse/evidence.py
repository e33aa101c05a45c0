"""Evidence of findings, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.abuse.model import COUNT_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from headgate.abuse.model import AbuseScenario

__all__ = ["describe_client", "describe_member"]

COUNTED: Final = {
    "requests": "sent {} requests",
    "accounts": "tried {} accounts",
    "addresses": "was used from {} addresses",
    "agents": "used {} user agents",
    "paths": "requested {} paths",
    "newcomers": "had {} new addresses",
    "seconds": "took {} seconds to answer",
}
SHARES: Final = {
    "refused": "were refused (401 or 403)",
    "missing": "were not found (404 or 410)",
    "limited": "were over a limit (429 or 503)",
    "regular": "came at the same interval as the one before",
}
KINDS: Final = {
    "ip": "",
    "subnet": "",
    "api_key": "API key ",
    "global": "all clients",
    "asn": "network ",
    "agent": "agent ",
}
MAX_SHOWN: Final = 80


def describe_client(scenario: AbuseScenario, value: str, values: Mapping[str, float], nodes: int) -> str:
    """The evidence about a group, such as "203.0.113.9 tried 27 accounts in 5 minutes; 96% of 31 requests ..."."""
    name = KINDS.get(scenario.by, f"{scenario.by} ")
    named = name if scenario.by == "global" else f"{name}{_shown(value)}"
    counts = [
        COUNTED[each.signal].format(f"{values[each.signal]:,}")
        for each in scenario.when
        if each.signal in COUNT_SIGNALS
    ]
    clauses = [f"{named} {' and '.join(counts)} in {spell(scenario.window)}{_on(nodes)}"]
    return "; ".join([*clauses, *_shares(scenario, values)])


def describe_member(
    scenario: AbuseScenario, address: str, group: str, values: Mapping[str, float], interval_us: int, nodes: int
) -> str:
    """The evidence about an address that behaves as many others of its group."""
    others = f"{values['addresses'] - 1:,} other addresses"
    common = "" if scenario.by == "global" else f" with the same {_GROUPS[scenario.by]} ({_shown(group)})"
    every = f", one every {interval_us / 1_000_000:.3g} s" if "regular" in values else ""
    sent = f"{address} sent {values['requests']:,} requests in {spell(scenario.window)}{every}, as did {others}{common}"
    return "; ".join([f"{sent}{_on(nodes)}", *_shares(scenario, values)])


_GROUPS: Final = {"agent": "user agent", "endpoint": "endpoint", "asn": "network"}


def spell(window: timedelta) -> str:
    """A duration in words.

    >>> from datetime import timedelta
    >>> spell(timedelta(minutes=5)), spell(timedelta(seconds=90)), spell(timedelta(minutes=1))
    ('5 minutes', '90 seconds', '1 minute')
    """
    seconds = int(window.total_seconds())
    number, unit = (seconds // 60, "minute") if seconds % 60 == 0 else (seconds, "second")
    return f"{number} {unit}{'s' * (number != 1)}"


def _shares(scenario: AbuseScenario, values: Mapping[str, float]) -> list[str]:
    found = [
        each.signal for each in (*scenario.when, *scenario.each) if each.signal in SHARES and each.signal in values
    ]
    requests = f"{values['requests']:,} requests"
    return [f"{values[name]:.0%} of its {requests} {SHARES[name]}" for name in dict.fromkeys(found)]


def _on(nodes: int) -> str:
    return f" on {nodes} nodes" if nodes > 1 else ""


def _shown(value: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in value)
    return printable if len(printable) <= MAX_SHOWN else f"{printable[: MAX_SHOWN - 3]}..."
