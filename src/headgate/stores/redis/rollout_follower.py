"""The part of a node in a rollout of scripts: follows the shared record, and uses the version that applies here."""

from __future__ import annotations

import json
import logging
import os
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from headgate._node import node_name
from headgate.errors import InvalidInput
from headgate.stores.redis.rollout import (
    CANARY,
    PROMOTED,
    ROLLED_BACK,
    CanaryMonitor,
    RolloutClient,
    ScriptDifference,
    ScriptRollout,
    check_formats,
)
from headgate.stores.redis.scripts import ScriptSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.stores.redis.background_client import BackgroundClient
    from headgate.stores.redis.encoding import CommandEncoder

__all__ = ["RolloutFollower"]

logger = logging.getLogger("headgate")

MAX_LOGGED: Final = 20
"""Differences that a node logs in one canary; all are counted."""

_numbers: Final[dict[int, count[int]]] = {}
"""The numbers of the followers of a process, by its id."""


class RolloutFollower:
    """Applies the rollout of scripts to the encoder of a store. Only one thread may call `poll`."""

    def __init__(self, encoder: CommandEncoder, client: BackgroundClient, *, where: str) -> None:
        self.node = node_name()
        self.wake: Callable[[], None] = lambda: None
        """Called when a rejection has to be written, from any thread."""
        self.is_refused = False
        """True after the store was found in a format that this library cannot read."""
        self._encoder = encoder
        self._client = RolloutClient(client)
        self._where = where
        self._stable = ScriptSet.shipped()
        self._revision = -1
        self._rollout: ScriptRollout | None = None
        self._monitor: CanaryMonitor | None = None
        self._pid = self._number = 0
        self._is_reported = True
        """False while a rejection of the candidate has not been written."""
        self._has_joined = False
        self._role, self._digest, self._problem = "stable", self._stable.digest, ""

    @property
    def needs_poll(self) -> bool:
        return not self._is_reported

    def check_store(self) -> None:
        """Raise StoreUnavailable if the store was written in a format that this library cannot read."""
        if not self._has_joined:
            now_us, used = self._client.formats()
            self.is_refused = True
            check_formats(self._stable.formats, used, now_us, self._where)
            self.is_refused, self._has_joined = False, True

    def poll(self) -> None:
        """Report the status of this node, and follow the record. May raise a StoreError."""
        self.check_store()
        if not self._is_reported and self._monitor is not None:
            reason = f"{self.node}: {self._monitor.rejection}"
            self._client.end(self._monitor.rollout.id, ROLLED_BACK, by=f"node {self.node}", reason=reason)
            self._is_reported = True
        name = self._process_name()
        status = json.dumps(self.status())
        revision, record = self._client.poll(self._revision, name, status, self._stable.formats)
        if revision != self._revision:
            self._revision = revision
            self._follow(record)

    def _process_name(self) -> str:
        """The node with its process, like "web-1:311"; another follower in that process is "web-1:311-2"."""
        pid = os.getpid()
        if self._pid != pid:
            self._pid, self._number = pid, next(_numbers.setdefault(pid, count(1)))
        return f"{self.node}:{pid}" + (f"-{self._number}" if self._number > 1 else "")

    def status(self) -> dict[str, Any]:
        """The version in use, and the counts of the canary."""
        monitor = self._monitor
        return {
            "role": self._role,
            "stable": self._stable.digest,
            "digest": self._digest,
            "rollout": None if self._rollout is None else self._rollout.id,
            "problem": self._problem,
            "runs": 0 if monitor is None else monitor.runs,
            "differences": 0 if monitor is None else monitor.differences,
            "errors": 0 if monitor is None else monitor.errors,
            "stable_us": 0 if monitor is None else monitor.stable_us,
            "candidate_us": 0 if monitor is None else monitor.candidate_us,
        }

    def _follow(self, record: bytes) -> None:
        try:
            rollout = ScriptRollout.from_json(record) if record else None
            if rollout is not None and rollout.state == CANARY and self._is_rejected(rollout):
                return
            self._rollout, self._problem = rollout, ""
            if rollout is None or rollout.state == ROLLED_BACK or rollout.stable != self._stable.digest:
                self._use_stable()
            elif rollout.state == PROMOTED:
                candidate = rollout.scripts(self._stable)
                self._encoder.use_scripts(candidate.script)
                self._set_role("promoted", candidate.digest)
            elif rollout.includes(self.node):
                self._start_canary(rollout)
            else:
                self._use_stable()
        except InvalidInput as error:
            self._problem = str(error)[:500]
            logger.error("scripts: this node keeps the stable version: %s", error)
            self._use_stable()

    def _is_rejected(self, rollout: ScriptRollout) -> bool:
        monitor = self._monitor
        return monitor is not None and monitor.rollout.id == rollout.id and monitor.rejection is not None

    def _start_canary(self, rollout: ScriptRollout) -> None:
        if self._monitor is not None and self._monitor.rollout.id == rollout.id:
            return
        candidate = rollout.scripts(self._stable)
        monitor = CanaryMonitor(rollout, self._stable, candidate, self._reject, self._log)
        self._monitor, self._is_reported = monitor, True
        self._encoder.use_scripts(monitor.script, is_canary=True)
        self._set_role("canary", candidate.digest)

    def _reject(self, reason: str) -> None:
        """Stop to use the candidate; called in the thread of a request."""
        self._use_stable()
        self._is_reported = False
        logger.error("scripts: this node has rejected the candidate and uses the stable version: %s", reason)
        self.wake()

    def _log(self, difference: ScriptDifference) -> None:
        if self._monitor is not None and self._monitor.differences <= MAX_LOGGED:
            logger.error("scripts: the candidate differs: %s", difference)

    def _use_stable(self) -> None:
        self._encoder.use_scripts(self._stable.script)
        self._set_role("stable", self._stable.digest)

    def _set_role(self, role: str, digest: str) -> None:
        if (role, digest) != (self._role, self._digest):
            logger.warning("scripts: this node uses version %s (%s)", digest, role)
        self._role, self._digest = role, digest
