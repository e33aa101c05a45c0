"""The gate of the shop, with decision log and node status. Its policy is in the config store, if there is one."""

from __future__ import annotations

import os
import tempfile
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.shop.customers import customer_of
from examples.shop.decision_printer import show
from headgate.gate.gate import AsyncGate
from headgate.quotas import Ledger

if TYPE_CHECKING:
    from headgate.adapters import RequestInfo
    from headgate.telemetry.decision_log.log import DecisionLog

__all__ = ["gate", "ledger", "log"]


def login_name(request: RequestInfo) -> str | None:
    """The user name of a login attempt, for limits `by: user`. Runs before the app, so it reads the request itself."""
    scheme, _, credentials = ",".join(request.header("authorization")).partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):  # an invalid header identifies no user; the request counts by address
            return b64decode(credentials).decode().partition(":")[0]
    return None


def _opened(store: str, config: str | None, ledger: str) -> AsyncGate:
    policy: Any = Path(__file__).with_name("policy.yaml")
    if config is not None:
        from headgate.control.config.watcher import ConfigSource

        policy = ConfigSource(config)
    identities = {"user": login_name, "customer": customer_of}
    return AsyncGate(policy, store, ledger=ledger, identities=identities, on_decision=show)


def _watched(gate: AsyncGate, store: str, url: str) -> DecisionLog:
    """Attach the decision log and the node status to the gate."""
    from headgate.telemetry.decision_log.log import DecisionLog
    from headgate.telemetry.fleet.reporter import StatusReporter
    from headgate.telemetry.fleet.status_store import open_status_store

    log = DecisionLog(f"{url}?days=2&size_mb=100", node="shop", sample=0.5)
    gate.add_observer(log)
    StatusReporter(gate, open_status_store(store), node="shop", log=log)
    return log


# Through the environment, as workers are separate processes.
_store = os.environ.get("SHOP_STORE") or "memory://"  # redis://... counts for all workers and machines together
_log = os.environ.get("SHOP_LOG")
_ledger = os.environ.get("SHOP_LEDGER") or f"sqlite:///{tempfile.mkdtemp(prefix='shop-')}/ledger.db"
gate = _opened(_store, os.environ.get("SHOP_CONFIG"), _ledger)
ledger = Ledger(_ledger, author="shop", connect=False)
log = _watched(gate, _store, _log) if _log else None
