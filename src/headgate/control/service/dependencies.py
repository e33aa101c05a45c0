"""The dependencies that all topic services share, and the steps of every change: attribution, confirmation, audit."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from headgate._fork import reinit_after_fork
from headgate.clock import Clock, SystemClock
from headgate.control.config.audit_log import record_action
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.control.config.queries import LabelledRow, base_stamp, find_row, rows_of_clients
from headgate.control.config.reading import newest_version
from headgate.control.config.writing import MAX_AUTHOR_LENGTH, MAX_REASON_LENGTH, ConcurrentChange
from headgate.control.service.client_lookup import ClientLookup
from headgate.control.service.effective_policy import BasePolicy, EffectivePolicy, base_policy_at, effective_policy
from headgate.control.service.errors import NotFound, Risk, log_and_summarize
from headgate.control.service.guardrails import require_confirmation
from headgate.control.service.log_reader import DecisionLogReader
from headgate.control.service.models import Actor, Change, ChangeContext, ClientRef
from headgate.control.service.redaction import redact_errors
from headgate.errors import HeadgateError, InvalidInput
from headgate.policy import scalars
from headgate.telemetry.fleet.aggregator import FleetAggregator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sqlalchemy import Connection

    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config.history import Version
    from headgate.control.config.store import ConfigStore
    from headgate.limiter import Limiter
    from headgate.local.block_list import LiveBlock
    from headgate.telemetry.fleet.model import ClientCount, NearLimit
    from headgate.telemetry.fleet.status_store import StatusStore

__all__ = ["MAX_ID", "MAX_REASON_LENGTH", "ServiceDependencies", "TopicService", "to_change"]

MAX_ID: Final = 2**63 - 1
"""The largest integer that the databases store."""
MAX_ATTEMPTS: Final = 5
"""Attempts at a change while others write, before it fails with a conflict."""
MAX_ACTION_LENGTH: Final = 100
MAX_SUBJECT_LENGTH: Final = 600


class ServiceDependencies:
    """Config store, counters, decision log, node status and client lookup, as the topic services use them."""

    def __init__(
        self,
        config: ConfigStore,
        counters: Limiter | None,
        log: str | None,
        status_store: StatusStore | None,
        secret: str | bytes | None,
        clock: Clock | None,
        anomalies: AnomalyLog | None,
    ) -> None:
        self.config = config
        self.counters = counters
        self.clock = clock or SystemClock()
        self.log = DecisionLogReader(log)
        self.fleet = None if status_store is None else FleetAggregator(status_store, clock=clock)
        self.lookup = ClientLookup(self, secret)
        self.anomalies = anomalies
        self._base: tuple[tuple[int, ...], BasePolicy] | None = None
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the locks, whose owners may not exist in the child."""
        self._base_lock = threading.Lock()
        self.write_lock = threading.Lock()
        """Held from the checks of a change to its write, so that no other change of this process comes between."""

    def now_us(self) -> int:
        return self.clock.now_us()

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.now_us() / 1_000_000, UTC)

    def reading(self) -> AbstractContextManager[Connection]:
        """A read transaction on the config store."""
        return read_transaction(self.config.engine)

    def base_policy(self, connection: Connection) -> BasePolicy:
        """The newest base policy, which is cached until the document, a tier or a route changes."""
        stamp, cached = base_stamp(connection), self._base
        if cached is None or cached[0] != stamp:
            with self._base_lock:  # composing can be slow: one thread does it, the others wait
                cached = self._base
                if cached is None or cached[0] != stamp:
                    cached = self._base = stamp, base_policy_at(connection, newest_version(connection))
        return cached[1]

    def current_policy(self) -> BasePolicy:
        """The newest base policy, on a connection of its own."""
        with self.reading() as connection:
            return self.base_policy(connection)

    def resolve(self, client: ClientRef) -> EffectivePolicy:
        """The effective policy of a client in its canonical spelling, as one consistent read."""
        with self.reading() as connection:
            base = self.base_policy(connection)
            facts = self.lookup.facts(client, base.policy)
            rows = rows_of_clients(connection, facts.identities)
        return effective_policy(base, facts, rows)

    def find_row(self, connection: Connection, section: str, noun: str, id: int) -> LabelledRow:
        """The current row with this id; raise NotFound if there is none."""
        found = find_row(connection, section, id) if 0 <= id <= MAX_ID else None
        if found is None:
            raise NotFound(f"there is no {noun} {id}")
        return found

    def require_version(self, version: int) -> int:
        """Return the version; raise NotFound if it does not exist."""
        newest = self.config.version
        if not 0 <= version <= newest:
            raise NotFound(f"there is no version {version}; the newest is {newest}")
        return version

    def live_blocks(self) -> tuple[Sequence[LiveBlock], list[str]]:
        """The blocks that are active on the nodes, and the error message if they could not be read."""
        try:
            return () if self.counters is None else self.counters.blocked(), []
        except HeadgateError as error:
            return (), [log_and_summarize("live blocks cannot be read", error)]

    def status_label(self, key: str) -> str | None:
        """The label under which nodes report the client with this hash; None if no node reports it."""
        if self.fleet is None:
            return None
        found = self.fleet.gather()
        clients: Iterable[NearLimit | ClientCount] = (*found.near, *found.top_denied)
        return {each.key: each.label for each in clients}.get(key)

    @contextmanager
    def attributed(self, change: ChangeContext, *texts: str | None) -> Iterator[dict[str, Any]]:
        """Hold the write lock, and yield author, reason and base version as keyword arguments of a config store write.

        `texts` are the texts that the change would store. InvalidInput if the author or the reason cannot be stored, or
        if a text contains an API key; errors raised inside the block do not repeat a text that may be one.
        """
        name = change.actor.name
        if not isinstance(name, str) or not 0 < len(name) <= MAX_AUTHOR_LENGTH or not name.isprintable():
            raise InvalidInput(f"an actor needs a name of up to {MAX_AUTHOR_LENGTH} printable characters")
        reason = _check_reason(change.reason)
        self.lookup.refuse_keys(reason, *texts)
        with redact_errors(*texts), self.write_lock:
            yield {"author": name, "reason": reason, "based_on": change.based_on}

    def write_confirmed(
        self,
        change: ChangeContext,
        find_risks: Callable[[], Iterable[Risk]],
        write: Callable[[ConfigStore], Version | None],
    ) -> Change:
        """Write a change whose risks are all confirmed; raise NeedsConfirmation otherwise.

        If another process, such as another admin server, writes between the check and the write, the risks are checked
        again, so that the confirmed change is the one that is written.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            store = self.config.expecting(self.config.version)  # before the check: later writes are then noticed
            require_confirmation(find_risks(), change.confirmed)
            try:
                return to_change(write(store))
            except ConcurrentChange:
                if attempt == MAX_ATTEMPTS:
                    raise
        raise AssertionError

    @contextmanager
    def audited(self, actor: Actor, action: str, subject: str, *, reason: str = "") -> Iterator[None]:
        """Record an action in the audit log if the block succeeds. The block does not run if the log cannot be
        written."""
        author, action, about = actor.name[:MAX_AUTHOR_LENGTH], action[:MAX_ACTION_LENGTH], subject[:MAX_SUBJECT_LENGTH]
        if not action or not (author + action + about).isprintable():
            raise InvalidInput("an audit entry must be one line of printable characters")
        reason = _check_reason(reason) if reason else ""
        with write_transaction(self.config.engine) as connection:
            at_us = self.now_us()
            record_action(connection, at_us=at_us, author=author, action=action, about=about, reason=reason)
            yield

    def require_future(self, end: datetime | None) -> None:
        """InvalidInput if the end of a validity is in the past."""
        if end is not None and scalars.instant(end) <= self.now():
            raise InvalidInput(f"{end.isoformat()} is in the past; give a future time, or none")


class TopicService:
    """Base class of the services, one for each topic."""

    def __init__(self, deps: ServiceDependencies) -> None:
        self._deps = deps


def to_change(version: Version | None, *notes: str) -> Change:
    """The result of a write that created this version, or None if it changed nothing."""
    if version is None:
        return Change(None, ("Nothing to change: it was already set.", *notes), "nothing to change")
    return Change(version, notes, version.what)


def _check_reason(reason: str) -> str:
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidInput("give a reason; it is shown in the audit log")
    if len(reason) > MAX_REASON_LENGTH or not reason.isprintable():
        raise InvalidInput(f"a reason is one line of up to {MAX_REASON_LENGTH} printable characters")
    return reason
