"""Paged and searchable lists of overrides, blocks and clients.

The tables can be large and are paged by the database; the policy document and the live blocks are in memory. A list
goes through a sequence of sources. A cursor is the name of a source and a position in it: "policy:12".
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from headgate.control.config import queries
from headgate.control.config.queries import ClientEntry, LabelledRow, group_by_kind
from headgate.control.config.rows import format_bucket, microseconds
from headgate.control.service.effective_policy import BasePolicy, format_limit
from headgate.control.service.models import BlockView, ClientRef, ClientRow, OverrideView, Page, State
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sqlalchemy import Connection

    from headgate.control.config.rows import BlockRow, OverrideRow
    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.local.block_list import LiveBlock
    from headgate.policy.model import Block, Override

__all__ = [
    "MAX_PAGE", "MAX_SEARCH_LENGTH", "STATES", "ListQuery", "block_view", "blocks", "check_page", "clients",
    "live_view", "open_list", "override_view", "overrides", "policy_block_view", "state_of",
]  # fmt: skip

STATES: Final = ("all", "active", "future", "expired")
MAX_PAGE: Final = 200
MAX_SEARCH_LENGTH: Final = 500
MAX_CURSOR_LENGTH: Final = 4000

T = TypeVar("T")
Positioned: TypeAlias = list[tuple[str, T]]
"""Items with their positions in a source."""


class ListQuery(NamedTuple):
    """The part of a list that was requested, and the state of the configuration from which it is read."""

    connection: Connection
    base: BasePolicy
    now_us: int
    search: str
    hashed: str | None
    """The search text hashed as an API key."""
    state: str
    who: ClientRef | None
    after: str | None
    most: int

    def from_table(self, section: str, view: Callable[[Any, BasePolicy, int], T], at: str | None) -> Positioned[T]:
        """Views of the rows of a table after a position."""
        rows = queries.list_rows(
            self.connection, section, now_us=self.now_us, most=self.most + 1, search=self.search, hashed=self.hashed,
            state=self.state, before=None if at is None else _parse_index(at), who=self.who,
        )  # fmt: skip
        return [(str(each.id), view(each, self.base, self.now_us)) for each in rows]

    def from_document(
        self, entries: Iterable[Any], view: Callable[[Any, BasePolicy, int], T], at: str | None
    ) -> Positioned[T]:
        """Views of the matching entries of the policy document after a position."""
        last, views = _parse_index(at), [view(each, self.base, self.now_us) for each in entries]
        return [(str(index), each) for index, each in enumerate(views) if index > last and self.matches(each)]

    def matches(self, view: Any) -> bool:
        """True if a view of an override or a block is in the requested state and contains the search text."""
        scope = (view.limit, view.route_class) if isinstance(view, OverrideView) else ()
        is_found = self.contains(view.who, view.who.value, view.label, view.reason, *scope)
        return is_found and self.state in ("all", view.state) and self.who in (None, view.who)

    def contains(self, client: tuple[str, str], *texts: str | None) -> bool:
        """True if one of the texts contains the search text, or if the client is the API key searched for."""
        sought = self.search.casefold()
        is_key = client == ("api_key", self.hashed)
        return not sought or is_key or any(sought in (text or "").casefold() for text in texts)

    def read_page(self, sources: dict[str, Callable[[str | None], Positioned[T]]]) -> Page[T]:
        """A page from sources that return the items after a position; later ones are read only if there is room."""
        names = list(sources)
        name, position = names[0], None
        if self.after is not None:
            name, _, position = self.after[:MAX_CURSOR_LENGTH].partition(":")
            if name not in sources or not position:
                raise _invalid_cursor()
        found: Positioned[T] = []
        for each in names[names.index(name) :]:
            if len(found) <= self.most:
                found += [(f"{each}:{at}", item) for at, item in sources[each](position if each == name else None)]
        is_last = len(found) <= self.most
        return Page(tuple(item for _, item in found[: self.most]), None if is_last else found[self.most - 1][0])


@contextmanager
def open_list(
    deps: ServiceDependencies,
    *,
    search: str,
    after: str | None,
    most: int,
    state: str = "all",
    who: ClientRef | None = None,
) -> Iterator[ListQuery]:
    """Check the parameters of a list, and open a read transaction for it."""
    check_page(search, state, most)
    hashed, who = deps.lookup.hash_as_key(search), None if who is None else deps.lookup.canonical(who)
    with deps.reading() as connection:
        base = deps.base_policy(connection)
        yield ListQuery(connection, base, deps.now_us(), search, hashed, state, who, after, most)


def check_page(search: str, state: str, most: int) -> None:
    """InvalidInput for a state, page size or search text that no list accepts."""
    if state not in STATES:
        raise InvalidInput(f"there is no such state; known are {', '.join(STATES)}")
    if not 1 <= most <= MAX_PAGE:
        raise InvalidInput(f"a page has 1 to {MAX_PAGE} lines, not {most}")
    if len(search) > MAX_SEARCH_LENGTH or "\0" in search:
        raise InvalidInput(f"search for at most {MAX_SEARCH_LENGTH} printable characters")


def overrides(query: ListQuery) -> Page[OverrideView]:
    """The overrides in the config store, newest first, then those in the policy document."""
    if query.after is not None and query.after.isdigit():  # the id of a row is a cursor of its own
        query = query._replace(after=f"config:{query.after}")
    page = query.read_page(
        {
            "config": lambda at: query.from_table("overrides", override_view, at),
            "policy": lambda at: query.from_document(query.base.policy.overrides, _policy_override_view, at),
        }
    )
    return Page(page.items, page.next and page.next.removeprefix("config:"))


def blocks(query: ListQuery, live: Sequence[LiveBlock]) -> Page[BlockView]:
    """The blocks in the config store, newest first, then those in the policy document, then those on the nodes only."""
    connection, base, now_us = query.connection, query.base, query.now_us
    in_document = base.policy.blocked

    def from_nodes(position: str | None) -> Positioned[BlockView]:
        last = None if position is None else tuple(_parse_texts(position, 2))
        rows = queries.rows_of_clients(connection, group_by_kind(block[:2] for block in live), ["blocked"])["blocked"]
        others = {(each.row.kind, each.row.value) for each in rows} | {tuple(each.identity) for each in in_document}
        only_live = [block for block in live if block[:2] not in others and (last is None or block[:2] > last)]
        only_live.sort(key=lambda block: block[:2])
        labels = queries.labels_of(connection, [block[:2] for block in only_live[: query.most + 1]])
        views = [live_view(each, labels.get(each[:2]) or base.label_of(each[:2]), now_us) for each in only_live]
        return [(_format_texts(view.who), view) for view in views if query.matches(view)]

    return query.read_page(
        {
            "config": lambda at: query.from_table("blocked", block_view, at),
            "policy": lambda at: query.from_document(in_document, policy_block_view, at),
            "live": from_nodes,
        }
    )


def clients(query: ListQuery) -> Page[ClientRow]:
    """Labelled clients by label, then clients that only the document has, then the others in the tables."""
    connection, base, most = query.connection, query.base, query.most
    filters: Any = {"search": query.search, "hashed": query.hashed}
    in_document = [
        ClientEntry(*who, base.label_of(who), _tier(base, who))
        for who in base.entries
        if query.contains(who, who[1], base.label_of(who))
    ]

    def labelled(position: str | None) -> Positioned[ClientEntry]:
        last: Any = None if position is None else tuple(_parse_texts(position, 3))
        found = queries.labelled_clients(connection, **filters, after=last, most=most + 1)
        own = [each for each in in_document if each.label]
        rows = queries.rows_of_clients(connection, group_by_kind(each[:2] for each in own), ["clients"])["clients"]
        in_tables = {(each.row.kind, each.row.value): each.row for each in rows}
        for each in own:
            row = in_tables.get(each[:2])
            if row is None or row.label is None:
                found.append(each if row is None else each._replace(tier=row.tier or each.tier))
        keyed = sorted([(queries.label_sort_key(each.label or "", each.kind, each.value), each) for each in found])
        return [(_format_texts(key), each) for key, each in keyed if last is None or key > last][: most + 1]

    def only_in_document(position: str | None) -> Positioned[ClientEntry]:
        last, numbers = _parse_index(position), {who: index for index, who in enumerate(base.entries)}
        found = [each for each in in_document if numbers[each[:2]] > last and not each.label]
        rows = queries.rows_of_clients(connection, group_by_kind(each[:2] for each in found))
        in_tables = {(each.row.kind, each.row.value) for some in rows.values() for each in some}
        return [(str(numbers[each[:2]]), each) for each in found if each[:2] not in in_tables]

    def unlabelled(position: str | None) -> Positioned[ClientEntry]:
        last: Any = None if position is None else tuple(_parse_texts(position, 2))
        found: Positioned[ClientEntry] = []
        while len(found) <= most:
            some = queries.unlabelled_clients(connection, **filters, after=last, most=MAX_PAGE)
            # A client that the document labels is among the labelled ones.
            found += [(_format_texts(each[:2]), each) for each in some if base.label_of(each[:2]) is None]
            if len(some) < MAX_PAGE:
                break
            last = some[-1][:2]
        return found

    page = query.read_page({"names": labelled, "document": only_in_document, "tables": unlabelled})
    shown = [each[:2] for each in page.items]
    counts = queries.count_overrides(connection, shown)
    rows = queries.rows_of_clients(connection, group_by_kind(shown), ["blocked"])["blocked"]
    blocked = {(each.row.kind, each.row.value) for each in rows if state_of(each.row, query.now_us) == "active"}
    blocked |= {(each.identity.kind, each.identity.value) for each in base.policy.blocked}

    def view(each: ClientEntry) -> ClientRow:
        who = ClientRef(each.kind, each.value)
        overrides = counts.get(who, 0) + len(base.entries.get(who, {}).get("overrides", ()))
        return ClientRow(
            who, each.label or base.label_of(who), each.tier or _tier(base, who), overrides, who in blocked
        )

    return Page(tuple(map(view, page.items)), page.next)


def override_view(each: LabelledRow, base: BasePolicy, now_us: int) -> OverrideView:
    row: OverrideRow = each.row
    shared = asdict(block_view(each, base, now_us))
    return OverrideView(limit=row.limit_name, route_class=row.route_class, bucket=format_bucket(row), **shared)


def _policy_override_view(override: Override, base: BasePolicy, now_us: int) -> OverrideView:
    bucket, shared = format_limit(override.limit), asdict(policy_block_view(override, base, now_us))
    return OverrideView(limit=override.rule, route_class=override.route_class, bucket=bucket, **shared)


def block_view(each: LabelledRow, base: BasePolicy, now_us: int) -> BlockView:
    row, state = each.row, state_of(each.row, now_us)
    who = ClientRef(row.kind, row.value)
    validity, label = (row.valid_from_us, row.valid_until_us), each.label or base.label_of(who)
    return BlockView(each.id, each.since, who, label, *validity, row.reason, row.author, state, "config")


def policy_block_view(entry: Override | Block, base: BasePolicy, now_us: int) -> BlockView:
    who, times = ClientRef(*entry.identity), (entry.validity.since, entry.validity.until)
    since, until = (None if each is None else microseconds(each) for each in times)
    state = _state(since, until, now_us)
    return BlockView(None, None, who, base.label_of(who), since, until, entry.reason, None, state, "policy")


def live_view(block: LiveBlock, label: str | None, now_us: int) -> BlockView:
    kind, value, until_us, reason = block
    state = _state(None, until_us, now_us)
    return BlockView(None, None, ClientRef(kind, value), label, None, until_us, reason, None, state, "live")


def state_of(row: OverrideRow | BlockRow, now_us: int) -> State:
    """The state of a row by its validity."""
    return _state(row.valid_from_us, row.valid_until_us, now_us)


def _state(since_us: int | None, until_us: int | None, now_us: int) -> State:
    if until_us is not None and until_us <= now_us:
        return "expired"
    return "future" if since_us is not None and since_us > now_us else "active"


def _tier(base: BasePolicy, who: tuple[str, str]) -> str | None:
    return next((each.tier for each in base.entries.get(who, {}).get("clients", ())), None)


def _format_texts(texts: Sequence[str]) -> str:
    """Texts as a position in a cursor, which may appear in a URL."""
    return json.dumps(texts, separators=(",", ":")).replace(" ", "\\u0020")


def _parse_texts(position: str, count: int) -> list[str]:
    try:
        found = json.loads(position)
    except (ValueError, RecursionError):
        raise _invalid_cursor() from None
    is_valid = isinstance(found, list) and all(isinstance(each, str) and each.isprintable() for each in found)
    if not is_valid or len(found) != count:
        raise _invalid_cursor()
    return list(found)


def _parse_index(position: str | None) -> int:
    if position is None:
        return -1
    if not (position.isascii() and position.isdigit() and len(position) <= 18):
        raise _invalid_cursor()
    return int(position)


def _invalid_cursor() -> InvalidInput:
    return InvalidInput("after is not a position in this list; give the `next` of the previous page")
