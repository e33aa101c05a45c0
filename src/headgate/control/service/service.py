"""`AdminService`, the entry point to the services behind the admin API, pages and CLI, with its smallest topics: the
overview of the fleet, and the audit log."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from headgate.control.canaries.evaluator import CanaryEvaluator
from headgate.control.config.audit_log import AuditRecord, list_audit_records
from headgate.control.service.actions import ActionService
from headgate.control.service.blocks import BlockService
from headgate.control.service.canaries import CanaryService
from headgate.control.service.clients import ClientService
from headgate.control.service.dependencies import ServiceDependencies, TopicService
from headgate.control.service.errors import hide_address, log_and_summarize
from headgate.control.service.growth import GrowthService
from headgate.control.service.ledger import LedgerService
from headgate.control.service.listing import MAX_SEARCH_LENGTH, check_page
from headgate.control.service.models import Actor, AuditEntry, Overview, Page
from headgate.control.service.overrides import OverrideService
from headgate.control.service.policy import PolicyService
from headgate.control.service.regions import RegionService
from headgate.control.service.scripts import ScriptService
from headgate.control.service.suggestions import SuggestionService
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.clock import Clock
    from headgate.control.anomalies.detector import Anomaly, AnomalyLog
    from headgate.control.config.store import ConfigStore
    from headgate.limiter import Limiter
    from headgate.quotas import Ledger
    from headgate.telemetry.fleet.model import NodeStatus
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["AdminService", "AuditService", "FleetService"]

ACTIONS: Final = ("added", "changed", "removed", "started", "promoted", "rolled back")
"""The first words of the summaries of versions."""


class FleetService(TopicService):
    """The state of the nodes and of their traffic."""

    def overview(self, actor: Actor | None = None) -> Overview:
        """The overview. It does not raise: what cannot be read is reported in `troubles`, with addresses of stores for
        operators only."""
        deps, troubles = self._deps, []
        version: int | None = None
        anomalies: tuple[Anomaly, ...] = ()
        try:
            version = deps.config.version
        except HeadgateError as error:
            troubles.append(log_and_summarize("the config store cannot be read", error))
        try:
            anomalies = tuple(self.anomalies())
        except HeadgateError as error:
            troubles.append(log_and_summarize("anomalies cannot be read", error))
        if trouble := deps.log.trouble:
            troubles.append(trouble)
        if deps.fleet is None:
            troubles.append("the admin server was started without --store, so it cannot see any node")
            return Overview(at_us=deps.now_us(), version=version, steps=anomalies, troubles=tuple(troubles))
        found = deps.fleet.gather()
        if actor is None or not actor.may("operator"):
            reported = [hide_address(each, each.partition(":")[0]) for each in found.troubles]
            found = replace(found, nodes=tuple(map(_without_addresses, found.nodes)), troubles=tuple(reported))
        status = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "canary_nodes"}
        return Overview(**status | {"version": version, "steps": anomalies, "troubles": (*troubles, *found.troubles)})

    def anomalies(self, *, most: int = 20) -> list[Anomaly]:
        """The traffic anomalies, newest first."""
        return [] if self._deps.anomalies is None else list(self._deps.anomalies.recent(most=most))


class AuditService(TopicService):
    """Reads and writes the audit log."""

    def list(
        self, *, before: str | None = None, most: int = 50, author: str | None = None, search: str = ""
    ) -> Page[AuditEntry]:
        """The entries, newest first."""
        for text in (search, author or ""):
            check_page(text, "all", most)
        with self._deps.reading() as connection:
            found = list_audit_records(connection, before=before, most=most + 1, author=author, search=search)
        entries = tuple(map(_to_entry, found[:most]))
        return Page(entries, entries[-1].id if len(found) > most else None)

    def record(self, actor: Actor, action: str, subject: str) -> None:
        """Record an action that creates no version, such as a sign-in or a new token."""
        with self._deps.audited(actor, action, subject):
            pass


class AdminService:
    """Everything that operators can view and change, by topic. Thread-safe.

    Commands take a `ChangeContext` and raise NotAllowed if the actor's role is too low, NeedsConfirmation if the change
    is probably a mistake and was not confirmed, and Conflict if the same entry changed since the base version.

    >>> from headgate.control.config import ConfigStore
    >>> from headgate.control.service import Actor, AdminService, ChangeContext, ClientRef, OverrideSpec
    >>> import tempfile
    >>> directory = tempfile.TemporaryDirectory()
    >>> service = AdminService(ConfigStore(f"sqlite:///{directory.name}/headgate.db"), secret="sixteen bytes or more")
    >>> acme, launch = ClientRef("tenant", "acme"), ChangeContext(Actor("ada", "operator"), reason="launch")
    >>> service.policy.put(launch, "limits: [{name: all, by: tenant, bucket: 10/minute}]").version.number
    1
    >>> service.overrides.add(launch, acme, OverrideSpec("50/minute", limit="all")).what
    'added override of tenant acme on limit all: 50/minute'
    >>> [(each.limit, each.bucket, each.from_) for each in service.clients.get(acme).limits]
    [('all', '50/minute', 'override')]
    >>> directory.cleanup()
    """

    def __init__(
        self,
        config: ConfigStore,
        *,
        counters: Limiter | None = None,
        log: str | None = None,
        status_store: StatusStore | None = None,
        secret: str | bytes | None = None,
        clock: Clock | None = None,
        anomalies: AnomalyLog | None = None,
        namespace: str = "headgate",
        ledger: Ledger | None = None,
    ) -> None:
        """`counters` is a limiter on the gates' store, `log` the URL of the decision log, and `secret` the secret of
        the gates (default: HEADGATE_SECRET). Views report what they cannot show without one of these as `troubles`.
        `namespace` is that of the gates in the stores of the regions, and `ledger` has the accounts of quotas.
        """
        self._deps = deps = ServiceDependencies(config, counters, log, status_store, secret, clock, anomalies)
        self.audit = AuditService(deps)
        self.fleet = FleetService(deps)
        self.clients = ClientService(deps)
        self.overrides = OverrideService(deps)
        self.blocks = BlockService(deps)
        self.actions = ActionService(deps)
        self.policy = PolicyService(deps, self.overrides, self.blocks)
        self.canaries = CanaryService(deps, self.policy)
        self.regions = RegionService(deps, namespace)
        self.scripts = ScriptService(deps)
        self.ledger = LedgerService(deps, ledger)
        self.suggestions = SuggestionService(deps)
        self.growth = GrowthService(deps, self.clients, self.overrides, secret)

    def watchers(self) -> list[CanaryEvaluator]:
        """The background work of an admin server: it evaluates canaries if it can see the nodes."""
        deps = self._deps
        return [] if deps.fleet is None else [CanaryEvaluator(deps.config, deps.fleet, clock=deps.clock)]

    def __repr__(self) -> str:
        return f"AdminService({self._deps.config!r})"

    @property
    def version(self) -> int:
        """The newest version of the configuration."""
        return self._deps.config.version

    def refuse_keys(self, *texts: str) -> None:
        """InvalidInput if a text contains an API key, and so must not be stored or logged."""
        self._deps.lookup.refuse_keys(*texts)

    def searchable(self, text: str) -> str:
        """The search text to put into a URL in place of this one: the same, or the hash if it may be an API key."""
        return self._deps.lookup.searchable(text, self._is_listed)

    def _is_listed(self, text: str) -> bool:
        """True if a list shows this text, which is then not a secret."""
        if len(text) > MAX_SEARCH_LENGTH or "\0" in text:
            return False
        lists = (self.clients.list, self.overrides.list, self.blocks.list, self.audit.list)
        return any(each(search=text, most=1).items for each in lists)


def _without_addresses(node: NodeStatus) -> NodeStatus:
    return replace(
        node,
        reason=node.reason and hide_address(node.reason, "its store is unavailable"),
        shards=tuple([(f"server {number}", ready) for number, (_, ready) in enumerate(node.shards, 1)]),
        policy_error=node.policy_error and hide_address(node.policy_error, "the config store is unavailable"),
        log_error=node.log_error and hide_address(node.log_error, "it cannot be written"),
    )


def _to_entry(record: AuditRecord) -> AuditEntry:
    summary, version = record.what, None if record.action else record.number
    if record.action:
        action, subject, summary = record.action, summary, f"{record.action} {summary}".strip()
    elif record.restores is not None:
        action, subject = "restored", f"version {record.restores}"
    else:  # a version: "added override of tenant acme on limit search: 10/minute"
        action = next((each for each in ACTIONS if summary.startswith(f"{each} ")), "")
        subject = summary.removeprefix(f"{action} ").partition("; ")[0].partition(": ")[0]
        if not action:
            action, subject = "changed", summary
    return AuditEntry(record.id, record.at_us, record.author, action, subject, summary, record.reason, version)
