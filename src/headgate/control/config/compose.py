"""From a document and the rows of the tables to one policy, by the strict reader of policies.

The rows of `LISTS` don't depend on each other, but only on the frame: the document with the tiers and the routes. So
a few that have changed are read by themselves, and take milliseconds where a hundred thousand take seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headgate._pace import release
from headgate.control.config.rows import LIST_SECTIONS, PolicyDocument, format_bucket, policy_entry
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy.loader import build, no_search_for_cycles
from headgate.policy.problems import PolicyProblem, PolicyProblems
from headgate.policy.scalars import route
from headgate.policy.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headgate.control.config.rows import RouteCost, Row, TierLimit
    from headgate.policy.model import Policy

__all__ = ["PolicyAssembly", "PolicyTemplate"]

AT_ONCE: Final = 5000
"""Rows that are read in one go: what is made of them on the way is freed in one go, too."""

_NO_DOCUMENT: Final = PolicyDocument("{}", "json", "config store")


class PolicyTemplate:
    """What rows are read against: a document, with the tiers and the routes of the tables merged into it.

    What a table says goes before what the document says of the same route, or of the same tier and limit.
    """

    def __init__(
        self, document: PolicyDocument | None, tiers: Iterable[TierLimit], routes: Iterable[RouteCost]
    ) -> None:
        self._source = Source(*_arguments(document or _NO_DOCUMENT))
        self._owners: dict[tuple[str | int, ...], Row] = {}
        """The rows, by their places in the policy."""
        value = self._source.value
        self._is_readable = value is None or isinstance(value, dict)
        self._value: dict[str, Any] = dict(value) if isinstance(value, dict) else {}
        self._lists = {section: self._taken(section) for section in LIST_SECTIONS}
        if self._is_readable:
            self._add_routes(list(routes))
            self._add_tiers(list(tiers))

    def read(self, rows: Mapping[str, Sequence[Row]], *, alone: bool = False) -> Policy:
        """The policy with these rows in its lists; without those of the document, if the rows are read alone.

        InvalidPolicy, if it has mistakes: those of the document by their places, those of rows by who they are about.
        """
        value = dict(self._value)
        owners: dict[tuple[str | int, ...], Any] = dict(self._owners)
        for section in LIST_SECTIONS:
            own, added = self._lists[section], rows.get(section, ())
            if own is not None and not isinstance(own, list) and not alone:
                value[section] = own  # its reader says what is wrong with it
                continue
            kept = list(own) if own and not alone else []
            if section == "clients" and kept:
                added = _replaced(kept, added, owners)
            if kept or added:
                value[section] = [*kept, *map(policy_entry, added)]
                owners[section,] = _Rows(len(kept), added)
        problems, warnings = PolicyProblems(), PolicyProblems()
        with no_search_for_cycles():
            policy = build(value if self._is_readable else self._source.value, problems, warnings)
        if refusal := self._refusal(problems, owners):
            raise refusal
        return replace(policy, warnings=tuple(self._lines(warnings, owners))) if warnings else policy

    # ------------------------------------------------------------------ routes and tiers

    def _add_routes(self, rows: list[RouteCost]) -> None:
        if not rows:
            return
        entries = self._value.get("routes")
        if entries is not None and not isinstance(entries, list):
            return  # its reader says so
        entries = list(entries or ())
        places = {_place(entry): index for index, entry in enumerate(entries)}
        for row in rows:
            index = places.get(_place({"path": row.path}))
            if index is None:
                entries.append(policy_entry(row))
                self._owners["routes", len(entries) - 1] = row
            else:
                own = {"cost": row.cost} if row.route_class is None else {"cost": row.cost, "class": row.route_class}
                entries[index] = {**entries[index], **own}
        self._value["routes"] = entries

    def _add_tiers(self, rows: list[TierLimit]) -> None:
        for row in rows:
            self._without_numbers(row)
            tiers = self._value.setdefault("tiers", {})
            limits = tiers.get(row.tier, {}) if isinstance(tiers, dict) else None
            named = limits.get("limits", {}) if isinstance(limits, dict) else None
            if not isinstance(named, dict) or not isinstance(tiers, dict):
                return  # its reader says so
            merged = {**(limits or {}), "limits": {**named, row.limit_name: format_bucket(row)}}
            self._value["tiers"] = {**tiers, row.tier: merged}
            self._owners["tiers", row.tier, "limits", row.limit_name] = row

    def _without_numbers(self, row: TierLimit) -> None:
        """Numbers for the same tier that stand with the limit itself make way."""
        limits = self._value.get("limits")
        if isinstance(limits, dict) and self._value.get("tier") == row.tier and row.limit_name in limits:
            self._value["limits"] = {name: each for name, each in limits.items() if name != row.limit_name}
        if not isinstance(limits, list):
            return
        for index, entry in enumerate(limits):
            named = entry.get("tiers") if isinstance(entry, dict) and entry.get("name") == row.limit_name else None
            if isinstance(named, dict) and row.tier in named:
                others = {tier: each for tier, each in named.items() if tier != row.tier}
                rest = {key: each for key, each in entry.items() if key != "tiers"}
                changed = {**rest, "tiers": others} if others else rest
                self._value["limits"] = [*limits[:index], changed, *limits[index + 1 :]]
                return

    def _taken(self, section: str) -> Any:
        return self._value.pop(section, None)

    # ------------------------------------------------------------------ mistakes

    def _refusal(self, problems: PolicyProblems, owners: Mapping[tuple[str | int, ...], Any]) -> InvalidPolicy | None:
        own = self._source.refusal(PolicyProblems())  # what the format itself has found, and nothing else
        told = [*(own.problems if own else ()), *self._lines(problems, owners)]
        if problems.full:
            told.append(f"{self._source.file}: these are the first {len(told)} mistakes; there may be more")
        return InvalidPolicy(told) if told else None

    def _lines(self, problems: PolicyProblems, owners: Mapping[tuple[str | int, ...], Any]) -> list[str]:
        """Each mistake on a line: by its place in the document, or by the row that it is in."""
        of_document, lines = PolicyProblems(), []
        for problem in problems.kept:
            row = _owner(problem, owners)
            if row is None:
                of_document.kept.append(problem)
            else:
                other = "another entry" if problem.other is not None else ""
                lines.append(f"{row}: {problem.before}{other}{problem.after}")
        return [*self._source.tell(of_document), *dict.fromkeys(lines)]


class PolicyAssembly:
    """A policy that is put together again when rows change, from what was read of the others before."""

    def __init__(self, frame: PolicyTemplate, rows: Mapping[str, Mapping[int, Row]]) -> None:
        self._frame = frame
        self._base = frame.read({})
        self._made: dict[str, dict[int, Any]] = {section: {} for section in LIST_SECTIONS}
        self._made = self._with(rows)

    @property
    def policy(self) -> Policy:
        made = self._made
        clients = {client.identity: client for client in (*self._base.clients, *made["clients"].values())}
        return replace(
            self._base,
            clients=tuple(clients.values()),
            overrides=(*self._base.overrides, *made["overrides"].values()),
            blocked=(*self._base.blocked, *made["blocked"].values()),
        )

    def changed(self, rows: Mapping[str, Mapping[int, Row | None]]) -> PolicyAssembly:
        """The same with other rows in place of those of the same id, or with none where there is None."""
        other = object.__new__(PolicyAssembly)
        other._frame, other._base, other._made = self._frame, self._base, self._made
        other._made = other._with(rows)
        return other

    def release(self) -> None:
        """Let go of what it is made of, some at a time: to free all of it at once would stop every thread."""
        for made in self._made.values():
            release(made)

    def _with(self, rows: Mapping[str, Mapping[int, Row | None]]) -> dict[str, dict[int, Any]]:
        made = {}
        for section in LIST_SECTIONS:
            after = dict(self._made[section])
            put = []
            for id, row in rows.get(section, {}).items():
                after.pop(id, None)
                if row is not None:
                    put.append((id, row))
            for start in range(0, len(put), AT_ONCE):
                some = put[start : start + AT_ONCE]
                policy = self._frame.read({section: [row for _, row in some]}, alone=True)
                after.update(zip([id for id, _ in some], getattr(policy, section), strict=True))
            made[section] = after
        return made


class _Rows:
    """The rows at the end of a list."""

    def __init__(self, first: int, rows: Sequence[Row]) -> None:
        self._first = first
        self._rows = rows

    def at(self, index: object) -> Row | None:
        position = index - self._first if isinstance(index, int) else -1
        return self._rows[position] if 0 <= position < len(self._rows) else None


def _owner(problem: PolicyProblem, owners: Mapping[tuple[str | int, ...], Any]) -> Row | None:
    path = getattr(problem.spot, "path", ())
    for length in range(len(path), 0, -1):
        found = owners.get(path[:length])
        if isinstance(found, _Rows):
            return found.at(path[length]) if len(path) > length else None
        if found is not None:
            return found  # type: ignore[no-any-return] # a row
    return None


def _arguments(document: PolicyDocument) -> tuple[str, str, str]:
    return document.text, document.name, document.format


def _replaced(entries: list[Any], rows: Sequence[Any], owners: dict[tuple[str | int, ...], Any]) -> list[Any]:
    """Puts rows in place of the document's entries for the same clients; the rows that are left."""
    left = {(row.kind, row.value): row for row in rows}
    for index, entry in enumerate(entries):
        named = entry.items() if isinstance(entry, dict) else ()
        who = next(((kind, str(value)) for kind, value in named if (kind, str(value)) in left), None)
        if who is not None:
            owners["clients", index] = row = left.pop(who)
            entries[index] = policy_entry(row)
    return list(left.values())


def _place(entry: object) -> object:
    """The route that an entry is about, however it is spelled; something that is no route's, if it cannot be read."""
    if isinstance(entry, dict):
        try:
            method, template = route(
                next((entry[word] for word in ("path", "endpoint", "route") if word in entry), None)
            )
        except InvalidInput:
            return object()
        methods = entry.get("methods", entry.get("method"))
        many = methods if isinstance(methods, list) else [] if methods is None else [methods]
        return template, frozenset(map(str, many) if method is None else [method])
    return object()
