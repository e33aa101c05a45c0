"""The config store and the admin server of the shop."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from examples.shop import simulated_clients
from headgate.control.admin.serve import AdminServer
from headgate.control.admin.tokens import Tokens
from headgate.control.anomalies.detector import AnomalyDetector, AnomalyLog
from headgate.control.config import Assignment, ConfigStore, Put
from headgate.control.service.service import AdminService
from headgate.errors import InvalidInput
from headgate.quotas import Ledger
from headgate.telemetry.fleet.status_store import open_status_store

if TYPE_CHECKING:
    from examples.shop.data_directory import DataDirectory
    from headgate import Limiter

__all__ = ["ShopAdmin"]

VISITOR = "you"
"""The author of changes made on the pages."""


class ShopAdmin:
    """The control plane of the shop. In production, `headgate admin` runs it as a separate process."""

    def __init__(self, data: DataDirectory) -> None:
        self.config = ConfigStore(data.config)
        self._log = data.log
        self._ledger = Ledger(data.ledger, connect=False)
        self._tokens = Tokens(data.config)
        self._server: AdminServer | None = None
        self._closing: list[Any] = [self._tokens, self._ledger, self.config]

    def open(self, counters: Limiter, *, store: str, host: str, port: int) -> str:
        """Serve the admin pages; returns their URL."""
        board = open_status_store(store)
        anomalies = AnomalyLog(self.config)
        desk = AdminService(
            self.config, counters=counters, log=self._log, ledger=self._ledger, status_store=board, anomalies=anomalies
        )
        watchers = [AnomalyDetector(board, self.config), *desk.watchers()]
        self._server = AdminServer(desk, self._tokens, host=host, port=port, watchers=watchers).start()
        self._closing[:0] = [counters, board]
        return self._server.url

    def link(self) -> str:
        """A link that signs a person in, once and within ten minutes."""
        assert self._server is not None
        held = [token for token in self._tokens.list() if token.name == VISITOR]
        now_us = self._tokens.clock.now_us()
        token = next((token for token in held if token.state(now_us) == "active"), None)
        return self._server.link(token or self._tokens.make(VISITOR, "admin", by="make run", days=7).token)

    def add_simulated_clients(self) -> None:
        """Add the simulated clients to the config store, once, so that later changes to them stay."""
        if self.config.clients() or self.config.overrides():
            return
        known = {client: self.config.normalize_client(("api_key", client.key)) for client in simulated_clients.CLIENTS}
        rows: list[Any] = [Put("clients", Assignment(*known[each], each.tier, each.label)) for each in known]
        until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=7)
        by: dict[str, Any] = {"author": "make run", "reason": "visitors that the shop sends itself"}
        with suppress(InvalidInput):  # another policy may not have these tiers
            self.config.write(rows, **by)
            self.config.override(
                known[simulated_clients.FESTIVAL],
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
