"""The control plane as an app sees it: connects a gate to its policy, decision log, node status and metrics."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate._node import node_name
from headgate.control.action_audit import ActionAudit
from headgate.control.canaries.evaluator import CanaryNodeGuard
from headgate.control.config import ConfigStore, ConfigUnavailable, Conflict, default_decision_log_url
from headgate.control.config.watcher import ConfigSource
from headgate.errors import InvalidConfiguration, StoreError
from headgate.policy.loader import decoded, file_content
from headgate.policy.model import Policy
from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import open_status_store

if TYPE_CHECKING:
    from collections.abc import Collection
    from os import PathLike

    from headgate.gate.base import GateBase
    from headgate.telemetry.decision_log.sinks import Sink
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["Connected", "ControlPlane"]

logger = logging.getLogger("headgate")

DEFAULT_LOG: Final = "default"
CLOSE_TIMEOUT_S: Final = 5.0


class Connected:
    """The parts of the control plane that are attached to one gate, as `gate.control`."""

    def __init__(
        self,
        log: DecisionLog | None,
        status: StatusReporter,
        status_store: StatusStore,
        guard: CanaryNodeGuard,
        audit: ActionAudit,
        *,
        owns_log: bool,
    ) -> None:
        self.log = log
        """None without a decision log."""
        self.status = status
        """Reports the node's status every second."""
        self._status_store = status_store
        self._guard = guard
        self._audit = audit
        self._owns_log = owns_log

    def close(self) -> None:
        """Stop reporting, and flush the decision log. A log that the app opened stays open."""
        self._guard.close()
        self._audit.close(CLOSE_TIMEOUT_S)
        self.status.close()
        with suppress(StoreError):  # an unavailable store has no connections to close
            self._status_store.close()
        if self._owns_log and self.log is not None:
            self.log.close(CLOSE_TIMEOUT_S)


class ControlPlane:
    """Connects a gate to its control plane: policy, decision log, node status and metrics.

    Adapters take one as `control=`, or just the config store's URL: `control="sqlite:///headgate.db"`.

    - The policy comes from the config store, and changes take effect within a second.
    - `log` is a decision log, a sink or the URL of one. By default, a SQLite config store `headgate.db` has its log
      in `headgate-decisions.db`, where `headgate admin` looks for it. None disables the log.
    - Node status goes to the store that the gate counts in, under the name `node`, by which canaries of the policy
      select nodes. The default is the environment variable HEADGATE_NODE, else the host name.
    - Metrics go to prometheus-client's default registry, if that package is installed and `metrics` is true.

    `cache` is a file with a copy of the configuration, for starting while the config store is unavailable. `show`
    names the kinds of identity that the log and the status contain in plain text, and not as keyed hashes.
    """

    def __init__(
        self,
        url: str,
        *,
        log: DecisionLog | Sink | str | None = DEFAULT_LOG,
        cache: str | PathLike[str] | None = None,
        node: str | None = None,
        region: str = "",
        show: Collection[str] = ("tenant",),
        metrics: bool = True,
    ) -> None:
        self.url = url
        """The URL of the config store."""
        self._source = ConfigSource(url, cache=cache, node=node)
        self._log = log
        self._node = node
        self._region = region
        self._show = tuple(show)
        self._metrics = metrics

    def policy_source(
        self, initial: Policy | str | PathLike[str] | None, *, secret: str | bytes | None
    ) -> Policy | ConfigSource:
        """The policy for a gate. A file is saved as the first version if the config store has no policy yet.

        A `Policy` that the app built itself is used as it is, and does not change.
        """
        if isinstance(initial, Policy):
            return initial
        if initial is not None or self.url.startswith("sqlite"):
            try:
                self._ensure_policy(initial, secret)
            except ConfigUnavailable as error:
                logger.warning("%s", error)  # the source starts from its copy on disk, or raises
        return self._source

    def connect(self, gate: GateBase, *, store: Any, namespace: str, secret: str | bytes | None) -> Connected:
        """Attach decision log, node status and metrics to a gate."""
        log, is_ours = self._open_log(gate, secret)
        if is_ours and log is not None:
            gate.add_observer(log)
        status_store = open_status_store(store, namespace=namespace)
        guard = CanaryNodeGuard(self.url, gate, status_store)
        status = StatusReporter(
            gate,
            status_store,
            secret=secret,
            node=self._node,
            region=self._region,
            show=self._show,
            log=log,
            on_report=guard.check,
        )
        if self._metrics and find_spec("prometheus_client") is not None:
            from headgate.telemetry import prometheus

            prometheus.register(gate)
        audit = ActionAudit(self.url)
        gate.add_action_listener(audit.add)
        return Connected(log, status, status_store, guard, audit, owns_log=is_ours)

    def _open_log(self, gate: GateBase, secret: str | bytes | None) -> tuple[DecisionLog | None, bool]:
        """The log, and True if it was opened here. A log that the app gave to its gate is used."""
        attached = next((each for each in gate.observers if isinstance(each, DecisionLog)), None)
        if attached is not None:
            return attached, False
        if isinstance(self._log, DecisionLog):
            gate.add_observer(self._log)
            return self._log, False
        sink = default_decision_log_url(self.url) if self._log == DEFAULT_LOG else self._log
        if sink is None:
            if self._log is not None:
                logger.warning(
                    "no decision log: only a SQLite config store has a default one, not %s. Give one, for example "
                    "ControlPlane(url, log='clickhouse://host/database'), or pass log=None",
                    self._source.name,
                )
            return None, False
        if secret is None:
            raise InvalidConfiguration(
                "control= needs the secret with which client identities are hashed, so that `headgate admin` can find "
                "them: pass secret=, or set HEADGATE_SECRET, to the same 16 or more random bytes in both"
            )
        node = node_name(self._node)
        return DecisionLog(sink, secret=secret, node=node, region=self._region, show=self._show), True

    def _ensure_policy(self, initial: str | PathLike[str] | None, secret: str | bytes | None) -> None:
        store = ConfigStore(self.url, secret=secret)
        try:
            saved = store.document()
            if initial is None:
                if saved is None:
                    raise InvalidConfiguration(
                        f"{self._source.name} has no policy yet: pass the path of a policy file, which is saved as the "
                        "first version, or save one with `headgate policy put FILE`"
                    )
                return
            file = Path(os.fspath(initial))
            text = decoded(file_content(file), file)
            if saved is None:
                self._save_first(store, file, text)
            elif saved.text != text:
                logger.warning(
                    "%s is not used, because %s already has a policy. To save the file there, run "
                    "`headgate policy put %s`",
                    file,
                    self._source.name,
                    file,
                )
        finally:
            store.close()

    def _save_first(self, store: ConfigStore, file: Path, text: str) -> None:
        with suppress(Conflict):  # another node saved its file first
            store.put_policy(
                text, file=file.name, author=f"app on {socket.gethostname()}", reason="initial policy", based_on=0
            )
