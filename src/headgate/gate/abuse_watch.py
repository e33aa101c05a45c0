"""AbuseWatch: passes the completed requests of a gate to its detector, and what it finds to the log and the actions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.abuse.detector import AbuseDetector, ObservedRequest
from headgate.abuse.network_names import NetworkNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from headgate.abuse.detector import SharedRow
    from headgate.abuse.model import AbuseScenario, AbuseSettings, Finding, FindingHandler
    from headgate.gate.admission import RequestInfo
    from headgate.policy.snapshot import Resolution

__all__ = ["AbuseWatch", "observed_request"]

logger = logging.getLogger("headgate")

MAX_FINDINGS: Final = 1_000
"""Findings that are kept for operators."""
LOG_INTERVAL_US: Final = 10_000_000
"""The time after a finding in which others of its scenario are not logged: a botnet has thousands."""
MAX_PATH: Final = 1_000


class AbuseWatch:
    """The detector of one gate. Its methods may be called from several threads."""

    def __init__(self, key: bytes, *, is_trusted_key: Callable[[str], bool], handle: FindingHandler) -> None:
        self.is_shared = False
        """True if a thread of the gate shares its counts, so that nothing else needs to."""
        self.findings: deque[Finding] = deque(maxlen=MAX_FINDINGS)
        """The newest findings."""
        self._handle = handle
        self.reset_after_fork()
        reinit_after_fork(self)
        self._detector = AbuseDetector(self._report, key, is_trusted_key=is_trusted_key)
        self._networks: NetworkNames | None = None
        self._logged_us: dict[str, int] = {}

    def reset_after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def configure(self, settings: AbuseSettings | None) -> None:
        """Evaluate the scenarios of another version of the policy."""
        networks = None if settings is None else settings.networks
        with self._lock:
            if networks is not None and (self._networks is None or self._networks.file != networks):
                self._networks = NetworkNames(networks)
                self._detector.network_of = self._networks
            self._detector.configure(() if settings is None else settings.scenarios)

    def observe_requests(self, requests: Iterable[ObservedRequest]) -> None:
        """Evaluate completed requests."""
        with self._lock:
            self._detector.observe(requests)

    @property
    def found(self) -> dict[str, int]:
        """The number of findings by scenario."""
        return {**self._detector.found}

    def shared_rows(self, nodes: int = 2) -> dict[str, list[SharedRow]]:
        """The groups of each scenario, for other nodes."""
        with self._lock:
            return {name: table.shared_rows(nodes) for name, table in self._detector.tables.items()}

    def scenario_marks(self) -> dict[str, str]:
        """A hash of each scenario: counts of different versions of it cannot be compared."""
        return {name: table.mark for name, table in self._detector.tables.items()}

    def receive(self, rows: Mapping[str, Sequence[SharedRow]]) -> None:
        """Evaluate what this node has seen together with the groups of other nodes, by scenario."""
        with self._lock:
            for name, table in self._detector.tables.items():
                table.receive(rows.get(name, ()))

    def _report(self, finding: Finding, scenario: AbuseScenario) -> None:
        self.findings.append(finding)
        logged_us = self._logged_us.get(finding.scenario)
        if logged_us is None or not 0 <= finding.at_us - logged_us < LOG_INTERVAL_US:
            self._logged_us[finding.scenario] = finding.at_us
            shadow = ", in shadow mode" if scenario.shadow else ""
            logger.warning("abuse: %s%s: %s", finding.scenario, shadow, finding.evidence)
        self._handle(finding, scenario)


def observed_request(
    request: RequestInfo, resolution: Resolution, received_us: int, status: int, duration_us: int
) -> ObservedRequest:
    """The completed request as scenarios look at it."""
    route, path, agent = resolution.route, request.path, ""
    if route.looks_at_agents and (agents := request.header("user-agent")):
        agent = agents[0]
    if len(path) > MAX_PATH:
        path = path[:MAX_PATH]
    who, endpoint = resolution.who, route.endpoint
    fields: tuple[Any, ...] = (received_us, route.scenarios, who, agent, path, status, endpoint, duration_us)
    return tuple.__new__(ObservedRequest, fields)
