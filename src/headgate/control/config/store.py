"""The config store: what people change while the API runs. Each change is a version that can be told, and undone."""

from __future__ import annotations

import copy
import os
import weakref
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import IntegrityError

from headgate._fork import reinit_after_fork
from headgate._limit_syntax import parse
from headgate.clock import SystemClock
from headgate.control.config import import_tables, raw_keys
from headgate.control.config.engine import display_url, open_engine, read_transaction, write_transaction
from headgate.control.config.history import diff_versions, list_versions
from headgate.control.config.migrations import migrate
from headgate.control.config.reading import VersionStamp, newest_version, read_contents, rows_at
from headgate.control.config.rows import (
    SECTIONS,
    Assignment,
    BlockRow,
    OverrideRow,
    PolicyDocument,
    RouteCost,
    TierLimit,
    bucket_columns,
    microseconds,
)
from headgate.control.config.tables import TABLES
from headgate.control.config.writing import Put, Remove, write
from headgate.errors import InvalidConfiguration, InvalidInput, InvalidPolicy
from headgate.policy import scalars
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement

    from headgate.clock import Clock
    from headgate.control.config.history import Difference, Version
    from headgate.control.config.import_tables import ImportedTables
    from headgate.control.config.rows import StoredRow
    from headgate.control.config.writing import Change
    from headgate.policy.model import Policy

__all__ = ["ConfigStore"]

SECRET_VARIABLE: Final = "HEADGATE_SECRET"
FINGERPRINT: Final = "hmac:"


class ConfigStore:
    """Tiers, assignments, overrides, route costs, blocks and the policy document, in SQLite or PostgreSQL.

    Every method that changes something takes who does it and why, and the version that it is `based_on`: `Conflict`, if
    the same was changed since then; None for whatever holds now. It gives the new version; None, if all was so already.
    What would not load is refused with `InvalidPolicy`, and nothing of it is written.
    """

    def __init__(self, url: str, *, secret: str | bytes | None = None, clock: Clock | None = None) -> None:
        """Opens the database, and makes or upgrades its tables. `secret` is what API keys are hashed with: that of the
        gates, or HEADGATE_SECRET."""
        self.engine = self._engine = open_engine(url, keep=2)
        weakref.finalize(self, self._engine.dispose)
        self._clock = clock or SystemClock()
        self._expected_version: int | None = None
        given = secret if secret is not None else os.environ.get(SECRET_VARIABLE) or None
        self._secret = given.encode() if isinstance(given, str) else given
        self._keys = None if self._secret is None else ApiKeyHasher(self._secret)
        with write_transaction(self._engine) as connection:
            migrate(connection)
        reinit_after_fork(self)

    def close(self) -> None:
        """Close the connections that are kept open; the next question opens another."""
        self._engine.dispose()

    def reset_after_fork(self) -> None:
        """Connections stay with the parent."""
        self._engine.dispose(close=False)

    def __repr__(self) -> str:
        return f"ConfigStore({display_url(self._engine)!r})"

    # ------------------------------------------------------------------ what holds

    @property
    def version(self) -> int:
        """The newest; 0 while nothing was written."""
        with read_transaction(self._engine) as connection:
            return newest_version(connection)

    def policy(self, version: int | None = None) -> Policy:
        """The document with all that the tables add to it, now or at a version."""
        with read_transaction(self._engine) as connection:
            at = self._existing(version, newest_version(connection))
            found = read_contents(connection, VersionStamp(at, 0))
        return found.frame.read(found.lists)

    def document(self, version: int | None = None) -> PolicyDocument | None:
        """The policy document; None while there is none."""
        found = self._rows("documents", version)
        return found[0].row if found else None

    def tiers(self, version: int | None = None) -> list[StoredRow[TierLimit]]:
        return self._rows("tiers", version)

    def routes(self, version: int | None = None) -> list[StoredRow[RouteCost]]:
        return self._rows("routes", version)

    def clients(self, version: int | None = None, *, who: tuple[str, str] | None = None) -> list[StoredRow[Assignment]]:
        return self._rows("clients", version, who)

    def overrides(
        self, version: int | None = None, *, who: tuple[str, str] | None = None
    ) -> list[StoredRow[OverrideRow]]:
        """All, or those of one client: overrides(who=("tenant", "acme"))."""
        return self._rows("overrides", version, who)

    def blocks(self, version: int | None = None, *, who: tuple[str, str] | None = None) -> list[StoredRow[BlockRow]]:
        return self._rows("blocked", version, who)

    # ------------------------------------------------------------------ what was

    def history(self, *, before: int | None = None, most: int = 100) -> list[Version]:
        """The versions, the newest first; `before` one of them, to page on."""
        with read_transaction(self._engine) as connection:
            return list_versions(connection, before=before, most=most)

    def diff(self, one: int, other: int) -> list[Difference]:
        """What is different at the second version from the first."""
        with read_transaction(self._engine) as connection:
            newest = newest_version(connection)
            return diff_versions(connection, self._existing(one, newest), self._existing(other, newest))

    def rollback(
        self,
        version: int,
        *,
        author: str,
        reason: str,
        sections: Collection[str] | None = None,
        based_on: int | None = None,
    ) -> Version | None:
        """Make everything as it was at a version, or only these sections of it. That is a version of its own."""
        unknown = set(sections or ()) - set(SECTIONS)
        if unknown:
            raise InvalidInput(f"there are no {', '.join(sorted(unknown))}; known are {', '.join(SECTIONS)}")
        with write_transaction(self._engine) as connection:
            newest = newest_version(connection)
            self._existing(version, newest)
            back: list[Change] = [
                Remove(each.section, each.id) if each.after is None else Put(each.section, each.after, each.id)
                for each in diff_versions(connection, newest, version)
                if sections is None or each.section in sections
            ]
            signed = self._signed(author, reason)
            return write(
                connection, back, **signed, based_on=based_on, restores=version, expected_version=self._expected_version
            )

    # ------------------------------------------------------------------ changes

    def put_policy(
        self,
        text: str,
        *,
        author: str,
        reason: str,
        file: str = "policy.yaml",
        hash_keys: bool = False,
        based_on: int | None = None,
    ) -> Version | None:
        """Take another policy document: YAML, TOML or JSON, by the name of the `file`. It holds no API keys but as
        their fingerprints; with `hash_keys`, each key in it is replaced by its fingerprint first."""
        document = PolicyDocument(text, _format(file), scalars.label(file))
        if hash_keys:
            document = raw_keys.hash_raw_keys(document, self._fingerprint)
        raw_keys.reject_raw_keys(document, None if self._keys is None else self._fingerprint)
        return self.write([Put("documents", document)], author=author, reason=reason, based_on=based_on)

    def set_tier(
        self, tier: str, limit: str, bucket: str, *, author: str, reason: str, based_on: int | None = None
    ) -> Version | None:
        """Give the clients of a tier these numbers on a limit: set_tier("pro", "search", "1000/minute", ...)."""
        row = TierLimit(scalars.name(tier), scalars.name(limit), **bucket_columns(parse(bucket)))
        return self.write([Put("tiers", row)], author=author, reason=reason, based_on=based_on)

    def remove_tier(
        self, tier: str, limit: str | None = None, *, author: str, reason: str, based_on: int | None = None
    ) -> Version | None:
        """Take the numbers of a tier out of the table: on one limit, or on all."""
        mine = [each for each in self.tiers() if each.row.tier == tier and limit in (None, each.row.limit_name)]
        return self._remove("tiers", mine, f"tier {tier!r}", author, reason, based_on)

    def set_route(
        self,
        path: str,
        cost: int,
        *,
        author: str,
        reason: str,
        route_class: str | None = None,
        based_on: int | None = None,
    ) -> Version | None:
        """Say what a request to a route costs, and perhaps of which class the route is."""
        row = RouteCost(
            scalars.text(path), scalars.whole(0, example=5)(cost), route_class and scalars.name(route_class)
        )
        return self.write([Put("routes", row)], author=author, reason=reason, based_on=based_on)

    def remove_route(self, path: str, *, author: str, reason: str, based_on: int | None = None) -> Version | None:
        mine = [each for each in self.routes() if each.row.path == path]
        return self._remove("routes", mine, f"route {path!r}", author, reason, based_on)

    def assign(
        self,
        who: tuple[str, str],
        tier: str | None,
        *,
        author: str,
        reason: str,
        label: str | None = None,
        based_on: int | None = None,
    ) -> Version | None:
        """Put a client into a tier: assign(("tenant", "acme"), "pro", ...)."""
        row = Assignment(*self.normalize_client(who), tier and scalars.name(tier), label and scalars.label(label))
        return self.write([Put("clients", row)], author=author, reason=reason, based_on=based_on)

    def unassign(
        self, who: tuple[str, str], *, author: str, reason: str, based_on: int | None = None
    ) -> Version | None:
        """Let the document, or the tier of everybody, say again in which tier a client is."""
        return self._remove("clients", self.clients(who=who), _named(who), author, reason, based_on)

    def override(
        self,
        who: tuple[str, str],
        bucket: str,
        *,
        author: str,
        reason: str,
        limit: str | None = None,
        route_class: str | None = None,
        valid_from: datetime | None = None,
        valid_until: datetime | None = None,
        id: int | None = None,
        based_on: int | None = None,
    ) -> Version | None:
        """Give a client numbers of its own: override(("tenant", "acme"), "10000/minute", limit="search", ...).

        In addition to those that it has; or in place of the one with this `id`.
        """
        row = OverrideRow(
            *self.normalize_client(who),
            limit and scalars.name(limit),
            route_class and scalars.name(route_class),
            **bucket_columns(parse(bucket)),
            valid_from_us=_us(valid_from),
            valid_until_us=_us(valid_until),
            reason=reason,
            author=author,
        )
        return self.write([Put("overrides", row, id)], author=author, reason=reason, based_on=based_on)

    def remove_override(self, id: int, *, author: str, reason: str, based_on: int | None = None) -> Version | None:
        return self.write([Remove("overrides", id)], author=author, reason=reason, based_on=based_on)

    def block(
        self,
        who: tuple[str, str],
        *,
        author: str,
        reason: str,
        valid_from: datetime | None = None,
        valid_until: datetime | None = None,
        based_on: int | None = None,
    ) -> Version | None:
        """Keep somebody out, as part of the policy. To keep somebody out within milliseconds, tell a gate, too."""
        row = BlockRow(*self.normalize_client(who), _us(valid_from), _us(valid_until), reason, author)
        return self.write([Put("blocked", row)], author=author, reason=reason, based_on=based_on)

    def unblock(self, who: tuple[str, str], *, author: str, reason: str, based_on: int | None = None) -> Version | None:
        return self._remove("blocked", self.blocks(who=who), _named(who), author, reason, based_on)

    def import_seed_tables(
        self, url: str, *, author: str, reason: str, default_tier: str | None = None
    ) -> Version | None:
        """Take over rate_limit_tiers, rate_limit_overrides and rate_limit_route_costs. A document that is here stays.

        What was imported before is brought up to date: of overrides, those on the same key and class are replaced.
        """
        found: ImportedTables = import_tables.read_tables(
            url, fingerprint=self._fingerprint, default_tier=default_tier, author=author
        )
        before = {
            (each.row.value, each.row.route_class): each.id for each in self.overrides() if each.row.limit_name is None
        }
        rows = [Put("overrides", row, before.get((row.value, row.route_class))) for row in found.overrides]
        document = [] if self.document() else [Put("documents", found.document)]
        tables = [*(Put("tiers", row) for row in found.tiers), *(Put("routes", row) for row in found.routes)]
        return self.write([*document, *tables, *rows], author=author, reason=reason)

    def write(
        self, changes: Sequence[Change], *, author: str, reason: str, based_on: int | None = None
    ) -> Version | None:
        """Make several changes as one version: all of them, or none. Rows are taken as they are."""
        signed = self._signed(author, reason)
        with write_transaction(self._engine) as connection:
            try:
                return write(connection, changes, **signed, based_on=based_on, expected_version=self._expected_version)
            except IntegrityError as error:
                raise InvalidInput("two rows would be about the same; change the one that is there") from error

    def expecting(self, version: int) -> ConfigStore:
        """The same store for one change that was judged by what held at a version: `Moved`, if that is not the newest
        any more when the change is written, by whichever process."""
        same = copy.copy(self)
        same._expected_version = version  # noqa: SLF001 - it is one of us
        return same

    def normalize_client(self, who: tuple[str, str]) -> tuple[str, str]:
        """Whom a row is about, as it is stored: addresses in their one spelling, of API keys only the hash."""
        kind, value = who
        kinds = scalars.by(kind)
        if kinds != (kind,):
            raise InvalidInput(f"{kind!r} is no kind of identity; give one, like ('tenant', 'acme')")
        match kind:
            case "api_key":
                return kind, self._fingerprint(scalars.api_key(value))
            case "ip":
                return kind, scalars.address_or_hash(value)
            case "subnet":
                return kind, scalars.subnet(value)
        return kind, scalars.identity(value)

    # ------------------------------------------------------------------ within

    def _rows(self, section: str, version: int | None, who: tuple[str, str] | None = None) -> list[StoredRow[Any]]:
        table = TABLES[section]
        where: list[ColumnElement[bool]] = []
        if who is not None:
            kind, value = self.normalize_client(who)
            where = [table.c.kind == kind, table.c.value == value]
        with read_transaction(self._engine) as connection:
            at = self._existing(version, newest_version(connection))
            return list(rows_at(connection, section, at, *where))

    def _remove(
        self, section: str, rows: list[Any], what: str, author: str, reason: str, based_on: int | None
    ) -> Version | None:
        if not rows:
            raise InvalidInput(f"the tables have no {section} of {what}")
        changes = [Remove(section, each.id) for each in rows]
        return self.write(changes, author=author, reason=reason, based_on=based_on)

    def _signed(self, author: str, reason: str) -> dict[str, Any]:
        if len(scalars.label(author)) > 200:
            raise InvalidInput("an author has at most 200 characters")
        return {"author": author, "reason": scalars.label(reason), "at_us": self._clock.now_us()}

    def _existing(self, version: int | None, newest: int) -> int:
        if version is None:
            return newest
        if not 0 <= version <= newest:
            raise InvalidInput(f"there is no version {version}; the newest is {newest}")
        return version

    def _fingerprint(self, key: str) -> str:
        if self._keys is None:
            if key.startswith(FINGERPRINT):
                return ApiKeyHasher(bytes(32)).fingerprint(key)  # nothing is hashed: it is one already
            raise InvalidConfiguration(
                "an API key is stored as a keyed hash, and there is no secret to key it with: give secret=, or set "
                f"{SECRET_VARIABLE}, to what the gates have"
            )
        return self._keys.fingerprint(key)


def _format(file: str) -> str:
    suffix = file.rpartition(".")[2].lower()
    found = "yaml" if suffix == "yml" else suffix
    if found not in FORMATS:
        raise InvalidPolicy([f"{file}: cannot tell its format; name the file .yaml, .yml, .toml or .json"])
    return found


def _us(moment: datetime | None) -> int | None:
    return None if moment is None else microseconds(scalars.instant(moment))


def _named(who: tuple[str, str]) -> str:
    return who[0] if who[0] == "api_key" else f"{who[0]} {who[1]}"
