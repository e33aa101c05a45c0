"""The config store: versioned tiers, assignments, overrides, route costs, blocks and the policy document."""

from __future__ import annotations

import copy
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypeAlias, TypedDict, Unpack

from sqlalchemy.exc import IntegrityError

from headgate._fork import reinit_after_fork
from headgate._limit_syntax import parse
from headgate.clock import SystemClock
from headgate.control.config import import_tables, raw_keys, rows
from headgate.control.config.canary import CanarySpec, canary_row
from headgate.control.config.engine import display_url, open_engine, read_transaction, write_transaction
from headgate.control.config.history import diff_versions, list_versions
from headgate.control.config.migrations import migrate
from headgate.control.config.reading import VersionStamp, newest_version, read_contents, rows_at
from headgate.control.config.tables import TABLES
from headgate.control.config.writing import Conflict, Put, Remove, reject_running_canary, write
from headgate.errors import InvalidConfiguration, InvalidInput, InvalidPolicy
from headgate.gate.options import SECRET_VARIABLE
from headgate.policy import scalars
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from headgate.clock import Clock
    from headgate.control.config.history import Difference, Version
    from headgate.control.config.rows import StoredRow
    from headgate.control.config.writing import Change
    from headgate.policy.model import Policy

    Client: TypeAlias = tuple[str, str]
    """Kind and value of an identity."""

__all__ = ["ConfigStore", "document_format", "optional_microseconds"]

HASH_PREFIX: Final = "hmac:"


class _By(TypedDict):
    """The attribution of a change, and the version on which it is based."""

    author: str
    reason: str
    based_on: NotRequired[int | None]


class ConfigStore:
    """Tiers, assignments, overrides, route costs, blocks and the policy document, in SQLite or PostgreSQL.

    Every change takes its `author`, a `reason`, and optionally the version it is `based_on`: it raises `Conflict` if
    the same rows have changed since then. It returns the new version, or None if nothing had to change. A change that
    would make the policy invalid raises `InvalidPolicy` and writes nothing.
    """

    def __init__(self, url: str, *, secret: str | bytes | None = None, clock: Clock | None = None) -> None:
        """Open the database and create or upgrade its tables.

        `secret` is the key for hashing API keys, the same as in the gates; default: HEADGATE_SECRET.
        """
        self.engine = open_engine(url, keep=2)
        weakref.finalize(self, self.engine.dispose)
        self._clock = clock or SystemClock()
        self._expected_version: int | None = None
        given = secret if secret is not None else os.environ.get(SECRET_VARIABLE) or None
        self._hasher = None if given is None else ApiKeyHasher(given.encode() if isinstance(given, str) else given)
        with write_transaction(self.engine) as connection:
            migrate(connection)
        reinit_after_fork(self)

    def close(self) -> None:
        """Close pooled connections; the store opens new ones if it is used again."""
        self.engine.dispose()

    def reset_after_fork(self) -> None:
        self.engine.dispose(close=False)

    def __repr__(self) -> str:
        return f"ConfigStore({display_url(self.engine)!r})"

    # ------------------------------------------------------------------ reads

    @property
    def version(self) -> int:
        """The newest version; 0 for an empty store."""
        with read_transaction(self.engine) as connection:
            return newest_version(connection)

    def policy(self, version: int | None = None) -> Policy:
        """The policy composed of the document and the tables, now or at a version."""
        with read_transaction(self.engine) as connection:
            found = read_contents(connection, VersionStamp(_existing(connection, version), 0))
        return found.template.compose(found.lists)

    def document(self, version: int | None = None) -> rows.PolicyDocument | None:
        found = self._rows("documents", version)
        return found[0].row if found else None

    def tiers(self, version: int | None = None) -> list[StoredRow[rows.TierLimit]]:
        return self._rows("tiers", version)

    def routes(self, version: int | None = None) -> list[StoredRow[rows.RouteCost]]:
        return self._rows("routes", version)

    def clients(self, version: int | None = None, *, who: Client | None = None) -> list[StoredRow[rows.Assignment]]:
        return self._rows("clients", version, who)

    def overrides(self, version: int | None = None, *, who: Client | None = None) -> list[StoredRow[rows.OverrideRow]]:
        """All overrides, or those of one client: overrides(who=("tenant", "acme"))."""
        return self._rows("overrides", version, who)

    def blocks(self, version: int | None = None, *, who: Client | None = None) -> list[StoredRow[rows.BlockRow]]:
        return self._rows("blocked", version, who)

    def canary(self) -> rows.CanaryRow | None:
        """The last canary, running or ended; None if there was none."""
        found = self._rows("canaries", None)
        return found[0].row if found else None

    def history(self, *, before: int | None = None, most: int = 100) -> list[Version]:
        """Versions, newest first; for the next page, pass the oldest seen as `before`."""
        with read_transaction(self.engine) as connection:
            return list_versions(connection, before=before, most=most)

    def diff(self, one: int, other: int) -> list[Difference]:
        """The differences from one version to another."""
        with read_transaction(self.engine) as connection:
            return diff_versions(connection, _existing(connection, one), _existing(connection, other))

    # ------------------------------------------------------------------ changes

    def rollback(self, version: int, *, sections: Collection[str] | None = None, **by: Unpack[_By]) -> Version | None:
        """Restore everything, or some sections, as of a version. The rollback is a new version.

        One that restores the document also ends a running canary.
        """
        known = rows.RESTORABLE_SECTIONS
        if unknown := set(sections or ()) - set(known):
            raise InvalidInput(f"unknown sections {', '.join(sorted(unknown))}; known are {', '.join(known)}")
        with write_transaction(self.engine) as connection:
            undo: list[Change] = [
                Remove(each.section, each.id) if each.after is None else Put(each.section, each.after, each.id)
                for each in diff_versions(connection, newest_version(connection), _existing(connection, version))
                if each.section in (known if sections is None else sections)
            ]
            if sections is None or "documents" in sections:
                undo += self._canary_end(connection, "rolled back", **by)
            return self._write(connection, undo, restores=version, **by)

    def put_policy(
        self, text: str, *, file: str = "policy.yaml", hash_keys: bool = False, **by: Unpack[_By]
    ) -> Version | None:
        """Replace the policy document. The suffix of `file` gives its format: YAML, TOML or JSON.

        API keys may appear in it as hashes only; `hash_keys` replaces raw keys by their hashes first.
        """
        return self.write([Put("documents", self._document(text, file, hash_keys=hash_keys))], **by)

    def start_canary(
        self,
        text: str,
        spec: CanarySpec,
        *,
        file: str = "policy.yaml",
        known_nodes: Collection[str] = (),
        **by: Unpack[_By],
    ) -> Version | None:
        """Apply another policy document on a share of the nodes, until it is promoted or rolled back.

        A percentage selects at least one of `known_nodes`, and not all of them if there are others. Raises InvalidInput
        if a canary is running already.
        """
        document = self._document(text, file)
        at_us = self._clock.now_us()
        row = canary_row(document, spec, known_nodes, begun_us=at_us, author=by["author"], reason=by["reason"])
        with write_transaction(self.engine) as connection:
            newest = newest_version(connection)
            current = _single_row(connection, "documents")
            if current is None:
                raise InvalidInput("there is no policy document to compare a canary with; save one first")
            if current.row == document:
                raise InvalidInput("the candidate is the current policy document; a canary needs another one")
            if by.get("based_on") is not None and current.since > (by["based_on"] or 0):
                raise Conflict(
                    f"the policy document was changed in version {current.since}, after version {by['based_on']} on "
                    "which this candidate is based; review it and try again",
                    version=newest,
                )
            reject_running_canary(connection, newest)
            return self._write(connection, [Put("canaries", row)], author=by["author"], reason=by["reason"])

    def promote_canary(self, canary: str | None = None, **by: Unpack[_By]) -> Version | None:
        """Make the candidate of the running canary the policy document. Returns None if it is not running (any more).

        `canary` identifies one; by default, the one that is running.
        """
        return self._end_canary("promoted", canary, **by)

    def rollback_canary(self, canary: str | None = None, **by: Unpack[_By]) -> Version | None:
        """End the running canary, so that its nodes apply the policy document again; like `promote_canary`."""
        return self._end_canary("rolled back", canary, **by)

    def set_tier(self, tier: str, limit: str, bucket: str, **by: Unpack[_By]) -> Version | None:
        """Set a limit of a tier: set_tier("pro", "search", "1000/minute", ...)."""
        row = rows.TierLimit(scalars.name(tier), scalars.name(limit), **rows.bucket_columns(parse(bucket)))
        return self.write([Put("tiers", row)], **by)

    def remove_tier(self, tier: str, limit: str | None = None, **by: Unpack[_By]) -> Version | None:
        """Remove one or all limits of a tier from the table; those in the document apply again."""
        mine = [each for each in self.tiers() if each.row.tier == tier and limit in (None, each.row.limit_name)]
        return self._remove("tiers", mine, f"tier {tier!r}", **by)

    def set_route(self, path: str, cost: int, *, route_class: str | None = None, **by: Unpack[_By]) -> Version | None:
        """Set the cost of a request to a route, and optionally the class of the route."""
        cost = scalars.whole(0, example=5)(cost)
        row = rows.RouteCost(scalars.text(path), cost, route_class and scalars.name(route_class))
        return self.write([Put("routes", row)], **by)

    def remove_route(self, path: str, **by: Unpack[_By]) -> Version | None:
        mine = [each for each in self.routes() if each.row.path == path]
        return self._remove("routes", mine, f"route {path!r}", **by)

    def assign(
        self,
        who: Client,
        tier: str | None,
        *,
        label: str | None = None,
        timezone: str | None = None,
        starts: int | str | None = None,
        **by: Unpack[_By],
    ) -> Version | None:
        """Assign a client to a tier: assign(("tenant", "acme"), "pro", ...).

        `timezone` and `starts`, the first day of its months (15) or years ("04-01"), are those of its calendar periods.
        """
        row = rows.Assignment(
            *self.normalize_client(who),
            tier and scalars.name(tier),
            label and scalars.label(label),
            timezone and scalars.time_zone(timezone),
            None if starts is None else f"{scalars.client_starts(starts)}",
        )
        return self.write([Put("clients", row)], **by)

    def unassign(self, who: Client, **by: Unpack[_By]) -> Version | None:
        """Remove an assignment; the document or the default tier applies again."""
        return self._remove("clients", self.clients(who=who), _described(who), **by)

    def override(
        self,
        who: Client,
        bucket: str,
        *,
        limit: str | None = None,
        route_class: str | None = None,
        valid_from: datetime | None = None,
        valid_until: datetime | None = None,
        id: int | None = None,
        **by: Unpack[_By],
    ) -> Version | None:
        """Override a limit of a client: override(("tenant", "acme"), "10000/minute", limit="search", ...).

        Adds an override, or replaces the one with this `id`.
        """
        row = rows.OverrideRow(
            *self.normalize_client(who),
            limit and scalars.name(limit),
            route_class and scalars.name(route_class),
            **rows.bucket_columns(parse(bucket)),
            valid_from_us=optional_microseconds(valid_from),
            valid_until_us=optional_microseconds(valid_until),
            reason=by["reason"],
            author=by["author"],
        )
        return self.write([Put("overrides", row, id)], **by)

    def remove_override(self, id: int, **by: Unpack[_By]) -> Version | None:
        return self.write([Remove("overrides", id)], **by)

    def block(
        self, who: Client, *, valid_from: datetime | None = None, valid_until: datetime | None = None, **by: Unpack[_By]
    ) -> Version | None:
        """Block a client as part of the policy. For effect within milliseconds, also block it on a gate."""
        validity = optional_microseconds(valid_from), optional_microseconds(valid_until)
        row = rows.BlockRow(*self.normalize_client(who), *validity, by["reason"], by["author"])
        return self.write([Put("blocked", row)], **by)

    def unblock(self, who: Client, **by: Unpack[_By]) -> Version | None:
        return self._remove("blocked", self.blocks(who=who), _described(who), **by)

    def import_seed_tables(self, url: str, *, default_tier: str | None = None, **by: Unpack[_By]) -> Version | None:
        """Import rate_limit_tiers, rate_limit_overrides and rate_limit_route_costs from another database.

        An existing policy document stays. A repeated import updates the overrides on the same key and class.
        """
        found = import_tables.read_tables(
            url, fingerprint=self._fingerprint, default_tier=default_tier, author=by["author"]
        )
        on_classes = [each for each in self.overrides() if each.row.limit_name is None]
        ids = {(each.row.value, each.row.route_class): each.id for each in on_classes}
        changes = [
            *([] if self.document() else [Put("documents", found.document)]),
            *(Put("tiers", row) for row in found.tiers),
            *(Put("routes", row) for row in found.routes),
            *(Put("overrides", row, ids.get((row.value, row.route_class))) for row in found.overrides),
        ]
        return self.write(changes, **by)

    def write(self, changes: Sequence[Change], **by: Unpack[_By]) -> Version | None:
        """Apply several changes as one version, all or none. Rows are stored as given."""
        with write_transaction(self.engine) as connection:
            try:
                return self._write(connection, changes, **by)
            except IntegrityError as error:
                raise InvalidInput("two rows have the same key; change the existing one") from error

    def expecting(self, version: int) -> ConfigStore:
        """A view of this store whose changes raise `ConcurrentChange` unless `version` is still the newest."""
        view = copy.copy(self)
        view._expected_version = version  # noqa: SLF001 - the same class
        return view

    def normalize_client(self, who: Client) -> Client:
        """A client as stored: addresses in canonical form, API keys hashed."""
        kind, value = who
        if scalars.by(kind) != (kind,):
            raise InvalidInput(f"{kind!r} is not a single kind of identity; give one, like ('tenant', 'acme')")
        if kind == "api_key":
            return kind, self._fingerprint(scalars.api_key(value))
        normalize = {"ip": scalars.address_or_hash, "subnet": scalars.subnet}.get(kind, scalars.identity)
        return kind, normalize(value)

    def _rows(self, section: str, version: int | None, who: Client | None = None) -> list[StoredRow[Any]]:
        table = TABLES[section]
        client = {} if who is None else dict(zip(("kind", "value"), self.normalize_client(who), strict=True))
        where = [table.c[name] == value for name, value in client.items()]
        with read_transaction(self.engine) as connection:
            return list(rows_at(connection, section, _existing(connection, version), *where))

    def _remove(self, section: str, found: list[Any], what: str, **by: Unpack[_By]) -> Version | None:
        if not found:
            raise InvalidInput(f"the tables have no {section} of {what}")
        return self.write([Remove(section, each.id) for each in found], **by)

    def _document(self, text: str, file: str, *, hash_keys: bool = False) -> rows.PolicyDocument:
        document = rows.PolicyDocument(text, document_format(file), scalars.label(file))
        if hash_keys:
            document = raw_keys.hash_raw_keys(document, self._fingerprint)
        raw_keys.reject_raw_keys(document, None if self._hasher is None else self._fingerprint)
        return document

    def _end_canary(self, state: str, canary: str | None, **by: Unpack[_By]) -> Version | None:
        with write_transaction(self.engine) as connection:
            changes = self._canary_end(connection, state, canary, **by)
            return self._write(connection, changes, **by) if changes else None

    def _canary_end(
        self, connection: Connection, state: str, canary: str | None = None, **by: Unpack[_By]
    ) -> list[Change]:
        """The changes that end the running canary; empty if it is not running."""
        found = _single_row(connection, "canaries")
        if found is None or not found.row.is_running or canary not in (None, found.row.canary):
            return []
        end = {"ended_us": self._clock.now_us(), "ended_by": by["author"], "end_reason": by["reason"]}
        changes: list[Change] = [Put("canaries", found.row._replace(state=state, **end), found.id)]
        return [*changes, Put("documents", found.row.document)] if state == "promoted" else changes

    def _write(
        self, connection: Connection, changes: Sequence[Change], restores: int | None = None, **by: Unpack[_By]
    ) -> Version | None:
        at_us, expected = self._clock.now_us(), self._expected_version
        return write(connection, changes, at_us=at_us, restores=restores, expected_version=expected, **by)

    def _fingerprint(self, key: str) -> str:
        if self._hasher is not None:
            return self._hasher.fingerprint(key)
        if key.startswith(HASH_PREFIX):
            return ApiKeyHasher(bytes(32)).fingerprint(key)  # only validates the hash; no secret is needed
        raise InvalidConfiguration(
            f"API keys are stored as keyed hashes, and there is no secret to hash with: pass secret= or set "
            f"{SECRET_VARIABLE}, the same as in the gates"
        )


def _single_row(connection: Connection, section: str) -> StoredRow[Any] | None:
    """The row of a section that has at most one."""
    return next(iter(list(rows_at(connection, section, newest_version(connection)))), None)


def _existing(connection: Connection, version: int | None) -> int:
    newest = newest_version(connection)
    if version is None:
        return newest
    if not 0 <= version <= newest:
        raise InvalidInput(f"version {version} does not exist; the newest is {newest}")
    return version


def document_format(file: str) -> str:
    """The format of a policy document by its file name; InvalidPolicy if it has no known suffix."""
    suffix = file.rpartition(".")[2].lower()
    found = "yaml" if suffix == "yml" else suffix
    if found not in FORMATS:
        raise InvalidPolicy([f"{file}: cannot tell its format; name the file .yaml, .yml, .toml or .json"])
    return found


def optional_microseconds(moment: datetime | None) -> int | None:
    """A time with a zone in microseconds since 1970; None for None."""
    return None if moment is None else rows.microseconds(scalars.instant(moment))


def _described(who: Client) -> str:
    return who[0] if who[0] == "api_key" else f"{who[0]} {who[1]}"
