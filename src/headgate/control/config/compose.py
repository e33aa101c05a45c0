"""Composes a policy from the document and the rows of the tables.

The rows of `LIST_SECTIONS` depend only on the template, which is the document with tiers and routes. So a few changed
rows are built alone, in milliseconds, where a hundred thousand take seconds.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headgate._pace import gc_paused, release
from headgate.control.config.rows import LIST_SECTIONS, PolicyDocument, format_bucket, policy_entry
from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy.loader import PolicyProblem, PolicyProblems, Source, build
from headgate.policy.scalars import route

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headgate.control.config.reading import ConfigRows
    from headgate.control.config.rows import RouteCost, Row, TierLimit
    from headgate.policy.model import Policy

__all__ = ["PolicyAssembly", "PolicyTemplate"]

BATCH_SIZE: Final = 5000  # rows built at a time, so that their intermediate values are freed in batches
_NO_DOCUMENT: Final = PolicyDocument("{}", "json", "config store")


class PolicyTemplate:
    """The policy document merged with the tiers and routes of the tables, which take precedence."""

    def __init__(
        self, document: PolicyDocument | None, tiers: Iterable[TierLimit], routes: Iterable[RouteCost]
    ) -> None:
        document = document or _NO_DOCUMENT
        self._source = Source(document.text, document.name, document.format)
        self._owners: dict[tuple[str | int, ...], Row] = {}  # rows by their position in the policy, for error messages
        value = self._source.value
        self._is_readable = value is None or isinstance(value, dict)
        self._value: dict[str, Any] = dict(value) if isinstance(value, dict) else {}
        self._lists = {section: self._value.pop(section, None) for section in LIST_SECTIONS}
        if self._is_readable:
            self._add_routes(list(routes))
            self._add_tiers(list(tiers))

    def compose(self, rows: Mapping[str, Sequence[Row]], *, rows_only: bool = False) -> Policy:
        """The policy with these rows in its lists; `rows_only` omits the lists of the document.

        Raises InvalidPolicy with the line for a problem in the document, or the row for a problem in a row.
        """
        value = dict(self._value)
        owners: dict[tuple[str | int, ...], Any] = dict(self._owners)
        for section in LIST_SECTIONS:
            own, added = self._lists[section], rows.get(section, ())
            if own is not None and not isinstance(own, list) and not rows_only:
                value[section] = own  # reported by the builder
                continue
            entries = list(own) if own and not rows_only else []
            if section == "clients" and entries:
                added = _replace_entries(entries, added, owners)
            if entries or added:
                value[section] = [*entries, *map(policy_entry, added)]
                owners[section,] = [*([None] * len(entries)), *added]
        problems, warnings = PolicyProblems(), PolicyProblems()
        with gc_paused():
            policy = build(value if self._is_readable else self._source.value, problems, warnings)
        if error := self._error(problems, owners):
            raise error
        return replace(policy, warnings=tuple(self._lines(warnings, owners))) if warnings else policy

    def _add_routes(self, rows: list[RouteCost]) -> None:
        if not rows:
            return
        entries = self._value.get("routes")
        if entries is not None and not isinstance(entries, list):
            return  # reported by the builder
        entries = list(entries or ())
        positions = {_route_key(entry): index for index, entry in enumerate(entries)}
        for row in rows:
            index = positions.get(_route_key({"path": row.path}))
            if index is None:
                entries.append(policy_entry(row))
                self._owners["routes", len(entries) - 1] = row
            else:
                own = {"cost": row.cost} if row.route_class is None else {"cost": row.cost, "class": row.route_class}
                entries[index] = {**entries[index], **own}
        self._value["routes"] = entries

    def _add_tiers(self, rows: list[TierLimit]) -> None:
        for row in rows:
            self._remove_inline_tier(row)
            tiers = self._value.setdefault("tiers", {})
            limits = tiers.get(row.tier, {}) if isinstance(tiers, dict) else None
            named = limits.get("limits", {}) if isinstance(limits, dict) else None
            if not isinstance(named, dict) or not isinstance(tiers, dict):
                return  # reported by the builder
            merged = {**(limits or {}), "limits": {**named, row.limit_name: format_bucket(row)}}
            self._value["tiers"] = {**tiers, row.tier: merged}
            self._owners["tiers", row.tier, "limits", row.limit_name] = row

    def _remove_inline_tier(self, row: TierLimit) -> None:
        """Remove the value for the same tier from the definition of the limit."""
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

    def _error(self, problems: PolicyProblems, owners: Mapping[tuple[str | int, ...], Any]) -> InvalidPolicy | None:
        own = self._source.refusal(PolicyProblems())  # problems of the format itself only
        lines = [*(own.problems if own else ()), *self._lines(problems, owners)]
        if problems.full:
            lines.append(f"{self._source.file}: these are the first {len(lines)} mistakes; there may be more")
        return InvalidPolicy(lines) if lines else None

    def _lines(self, problems: PolicyProblems, owners: Mapping[tuple[str | int, ...], Any]) -> list[str]:
        """One line per problem, with its position in the document or its row."""
        of_document, lines = PolicyProblems(), []
        for problem in problems:
            row = _owner(problem, owners)
            if row is None:
                of_document.append(problem)
            else:
                other = "another entry" if problem.other is not None else ""
                lines.append(f"{row}: {problem.before}{other}{problem.after}")
        return [*self._source.tell(of_document), *dict.fromkeys(lines)]


class PolicyAssembly:
    """A composed policy that can be updated incrementally."""

    def __init__(self, contents: ConfigRows, template: PolicyTemplate | None = None) -> None:
        """`template` replaces that of the contents, as for the candidate of a canary."""
        self._template = template or contents.template
        self._base = self._template.compose({})
        self._built: dict[str, dict[int, Any]] = {section: {} for section in LIST_SECTIONS}
        self._built = self._build(contents.rows)

    @property
    def policy(self) -> Policy:
        lists: Any = {name: (*getattr(self._base, name), *built.values()) for name, built in self._built.items()}
        lists["clients"] = tuple({client.identity: client for client in lists["clients"]}.values())
        return replace(self._base, **lists)

    def with_changes(self, rows: Mapping[str, Mapping[int, Row | None]]) -> PolicyAssembly:
        """An assembly with these rows replaced, or removed where None."""
        other = copy(self)
        other._built = self._build(rows)  # noqa: SLF001 - the same class
        return other

    def release(self) -> None:
        """Free its parts in batches; freeing all at once would stall every thread."""
        for built in self._built.values():
            release(built)

    def _build(self, rows: Mapping[str, Mapping[int, Row | None]]) -> dict[str, dict[int, Any]]:
        built = {}
        for section in LIST_SECTIONS:
            these = rows.get(section, {})
            after = dict(self._built[section])
            for id in these:
                after.pop(id, None)
            changed = [(id, row) for id, row in these.items() if row is not None]
            for start in range(0, len(changed), BATCH_SIZE):
                some = changed[start : start + BATCH_SIZE]
                policy = self._template.compose({section: [row for _, row in some]}, rows_only=True)
                after.update(zip([id for id, _ in some], getattr(policy, section), strict=True))
            built[section] = after
        return built


def _owner(problem: PolicyProblem, owners: Mapping[tuple[str | int, ...], Any]) -> Row | None:
    path = getattr(problem.spot, "path", ())
    for length in range(len(path), 0, -1):
        found = owners.get(path[:length])
        if isinstance(found, list):  # the owners of all entries of a section
            return found[path[length]] if len(path) > length else None
        if found is not None:
            return found  # type: ignore[no-any-return] # a row
    return None


def _replace_entries(entries: list[Any], rows: Sequence[Any], owners: dict[tuple[str | int, ...], Any]) -> list[Any]:
    """Replace the document's entries of the same clients; returns the remaining rows."""
    remaining = {(row.kind, row.value): row for row in rows}
    for index, entry in enumerate(entries):
        named = entry.items() if isinstance(entry, dict) else ()
        who = next(((kind, str(value)) for kind, value in named if (kind, str(value)) in remaining), None)
        if who is not None:
            owners["clients", index] = row = remaining.pop(who)
            entries[index] = policy_entry(row)
    return list(remaining.values())


def _route_key(entry: object) -> object:
    """A key equal for entries of the same route; unique if the entry cannot be parsed."""
    if not isinstance(entry, dict):
        return object()
    try:
        method, template = route(next((entry[word] for word in ("path", "endpoint", "route") if word in entry), None))
    except InvalidInput:
        return object()
    methods = entry.get("methods", entry.get("method"))
    many = methods if isinstance(methods, list) else [] if methods is None else [methods]
    return template, frozenset(map(str, many) if method is None else [method])
