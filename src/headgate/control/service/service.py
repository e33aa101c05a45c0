"""`AdminService`, the entry point to the services behind the admin API, pages and CLI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.control.service.audit import AuditService
from headgate.control.service.blocks import BlockService
from headgate.control.service.clients import ClientService
from headgate.control.service.dependencies import ServiceDependencies
from headgate.control.service.fleet import FleetService
from headgate.control.service.listing import MAX_SEARCH_LENGTH
from headgate.control.service.overrides import OverrideService
from headgate.control.service.policy import PolicyService
from headgate.control.service.redaction import LOOKS_SECRET, looks_secret
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from headgate.clock import Clock
    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config.store import ConfigStore
    from headgate.limiter import Limiter
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["AdminService"]


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
    ) -> None:
        """`counters` is a limiter on the gates' store, `log` the URL of the decision log, and `secret` the secret of
        the gates (default: HEADGATE_SECRET). Views report what they cannot show without one of these as `troubles`.
        """
        self._deps = deps = ServiceDependencies(
            config,
            counters=counters,
            log=log,
            status_store=status_store,
            secret=secret,
            clock=clock,
            anomalies=anomalies,
        )
        self.audit = AuditService(deps)
        self.fleet = FleetService(deps)
        self.clients = ClientService(deps)
        self.overrides = OverrideService(deps)
        self.blocks = BlockService(deps)
        self.policy = PolicyService(deps, self.overrides, self.blocks)

    def __repr__(self) -> str:
        return f"AdminService({self._deps.config!r})"

    @property
    def version(self) -> int:
        """The newest version of the configuration."""
        return self._deps.config.version

    def refuse_keys(self, *texts: str) -> None:
        """InvalidInput if a text contains an API key, and so must not be stored or logged."""
        self._deps.lookup.refuse_known_keys(*texts)
        if any(looks_secret(text) for text in texts):
            raise InvalidInput(LOOKS_SECRET)

    def searchable(self, text: str) -> str:
        """The search text to put into a URL in place of this one: the same, or the hash if it may be an API key."""
        return self._deps.lookup.searchable(text, self._is_listed)

    def _is_listed(self, text: str) -> bool:
        """True if a list shows this text, which is then not a secret."""
        if len(text) > MAX_SEARCH_LENGTH or "\0" in text:
            return False
        lists = (self.clients.list, self.overrides.list, self.blocks.list, self.audit.list)
        return any(each(search=text, most=1).items for each in lists)
