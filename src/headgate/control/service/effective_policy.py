"""What every client stands on: the policy document with its tiers and routes, read once for as long as it is the same.

A hundred thousand overrides are no part of it. What holds for one client is put together from the ground and that
client's own rows.
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

__all__ = ["BasePolicy", "BasePolicyCache", "EffectivePolicy", "changed", "ground_at", "held"]

EMPTY: Final = Policy()


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """A document with the tiers and the routes of the tables."""

    frame: PolicyTemplate
    base: Policy
    """What it says without the rows of clients, overrides and blocks; nothing, if it cannot be read."""
    problems: tuple[str, ...]
    """Why it cannot be read."""
    document: StoredRow[PolicyDocument] | None
    tiers: tuple[StoredRow[TierLimit], ...]
    routes: tuple[StoredRow[RouteCost], ...]
    entries: Mapping[tuple[str, str], Mapping[str, list[Any]]]
    """What the document itself says of clients: by identity, and by section of the policy."""

    def entries_of(self, identities: Mapping[str, Collection[str]], section: str) -> Iterator[Any]:
        """What the document says of whoever has one of these identities."""
        for kind, values in identities.items():
            for value in values:
                yield from self.entries.get((kind, value), {}).get(section, ())

    @property
    def labelled(self) -> Iterator[Client]:
        """The clients to whom the document gives a name."""
        return (client for client in self.base.clients if client.label)


class EffectivePolicy(NamedTuple):
    """What holds for one client, and where each of it comes from."""

    ground: BasePolicy
    version: int
    policy: Policy
    """The document without what it says of others."""
    snapshot: Snapshot
    rows: Mapping[str, Sequence[StoredRow[Any]]]
    ids: Mapping[int, int]
    """The ids of rows by what was made of them, which is known by its own id()."""

    def row_of(self, made: Override | Block | Client | None) -> int | None:
        """The id of the row that something was made of; None if it stands in the document."""
        return self.ids.get(id(made))

    def same_override(self, made: OverrideRow, *, but: int | None) -> int | None:
        """The id of another row for the same client, limit and time."""
        same = [each.id for each in self.rows["overrides"] if _of_what(each.row) == _of_what(made)]
        return next((each for each in same if each != but), None)


def _of_what(row: OverrideRow) -> tuple[Any, ...]:
    return row.kind, row.value, row.limit_name, row.route_class, row.valid_from_us, row.valid_until_us


class BasePolicyCache:
    """The newest ground, read again when it has changed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._kept: tuple[BaseStamp, BasePolicy] | None = None
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """Whoever held the lock is not in the child to release it."""
        self._lock = threading.Lock()

    def now(self, connection: Connection) -> BasePolicy:
        """The newest."""
        mark = base_stamp(connection)
        kept = self._kept
        if kept is None or kept[0] != mark:
            with self._lock:  # one reads it, the others wait for that: it may take a while
                kept = self._kept
                if kept is None or kept[0] != mark:
                    kept = self._kept = mark, ground_at(connection, newest_version(connection))
        return kept[1]

    def current(self) -> BasePolicy:
        """The same, for who asks nothing else of the database."""
        with read_transaction(self._engine) as connection:
            return self.now(connection)

    def holding(self, identities: Mapping[str, Collection[str]]) -> EffectivePolicy:
        """What holds now for whoever has these identities."""
        with read_transaction(self._engine) as connection:
            version = newest_version(connection)
            ground = self.now(connection)
            rows = rows_of_clients(connection, identities)
        return held(ground, version, rows, identities)


def held(
    ground: BasePolicy,
    version: int,
    rows: Mapping[str, Sequence[StoredRow[Any]]],
    identities: Mapping[str, Collection[str]],
) -> EffectivePolicy:
    """What holds with these rows."""
    plain = {section: [each.row for each in rows.get(section, ())] for section in LIST_SECTIONS}
    made: Policy = EMPTY
    if not ground.problems and any(plain.values()):
        made = ground.frame.read(plain, alone=True)
    ids: dict[int, int] = {}
    for section in LIST_SECTIONS:
        entries = getattr(made, section)
        if len(entries) == len(plain[section]):
            ids |= {id(entry): each.id for entry, each in zip(entries, rows.get(section, ()), strict=True)}
    own = {each.identity for each in made.clients}
    policy = replace(
        ground.base,
        clients=(
            *(each for each in ground.entries_of(identities, "clients") if each.identity not in own),
            *made.clients,
        ),
        overrides=(*ground.entries_of(identities, "overrides"), *made.overrides),
        blocked=(*ground.entries_of(identities, "blocked"), *made.blocked),
    )
    return EffectivePolicy(ground, version, policy, Snapshot(policy), rows, ids)


def ground_at(connection: Connection, version: int, document: PolicyDocument | None = None) -> BasePolicy:
    """The ground of a version, or with another document in place of its own."""
    found = {section: list(rows_at(connection, section, version)) for section in BASE_SECTIONS}
    own = next(iter(found["documents"]), None)
    given = document if document is not None else None if own is None else own.row
    frame = PolicyTemplate(given, [each.row for each in found["tiers"]], [each.row for each in found["routes"]])
    base: Policy = EMPTY
    problems: tuple[str, ...] = ("there is no policy yet",)
    if given is not None or found["tiers"] or found["routes"]:
        try:
            base, problems = frame.read({}), ()
        except InvalidPolicy as error:
            problems = error.problems
    entries: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for section in LIST_SECTIONS:
        for entry in getattr(base, section):
            entries.setdefault(tuple(entry.identity), {}).setdefault(section, []).append(entry)
    return BasePolicy(frame, base, problems, own, tuple(found["tiers"]), tuple(found["routes"]), entries)


def changed(
    ground: BasePolicy, *, tiers: Iterable[TierLimit] | None = None, routes: Iterable[RouteCost] | None = None
) -> Policy:
    """What would hold with other tiers or routes; InvalidPolicy, if that could not be read."""
    return PolicyTemplate(
        None if ground.document is None else ground.document.row,
        [each.row for each in ground.tiers] if tiers is None else tiers,
        [each.row for each in ground.routes] if routes is None else routes,
    ).read({})
