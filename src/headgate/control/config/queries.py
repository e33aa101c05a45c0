"""Questions about the configuration, a page at a time: the database answers them, however much there is."""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Select, and_, collate, exists, func, literal, or_, select, tuple_, union

from headgate.control.config.reading import in_force
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

_SMALL: Final = str.maketrans(ascii_uppercase, ascii_lowercase)
"""What databases take for small letters without knowing a language."""
AT_ONCE: Final = 400
"""Values in one question: SQLite takes 999 in its older versions."""


class BaseStamp(NamedTuple):
    """What tells one frame from another: as long as it is the same, so are document, tiers and routes."""

    changes: tuple[int, ...]
    at_us: int


class LabelledRow(NamedTuple):
    """A row, and what its client is called."""

    id: int
    since: int
    row: Any
    label: str | None


class ClientEntry(NamedTuple):
    """A client of whom a row says something."""

    kind: str
    value: str
    label: str | None
    tier: str | None


def base_stamp(connection: Connection) -> BaseStamp:
    """Found by the indices alone."""
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
    """The rows of whoever has one of these identities, given by kind: those of a version, or the current ones."""
    found: dict[str, list[StoredRow[Any]]] = {}
    for section in sections:
        table = TABLES[section]
        rows = [
            each
            for kind, values in identities.items()
            for some in _pieces(list(values))
            for each in _kept(connection, section, table.c.kind == kind, table.c.value.in_(some), version=version)
        ]
        found[section] = sorted(rows)
    return found


def find_row(connection: Connection, section: str, id: int) -> LabelledRow | None:
    """The row with an id, if it holds now."""
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
    """Overrides or blocks, the newest first. `hashed` is what the text that is searched for would be as an API key."""
    table = TABLES[section]
    query = _with_label(section)
    if search:
        names = ("value", "reason", "author", *(("limit_name", "route_class") if section == "overrides" else ()))
        query = query.where(
            or_(_found(connection, table, names, search, hashed), _is_called(connection, table, search))
        )
    if state != "all":
        query = query.where(_in_state(table, state, now_us))
    if before is not None:
        query = query.where(table.c.id < before)
    if who is not None:
        query = query.where(table.c.kind == who[0], table.c.value == who[1])
    return _listed(connection, query.order_by(table.c.id.desc()).limit(most), section)


def label_sort_key(label: str, kind: str, value: str) -> tuple[str, str, str]:
    """Where a client with a name stands among the others; the same in Python and in every database."""
    return label.translate(_SMALL), kind, value


def labelled_clients(
    connection: Connection,
    *,
    search: str = "",
    hashed: str | None = None,
    after: tuple[str, str, str] | None,
    most: int,
) -> list[ClientEntry]:
    """The clients to whom a row gives a name, by their names: in the order of `name_key`."""
    clients = TABLES["clients"]

    def in_order(column: ColumnElement[Any]) -> ColumnElement[Any]:
        return column if connection.dialect.name == "sqlite" else collate(column, "C")

    key = (in_order(func.lower(in_order(clients.c.label))), in_order(clients.c.kind), in_order(clients.c.value))
    query = select(clients.c.kind, clients.c.value, clients.c.label, clients.c.tier)
    query = query.where(clients.c.until_version.is_(None), clients.c.label.is_not(None))
    if after is not None:
        # The first test says no more than the second, but SQLite finds its way by it.
        query = query.where(key[0] >= after[0], tuple_(*key) > tuple_(*[literal(each) for each in after]))
    if search:
        query = query.where(_found(connection, clients, ("value", "label"), search, hashed))
    return [ClientEntry(*each) for each in connection.execute(query.order_by(*key).limit(most))]


def unlabelled_clients(
    connection: Connection, *, search: str = "", hashed: str | None = None, after: tuple[str, str] | None, most: int
) -> list[ClientEntry]:
    """Everybody else of whom a row says something, in the database's own order of kinds and values."""
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
            query = query.where(_found(connection, table, ("value",), search, hashed))
        # Each part is cut by its index: else the database would put all of them together first.
        parts.append(select(query.order_by(table.c.kind, table.c.value).limit(most).subquery()))
    everybody = union(*parts).subquery()
    query_all = (
        select(everybody.c.kind, everybody.c.value, clients.c.label, clients.c.tier)
        .outerjoin_from(everybody, clients, _same_client(everybody, clients))
        .order_by(everybody.c.kind, everybody.c.value)
        .limit(most)
    )
    return [ClientEntry(*each) for each in connection.execute(query_all)]


def labels_of(connection: Connection, who: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What clients are called, as far as rows say."""
    by_kind: dict[str, list[str]] = {}
    for kind, value in who:
        by_kind.setdefault(kind, []).append(value)
    found = rows_of_clients(connection, by_kind, ["clients"])["clients"]
    return {(each.row.kind, each.row.value): each.row.label for each in found if each.row.label}


def find_by_label(connection: Connection, label: str) -> list[tuple[str, str]]:
    """The clients with a label, however it is spelled, as far as the database can tell."""
    table = TABLES["clients"]
    query = (
        select(table.c.kind, table.c.value)
        .where(
            table.c.until_version.is_(None),
            table.c.label.is_not(None),  # said for SQLite, which else does not see that the index has them all
            func.lower(table.c.label) == func.lower(label),
        )
        .order_by(table.c.id)
        .limit(10)
    )
    return [(kind, value) for kind, value in connection.execute(query)]


def count_overrides(connection: Connection, who: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """How many overrides these clients have."""
    table = TABLES["overrides"]
    by_kind: dict[str, list[str]] = {}
    for kind, value in who:
        by_kind.setdefault(kind, []).append(value)
    found: dict[tuple[str, str], int] = {}
    for kind, values in by_kind.items():
        query = (
            select(table.c.value, func.count())
            .where(table.c.until_version.is_(None), table.c.kind == kind, table.c.value.in_(values))
            .group_by(table.c.value)
        )
        found |= {(kind, value): count for value, count in connection.execute(query)}
    return found


def count_assignments(connection: Connection) -> dict[str, int]:
    """How many clients rows put into each tier."""
    table = TABLES["clients"]
    query = (
        select(table.c.tier, func.count())
        .where(table.c.until_version.is_(None), table.c.tier.is_not(None))
        .group_by(table.c.tier)
    )
    return {str(tier): count for tier, count in connection.execute(query)}


def sample_rows(connection: Connection) -> dict[str, list[Any]]:
    """One row of each sort: whether a document fits all rows is seen by these."""
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
        found[section] = [each.row for each in _kept(connection, section, table.c.id.in_(first))]
    return found


# ------------------------------------------------------------------ within


def version_at(connection: Connection, at_us: int) -> int:
    """The version that was current at a time; the oldest, if there was none yet; 0 if there is none at all."""
    then = select(func.max(VERSIONS.c.version)).where(VERSIONS.c.at_us <= at_us)
    return int(connection.scalar(then) or connection.scalar(select(func.min(VERSIONS.c.version))) or 0)


def _kept(
    connection: Connection, section: str, *where: ColumnElement[bool], version: int | None = None
) -> list[StoredRow[Any]]:
    table, kind = TABLES[section], SECTIONS[section]
    columns = [table.c[name] for name in kind._fields]
    is_held = table.c.until_version.is_(None) if version is None else in_force(section, version)
    query = select(table.c.id, table.c.since, *columns).where(is_held, *where)
    return [
        StoredRow(id, since, kind(*fields)) for id, since, *fields in connection.execute(query.order_by(table.c.id))
    ]


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


def _found(
    connection: Connection, table: Table, names: Iterable[str], search: str, hashed: str | None
) -> ColumnElement[bool]:
    """Whether a text stands in one of these columns."""
    tests = [_holds(connection, table.c[name], search) for name in names]
    if hashed is not None:
        tests.append(and_(table.c.kind == "api_key", table.c.value == hashed))
    return or_(*tests)


def _is_called(connection: Connection, table: Table, search: str) -> ColumnElement[bool]:
    """Whether a text stands in the label of the client."""
    clients = TABLES["clients"]
    labels = (clients.c.until_version.is_(None), _holds(connection, clients.c.label, search))
    return tuple_(table.c.kind, table.c.value).in_(select(clients.c.kind, clients.c.value).where(*labels))


def _holds(connection: Connection, column: ColumnElement[Any], search: str) -> ColumnElement[bool]:
    # SQLite's LIKE takes capitals for small letters by itself, in a third of the time.
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


def _pieces(values: list[str]) -> list[list[str]]:
    return [values[start : start + AT_ONCE] for start in range(0, len(values), AT_ONCE)]
