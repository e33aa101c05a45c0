"""Fleet membership: heartbeats of this process, and the number of live processes that share the limits."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

if TYPE_CHECKING:
    from headgate.failure import FleetShare

__all__ = ["Membership"]

HEARTBEAT_INTERVAL_S: Final = 2.0
MISSED_HEARTBEATS: Final = 3
"""Heartbeats that a member may miss before it counts as dead."""
SETTLING_HEARTBEATS: Final = 3
"""At first and after an outage, this many heartbeats follow each other quickly, and the fleet is not taken to be
smaller than before: not all members have sent theirs yet."""

_random = Random()


class Membership:
    """One member of the fleet. Only the maintenance thread uses it."""

    def __init__(self, client: Any, fleet: FleetShare) -> None:
        self._client = client
        self._fleet = fleet
        self._id = uuid4().hex
        self.next_heartbeat = 0.0
        """When the next one is due, on the monotonic clock."""
        self.heartbeats = 0
        """Heartbeats that were answered."""
        self.unsettled = SETTLING_HEARTBEATS
        """Heartbeats until the fleet may be taken to be smaller than before."""

    def schedule_heartbeat(self) -> None:
        interval = HEARTBEAT_INTERVAL_S / 8 if self.unsettled else HEARTBEAT_INTERVAL_S
        self.next_heartbeat = time.monotonic() + interval * _random.uniform(0.8, 1.0)

    def send_heartbeat(self) -> None:
        """Report that this process is alive, and count the live ones."""
        nodes = self._client.heartbeat(self._id, int(HEARTBEAT_INTERVAL_S * MISSED_HEARTBEATS * 1_000_000))
        self._fleet.nodes = max(nodes, self._fleet.nodes) if self.unsettled else nodes

    def record_success(self) -> None:
        self.heartbeats += 1
        self.unsettled = max(0, self.unsettled - 1)

    def record_outage(self) -> None:
        """Keep the known size of the fleet: the other members cannot send heartbeats, either."""
        self.unsettled = SETTLING_HEARTBEATS

    def leave(self) -> None:
        self._client.leave(self._id)
