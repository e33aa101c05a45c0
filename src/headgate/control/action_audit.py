"""ActionAudit: writes the actions of a node to the audit log of its config store."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Final

from headgate.control.config import ConfigStore
from headgate.control.config.audit_log import record_action
from headgate.control.config.engine import write_transaction
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.abuse.actions import ClientAction

__all__ = ["ActionAudit"]

logger = logging.getLogger("headgate")

MAX_PENDING: Final = 20_000
AUTHOR: Final = "headgate"
VERBS: Final = {"tighten": "tightened", "delay": "delayed", "challenge": "challenged", "block": "blocked"}


class ActionAudit:
    """Records actions in a thread of its own, which ends when all are recorded: they come seldom, or many at a time.

    Only the node that has taken an action records it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pending: deque[ClientAction] = deque(maxlen=MAX_PENDING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, action: ClientAction) -> None:
        """Record an action soon."""
        with self._lock:
            self._pending.append(action)
            if self._thread is None or not self._thread.is_alive():  # not alive after a fork
                self._thread = threading.Thread(target=self._run, name="headgate-action-audit", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait until all actions are recorded."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = list(self._pending)
                self._pending.clear()
                if not batch:
                    self._thread = None
                    return
            try:
                self._record(batch)
            except HeadgateError as error:
                logger.warning("%d actions are missing in the audit log: %s", len(batch), error)
            except Exception:
                logger.exception("%d actions are missing in the audit log", len(batch))

    def _record(self, batch: list[ClientAction]) -> None:
        with closing(ConfigStore(self._url)) as store, write_transaction(store.engine) as connection:
            for kind, value, restriction in batch:
                verb = VERBS[restriction.action]
                record_action(
                    connection,
                    at_us=restriction.at_us,
                    author=AUTHOR,
                    action=f"would have {verb}" if restriction.shadow else verb,
                    about=f"{kind} {value}",
                    reason=restriction.sentence,
                )
