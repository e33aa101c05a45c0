"""The base policy, which is the same for all clients, and the effective policy of one client.

The base policy is the policy document with the tiers and routes of the tables, and is cached. The tables may hold a
hundred thousand overrides, so the effective policy of a client is composed from the base policy and that client's rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate._fork import reinit_after_fork
from headgate.control.config.compose import PolicyTemplate
from headgate.control.config.engine import read_transaction
from headgate.control.config.queries import base_stamp, rows_of_clients
from headgate.control.config.reading import newest_version, rows_at
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS
from headgate.errors import InvalidPolicy
from headgate.policy.model import Policy
from headgate.policy.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Engine

    from headgate.control.config.queries import BaseStamp
    from headgate.control.config.rows import OverrideRow, PolicyDocument, RouteCost, StoredRow, TierLimit
    from headgate.policy.model import Block, Client, Override

__all__ = [
    "BasePolicy",
    "BasePolicyCache",
    "EffectivePolicy",
    "base_policy_at",
    "compose_effective",
    "effective_policy",
]

EMPTY: Final = Policy()


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """The policy document with the tiers and routes of the tables, without rows about single clients."""

    template: PolicyTemplate
    policy: Policy
    """Empty if the document is invalid."""
    problems: tuple[str, ...]
    """The reasons why the document is invalid."""
    document: StoredRow[PolicyDocument] | None
    tiers: tuple[StoredRow[TierLimit], ...]
    routes: tuple[StoredRow[RouteCost], ...]
    entries: Mapping[tuple[str, str], Mapping[str, list[Any]]]
    """The document's own entries about clients, by identity and section."""

    def entries_of(self, identities: Mapping[str, Collection[str]], section: str) -> Iterator[Any]:
        """The document's entries about a client with any of these identities."""
        for kind, values in identities.items():
            for value in values:
                yield from self.entries.get((kind, value), {}).get(section, ())

    def label_of(self, client: tuple[str, str]) -> str | None:
        """The label that the document gives a client."""
        return next((each.label for each in self.entries_of({client[0]: (client[1],)}, "clients")), None)

    def require_valid(self) -> BasePolicy:
        """Return self; raise InvalidPolicy if the document is invalid."""
        if self.problems:
            raise InvalidPolicy(self.problems)
        return self

    def recompose(
        self, *, tiers: Iterable[TierLimit] | None = None, routes: Iterable[RouteCost] | None = None
    ) -> Policy:
        """Compose the policy with other tiers or routes; raise InvalidPolicy if the result is invalid."""
        return PolicyTemplate(
            None if self.document is None else self.document.row,
            [each.row for each in self.tiers] if tiers is None else tiers,
            [each.row for each in self.routes] if routes is None else routes,
        ).compose({})


class EffectivePolicy(NamedTuple):
    """The policy that applies to one client, with the source of each entry."""

    base: BasePolicy
    version: int
    policy: Policy
    """The base policy and the entries about this client."""
    snapshot: Snapshot
    rows: Mapping[str, Sequence[StoredRow[Any]]]
    row_ids: Mapping[int, int]
    """Row ids by the `id()` of the policy entry that was built from the row."""

    def row_of(self, entry: Override | Block | Client | None) -> int | None:
        """The id of the row that an entry was built from; None for an entry of the document."""
        return self.row_ids.get(id(entry))

    def find_duplicate(self, override: OverrideRow, *, ignore: int | None) -> int | None:
        """The id of another override with the same client, limit, class and validity."""
        same = [each.id for each in self.rows["overrides"] if _override_key(each.row) == _override_key(override)]
        return next((each for each in same if each != ignore), None)


def _override_key(row: OverrideRow) -> tuple[Any, ...]:
    return row.kind, row.value, row.limit_name, row.route_class, row.valid_from_us, row.valid_until_us


class BasePolicyCache:
    """Caches the newest base policy until the document, a tier or a route changes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._cached: tuple[BaseStamp, BasePolicy] | None = None
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Replace the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()

    def get(self, connection: Connection) -> BasePolicy:
        """The newest base policy."""
        mark = base_stamp(connection)
        cached = self._cached
        if cached is None or cached[0] != mark:
            with self._lock:  # composing can be slow: one thread does it, the others wait
                cached = self._cached
                if cached is None or cached[0] != mark:
                    cached = self._cached = mark, base_policy_at(connection, newest_version(connection))
        return cached[1]

    def current(self) -> BasePolicy:
        """The newest base policy, on a connection of its own."""
        with read_transaction(self._engine) as connection:
            return self.get(connection)


def effective_policy(
    connection: Connection, base: BasePolicy, identities: Mapping[str, Collection[str]]
) -> EffectivePolicy:
    """The policy that applies now to a client with these identities."""
    return compose_effective(base, newest_version(connection), rows_of_clients(connection, identities), identities)


def compose_effective(
    base: BasePolicy,
    version: int,
    rows: Mapping[str, Sequence[StoredRow[Any]]],
    identities: Mapping[str, Collection[str]],
) -> EffectivePolicy:
    """Compose the effective policy of a client from the base policy and these rows."""
    plain = {section: [each.row for each in rows.get(section, ())] for section in LIST_SECTIONS}
    own: Policy = EMPTY
    if not base.problems and any(plain.values()):
        own = base.template.compose(plain, rows_only=True)
    row_ids: dict[int, int] = {}
    for section in LIST_SECTIONS:
        entries = getattr(own, section)
        if len(entries) == len(plain[section]):
            row_ids |= {id(entry): each.id for entry, each in zip(entries, rows.get(section, ()), strict=True)}
    assigned = {each.identity for each in own.clients}
    policy = replace(
        base.policy,
        clients=(
            *(each for each in base.entries_of(identities, "clients") if each.identity not in assigned),
            *own.clients,
        ),
        overrides=(*base.entries_of(identities, "overrides"), *own.overrides),
        blocked=(*base.entries_of(identities, "blocked"), *own.blocked),
    )
    return EffectivePolicy(base, version, policy, Snapshot(policy), rows, row_ids)


def base_policy_at(connection: Connection, version: int, document: PolicyDocument | None = None) -> BasePolicy:
    """The base policy at a version, optionally with another document in place of the stored one."""
    found = {section: list(rows_at(connection, section, version)) for section in BASE_SECTIONS}
    stored = next(iter(found["documents"]), None)
    given = document if document is not None else None if stored is None else stored.row
    template = PolicyTemplate(given, [each.row for each in found["tiers"]], [each.row for each in found["routes"]])
    policy: Policy = EMPTY
    problems: tuple[str, ...] = ("there is no policy yet",)
    if given is not None or found["tiers"] or found["routes"]:
        try:
            policy, problems = template.compose({}), ()
        except InvalidPolicy as error:
            problems = error.problems
    entries: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for section in LIST_SECTIONS:
        for entry in getattr(policy, section):
            entries.setdefault(tuple(entry.identity), {}).setdefault(section, []).append(entry)
    return BasePolicy(template, policy, problems, stored, tuple(found["tiers"]), tuple(found["routes"]), entries)
