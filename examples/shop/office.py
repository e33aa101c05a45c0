"""Behind the shop: the config store, the admin pages, and who may open them."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from examples.shop import crowd
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.anomalies.detector import AnomalyDetector, AnomalyLog
from headgate.control.config import Assignment, ConfigStore, Put
from headgate.control.service.service import AdminService
from headgate.errors import InvalidInput
from headgate.telemetry.fleet.status_store import open_status_store

if TYPE_CHECKING:
    from examples.shop.home import Home
    from headgate import Limiter

__all__ = ["Office"]

VISITOR = "you"
"""What is done on the pages is signed with this name."""


class Office:
    """All that stands beside a gate. Yours may be another process, and `headgate admin` is one."""

    def __init__(self, home: Home) -> None:
        self.config = ConfigStore(home.config)
        self._log = home.log
        self._tokens = Tokens(home.config)
        self._server: AdminServer | None = None
        self._closing: list[Any] = [self._tokens, self.config]

    def open(self, counters: Limiter, *, store: str, host: str, port: int) -> str:
        """Serve the admin pages; where they are."""
        board = open_status_store(store)
        desk = AdminService(
            self.config, counters=counters, log=self._log, status_store=board, anomalies=AnomalyLog(self.config)
        )
        watcher = AnomalyDetector(board, self.config)
        self._server = AdminServer(desk, self._tokens, host=host, port=port, watchers=[watcher]).start()
        self._closing[:0] = [counters, board]
        return self._server.url

    def link(self) -> str:
        """Signs a person in: once, within ten minutes."""
        assert self._server is not None
        held = [token for token in self._tokens.list() if token.name == VISITOR]
        now_us = self._tokens.clock.now_us()
        token = next((token for token in held if token.state(now_us) == "active"), None)
        return self._server.link(token or self._tokens.make(VISITOR, "admin", by="make run", days=7).token)

    def welcome_the_crowd(self) -> None:
        """Customers are rows of the config store, and no lines of a file. Once: what you change about them stays."""
        if self.config.clients() or self.config.overrides():
            return
        known = {client: self.config.normalize_client(("api_key", client.key)) for client in crowd.CLIENTS}
        rows: list[Any] = [Put("clients", Assignment(*known[each], each.tier, each.label)) for each in known]
        until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=7)
        by: dict[str, Any] = {"author": "make run", "reason": "visitors that the shop sends itself"}
        with suppress(InvalidInput):  # another policy may have no such tiers, and then there are none
            self.config.write(rows, **by)
            self.config.override(
                known[crowd.FESTIVAL],
                "240/minute",
                limit="requests",
                valid_until=until,
                author="make run",
                reason="lantern festival, all week",
            )

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        for each in self._closing:
            each.close()
