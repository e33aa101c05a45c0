"""ActionDispatcher: applies the steps of scenarios to the clients that were found, on all nodes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.abuse.progression import climb, undo
from headgate.errors import InvalidInput, StoreError
from headgate.local.block_list import LiveBlock
from headgate.local.live_list import canonical
from headgate.local.restrictions import ClientRestrictions, Restriction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from headgate.abuse.model import AbuseScenario, Finding
    from headgate.engine import Engine
    from headgate.local.live_clients import LiveClientStore, StoredRestrictions

__all__ = ["ActionDispatcher", "ClientAction", "list_actions", "undo_action"]

logger = logging.getLogger("headgate")

MAX_PENDING: Final = 20_000
"""Findings that wait to be applied; more are dropped, as they will be found again."""
MAX_RECORDS: Final = 100_000
"""Clients with restrictions on one node. With more, no others are restricted until some have ended."""
BATCH_SIZE: Final = 500
MAX_ATTEMPTS: Final = 5
"""Attempts at a change while other nodes change the same record."""
UNKNOWN_CLIENTS: Final = ("global", "endpoint", "agent", "asn")
"""Kinds of groups that do not identify a client."""


class ClientAction(NamedTuple):
    """A restriction with the client that it is about."""

    kind: str
    value: str
    restriction: Restriction

    @property
    def is_block(self) -> bool:
        """True if it is a block of the live block list."""
        return self.restriction.action == "block" and not self.restriction.shadow

    @property
    def id(self) -> str:
        """Names the action in URLs and commands; the same on all nodes."""
        text = "\0".join([self.kind, self.value, self.restriction.scenario])
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class PendingFinding(NamedTuple):
    """A finding that waits to be applied, of a client in canonical spelling."""

    client: tuple[str, str]
    evidence: str
    scenario: AbuseScenario


class ActionDispatcher:
    """Applies scenarios to findings. Thread-safe; nothing in it waits for the store except `flush`.

    `is_allowed` returns True for a client, by kind and value, against whom the policy takes no action. `on_action` is
    called with each new action, in the thread that has applied it, on the one node that has.
    """

    def __init__(
        self,
        engine: Engine,
        now_us: Callable[[], int],
        *,
        is_allowed: Callable[[str, str], bool] = lambda kind, value: False,
        on_action: Callable[[ClientAction], None] = lambda action: None,
    ) -> None:
        self._engine, self._now_us, self._is_allowed = engine, now_us, is_allowed
        self.on_action = on_action
        self.counts: Counter[tuple[str, str, bool]] = Counter()
        """The actions that this node has taken, by scenario, action and whether in shadow mode."""
        self.dropped = 0
        """Findings that could not be applied, because too many waited or the store was unavailable."""
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Leave what waits to the parent."""
        self._pending: dict[tuple[str, str, str], PendingFinding] = {}
        self._lock = threading.Lock()
        self._applying = threading.Lock()
        self._thread: threading.Thread | None = None

    def apply(self, finding: Finding, scenario: AbuseScenario) -> None:
        """Take the next step of the scenario against a client that was found, unless that is not to be.

        Nothing happens to allow-listed clients, within the window of the scenario after its last action, and within the
        grace time after an undo. Several findings of one client count once, also those of other nodes. A finding waits
        for the store in a thread of its own.
        """
        if not scenario.steps or finding.kind in UNKNOWN_CLIENTS:
            return
        try:
            value = canonical(finding.kind, finding.value)
        except InvalidInput as error:
            logger.warning("scenario %s has found an invalid client: %s", scenario.name, error)
            return
        if self._is_allowed(finding.kind, value) or not self._changes_local(finding, scenario, value):
            return
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                self._drop(1)
                return
            client = finding.kind, value
            self._pending[scenario.name, *client] = PendingFinding(client, finding.evidence, scenario)
            if self._engine.memory is None:
                if self._thread is None:
                    self._start()
                return
        self.flush()

    def flush(self) -> None:
        """Apply the findings that wait, before returning."""
        with self._applying, self._engine.live_client_store() as store:
            while True:
                with self._lock:
                    keys = list(islice(self._pending, BATCH_SIZE))
                    batch = [self._pending.pop(key) for key in keys]
                if not batch:
                    return
                try:
                    self._apply_batch(store, batch)
                except StoreError as error:
                    self._drop(len(batch))
                    logger.warning("%d findings could not be applied: %s", len(batch), error)
                except Exception:
                    logger.exception("%d findings could not be applied", len(batch))

    def _apply_batch(self, store: LiveClientStore, batch: Sequence[PendingFinding]) -> None:
        """Climb with each client.

        Blocks come before the records: a node that fails in between has blocked the client until the end of that block,
        and the next finding takes the same step again.
        """
        rest = list(batch)
        for _ in range(MAX_ATTEMPTS):
            clients = list(dict.fromkeys([each.client for each in rest]))
            records = dict(zip(clients, store.find_restrictions(clients), strict=True))
            steps: list[tuple[PendingFinding, StoredRestrictions, ClientRestrictions, ClientAction]] = []
            again: list[PendingFinding] = []
            now_us = self._now_us()
            for each in rest:
                before = records.pop(each.client, None)
                if before is None:  # another finding of the client comes first
                    again.append(each)
                    continue
                record = before.record or ClientRestrictions(*each.client, {})
                restriction = climb(record.by_scenario.get(each.scenario.name), each.scenario, each.evidence, now_us)
                if restriction is not None:
                    after = record.with_restriction(restriction, now_us)
                    steps.append((each, before, after, ClientAction(*each.client, restriction)))
            store.extend_blocks([_block_of(action) for *_, action in steps if action.is_block])
            swapped = store.swap_restrictions([(before, after) for _, before, after, _ in steps])
            for (each, _, _, action), is_swapped in zip(steps, swapped, strict=True):
                if is_swapped:
                    self._report(action)
                    continue
                again.append(each)  # another node was faster
                if action.is_block:
                    _correct_block(store, action, now_us)
            if not again:
                return
            rest = again
        self._drop(len(rest))

    def _changes_local(self, finding: Finding, scenario: AbuseScenario, value: str) -> bool:
        """False if the record that this node knows says that the finding changes nothing."""
        restrictions = self._engine.local.live_clients.restrictions
        record = restrictions.get(finding.kind, value)
        if record is None:
            return len(restrictions) < MAX_RECORDS
        return climb(record.by_scenario.get(scenario.name), scenario, "", self._now_us()) is not None

    def _report(self, action: ClientAction) -> None:
        restriction = action.restriction
        self.counts[restriction.scenario, restriction.action, restriction.shadow] += 1
        logger.warning("%s %s: %s", action.kind, action.value, restriction.sentence)
        try:
            self.on_action(action)
        except Exception:
            logger.exception("on_action failed for %s", restriction.scenario)

    def _drop(self, count: int) -> None:
        self.dropped += count

    def _start(self) -> None:
        """Start a thread that applies what waits and ends; called with the lock held."""
        self._thread = threading.Thread(target=self._run, name="headgate-actions", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None

    def _run(self) -> None:
        while True:
            self.flush()
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return


def list_actions(engine: Engine, now_us: int) -> list[ClientAction]:
    """The actions on all nodes, newest first: those in force and in shadow mode, those that were undone within their
    grace time, and those whose level has not decayed yet."""
    with engine.live_client_store() as store:
        records = store.restrictions()
    found = [
        ClientAction(record.kind, record.value, each)
        for record in records
        for each in record.by_scenario.values()
        if now_us < each.forget_us
    ]
    return sorted(found, key=lambda action: (-action.restriction.at_us, action.id))


def undo_action(engine: Engine, action: ClientAction, *, grace: timedelta, by: str, now_us: int) -> Restriction | None:
    """End an action on all nodes; the restriction as it is now, or None if there is none of this scenario."""
    kind, value, asked = action
    with engine.live_client_store() as store:
        for _ in range(MAX_ATTEMPTS):
            (before,) = store.find_restrictions([(kind, value)])
            restriction = None if before.record is None else before.record.by_scenario.get(asked.scenario)
            if before.record is None or restriction is None or restriction.undone_us is not None:
                return restriction
            after = undo(restriction, grace, by, now_us)
            (is_swapped,) = store.swap_restrictions([(before, before.record.with_restriction(after, now_us))])
            if is_swapped:
                ended = ClientAction(kind, value, restriction)
                if ended.is_block:
                    _correct_block(store, ended, now_us)
                return after
    raise StoreError(f"the restrictions of {kind} {value} are being changed; try again")


def _correct_block(store: LiveClientStore, action: ClientAction, now_us: int) -> None:
    """Make the block of a client agree with the record that another node, or a person, has written meanwhile."""
    store.lift(_block_of(action))
    ((record, _),) = store.find_restrictions([(action.kind, action.value)])
    stored = [] if record is None else [ClientAction(*action[:2], each) for each in record.by_scenario.values()]
    store.extend_blocks([_block_of(each) for each in stored if each.is_block and each.restriction.applies_at(now_us)])


def _block_of(action: ClientAction) -> LiveBlock:
    restriction = action.restriction
    return LiveBlock(action.kind, action.value, restriction.until_us, restriction.sentence)
