"""ScenarioReplay: evaluates scenarios of abuse on a log, and counts the requests that their actions would apply to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headgate.abuse.detector import AbuseDetector, ObservedRequest
from headgate.abuse.network_names import NetworkNames
from headgate.abuse.progression import climb
from headgate.replay.times import iso

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.abuse.model import AbuseScenario, AbuseSettings, Finding
    from headgate.local.restrictions import Restriction
    from headgate.policy.snapshot import RoutePlan, Snapshot

__all__ = ["FoundClient", "ScenarioReplay"]

MAX_FOUND: Final = 20
"""Clients of one scenario that are listed without --all-clients."""
REFUSING: Final = ("challenge", "block")
"""Actions whose requests a gate does not pass to the detector."""


@dataclass(slots=True, eq=False)
class FoundClient:
    """A client that a scenario has found."""

    kind: str
    value: str
    is_allowed: bool
    """True if the policy lists it under `allow`, so that no action is taken."""
    first_us: int
    evidence: str
    """Of the first finding."""
    findings: int = 0
    affected: int = 0
    """Requests during its actions."""
    actions: list[str] = field(default_factory=list)
    """The actions in the order in which they were taken."""
    restriction: Restriction | None = None
    """The last action."""


class ScenarioReplay:
    """Passes the requests of a replay to the detector of production, and keeps what it finds.

    A client under a challenge or a block sends its requests in vain, as a gate would refuse them: they do not count for
    other findings. Scenarios in shadow mode change nothing.
    """

    def __init__(self, settings: AbuseSettings, snapshot: Snapshot) -> None:
        self.settings = settings
        self.found: dict[str, dict[tuple[str, str], FoundClient]] = {each.name: {} for each in settings.scenarios}
        """The clients found by scenario; including groups that do not identify a client."""
        self.has_agents = False
        """True if a request had a user agent."""
        self.has_status = False
        self._snapshot = snapshot
        self._kinds: set[str] = set()
        """The kinds of the clients that were found."""
        self._detector = AbuseDetector(self._handle, is_trusted_key=snapshot.is_trusted_key)
        if settings.networks is not None:
            self._detector.network_of = NetworkNames(settings.networks)
        self._detector.configure(settings.scenarios)

    def add(
        self,
        at_us: int,
        route: RoutePlan,
        who: Mapping[str, str],
        agent: str,
        path: str,
        status: int,
        duration_us: int | None,
    ) -> None:
        """Evaluate a request with the status that the log, or a rejection of the policy, has given it."""
        self.has_agents = self.has_agents or bool(agent)
        self.has_status = self.has_status or status != 0
        if self._kinds and self._affects(at_us, who):
            return
        if route.scenarios:
            endpoint = route.endpoint
            request = ObservedRequest(at_us, route.scenarios, who, agent, path, status, endpoint, duration_us or 0)
            self._detector.observe((request,))

    @property
    def found_clients(self) -> int:
        """The number of clients that any scenario has found."""
        named = [each.name for each in self.settings.scenarios if each.names_clients]
        return len({client for name in named for client in self.found[name]})

    def report(self, *, all_clients: bool) -> dict[str, Any]:
        """The findings by scenario, for JSON."""
        return {scenario.name: self._report_of(scenario, all_clients) for scenario in self.settings.scenarios}

    def _affects(self, at_us: int, who: Mapping[str, str]) -> bool:
        """Count a request for the actions in force; True if one of them refuses it."""
        is_refused = False
        for kind in self._kinds:
            values = (who.get(kind), who.get("subnet")) if kind == "ip" else (who.get(kind),)
            for value in values:
                if value is None:
                    continue
                for found in self.found.values():
                    client = found.get((kind, value))
                    if client is None or client.restriction is None or not client.restriction.is_shown_at(at_us):
                        continue
                    client.affected += 1
                    is_refused |= client.restriction.action in REFUSING and not client.restriction.shadow
        return is_refused

    def _handle(self, finding: Finding, scenario: AbuseScenario) -> None:
        clients, name = self.found[scenario.name], (finding.kind, finding.value)
        client = clients.get(name)
        if client is None:
            is_allowed = scenario.names_clients and self._snapshot.allows_client(*name)
            client = clients[name] = FoundClient(*name, is_allowed, finding.at_us, finding.evidence)
        client.findings += 1
        if client.is_allowed or not scenario.steps or not scenario.names_clients:
            return
        restriction = climb(client.restriction, scenario, finding.evidence, finding.at_us)
        if restriction is not None:
            self._kinds.add(finding.kind)
            client.restriction = restriction
            client.actions.append(restriction.action)

    def _report_of(self, scenario: AbuseScenario, all_clients: bool) -> dict[str, Any]:
        clients = sorted(self.found[scenario.name].values(), key=lambda each: (-each.affected, each.first_us))
        actions: dict[str, int] = {}
        for each in clients:
            for action in each.actions:
                actions[action] = actions.get(action, 0) + 1
        return {
            "by": scenario.by,
            "shadow": scenario.shadow,
            "clients": len(clients),
            "findings": sum(each.findings for each in clients),
            "actions": actions,
            "affected": sum(each.affected for each in clients),
            "found": [
                {
                    "client": each.value,
                    "kind": each.kind,
                    "allowed": each.is_allowed,
                    "at": iso(each.first_us),
                    "evidence": each.evidence,
                    "actions": each.actions,
                    "affected": each.affected,
                }
                for each in (clients if all_clients else clients[:MAX_FOUND])
            ],
        }
