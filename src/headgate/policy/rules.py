"""Builds the rules of a policy from `limits` and `tiers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import suggest
from headgate._pace import release
from headgate.errors import InvalidLimit
from headgate.limits import Limit
from headgate.policy import scalars
from headgate.policy.model import NET_SUFFIX, Rule
from headgate.policy.routes import Matcher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from headgate._limit_syntax import Phrase
    from headgate.policy.formats.document import Path
    from headgate.policy.problems import PolicyProblems
    from headgate.policy.routes import Template
    from headgate.policy.schema_types import StructValue

__all__ = ["CONCURRENCY", "MIXED", "RuleDraft", "RuleMatcher", "RuleTable", "nearest"]

CONCURRENCY: Final = "concurrency"
MIXED: Final = "it limits concurrency for some clients and a rate for others; write two limits"
MOST_NAMES: Final = 12
NEVER_LEASED: Final = (CONCURRENCY, "leaky_bucket")


@dataclass(slots=True, eq=False)
class RuleDraft:
    """A rule under construction, with its position in the file."""

    name: str
    path: Path
    entry: StructValue | None = None
    by: tuple[str, ...] = ("client",)
    templates: tuple[Template, ...] = ()
    methods: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    algorithm: str | None = None
    """For numbers without an algorithm."""
    numbers: dict[str | None, tuple[Phrase, Path]] = field(default_factory=dict)
    """By tier; None for clients in none of them."""
    limits: dict[str | None, Limit] = field(default_factory=dict)
    is_concurrency: bool = False
    split: int = 1

    def get(self, name: str, default: Any = None) -> Any:
        return default if self.entry is None else self.entry.get(name, default)

    def at(self, name: str) -> Path:
        return self.path if self.entry is None else self.entry.at(name)

    @property
    def is_everywhere(self) -> bool:
        return not self.templates and not self.classes

    def rule(self) -> Rule:
        reserve = self.get("reserve")
        return Rule(
            self.name,
            self.limits.get(None),
            self.by,
            tiers={tier: limit for tier, limit in self.limits.items() if tier is not None},
            templates=self.templates,
            methods=self.methods,
            classes=self.classes,
            cost=self.get("cost", reserve),
            settled=reserve is not None,
            count_when=self.get("count_when"),
            shadow=self.get("shadow", False),
            on_failure=self.get("on_failure"),
            missing=self.get("missing"),
            unit=self.get("unit", "concurrent-requests" if self.is_concurrency else "requests"),
            lease=self.get("lease", "auto"),
            split=self.split,
        )


class RuleMatcher:
    """Finds the rules that apply to a route, with one match for all of up to a thousand rules."""

    def __init__(self, drafts: Collection[RuleDraft]) -> None:
        self._everywhere = [draft for draft in drafts if draft.is_everywhere]
        self._by_class: dict[str, list[RuleDraft]] = {}
        self._templates: list[tuple[Template, RuleDraft]] = []
        for draft in drafts:
            self._templates += [(template, draft) for template in draft.templates]
            for name in draft.classes:
                self._by_class.setdefault(name, []).append(draft)
        self._matcher = Matcher([template for template, _ in self._templates])

    def find(self, template: Template, methods: frozenset[str], route_class: str | None = None) -> list[RuleDraft]:
        """The rules that apply to all requests to these paths with one of the methods."""
        # As a path, a template matches the templates that cover it: only a parameter matches the segment "{id}".
        path = template.text.removesuffix("*")
        covering = [self._templates[index] for index in self._matcher.match(path)]
        found = [
            *self._everywhere,
            *self._by_class.get(route_class or "", ()),
            *(draft for wide, draft in covering if wide.open_ended or not template.open_ended),
        ]
        return [draft for draft in found if not (draft.methods and methods and draft.methods.isdisjoint(methods))]


class RuleTable:
    """All rules by name, including those with mistakes as far as they were parsed."""

    def __init__(self, policy: StructValue, classes: Collection[str], problems: PolicyProblems) -> None:
        self.drafts: dict[str, RuleDraft] = {}
        self.is_complete = True
        """True if the names of all limits are known."""
        self._classes = classes
        self._problems = problems
        self._limits: dict[tuple[str, Phrase, str], Limit] = {}
        limits = policy.get("limits", ())
        if isinstance(limits, dict):
            self._add_numbers(limits, policy.get("tier"), policy.at("limits"))
        else:
            for entry in limits:
                self._declare(entry)
        for tier, numbers in policy.get("tiers", {}).items():
            self._add_numbers(numbers.get("limits", {}), tier, numbers.at("limits"))
        for draft in self.drafts.values():
            self._make_limits(draft)
            if draft.name.endswith(NET_SUFFIX):
                message = (
                    f"names that end in {NET_SUFFIX.strip()!r} are reserved for what Headgate adds; rename the limit"
                )
                problems.add(draft.at("name"), message)

    def limit(self, draft: RuleDraft, phrase: Phrase, algorithm: str | None = None) -> Limit:
        """The limit of a rule with these numbers, created once; raises InvalidLimit."""
        algorithm = phrase.algorithm or algorithm or draft.algorithm or "token_bucket"
        asked = (draft.name, phrase, algorithm)
        made = self._limits.get(asked)
        if made is None:
            quota, period, burst, _ = phrase
            made = self._limits[asked] = Limit(
                quota, period, burst=burst, algorithm=algorithm, name=draft.name, split=draft.split
            )
        return made

    def release(self) -> None:
        """Free the cache of limits in slices, as freeing all at once would delay other threads."""
        release(self._limits)

    # ------------------------------------------------------------------ limits

    def _declare(self, entry: StructValue) -> None:
        """Add a limit of the list `limits`."""
        paths = entry.get("path", ())
        draft = RuleDraft(
            "",
            entry.path,
            entry,
            by=entry.get("by", ("client",)),
            templates=tuple([template for _, template in paths]),
            methods=self._methods(entry, paths),
            classes=entry.get("class", ()),
            split=entry.get("split", 1),
        )
        bucket = entry.get("bucket")
        draft.algorithm = entry.get("algorithm") or (bucket.algorithm if bucket else None)
        if bucket is not None:
            draft.numbers[None] = (bucket, entry.at("bucket"))
        for tier, phrase in entry.get("tiers", {}).items():
            draft.numbers[tier] = (phrase, (*entry.at("tiers"), tier))
        if not entry.broken:
            self._check_entry(draft, entry)
        name = self._name(draft, entry)
        if name is None:
            self.is_complete = False
            return
        draft.name = name
        twin = self.drafts.setdefault(name, draft)
        if twin is not draft:
            remedy = f"; {'rename one of them' if 'name' in entry.fields else 'give one of them a name:'}"
            self._problems.add(
                entry.at("name"), f"two limits are called {name!r}, the other at ", other=twin.at("name"), after=remedy
            )

    def _name(self, draft: RuleDraft, entry: StructValue) -> str | None:
        if "name" in entry.fields:
            return str(entry.fields["name"])
        if not entry.unread.isdisjoint(("name", "path", "class", "by")):
            return None  # the name would be derived from them
        routes = [template.text for template in draft.templates] or list(draft.classes) or ["every route"]
        made = f"{', '.join(routes)} by {'+'.join(draft.by) or 'global'}"
        try:
            return scalars.name(made)
        except ValueError:
            self._problems.add(
                entry.path, f"its name would be {made[:60]!r}, which headers cannot hold; give it a name:"
            )
            return None

    def _methods(self, entry: StructValue, paths: tuple[tuple[str | None, Template], ...]) -> frozenset[str]:
        prefixes = {method for method, _ in paths}
        if prefixes <= {None}:
            return frozenset(entry.get("methods", ()))
        if len(prefixes) > 1:
            self._problems.add(entry.at("path"), "these paths differ in their methods; write a limit for each method")
        elif "methods" in entry.fields:
            self._problems.add(entry.at("methods"), "methods are given here and in front of the path; keep one")
        return frozenset([method for method in prefixes if method is not None])

    def _check_entry(self, draft: RuleDraft, entry: StructValue) -> None:
        fields, add = entry.fields, self._problems.add
        if "path" in fields and "class" in fields:
            add(entry.at("class"), "a limit is for paths or for classes; keep one, or write two limits")
        phrase = fields.get("bucket")
        algorithm = fields.get("algorithm")
        if phrase is not None and None not in (phrase.algorithm, algorithm) and phrase.algorithm != algorithm:
            add(entry.at("algorithm"), f"the numbers name {phrase.algorithm}, this field {algorithm}; keep one")
        if "cost" in fields and "reserve" in fields:
            add(entry.at("reserve"), "cost is the amount that is charged, reserve an estimate of it; keep one")
        if "count_when" in fields and "reserve" in fields:
            add(entry.at("count_when"), "count_when and reserve both say later what counts; keep one")
        for name in ("count_when", "reserve"):
            if name in fields and fields.get("shadow"):
                add(
                    entry.at(name),
                    f"{name} has no effect in shadow mode, where nothing is charged; leave out one of them",
                )
            if name in fields and draft.split > 1:
                message = f"what {name} gives back has no place where a limit is split over several counters; keep one"
                add(entry.at("split"), message)

    # ------------------------------------------------------------------ tiers

    def _add_numbers(self, numbers: dict[str, Phrase], tier: str | None, path: Path) -> None:
        """Add numbers by name, for a declared limit or for a new one."""
        for name, phrase in numbers.items():
            where = (*path, name)
            draft = self.drafts.get(name)
            if draft is None:
                known = name in self._classes
                # An undeclared name creates a limit for every route, which a misspelled name should not.
                if not known and (near := get_close_matches(name, self._declared(), n=1, cutoff=0.8)):
                    message = f"no limit and no class is called {name!r}; did you mean {near[0]!r}?"
                    self._problems.add(where, message, at_key=True)
                    continue
                draft = self.drafts[name] = RuleDraft(name, where, classes=(name,) if known else ())
            if tier in draft.numbers:
                other = draft.numbers[tier][1]
                self._problems.add(
                    where, f"tier {tier!r} has numbers for limit {name!r} already, at ", other=other, after="; keep one"
                )
                continue
            draft.numbers[tier] = (phrase, where)

    def _declared(self) -> set[str]:
        return {*self._classes, *(name for name, draft in self.drafts.items() if draft.entry is not None)}

    def _make_limits(self, draft: RuleDraft) -> None:
        if not draft.numbers and draft.entry is not None and not draft.entry.broken:
            self._problems.add(draft.path, 'a limit without numbers; add bucket: "10/minute", or numbers for tiers:')
        for tier, (phrase, path) in draft.numbers.items():
            try:
                draft.limits[tier] = self.limit(draft, phrase)
            except InvalidLimit as error:
                self._problems.add(path, str(error))
        unleased = [limit.algorithm for limit in draft.limits.values() if limit.algorithm in NEVER_LEASED]
        if unleased and draft.get("lease") == "always":
            self._problems.add(draft.at("lease"), f"a limit of {unleased[0]} is never prepaid; leave it out")
        draft.is_concurrency = any(limit.algorithm == CONCURRENCY for limit in draft.limits.values())
        if not draft.is_concurrency:
            return
        if any(limit.algorithm != CONCURRENCY for limit in draft.limits.values()):
            self._problems.add(draft.path, MIXED)
        if draft.get("cost") == 0:
            self._problems.add(
                draft.at("cost"), "cost 0 would allow any number at once; write at least 1, or leave it out"
            )
        if draft.get("shadow"):
            self._problems.add(
                draft.at("shadow"),
                "concurrency counts admitted requests, and a limit in shadow mode admits none; "
                "leave shadow out, and start with a high number",
            )
        for name in ("count_when", "reserve"):
            if draft.get(name) is not None:
                self._problems.add(
                    draft.at(name), f"{name} has no effect on concurrency, which returns everything; leave it out"
                )


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a message about an unknown name: the most similar one, some names, or what to do without any."""
    names = sorted(known)
    if len(names) > MOST_NAMES and not get_close_matches(word.lower(), names, n=1):
        return f"known are {', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"
    return suggest(word, names) if names else otherwise
