"""Paged and searchable queries on the configuration, answered by the database at any size."""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Select, and_, collate, exists, func, literal, or_, select, tuple_, union

from headgate.control.config.reading import in_force, select_rows
from headgate.control.config.rows import BASE_SECTIONS, LIST_SECTIONS, SECTIONS, StoredRow
from headgate.control.config.tables import TABLES, VERSIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sqlalchemy import ColumnElement, Connection, Table

__all__ = [
    "ClientEntry",
    "LabelledRow",
    "base_stamp",
    "count_assignments",
    "count_overrides",
    "find_by_label",
    "find_row",
    "group_by_kind",
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
MAX_PARAMETERS: Final = 400  # values in one query; older SQLite versions accept 999
CLIENTS: Final = TABLES["clients"]
OVERRIDES: Final = TABLES["overrides"]


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


def base_stamp(connection: Connection) -> tuple[int, ...]:
    """Numbers that identify the current state of document, tiers and routes; reads indexes only."""
    ends = [
        select(func.max(column)).where(column.is_not(None)).scalar_subquery()
        for section in BASE_SECTIONS
        for column in (TABLES[section].c.since, TABLES[section].c.until_version)
    ]
    changes = tuple(int(each or 0) for each in connection.execute(select(*ends)).one())
    at_us = connection.scalar(select(VERSIONS.c.at_us).where(VERSIONS.c.version == max(changes)))
    return *changes, int(at_us or 0)


def rows_of_clients(
    connection: Connection,
    identities: Mapping[str, Collection[str]],
    sections: Iterable[str] = LIST_SECTIONS,
    *,
    version: int | None = None,
) -> dict[str, list[StoredRow[Any]]]:
    """The rows of clients with any of these identities, given by kind; current ones, or those of a version."""
    found: dict[str, list[StoredRow[Any]]] = {section: [] for section in sections}
    for section, rows in found.items():
        table = TABLES[section]
        for kind, collection in identities.items():
            values = list(collection)
            for start in range(0, len(values), MAX_PARAMETERS):
                is_one = table.c.kind == kind, table.c.value.in_(values[start : start + MAX_PARAMETERS])
                rows += select_rows(connection, section, in_force(section, version), *is_one)
        rows.sort()
    return found


def find_row(connection: Connection, section: str, id: int) -> LabelledRow | None:
    """The current row with an id, or None."""
    return next(iter(_listed(connection, _with_label(section).where(TABLES[section].c.id == id), section)), None)


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
        has_label = in_force("clients"), _contains(connection, CLIENTS.c.label, search)
        labelled = tuple_(table.c.kind, table.c.value).in_(select(CLIENTS.c.kind, CLIENTS.c.value).where(*has_label))
        query = query.where(or_(_matches_text(connection, table, names, search, hashed), labelled))
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

    def in_order(column: ColumnElement[Any]) -> ColumnElement[Any]:
        return column if connection.dialect.name == "sqlite" else collate(column, "C")

    columns = CLIENTS.c
    key = in_order(func.lower(in_order(columns.label))), in_order(columns.kind), in_order(columns.value)
    query = select(columns.kind, columns.value, columns.label, columns.tier)
    query = query.where(in_force("clients"), columns.label.is_not(None))
    if after is not None:
        # Implied by the second condition, but lets SQLite use its index.
        query = query.where(key[0] >= after[0], tuple_(*key) > tuple_(*map(literal, after)))
    if search:
        query = query.where(_matches_text(connection, CLIENTS, ("value", "label"), search, hashed))
    return [ClientEntry(*each) for each in connection.execute(query.order_by(*key).limit(most))]


def unlabelled_clients(
    connection: Connection, *, search: str = "", hashed: str | None = None, after: tuple[str, str] | None, most: int
) -> list[ClientEntry]:
    """Clients with rows but no label, in the database's order of kind and value."""
    parts = []
    for section in LIST_SECTIONS:
        table, called = TABLES[section], CLIENTS.alias()
        who = table.c.kind, table.c.value
        has_name = exists().where(_same_client(table, called), called.c.label.is_not(None))
        query = select(*who).where(in_force(section), ~has_name).distinct()
        if after is not None:
            query = query.where(tuple_(*who) > tuple_(*map(literal, after)))
        if search:
            query = query.where(_matches_text(connection, table, ("value",), search, hashed))
        # Limit each part by its index; otherwise the database would merge all rows first.
        parts.append(select(query.order_by(*who).limit(most).subquery()))
    found = union(*parts).subquery()
    everything = (
        select(found.c.kind, found.c.value, CLIENTS.c.label, CLIENTS.c.tier)
        .outerjoin_from(found, CLIENTS, _same_client(found, CLIENTS))
        .order_by(found.c.kind, found.c.value)
        .limit(most)
    )
    return [ClientEntry(*each) for each in connection.execute(everything)]


def labels_of(connection: Connection, who: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The labels of clients that have one."""
    found = rows_of_clients(connection, group_by_kind(who), ["clients"])["clients"]
    return {(each.row.kind, each.row.value): each.row.label for each in found if each.row.label}


def find_by_label(connection: Connection, label: str) -> list[tuple[str, str]]:
    """Clients with this label, ignoring case as far as the database can."""
    has_label = CLIENTS.c.label.is_not(None)  # lets SQLite use the partial index
    is_same = in_force("clients"), has_label, func.lower(CLIENTS.c.label) == func.lower(label)
    query = select(CLIENTS.c.kind, CLIENTS.c.value).where(*is_same).order_by(CLIENTS.c.id).limit(10)
    return [(kind, value) for kind, value in connection.execute(query)]


def count_overrides(connection: Connection, who: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """The number of overrides of each client."""
    kind, value = OVERRIDES.c.kind, OVERRIDES.c.value
    found: dict[tuple[str, str], int] = {}
    for each, values in group_by_kind(who).items():
        query = select(value, func.count()).where(in_force("overrides"), kind == each, value.in_(values))
        found |= {(each, value): count for value, count in connection.execute(query.group_by(value))}
    return found


def count_assignments(connection: Connection) -> dict[str, int]:
    """The number of clients assigned to each tier."""
    tier = CLIENTS.c.tier
    query = select(tier, func.count()).where(in_force("clients"), tier.is_not(None)).group_by(tier)
    return {str(tier): count for tier, count in connection.execute(query)}


def sample_rows(connection: Connection) -> dict[str, list[Any]]:
    """One row of each distinct shape: enough to validate a document against all rows."""
    found: dict[str, list[Any]] = {"blocked": []}
    limit = ("limit_name", "route_class", "quota", "period_us", "burst", "algorithm")
    for section, alike in (("clients", ("tier",)), ("overrides", limit)):
        columns = TABLES[section].c
        first = select(func.min(columns.id)).where(in_force(section)).group_by(*[columns[name] for name in alike])
        rows = select_rows(connection, section, in_force(section), columns.id.in_(first))
        found[section] = [each.row for each in rows]
    return found


def version_at(connection: Connection, at_us: int) -> int:
    """The version current at a time; before the first version that one, and 0 in an empty store."""
    then = select(func.max(VERSIONS.c.version)).where(VERSIONS.c.at_us <= at_us)
    return int(connection.scalar(then) or connection.scalar(select(func.min(VERSIONS.c.version))) or 0)


def group_by_kind(who: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The values of identities by their kind."""
    by_kind: dict[str, list[str]] = {}
    for kind, value in who:
        by_kind.setdefault(kind, []).append(value)
    return by_kind


def _with_label(section: str) -> Select[Any]:
    table = TABLES[section]
    columns = [table.c[name] for name in SECTIONS[section]._fields]
    query = select(table.c.id, table.c.since, CLIENTS.c.label, *columns)
    return query.outerjoin_from(table, CLIENTS, _same_client(table, CLIENTS)).where(in_force(section))


def _listed(connection: Connection, query: Select[Any], section: str) -> list[LabelledRow]:
    kind = SECTIONS[section]
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


def _contains(connection: Connection, column: ColumnElement[Any], search: str) -> ColumnElement[bool]:
    # SQLite's LIKE ignores case already, in a third of the time.
    test = column.contains if connection.dialect.name == "sqlite" else column.icontains
    return test(search, autoescape=True)


def _in_state(table: Table, state: str, now_us: int) -> ColumnElement[bool]:
    since, until = table.c.valid_from_us, table.c.valid_until_us
    if state == "expired":
        return until <= now_us
    begins = since > now_us if state == "future" else or_(since.is_(None), since <= now_us)
    return and_(begins, or_(until.is_(None), until > now_us))
