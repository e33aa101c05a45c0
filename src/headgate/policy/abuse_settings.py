"""Builds the abuse settings of a policy: scenarios of its own, and shipped ones with its changes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from headgate.abuse.model import ADDRESS_GROUPS, SHARE_SIGNALS, AbuseScenario, AbuseSettings, Threshold
from headgate.policy.rules import METHODS_TWICE, nearest
from headgate.policy.shipped_scenarios import SHIPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.policy.formats.document import Path
    from headgate.policy.loader import PolicyProblems
    from headgate.policy.model import Identity
    from headgate.policy.schema import StructValue

__all__ = ["build_abuse_settings"]

WINDOW: Final = timedelta(minutes=5)


def build_abuse_settings(
    section: Any,
    path: Path,
    problems: PolicyProblems,
    warnings: PolicyProblems,
    identity: Callable[[StructValue], Identity | None],
) -> AbuseSettings:
    """The settings that were read from `abuse:`, which is a word or a mapping."""
    if isinstance(section, str):
        return AbuseSettings(_all_shipped(section))
    allowed = [identity(entry) for entry in section.get("allow", ()) if not entry.broken]
    found = [each for each in allowed if each is not None]
    networks = section.get("networks")
    written, at = section.get("scenarios", "on"), section.at("scenarios")
    if isinstance(written, str):
        return AbuseSettings(_all_shipped(written), tuple(found), networks)
    if isinstance(written, tuple):
        written = dict.fromkeys(written, "on")
    scenarios = []
    for name, entry in written.items():
        where = (*at, name) if at != section.path else at
        scenario = _scenario(name, entry, where, problems)
        if scenario is not None:
            scenarios.append(scenario)
            _check(scenario, where, problems, warnings)
            if scenario.by == "asn" and networks is None:
                remedy = "add networks: with the path of a MaxMind DB file, like GeoLite2-ASN.mmdb, under abuse:"
                problems.add(
                    where, f"scenario {name!r} is by asn, and nothing says which one an address is in; {remedy}"
                )
    return AbuseSettings(tuple(scenarios), tuple(found), networks)


def _all_shipped(word: str) -> tuple[AbuseScenario, ...]:
    return () if word == "off" else tuple(replace(each, shadow=word == "shadow") for each in SHIPPED.values())


def _scenario(name: str, entry: Any, path: Path, problems: PolicyProblems) -> AbuseScenario | None:
    """One scenario; None if it is off, or a problem was added."""
    shipped = SHIPPED.get(name)
    if isinstance(entry, str):
        if shipped is None:
            problems.add(path, f"no scenario is called {name!r}; {nearest(name, SHIPPED, 'write its fields')}")
            return None
        return None if entry == "off" else replace(shipped, shadow=entry == "shadow")
    if entry.broken:
        return None
    fields: dict[str, Any] = dict(entry.fields)
    templates, methods = fields.pop("path", None), fields.pop("methods", None)
    if templates is not None:
        named = [method for method, _ in templates if method is not None]
        if named and (methods is not None or len({*named}) > 1 or len(named) < len(templates)):
            entry.report("path", METHODS_TWICE)
            return None
        fields["templates"] = tuple(template for _, template in templates)
        methods = named[:1] or methods
    if methods is not None:
        fields["methods"] = frozenset(methods)
    if "class" in fields:
        fields["classes"] = fields.pop("class")
    if shipped is not None and ("templates" in fields or "classes" in fields):
        fields = {"templates": (), "classes": ()} | fields  # in place of the routes that it looks at otherwise
    for which in ("when", "each"):
        if which in fields:
            changed = {} if shipped is None else {each.signal: each.value for each in getattr(shipped, which)}
            fields[which] = tuple(Threshold(*item) for item in (changed | fields[which].fields).items())
    if shipped is not None:
        return replace(shipped, **fields)
    for required, example in (("by", "by: ip"), ("when", "when: {accounts: 20, refused: 50%}")):
        if not fields.get(required):
            problems.add(
                path,
                f"scenario {name!r} has no {required}; add one like {example}, or use a shipped scenario: "
                f"{', '.join(SHIPPED)}",
            )
            return None
    fields.setdefault("window", WINDOW)
    return AbuseScenario(name, **fields)


def _check(scenario: AbuseScenario, path: Path, problems: PolicyProblems, warnings: PolicyProblems) -> None:
    """Report settings of a scenario that contradict each other, or have no effect."""
    finds_addresses = scenario.by in ADDRESS_GROUPS
    if scenario.each and not finds_addresses:
        remedy = f"each: is for groups by {', '.join(ADDRESS_GROUPS)}; move it to when:"
        problems.add(path, f"scenario {scenario.name!r} is by {scenario.by}, which is one client; {remedy}")
    if finds_addresses and scenario.steps and not scenario.each:
        remedy = "or an attacker could get others blocked who share it; add one like each: {requests: 10, regular: 80%}"
        problems.add(
            path,
            f"scenario {scenario.name!r} acts on all addresses of a group by {scenario.by} without each:, {remedy}",
        )
    if scenario.by == scenario.account and scenario.steps:
        remedy = "leave out steps to report it, or find those who try: by: ip, when: {accounts: 20}"
        problems.add(
            path,
            f"scenario {scenario.name!r} acts on {scenario.by}s, and anyone can try those of others: they would lock "
            f"them out; {remedy}",
        )
    counts = [each for each in scenario.when if each.signal not in SHARE_SIGNALS]
    if not counts:
        problems.add(
            path,
            f"scenario {scenario.name!r} has only shares in when:, which one request can reach; "
            "add a number, like requests: 20",
        )
    if not scenario.steps:
        warnings.add(path, f"scenario {scenario.name!r} has no steps, so that it is only reported")
