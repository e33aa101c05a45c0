"""The overview of the fleet: nodes, traffic, hot keys and anomalies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headgate.control.service.errors import hide_address, log_and_summarize
from headgate.control.service.models import MinuteTotals, Overview
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.control.anomalies.detector import Anomaly
    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.control.service.models import Actor
    from headgate.telemetry.fleet.model import NodeStatus

__all__ = ["FleetService"]


class FleetService:
    """The state of the nodes and of their traffic."""

    def __init__(self, deps: ServiceDependencies) -> None:
        self._deps = deps

    def overview(self, actor: Actor | None = None) -> Overview:
        """The overview. It does not raise: what cannot be read is reported in `troubles`, with addresses of stores for
        operators only."""
        deps, troubles = self._deps, []
        version: int | None = None
        try:
            version = deps.config.version
        except HeadgateError as error:
            troubles.append(log_and_summarize("the config store cannot be read", error))
        anomalies: list[Anomaly] = []
        try:
            anomalies = self.anomalies()
        except HeadgateError as error:
            troubles.append(log_and_summarize("anomalies cannot be read", error))
        if trouble := deps.log.trouble:
            troubles.append(trouble)
        if deps.fleet is None:
            troubles.append("the admin server was started without --store, so it cannot see any node")
            return Overview(
                deps.now_us(), version, (), None, MinuteTotals(), (), (), (), tuple(anomalies), tuple(troubles)
            )
        found = deps.fleet.gather()
        nodes, reported = found.nodes, found.troubles
        if actor is None or not actor.may("operator"):
            nodes = tuple([_without_addresses(node) for node in nodes])
            reported = tuple([hide_address(each, each.partition(":")[0]) for each in reported])
        return Overview(
            found.at_us,
            version,
            nodes,
            found.series,
            found.totals,
            found.top_denied,
            found.near,
            found.hot,
            tuple(anomalies),
            (*troubles, *reported),
        )

    def anomalies(self, *, most: int = 20) -> list[Anomaly]:
        """The traffic anomalies, newest first."""
        return [] if self._deps.anomalies is None else list(self._deps.anomalies.recent(most=most))


def _without_addresses(node: NodeStatus) -> NodeStatus:
    return replace(
        node,
        reason=node.reason and hide_address(node.reason, "its store is unavailable"),
        shards=tuple([(f"server {number}", ready) for number, (_, ready) in enumerate(node.shards, 1)]),
        policy_error=node.policy_error and hide_address(node.policy_error, "the config store is unavailable"),
        log_error=node.log_error and hide_address(node.log_error, "it cannot be written"),
    )
