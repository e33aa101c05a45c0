"""Pages of clients, overrides and blocks, which come from the tables, the policy document and the nodes.

Each list is a sequence of sources. A cursor is the name of a source and a position in it: "policy:12".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headgate.control.config import queries
from headgate.control.config.rows import format_bucket as format_row_bucket
from headgate.control.config.rows import microseconds
from headgate.control.service.models import BlockView, ClientRef, ClientRow, OverrideView, Page
from headgate.control.service.usage import format_bucket
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Connection

    from headgate.control.config.queries import ClientEntry, LabelledRow
    from headgate.control.config.rows import BlockRow, OverrideRow
    from headgate.control.service.effective_policy import BasePolicy
    from headgate.control.service.models import State
    from headgate.local.block_list import LiveBlock
    from headgate.policy.model import Block, Override

__all__ = [
    "MAX_PAGE",
    "MAX_SEARCH_LENGTH",
    "STATES",
    "block_view",
    "blocks",
    "check_page",
    "clients",
    "live_view",
    "override_view",
    "overrides",
    "policy_block_view",
    "state_of",
]

STATES: Final = ("all", "active", "future", "expired")
MAX_PAGE: Final = 200
MAX_SEARCH_LENGTH: Final = 500
MAX_CURSOR_LENGTH: Final = 4000

T = TypeVar("T")


def check_page(search: str, state: str, most: int) -> None:
    """InvalidInput for a state, page size or search text that no list accepts."""
    if state not in STATES:
        raise InvalidInput(f"there is no such state; known are {', '.join(STATES)}")
    if not 1 <= most <= MAX_PAGE:
        raise InvalidInput(f"a page has 1 to {MAX_PAGE} lines, not {most}")
    if len(search) > MAX_SEARCH_LENGTH or "\0" in search:
        raise InvalidInput(f"search for at most {MAX_SEARCH_LENGTH} printable characters")


def overrides(
    connection: Connection,
    base: BasePolicy,
    *,
    now_us: int,
    most: int,
    after: str | None,
    search: str,
    state: str,
    hashed: str | None,
    who: ClientRef | None,
) -> Page[OverrideView]:
    """The overrides in the config store, newest first, then those in the policy document."""

    def from_tables(position: str | None) -> list[tuple[str, OverrideView]]:
        rows = queries.list_rows(
            connection, "overrides", now_us=now_us, most=most + 1, before=_parse_id(position),
            search=search, state=state, hashed=hashed, who=who,
        )  # fmt: skip
        return [(str(each.id), override_view(each, base, now_us)) for each in rows]

    def from_document(position: str | None) -> list[tuple[str, OverrideView]]:
        views = [_policy_override_view(each, base, now_us) for each in base.policy.overrides]
        return [
            (str(index), view)
            for index, view in enumerate(views)
            if index > _parse_index(position)
            and _matches(view, search, state, hashed, view.limit, view.route_class)
            and who in (None, view.who)
        ]

    if after is not None and after.isdigit():  # the id of a row is a cursor of its own
        after = f"config:{after}"
    page = _read_page({"config": from_tables, "policy": from_document}, after, most)
    return Page(page.items, page.next and page.next.removeprefix("config:"))


def blocks(
    connection: Connection,
    base: BasePolicy,
    live: Sequence[LiveBlock],
    *,
    now_us: int,
    most: int,
    after: str | None,
    search: str,
    state: str,
    hashed: str | None,
) -> Page[BlockView]:
    """The blocks in the config store, newest first, then those in the policy document, then those on the nodes only."""

    def from_tables(position: str | None) -> list[tuple[str, BlockView]]:
        rows = queries.list_rows(
            connection, "blocked", now_us=now_us, most=most + 1, before=_parse_id(position),
            search=search, state=state, hashed=hashed,
        )  # fmt: skip
        return [(str(each.id), block_view(each, base, now_us)) for each in rows]

    def from_document(position: str | None) -> list[tuple[str, BlockView]]:
        views = [policy_block_view(each, base, now_us) for each in base.policy.blocked]
        return [
            (str(index), view)
            for index, view in enumerate(views)
            if index > _parse_index(position) and _matches(view, search, state, hashed)
        ]

    def from_nodes(position: str | None) -> list[tuple[str, BlockView]]:
        last = None if position is None else tuple(_parse_texts(position, 2))
        rows = queries.rows_of_clients(connection, _by_kind(block[:2] for block in live), ["blocked"])["blocked"]
        others = {(each.row.kind, each.row.value) for each in rows}
        others |= {(each.identity.kind, each.identity.value) for each in base.policy.blocked}
        only_live = [block for block in live if block[:2] not in others and (last is None or block[:2] > last)]
        only_live.sort(key=lambda block: block[:2])
        labels = queries.labels_of(connection, [block[:2] for block in only_live[: most + 1]])
        views = [live_view(each, labels.get(each[:2]) or base.label_of(each[:2]), now_us) for each in only_live]
        return [(_format_texts(view.who), view) for view in views if _matches(view, search, state, hashed)]

    return _read_page({"config": from_tables, "policy": from_document, "live": from_nodes}, after, most)


def clients(
    connection: Connection,
    base: BasePolicy,
    *,
    search: str,
    hashed: str | None,
    after: str | None,
    most: int,
    now_us: int,
) -> Page[ClientRow]:
    """Labelled clients by label, then clients that only the document has, then the others in the tables."""
    in_document = [
        queries.ClientEntry(*who, base.label_of(who), _tier(base, who))
        for who in base.entries
        if _is_found(search, hashed, ClientRef(*who), who[1], base.label_of(who))
    ]

    def labelled(position: str | None) -> list[tuple[str, ClientEntry]]:
        last: Any = None if position is None else tuple(_parse_texts(position, 3))
        found = queries.labelled_clients(connection, search=search, hashed=hashed, after=last, most=most + 1)
        own = [each for each in in_document if each.label]
        rows = queries.rows_of_clients(connection, _by_kind(each[:2] for each in own), ["clients"])["clients"]
        in_tables = {(each.row.kind, each.row.value): each.row for each in rows}
        for each in own:
            row = in_tables.get(each[:2])
            if row is None or row.label is None:
                found.append(each if row is None else each._replace(tier=row.tier or each.tier))
        keyed = sorted([(queries.label_sort_key(each.label or "", each.kind, each.value), each) for each in found])
        return [(_format_texts(key), each) for key, each in keyed if last is None or key > last][: most + 1]

    def only_in_document(position: str | None) -> list[tuple[str, ClientEntry]]:
        numbers = {who: index for index, who in enumerate(base.entries)}
        found = [
            (str(numbers[each[:2]]), each)
            for each in in_document
            if numbers[each[:2]] > _parse_index(position) and not each.label
        ]
        rows = queries.rows_of_clients(connection, _by_kind(each[:2] for _, each in found))
        in_tables = {(each.row.kind, each.row.value) for some in rows.values() for each in some}
        return [(index, each) for index, each in found if each[:2] not in in_tables]

    def unlabelled(position: str | None) -> list[tuple[str, ClientEntry]]:
        last: Any = None if position is None else tuple(_parse_texts(position, 2))
        found: list[tuple[str, ClientEntry]] = []
        while len(found) <= most:
            some = queries.unlabelled_clients(connection, search=search, hashed=hashed, after=last, most=MAX_PAGE)
            # A client that the document labels is among the labelled ones.
            found += [(_format_texts(each[:2]), each) for each in some if base.label_of(each[:2]) is None]
            if len(some) < MAX_PAGE:
                break
            last = some[-1][:2]
        return found

    page = _read_page({"names": labelled, "document": only_in_document, "tables": unlabelled}, after, most)
    shown = [each[:2] for each in page.items]
    counts = queries.count_overrides(connection, shown)
    rows = queries.rows_of_clients(connection, _by_kind(shown), ["blocked"])["blocked"]
    blocked = {(each.row.kind, each.row.value) for each in rows if state_of(each.row, now_us) == "active"}
    blocked |= {(each.identity.kind, each.identity.value) for each in base.policy.blocked}
    return Page(
        tuple(
            ClientRow(
                ClientRef(*who),
                each.label or base.label_of(who),
                each.tier or _tier(base, who),
                counts.get(who, 0) + len(base.entries.get(who, {}).get("overrides", ())),
                who in blocked,
            )
            for who, each in zip(shown, page.items, strict=True)
        ),
        page.next,
    )


def _read_page(
    sources: dict[str, Callable[[str | None], list[tuple[str, T]]]], after: str | None, most: int
) -> Page[T]:
    """Read a page from sources that return positions and items after a position; later ones only if there is room."""
    names = list(sources)
    name, position = names[0], None
    if after is not None:
        name, _, position = after[:MAX_CURSOR_LENGTH].partition(":")
        if name not in sources or not position:
            raise _invalid_cursor()
    found: list[tuple[str, T]] = []
    for each in names[names.index(name) :]:
        if len(found) <= most:
            found += [(f"{each}:{at}", item) for at, item in sources[each](position if each == name else None)]
    return Page(tuple(item for _, item in found[:most]), found[most - 1][0] if len(found) > most else None)


# ------------------------------------------------------------------ views


def override_view(each: LabelledRow, base: BasePolicy, now_us: int) -> OverrideView:
    row: OverrideRow = each.row
    return OverrideView(
        limit=row.limit_name,
        route_class=row.route_class,
        bucket=format_row_bucket(row),
        source="config",
        **_row_fields(each, base, now_us),
    )


def block_view(each: LabelledRow, base: BasePolicy, now_us: int) -> BlockView:
    return BlockView(source="config", **_row_fields(each, base, now_us))


def _policy_override_view(override: Override, base: BasePolicy, now_us: int) -> OverrideView:
    return OverrideView(
        limit=override.rule,
        route_class=override.route_class,
        bucket=format_bucket(override.limit),
        source="policy",
        **_entry_fields(override, base, now_us),
    )


def policy_block_view(block: Block, base: BasePolicy, now_us: int) -> BlockView:
    return BlockView(source="policy", **_entry_fields(block, base, now_us))


def live_view(block: LiveBlock, label: str | None, now_us: int) -> BlockView:
    kind, value, until_us, reason = block
    state = _state(None, until_us, now_us)
    return BlockView(None, None, ClientRef(kind, value), label, None, until_us, reason, None, state, "live")


def _row_fields(each: LabelledRow, base: BasePolicy, now_us: int) -> dict[str, Any]:
    """The fields that views of override and block rows share."""
    row: Any = each.row
    return {
        "id": each.id,
        "since": each.since,
        "who": ClientRef(row.kind, row.value),
        "label": each.label or base.label_of((row.kind, row.value)),
        "valid_from_us": row.valid_from_us,
        "valid_until_us": row.valid_until_us,
        "reason": row.reason,
        "author": row.author,
        "state": state_of(row, now_us),
    }


def _entry_fields(entry: Override | Block, base: BasePolicy, now_us: int) -> dict[str, Any]:
    """The fields that views of overrides and blocks in the policy document share."""
    since, until = (
        None if each is None else microseconds(each) for each in (entry.validity.since, entry.validity.until)
    )
    who = ClientRef(*entry.identity)
    return {
        "id": None,
        "since": None,
        "who": who,
        "label": base.label_of(who),
        "valid_from_us": since,
        "valid_until_us": until,
        "reason": entry.reason,
        "author": None,
        "state": _state(since, until, now_us),
    }


def state_of(row: OverrideRow | BlockRow, now_us: int) -> State:
    """The state of a row by its validity."""
    return _state(row.valid_from_us, row.valid_until_us, now_us)


def _state(since_us: int | None, until_us: int | None, now_us: int) -> State:
    if until_us is not None and until_us <= now_us:
        return "expired"
    return "future" if since_us is not None and since_us > now_us else "active"


# ------------------------------------------------------------------ search and cursors


def _matches(view: OverrideView | BlockView, search: str, state: str, hashed: str | None, *texts: str | None) -> bool:
    is_found = _is_found(search, hashed, view.who, view.who.value, view.label, view.reason, *texts)
    return is_found and state in ("all", view.state)


def _is_found(search: str, hashed: str | None, client: ClientRef, *texts: str | None) -> bool:
    is_key = client.kind == "api_key" and client.value == hashed
    return not search or is_key or any(search.casefold() in (text or "").casefold() for text in texts)


def _tier(base: BasePolicy, who: tuple[str, str]) -> str | None:
    return next((each.tier for each in base.entries.get(who, {}).get("clients", ())), None)


def _by_kind(clients: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind, value in clients:
        found.setdefault(kind, []).append(value)
    return found


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


def _parse_id(position: str | None) -> int | None:
    return None if position is None else _parse_index(position)


def _parse_index(position: str | None) -> int:
    if position is None:
        return -1
    if not (position.isascii() and position.isdigit() and len(position) <= 18):
        raise _invalid_cursor()
    return int(position)


def _invalid_cursor() -> InvalidInput:
    return InvalidInput("after is not a position in this list; give the `next` of the previous page")
