"""Paged and searchable queries on the configuration, answered by the database at any size."""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Select, and_, collate, exists, func, literal, or_, select, tuple_, union

from headgate.control.config.reading import in_force, select_rows
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, SECTIONS, BlockRow, OverrideRow, StoredRow
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sqlalchemy import ColumnElement, Connection, Table

__all__ = [
    "BaseStamp",
    "ClientEntry",
    "LabelledRow",
    "base_stamp",
    "count_assignments",
    "count_overrides",
    "find_by_label",
    "find_row",
    "label_sort_key",
    "labelled_clients",
    "labels_of",
    "list_rows",
    "rows_of_clients",
    "sample_rows",
    "unlabelled_clients",
    "version_at",
]

_ASCII_LOWER: Final = str.maketrans(ascii_uppercase, ascii_lowercase)
"""The lower case of databases without a locale: ASCII only."""
MAX_PARAMETERS: Final = 400
"""Values in one query; older SQLite versions accept 999."""


class BaseStamp(NamedTuple):
    """Identifies a state of document, tiers and routes: they are unchanged while it is equal."""

    changes: tuple[int, ...]
    at_us: int


class LabelledRow(NamedTuple):
    """A row with the label of its client."""

    id: int
    since: int
    row: Any
    label: str | None


class ClientEntry(NamedTuple):
    """A client with at least one row."""

    kind: str
    value: str
    label: str | None
    tier: str | None


def base_stamp(connection: Connection) -> BaseStamp:
    """The current state of document, tiers and routes; reads indexes only."""
    ends = [
        select(func.max(column)).where(column.is_not(None)).scalar_subquery()
        for section in BASE_SECTIONS
        for column in (TABLES[section].c.since, TABLES[section].c.until_version)
    ]
    found = connection.execute(select(*ends)).one()
    changes = tuple(int(each or 0) for each in found)
    at_us = connection.scalar(select(VERSIONS.c.at_us).where(VERSIONS.c.version == max(changes)))
    return BaseStamp(changes, int(at_us or 0))


def rows_of_clients(
    connection: Connection,
    identities: Mapping[str, Collection[str]],
    sections: Iterable[str] = LIST_SECTIONS,
    *,
    version: int | None = None,
) -> dict[str, list[StoredRow[Any]]]:
    """The rows of clients with any of these identities, given by kind; current ones, or those of a version."""
    found: dict[str, list[StoredRow[Any]]] = {}
    for section in sections:
        table = TABLES[section]
        rows = [
            each
            for kind, values in identities.items()
            for some in _chunks(list(values))
            for each in select_rows(
                connection, section, _is_held(section, version), table.c.kind == kind, table.c.value.in_(some)
            )
        ]
        found[section] = sorted(rows)
    return found


def find_row(connection: Connection, section: str, id: int) -> LabelledRow | None:
    """The current row with an id, or None."""
    found = _listed(connection, _with_label(section).where(TABLES[section].c.id == id), section)
    return found[0] if found else None


def list_rows(
    connection: Connection,
    section: str,
    *,
    now_us: int,
    most: int,
    search: str = "",
    hashed: str | None = None,
    state: str = "all",
    before: int | None = None,
    who: tuple[str, str] | None = None,
) -> list[LabelledRow]:
    """Overrides or blocks, newest first. `hashed` is the search text hashed as an API key."""
    table = TABLES[section]
    query = _with_label(section)
    if search:
        names = ("value", "reason", "author", *(("limit_name", "route_class") if section == "overrides" else ()))
        query = query.where(
            or_(_matches_text(connection, table, names, search, hashed), _matches_label(connection, table, search))
        )
    if state != "all":
        query = query.where(_in_state(table, state, now_us))
    if before is not None:
        query = query.where(table.c.id < before)
    if who is not None:
        query = query.where(table.c.kind == who[0], table.c.value == who[1])
    return _listed(connection, query.order_by(table.c.id.desc()).limit(most), section)


def label_sort_key(label: str, kind: str, value: str) -> tuple[str, str, str]:
    """The sort key of a labelled client, identical in Python and in every database."""
    return label.translate(_ASCII_LOWER), kind, value


def labelled_clients(
    connection: Connection,
    *,
    search: str = "",
    hashed: str | None = None,
    after: tuple[str, str, str] | None,
    most: int,
) -> list[ClientEntry]:
    """Labelled clients in the order of `label_sort_key`."""
    clients = TABLES["clients"]

    def in_order(column: ColumnElement[Any]) -> ColumnElement[Any]:
        return column if connection.dialect.name == "sqlite" else collate(column, "C")

    key = (in_order(func.lower(in_order(clients.c.label))), in_order(clients.c.kind), in_order(clients.c.value))
    query = select(clients.c.kind, clients.c.value, clients.c.label, clients.c.tier)
    query = query.where(clients.c.until_version.is_(None), clients.c.label.is_not(None))
    if after is not None:
        # Implied by the second condition, but lets SQLite use its index.
        query = query.where(key[0] >= after[0], tuple_(*key) > tuple_(*[literal(each) for each in after]))
    if search:
        query = query.where(_matches_text(connection, clients, ("value", "label"), search, hashed))
    return [ClientEntry(*each) for each in connection.execute(query.order_by(*key).limit(most))]


def unlabelled_clients(
    connection: Connection, *, search: str = "", hashed: str | None = None, after: tuple[str, str] | None, most: int
) -> list[ClientEntry]:
    """Clients with rows but no label, in the database's order of kind and value."""
    clients = TABLES["clients"]
    parts = []
    for section in LIST_SECTIONS:
        table = TABLES[section]
        called = clients.alias()
        has_name = exists().where(_same_client(table, called), called.c.label.is_not(None))
        query = select(table.c.kind, table.c.value).where(table.c.until_version.is_(None), ~has_name).distinct()
        if after is not None:
            query = query.where(tuple_(table.c.kind, table.c.value) > tuple_(literal(after[0]), literal(after[1])))
        if search:
            query = query.where(_matches_text(connection, table, ("value",), search, hashed))
        # Limit each part by its index; otherwise the database would merge all rows first.
        parts.append(select(query.order_by(table.c.kind, table.c.value).limit(most).subquery()))
    unlabelled = union(*parts).subquery()
    query_all = (
        select(unlabelled.c.kind, unlabelled.c.value, clients.c.label, clients.c.tier)
        .outerjoin_from(unlabelled, clients, _same_client(unlabelled, clients))
        .order_by(unlabelled.c.kind, unlabelled.c.value)
        .limit(most)
    )
    return [ClientEntry(*each) for each in connection.execute(query_all)]


def labels_of(connection: Connection, who: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The labels of clients that have one."""
    found = rows_of_clients(connection, _by_kind(who), ["clients"])["clients"]
    return {(each.row.kind, each.row.value): each.row.label for each in found if each.row.label}


def find_by_label(connection: Connection, label: str) -> list[tuple[str, str]]:
    """Clients with this label, ignoring case as far as the database can."""
    table = TABLES["clients"]
    query = (
        select(table.c.kind, table.c.value)
        .where(
            table.c.until_version.is_(None),
            table.c.label.is_not(None),  # lets SQLite use the partial index
            func.lower(table.c.label) == func.lower(label),
        )
        .order_by(table.c.id)
        .limit(10)
    )
    return [(kind, value) for kind, value in connection.execute(query)]


def count_overrides(connection: Connection, who: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """The number of overrides of each client."""
    table = TABLES["overrides"]
    found: dict[tuple[str, str], int] = {}
    for kind, values in _by_kind(who).items():
        query = (
            select(table.c.value, func.count())
            .where(table.c.until_version.is_(None), table.c.kind == kind, table.c.value.in_(values))
            .group_by(table.c.value)
        )
        found |= {(kind, value): count for value, count in connection.execute(query)}
    return found


def count_assignments(connection: Connection) -> dict[str, int]:
    """The number of clients assigned to each tier."""
    table = TABLES["clients"]
    query = (
        select(table.c.tier, func.count())
        .where(table.c.until_version.is_(None), table.c.tier.is_not(None))
        .group_by(table.c.tier)
    )
    return {str(tier): count for tier, count in connection.execute(query)}


def sample_rows(connection: Connection) -> dict[str, list[Any]]:
    """One row of each distinct shape: enough to validate a document against all rows."""
    found: dict[str, list[Any]] = {"blocked": []}
    for section, alike in (
        ("clients", ("tier",)),
        ("overrides", ("limit_name", "route_class", "quota", "period_us", "burst", "algorithm")),
    ):
        table = TABLES[section]
        first = (
            select(func.min(table.c.id))
            .where(table.c.until_version.is_(None))
            .group_by(*[table.c[name] for name in alike])
        )
        found[section] = [
            each.row for each in select_rows(connection, section, _is_held(section, None), table.c.id.in_(first))
        ]
    return found


def version_at(connection: Connection, at_us: int) -> int:
    """The version current at a time; before the first version that one, and 0 in an empty store."""
    then = select(func.max(VERSIONS.c.version)).where(VERSIONS.c.at_us <= at_us)
    return int(connection.scalar(then) or connection.scalar(select(func.min(VERSIONS.c.version))) or 0)


def _is_held(section: str, version: int | None) -> ColumnElement[bool]:
    return TABLES[section].c.until_version.is_(None) if version is None else in_force(section, version)


def _by_kind(who: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for kind, value in who:
        by_kind.setdefault(kind, []).append(value)
    return by_kind


def _with_label(section: str) -> Select[Any]:
    table, clients = TABLES[section], TABLES["clients"]
    columns = [table.c[name] for name in SECTIONS[section]._fields]
    return (
        select(table.c.id, table.c.since, clients.c.label, *columns)
        .outerjoin_from(table, clients, _same_client(table, clients))
        .where(table.c.until_version.is_(None))
    )


def _listed(connection: Connection, query: Select[Any], section: str) -> list[LabelledRow]:
    kind: Any = OverrideRow if section == "overrides" else BlockRow
    return [LabelledRow(id, since, kind(*fields), label) for id, since, label, *fields in connection.execute(query)]


def _same_client(one: Any, clients: Any) -> ColumnElement[bool]:
    return and_(clients.c.kind == one.c.kind, clients.c.value == one.c.value, clients.c.until_version.is_(None))


def _matches_text(
    connection: Connection, table: Table, names: Iterable[str], search: str, hashed: str | None
) -> ColumnElement[bool]:
    """Matches rows that contain a text in one of these columns."""
    tests = [_contains(connection, table.c[name], search) for name in names]
    if hashed is not None:
        tests.append(and_(table.c.kind == "api_key", table.c.value == hashed))
    return or_(*tests)


def _matches_label(connection: Connection, table: Table, search: str) -> ColumnElement[bool]:
    """Matches rows whose client has a text in its label."""
    clients = TABLES["clients"]
    labels = (clients.c.until_version.is_(None), _contains(connection, clients.c.label, search))
    return tuple_(table.c.kind, table.c.value).in_(select(clients.c.kind, clients.c.value).where(*labels))


def _contains(connection: Connection, column: ColumnElement[Any], search: str) -> ColumnElement[bool]:
    # SQLite's LIKE ignores case already, in a third of the time.
    if connection.dialect.name == "sqlite":
        return column.contains(search, autoescape=True)
    return column.icontains(search, autoescape=True)


def _in_state(table: Table, state: str, now_us: int) -> ColumnElement[bool]:
    since, until = table.c.valid_from_us, table.c.valid_until_us
    is_over, is_to_come = until <= now_us, since > now_us
    match state:
        case "expired":
            return is_over
        case "future":
            return and_(is_to_come, or_(until.is_(None), until > now_us))
    return and_(or_(since.is_(None), since <= now_us), or_(until.is_(None), until > now_us))


def _chunks(values: list[str]) -> list[list[str]]:
    return [values[start : start + MAX_PARAMETERS] for start in range(0, len(values), MAX_PARAMETERS)]
