"""Overrides, blocks and clients, a page at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from headgate.control.config import queries
from headgate.control.config.rows import format_bucket as format_row_bucket
from headgate.control.config.rows import microseconds
from headgate.control.service.models import (
    BlockView,
    ClientRef,
    ClientRow,
    OverrideView,
    Page,
)
from headgate.control.service.usage import format_bucket
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from headgate.control.config.queries import LabelledRow
    from headgate.control.config.rows import BlockRow, OverrideRow
    from headgate.control.service.effective_policy import BasePolicy
    from headgate.control.service.models import State
    from headgate.local.block_list import LiveBlock
    from headgate.policy.model import Block, Override

__all__ = [
    "STATES",
    "block_view",
    "blocks",
    "check_page",
    "clients",
    "live_view",
    "override_view",
    "overrides",
    "policy_block_view",
    "policy_override_view",
    "state_of",
]

STATES: Final = ("all", "active", "future", "expired")
MAX_PAGE: Final = 200
"""On one page."""
MAX_SEARCH_LENGTH: Final = 500
MAX_CURSOR_LENGTH: Final = 4000


def check_page(search: str, state: str, most: int) -> None:
    """InvalidInput for what no page can be of."""
    if state not in STATES:
        raise InvalidInput(f"there is no such state; known are {', '.join(STATES)}")
    if not 1 <= most <= MAX_PAGE:
        raise InvalidInput(f"a page has 1 to {MAX_PAGE} lines, not {most}")
    if len(search) > MAX_SEARCH_LENGTH or "\0" in search:
        raise InvalidInput(f"search for at most {MAX_SEARCH_LENGTH} characters that can be printed")


def overrides(
    connection: Connection, base: BasePolicy, *, now_us: int, most: int, after: str | None, **question: Any
) -> Page[OverrideView]:
    """The rows, the newest first; then those of the policy document."""
    place, last = ("config", after) if after is None or after.isdigit() else _cut(after)
    views: list[tuple[str, OverrideView]] = []
    if place == "config":
        before = None if last is None else _number(last)
        found = queries.list_rows(connection, "overrides", now_us=now_us, most=most + 1, before=before, **question)
        views = [(str(each.id), override_view(each, base, now_us)) for each in found]
        last = None
    if len(views) <= most:
        start = -1 if last is None else _number(last)
        views += [
            (f"policy:{index}", view)
            for index, each in enumerate(base.policy.overrides)
            if index > start and _is_asked_for(view := policy_override_view(each, base, now_us), **question)
        ]
    return Page(tuple(view for _, view in views[:most]), views[most - 1][0] if len(views) > most else None)


def _is_asked_for(
    view: OverrideView, *, search: str, hashed: str | None, state: str, who: tuple[str, str] | None
) -> bool:
    texts = (view.who.value, view.label, view.reason, view.limit, view.route_class)
    is_found = not search or any(search.casefold() in (text or "").casefold() for text in texts)
    is_key = view.who.kind == "api_key" and view.who.value == hashed
    return (is_found or is_key) and state in ("all", view.state) and who in (None, view.who)


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
    """The rows, the newest first; then those of the document; then those that only nodes were told of."""
    place, last = _place(after)
    views: list[tuple[str, BlockView]] = []
    if place == "config":
        before = None if last is None else _number(last)
        question: Any = {"search": search, "hashed": hashed, "state": state, "before": before}
        found = queries.list_rows(connection, "blocked", now_us=now_us, most=most + 1, **question)
        views = [(f"config:{each.id}", block_view(each, base, now_us)) for each in found]
        place, last = "policy", None
    if len(views) <= most and place == "policy":
        start = -1 if last is None else _number(last)
        views += [
            (f"policy:{index}", policy_block_view(each, base, now_us))
            for index, each in enumerate(base.policy.blocked)
            if index > start
        ]
        place, last = "live", None
    if len(views) <= most:
        seen = None if last is None else tuple(_pair(last))
        alone = [each for each in _alone(connection, base, live) if seen is None or each[:2] > seen]
        labels = queries.labels_of(connection, [each[:2] for each in alone[: most + 1]])
        views += [
            (f"live:{_spelled(each[:2])}", live_view(each, _label(base, each[:2], labels.get(each[:2])), now_us))
            for each in alone
        ]
    fitting = [each for each in views if _fits(each[1], search, state, hashed)]
    more = len(fitting) > most
    return Page(tuple(view for _, view in fitting[:most]), fitting[most - 1][0] if more else None)


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
    """Those with a name first, by their names; then those whom the document alone tells of, then those of the rows."""
    asked: Any = {"search": search, "hashed": hashed}
    place, rest = ("names", None) if after is None else _cut(after)
    found: list[tuple[str, queries.ClientEntry]] = []
    if place == "names":
        found = _with_names(connection, base, after=_key(rest), most=most + 1, **asked)
        place, rest = "document", None
    if len(found) <= most and place == "document":
        found += _of_document(connection, base, start=-1 if rest is None else _number(rest), **asked)
        place, rest = "tables", None
    if len(found) <= most and place == "tables":
        last = None if rest is None else _pair(rest)
        found += _of_tables(connection, base, after=last, most=most + 1 - len(found), **asked)
    shown = [each for _, each in found[:most]]
    named = [(each.kind, each.value) for each in shown]
    counts = queries.count_overrides(connection, named)
    blocked = {
        (each.row.kind, each.row.value)
        for each in queries.rows_of_clients(connection, _by_kind(shown), ["blocked"])["blocked"]
        if state_of(each.row, now_us) == "active"
    }
    blocked |= {(each.identity.kind, each.identity.value) for each in base.policy.blocked}
    rows = [
        ClientRow(
            ClientRef(each.kind, each.value),
            _label(base, (each.kind, each.value), each.label),
            each.tier or _tier(base, (each.kind, each.value)),
            counts.get((each.kind, each.value), 0) + len(_entries(base, (each.kind, each.value), "overrides")),
            (each.kind, each.value) in blocked,
        )
        for each in shown
    ]
    return Page(tuple(rows), found[most - 1][0] if len(found) > most else None)


# ------------------------------------------------------------------ one line each


def override_view(each: LabelledRow, base: BasePolicy, now_us: int) -> OverrideView:
    row: OverrideRow = each.row
    return OverrideView(
        id=each.id,
        since=each.since,
        who=ClientRef(row.kind, row.value),
        label=_label(base, (row.kind, row.value), each.label),
        limit=row.limit_name,
        route_class=row.route_class,
        bucket=format_row_bucket(row),
        valid_from_us=row.valid_from_us,
        valid_until_us=row.valid_until_us,
        reason=row.reason,
        author=row.author,
        state=state_of(row, now_us),
        source="config",
    )


def policy_override_view(override: Override, base: BasePolicy, now_us: int) -> OverrideView:
    """An override of the policy document."""
    since, until = (
        None if each is None else microseconds(each) for each in (override.validity.since, override.validity.until)
    )
    who = ClientRef(*override.identity)
    return OverrideView(
        id=None,
        since=None,
        who=who,
        label=_label(base, who, None),
        limit=override.rule,
        route_class=override.route_class,
        bucket=format_bucket(override.limit),
        valid_from_us=since,
        valid_until_us=until,
        reason=override.reason,
        author=None,
        state=_state(since, until, now_us),
        source="policy",
    )


def block_view(each: LabelledRow, base: BasePolicy, now_us: int) -> BlockView:
    row: BlockRow = each.row
    return BlockView(
        id=each.id,
        since=each.since,
        who=ClientRef(row.kind, row.value),
        label=_label(base, (row.kind, row.value), each.label),
        valid_from_us=row.valid_from_us,
        valid_until_us=row.valid_until_us,
        reason=row.reason,
        author=row.author,
        state=state_of(row, now_us),
        source="config",
    )


def policy_block_view(block: Block, base: BasePolicy, now_us: int) -> BlockView:
    since, until = (
        None if each is None else microseconds(each) for each in (block.validity.since, block.validity.until)
    )
    state = _state(since, until, now_us)
    who = ClientRef(*block.identity)
    return BlockView(None, None, who, _label(base, who, None), since, until, block.reason, None, state, "policy")


def live_view(block: LiveBlock, label: str | None, now_us: int) -> BlockView:
    kind, value, until_us, reason = block
    state = _state(None, until_us, now_us)
    return BlockView(None, None, ClientRef(kind, value), label, None, until_us, reason, None, state, "live")


def state_of(row: OverrideRow | BlockRow, now_us: int) -> State:
    """Whether a row holds, will, or did."""
    return _state(row.valid_from_us, row.valid_until_us, now_us)


def _state(since_us: int | None, until_us: int | None, now_us: int) -> State:
    if until_us is not None and until_us <= now_us:
        return "expired"
    return "future" if since_us is not None and since_us > now_us else "active"


# ------------------------------------------------------------------ within


def _alone(connection: Connection, base: BasePolicy, live: Sequence[LiveBlock]) -> list[LiveBlock]:
    """The live blocks that are neither a row nor a line of the document, in order."""
    by_kind: dict[str, list[str]] = {}
    for block in live:
        by_kind.setdefault(block.kind, []).append(block.value)
    rows = queries.rows_of_clients(connection, by_kind, ["blocked"])["blocked"]
    taken = {(each.row.kind, each.row.value) for each in rows} | {tuple(each.identity) for each in base.policy.blocked}
    return sorted([block for block in live if block[:2] not in taken], key=lambda block: block[:2])


def _fits(view: BlockView, search: str, state: str, hashed: str | None) -> bool:
    if view.source == "config":
        return True  # the database has seen to it
    texts = (view.who.value, view.label, view.reason)
    is_found = not search or any(search.casefold() in (text or "").casefold() for text in texts)
    return (is_found or (view.who.kind == "api_key" and view.who.value == hashed)) and state in ("all", view.state)


def _entries(base: BasePolicy, who: tuple[str, str], section: str) -> Sequence[Any]:
    return base.entries.get(who, {}).get(section, ())


def _label(base: BasePolicy, who: tuple[str, str], given: str | None) -> str | None:
    return given or next((each.label for each in _entries(base, (who[0], who[1]), "clients")), None)


def _tier(base: BasePolicy, who: tuple[str, str]) -> str | None:
    return next((each.tier for each in _entries(base, who, "clients")), None)


def _in_document(base: BasePolicy) -> list[queries.ClientEntry]:
    return [queries.ClientEntry(*who, _label(base, who, None), _tier(base, who)) for who in base.entries]


def _with_names(
    connection: Connection,
    base: BasePolicy,
    *,
    search: str,
    hashed: str | None,
    after: tuple[str, str, str] | None,
    most: int,
) -> list[tuple[str, queries.ClientEntry]]:
    """Those to whom a row gives a name, and those to whom only the document does; each with its place."""
    found = queries.labelled_clients(connection, search=search, hashed=hashed, after=after, most=most)
    labelled = [each for each in _in_document(base) if each.label and _is_meant(each, search, hashed)]
    rows = queries.rows_of_clients(connection, _by_kind(labelled), ["clients"])["clients"]
    in_rows = {(each.row.kind, each.row.value): each.row for each in rows}
    for each in labelled:
        row = in_rows.get((each.kind, each.value))
        if row is None or row.label is None:
            found.append(each if row is None else each._replace(tier=row.tier or each.tier))
    places = sorted([(queries.label_sort_key(each.label or "", each.kind, each.value), each) for each in found])
    return [(f"names:{_spelled(key)}", each) for key, each in places if after is None or key > after][:most]


def _of_document(
    connection: Connection, base: BasePolicy, *, search: str, hashed: str | None, start: int
) -> list[tuple[str, queries.ClientEntry]]:
    """Those without a name of whom no row says anything."""
    found = [
        (f"document:{index}", each)
        for index, each in enumerate(_in_document(base))
        if index > start and not each.label and _is_meant(each, search, hashed)
    ]
    in_rows = queries.rows_of_clients(connection, _by_kind(each for _, each in found))
    taken = {(each.row.kind, each.row.value) for rows in in_rows.values() for each in rows}
    return [(place, each) for place, each in found if (each.kind, each.value) not in taken]


def _of_tables(
    connection: Connection,
    base: BasePolicy,
    *,
    search: str,
    hashed: str | None,
    after: tuple[str, str] | None,
    most: int,
) -> list[tuple[str, queries.ClientEntry]]:
    """Those without a name of whom a row says something."""
    found: list[tuple[str, queries.ClientEntry]] = []
    while len(found) < most:
        some = queries.unlabelled_clients(connection, search=search, hashed=hashed, after=after, most=MAX_PAGE)
        named = [(each.kind, each.value) for each in some]
        found += [
            (f"tables:{_spelled(who)}", each)
            for who, each in zip(named, some, strict=True)
            if _label(base, who, None) is None  # else it has stood among the names
        ]
        if len(some) < MAX_PAGE:
            break
        after = named[-1]
    return found[:most]


def _is_meant(each: queries.ClientEntry, search: str, hashed: str | None) -> bool:
    text = search.casefold()
    is_key = each.kind == "api_key" and each.value == hashed
    return not search or is_key or text in each.value.casefold() or text in (each.label or "").casefold()


def _by_kind(named: Iterable[queries.ClientEntry]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in named:
        found.setdefault(each.kind, []).append(each.value)
    return found


def _place(after: str | None) -> tuple[str, str | None]:
    return ("config", None) if after is None else _cut(after)


def _cut(cursor: str) -> tuple[str, str | None]:
    place, _, rest = cursor[:MAX_CURSOR_LENGTH].partition(":")
    if place not in ("config", "policy", "live", "names", "document", "tables") or not rest:
        raise _no_cursor()
    return place, rest


def _spelled(texts: Sequence[str]) -> str:
    """Texts in a cursor, as they may stand in an address."""
    return json.dumps(texts, separators=(",", ":")).replace(" ", "\\u0020")


def _pair(text: str) -> tuple[str, str]:
    match _texts(text):
        case [kind, value]:
            return kind, value
    raise _no_cursor()


def _key(text: str | None) -> tuple[str, str, str] | None:
    if text is None:
        return None
    match _texts(text):
        case [label, kind, value]:
            return label, kind, value
    raise _no_cursor()


def _texts(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _no_cursor() from None
    if isinstance(found, list) and all(isinstance(each, str) and each.isprintable() for each in found):
        return found
    raise _no_cursor()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _no_cursor()
    return int(text)


def _no_cursor() -> InvalidInput:
    return InvalidInput("after is no place in this list; give the `next` of the page before")
