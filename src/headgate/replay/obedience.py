"""Clients that obey Retry-After: after a rejection they wait that long, then send their queued requests in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from headgate.clock import SECOND_US

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.replay.engine import PolicyReplay
    from headgate.replay.formats import LoggedRequest, Sender

__all__ = ["ObedientClients"]


@dataclass(slots=True, eq=False)
class ObedientClients:
    """Replays requests of clients that obey Retry-After, whole seconds rounded up.

    A rejected request is sent again after the wait, and everything that its sender wants to send meanwhile is queued
    behind it. A request that can never pass, or of a blocked client, is sent once.
    """

    engine: PolicyReplay
    postponed: int = 0
    """Requests that were sent later than in the log."""
    retries: int = 0
    longest_delay_us: int = 0
    total_delay_us: int = 0
    _queues: dict[Sender, deque[LoggedRequest]] = field(default_factory=dict)
    _due: list[tuple[int, int, Any]] = field(default_factory=list)
    """The senders that wait, by the ends of their waits."""
    _number: int = 0

    def replay(self, requests: Iterable[LoggedRequest]) -> None:
        """Send requests in the order of their times, and before each what is due."""
        for request in requests:
            self._send_due(request[0])
            queue = self._queues.get(request[4])
            if queue is not None:
                queue.append(request)
            elif (wait_us := self._send(request)) is not None:
                self._queues[request[4]] = deque([request])
                self._wait(request[4], request[0] + wait_us)

    def finish(self) -> None:
        """Send what is still queued after the end of the log."""
        self._send_due(None)

    def _send_due(self, now_us: int | None) -> None:
        while self._due and (now_us is None or self._due[0][0] <= now_us):
            at_us, _, sender = heappop(self._due)
            queue = self._queues[sender]
            self.retries += 1
            while queue:
                request = queue[0]
                wait_us = self._send((at_us, *request[1:]))
                if wait_us is not None:
                    self._wait(sender, at_us + wait_us)
                    break
                queue.popleft()
                self.postponed += 1
                self.total_delay_us += at_us - request[0]
                self.longest_delay_us = max(self.longest_delay_us, at_us - request[0])
            else:
                del self._queues[sender]

    def _wait(self, sender: Sender, until_us: int) -> None:
        self._number += 1
        heappush(self._due, (until_us, self._number, sender))

    def _send(self, request: LoggedRequest) -> int | None:
        """Send a request; the time until it is sent again, or None if it need not be."""
        self.engine.wait_us = 0
        self.engine.replay((request,))
        wait_us = self.engine.wait_us
        return -(-wait_us // SECOND_US) * SECOND_US if wait_us else None
