"""The rollout of scripts, as the nodes report it in their store."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from headgate.control.service.dependencies import TopicService
from headgate.control.service.errors import log_and_summarize
from headgate.control.service.models import ScriptNodeView, ScriptRolloutView, ScriptStatus
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.stores.redis.rollout import NodeScripts, ScriptRollout

__all__ = ["ScriptService"]


class ScriptService(TopicService):
    """Reads which nodes run which version of the scripts."""

    def status(self) -> ScriptStatus:
        """The last rollout, and the nodes with their versions. It does not raise: see `troubles`."""
        counters = self._deps.counters
        if counters is None:
            return ScriptStatus(troubles=("the admin server was started without --store, so it cannot see any node",))
        if counters.engine.maintenance is None:
            return ScriptStatus(troubles=("counters in memory need no scripts",))
        from headgate.stores.redis.rollout import RolloutClient

        try:
            with closing(counters.engine.store.background_client()) as client:
                found = RolloutClient(client).read()
        except HeadgateError as error:
            return ScriptStatus(troubles=(log_and_summarize("the rollout of scripts cannot be read", error),))
        rollout = None if found.rollout is None else _rollout(found.rollout)
        return ScriptStatus(rollout, tuple(map(_node, found.nodes)))


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
