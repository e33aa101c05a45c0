"""The rollout of scripts, as the nodes report it in their store: its state, promotion and rollback."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from headgate.control.service.dependencies import TopicService
from headgate.control.service.errors import NotFound, Risk, log_and_summarize
from headgate.control.service.guardrails import require_confirmation
from headgate.control.service.models import Change, ScriptNodeView, ScriptRolloutView, ScriptStatus
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headgate.control.service.models import ChangeContext
    from headgate.stores.redis.rollout import NodeScripts, RolloutView, ScriptRollout

__all__ = ["ScriptService"]

NO_STORE: Final = "the admin server was started without --store, so it cannot see any node"
IN_MEMORY: Final = "counters in memory need no scripts"


class ScriptService(TopicService):
    """Reads which nodes run which version of the scripts, and ends canaries."""

    def status(self) -> ScriptStatus:
        """The last rollout, and the nodes with their versions. It does not raise: see `troubles`."""
        counters = self._deps.counters
        if counters is None:
            return ScriptStatus(troubles=(NO_STORE,))
        if counters.engine.maintenance is None:
            return ScriptStatus(troubles=(IN_MEMORY,))
        from headgate.stores.redis.rollout import RolloutClient

        try:
            with closing(counters.engine.store.background_client()) as client:
                found = RolloutClient(client).read()
        except HeadgateError as error:
            return ScriptStatus(troubles=(log_and_summarize("the rollout of scripts cannot be read", error),))
        rollout = None if found.rollout is None else _rollout(found.rollout)
        return ScriptStatus(rollout, tuple(map(_node, found.nodes)))

    def promote(self, change: ChangeContext) -> Change:
        """Let all nodes use the candidate. Needs a confirmation if it was not compared or differs."""
        change.actor.require("operator", "promote scripts")
        return self._end(change, "promoted")

    def rollback(self, change: ChangeContext) -> Change:
        """Let all nodes use the scripts of their library again."""
        change.actor.require("operator", "roll back scripts")
        return self._end(change, "rolled back")

    def _end(self, change: ChangeContext, state: str) -> Change:
        counters = self._deps.counters
        if counters is None or counters.engine.maintenance is None:
            raise InvalidInput(NO_STORE if counters is None else IN_MEMORY)
        from headgate.stores.redis.rollout import RolloutClient

        with self._deps.attributed(change), closing(counters.engine.store.background_client()) as background:
            client = RolloutClient(background)
            found = client.read()
            rollout = _require_current(found, state)
            require_confirmation(_promotion_risks(found) if state == "promoted" else (), change.confirmed)
            about = f"version {rollout.candidate}"
            with self._deps.audited(change.actor, f"{state} scripts", about, reason=change.reason):
                ended = client.end(rollout.id, state, by=change.actor.name, reason=change.reason)
        if ended is None or ended.state != state:
            raise NotFound(f"the rollout is {'gone' if ended is None else ended.state} already")
        return Change(None, (), f"{state} {about} of the scripts")


def _require_current(found: RolloutView, state: str) -> ScriptRollout:
    """The rollout, if it can get into this state."""
    rollout = found.rollout
    if rollout is None:
        raise NotFound("there is no rollout of scripts")
    if rollout.state in (state, "rolled back"):
        raise NotFound(f"the rollout is {rollout.state} already")
    return rollout


def _promotion_risks(found: RolloutView) -> Iterator[Risk]:
    """The reasons why the candidate is not known to be right."""
    nodes = [_node(each) for each in found.nodes]
    runs, differences, errors = (
        sum(getattr(node, name) for node in nodes) for name in ("runs", "differences", "errors")
    )
    if not runs:
        yield Risk("canary", "no node has compared the candidate with the stable version")
    elif differences or errors:
        counts = f"runs {runs:,}, differences {differences:,}, errors {errors:,}"
        yield Risk("canary", f"comparison with the stable version: {counts}")


def _rollout(found: ScriptRollout) -> ScriptRolloutView:
    return ScriptRolloutView(
        version=found.candidate,
        stable=found.stable,
        state=found.state,  # type: ignore[arg-type] # one of these
        share=found.share,
        changes=tuple(sorted(found.changes)),
        begun_us=found.begun_us,
        author=found.author,
        ended_us=found.ended_us,
        ended_by=found.ended_by or None,
        reason=found.reason,
    )


def _node(found: NodeScripts) -> ScriptNodeView:
    status = found.status
    runs, stable_us = status.get("runs") or 0, status.get("stable_us") or 0
    return ScriptNodeView(
        name=found.node,
        age_s=found.age_s,
        version=f"{status.get('digest') or 'unknown'}",
        role=f"{status.get('role') or 'unknown'}",
        problem=status.get("problem") or None,
        runs=runs,
        differences=status.get("differences") or 0,
        errors=status.get("errors") or 0,
        slowdown=(status.get("candidate_us") or 0) / stable_us if runs and stable_us else None,
    )
