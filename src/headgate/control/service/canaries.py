"""Canaries of the policy: start, comparison, promotion and rollback."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headgate.control.canaries.comparison import compare
from headgate.control.service.dependencies import ServiceDependencies, TopicService, to_change
from headgate.control.service.errors import NotFound, Risk, hide_address
from headgate.control.service.models import CanaryNodeView, CanaryStatus, CanaryView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headgate.control.canaries.comparison import Comparison
    from headgate.control.config import CanarySpec, ConfigStore
    from headgate.control.config.history import Version
    from headgate.control.config.rows import CanaryRow
    from headgate.control.service.models import Actor, Change, ChangeContext
    from headgate.control.service.policy import PolicyService
    from headgate.telemetry.fleet.model import FleetStatus

__all__ = ["CanaryService"]

NO_STORE = "the admin server was started without --store, so it cannot compare the nodes"


class CanaryService(TopicService):
    """Shows, starts and ends canaries of the policy."""

    def __init__(self, deps: ServiceDependencies, policy: PolicyService) -> None:
        super().__init__(deps)
        self._policy = policy

    def status(self, actor: Actor | None = None) -> CanaryStatus:
        """The last canary, and the comparison of its nodes while it runs. Only operators see addresses in errors."""
        row = self._deps.config.canary()
        if row is None or not row.is_running:
            return CanaryStatus(None if row is None else _view(row))
        if self._deps.fleet is None:
            return CanaryStatus(_view(row), troubles=(NO_STORE,))
        fleet = self._deps.fleet.gather()
        comparison, nodes = compare(row, fleet.canary_nodes), _nodes(row, fleet)
        if actor is None or not actor.may("operator"):
            hidden = "a node cannot apply the candidate"
            reasons = tuple([hide_address(reason, hidden) for reason in comparison.reasons])
            comparison = replace(comparison, reasons=reasons)
            nodes = tuple([replace(each, error=each.error and hide_address(each.error, hidden)) for each in nodes])
        return CanaryStatus(_view(row), comparison, nodes)

    def start(self, change: ChangeContext, text: str, spec: CanarySpec, *, file: str = "policy.yaml") -> Change:
        """Apply a policy document on some nodes first."""
        change.actor.require("operator", "start a canary")
        known = self._known_nodes()
        with self._deps.attributed(change, file, *spec.nodes) as by:
            result = self._deps.write_confirmed(
                change,
                lambda: self._policy.document_risks(text, file),
                lambda store: store.start_canary(text, spec, file=file, known_nodes=known, **by),
            )
        row = self._deps.config.canary()
        return result if row is None else replace(result, notes=(*result.notes, *_notes(row, spec, known)))

    def promote(self, change: ChangeContext) -> Change:
        """Make the candidate the policy document. Needs a confirmation unless it is within its thresholds."""
        change.actor.require("operator", "promote a canary")

        def find_risks() -> Iterable[Risk]:
            self._require_running()
            found = self.status(change.actor)
            verdict = found.troubles[0] if found.comparison is None else _in_words(found.comparison)
            return [] if verdict is None else [Risk("canary", verdict)]

        return self._end(change, find_risks, lambda store, by: store.promote_canary(**by))

    def rollback(self, change: ChangeContext) -> Change:
        """End the canary: its nodes apply the policy document again."""
        change.actor.require("operator", "roll back a canary")

        def find_risks() -> Iterable[Risk]:
            self._require_running()
            return ()

        return self._end(change, find_risks, lambda store, by: store.rollback_canary(**by))

    def _end(
        self,
        change: ChangeContext,
        find_risks: Callable[[], Iterable[Risk]],
        end: Callable[[ConfigStore, dict[str, Any]], Version | None],
    ) -> Change:
        with self._deps.attributed(change) as by:
            result = self._deps.write_confirmed(change, find_risks, lambda store: end(store, by))
        return to_change(result.version) if result.version is not None else self._require_running()

    def _require_running(self) -> Any:
        row = self._deps.config.canary()
        if row is None or not row.is_running:
            ended = "" if row is None else f"; the last one, of {row.name}, was {row.state} by {row.ended_by}"
            raise NotFound(f"no canary is running{ended}")

    def _known_nodes(self) -> list[str]:
        """The names of the nodes that report, without their processes."""
        nodes = () if self._deps.fleet is None else self._deps.fleet.gather().nodes
        return sorted({_machine(node.name) for node in nodes if node.state != "silent"})


def _machine(node: str) -> str:
    return node.rpartition(":")[0] or node


def _nodes(row: CanaryRow, fleet: FleetStatus) -> tuple[CanaryNodeView, ...]:
    parts = {each.name: each for each in fleet.canary_nodes if each.canary == row.canary}
    views = []
    for node in fleet.nodes:
        part = parts.get(node.name)
        views.append(
            CanaryNodeView(
                name=node.name,
                state=node.state,
                wanted="candidate" if row.includes(_machine(node.name)) else "stable",
                role="unknown" if part is None else part.role,
                error=None if part is None else part.error,
                allowed=node.allowed,
                rejections=node.denied + node.blocked,
                errors=node.degraded,
                p99_us=node.p99_us,
            )
        )
    return tuple(views)


def _view(row: CanaryRow) -> CanaryView:
    return CanaryView(
        id=row.canary,
        state=row.state,  # type: ignore[arg-type] # one of these
        name=row.name,
        format=row.format,
        text=row.text,
        share=row.share,
        percent=row.percent,
        nodes=() if row.nodes is None else tuple(row.nodes.split(",")),
        max_rejections=row.max_rejections_bp / 100,
        max_errors=row.max_errors_bp / 100,
        max_latency=row.max_latency_percent / 100,
        for_s=None if row.run_us is None else row.run_us / 1_000_000,
        promote=bool(row.promotes),
        begun_us=row.begun_us,
        author=row.author,
        reason=row.reason,
        ended_us=row.ended_us,
        ended_by=row.ended_by,
        end_reason=row.end_reason,
    )


def _notes(row: CanaryRow, spec: CanarySpec, known: list[str]) -> Iterable[str]:
    if not known:
        return ["No node is reporting, so it is not known which nodes apply the candidate."]
    chosen, missing = [node for node in known if row.includes(node)], [node for node in spec.nodes if node not in known]
    notes = [f"Candidate on {', '.join(chosen[:10]) or 'no reporting node'}: {len(chosen)} of {len(known)} nodes."]
    if missing:
        notes.append(f"Not reporting: {', '.join(missing[:10])}.")
    if len(chosen) == len(known):
        notes.append("No other node is left to compare with, so nothing is rolled back or promoted automatically.")
    return notes


def _in_words(comparison: Comparison) -> str | None:
    """The reason not to promote; None if there is none."""
    if comparison.verdict == "within thresholds":
        return None
    return "; ".join(comparison.reasons) or f"the candidate was not compared: {comparison.verdict}"
