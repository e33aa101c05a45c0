"""Builds the rules of a policy from `limits` and `tiers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from headgate._limit_syntax import suggest
from headgate._pace import release
from headgate.calendars import Calendar
from headgate.errors import InvalidLimit
from headgate.limits import DEFAULT_ALGORITHM, FairLimit, Limit
from headgate.policy import scalars
from headgate.policy.model import NET_SUFFIX, Rule
from headgate.policy.quota_terms import QuotaTerms, no_rate, terms_of
from headgate.policy.routes import Matcher, Template
from headgate.policy.schema import StructValue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from headgate._limit_syntax import Phrase
    from headgate.policy.formats.document import Path
    from headgate.policy.loader import PolicyProblems

__all__ = ["CONCURRENCY", "METHODS_TWICE", "MIXED", "RuleDraft", "RuleMatcher", "RuleTable", "nearest"]

CONCURRENCY: Final = "concurrency"
METHODS_TWICE: Final = "methods are given here and in front of the path; keep one"
MIXED: Final = "it limits concurrency for some clients and a rate for others; write two limits"
MOST_NAMES: Final = 12
NEVER_LEASED: Final = (CONCURRENCY, "leaky_bucket")
QUOTA_NUMBERS: Final = "rollover and pay_as_you_go are numbers of a quota; write quota: in place of bucket:"
MAX_QUOTA_NAME: Final = 80
NOT_OF_SHARES: Final = {
    "tiers": "all clients share one limit; give tiers weights, like share: {weights: {pro: 4, free: 1}}",
    "quota": "a quota is charged to an account of each client; write bucket:, or leave share out",
    "split": "shares of one limit need one counter; leave split out",
    "region": "fair shares are those of one region; leave region out",
    "reserve": "shares are taken when a request arrives; leave reserve out, and give it a cost:",
    "lease": "a fair limit is never prepaid; leave lease out",
    "missing": "requests without that identity share one part of the limit; leave missing out",
}
"""Fields that a limit with shares cannot have, with the remedy."""
NOT_OF_QUOTAS: Final = {
    "bucket": "a limit is counted in the store or charged to the ledger; keep one, or write two limits",
    "algorithm": "a quota has no algorithm, as the ledger counts it; leave it out",
    "split": "a quota is charged to one account of the ledger; leave split out",
    "region": "a quota is charged to the same account in every region that uses the ledger; leave region out",
    "lease": "a quota is always spent in leases of the ledger; leave lease out",
    "count": "a quota counts requests; leave count out, and let the app report their cost",
    "shadow": "a quota in shadow mode would charge nothing; leave shadow out, and start with a large allowance",
    "on_failure": "is about the store, which does not count quotas; write on_ledger_failure",
}
"""Fields that a quota cannot have, with the remedy."""


@dataclass(slots=True, eq=False)
class RuleDraft:
    """A rule under construction, with its position in the file."""

    name: str
    entry: StructValue
    """Empty for a limit that is only named in numbers by name."""
    by: tuple[str, ...] = ("client",)
    templates: tuple[Template, ...] = ()
    methods: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    algorithm: str | None = None
    """For numbers without an algorithm."""
    numbers: dict[str | None, tuple[Phrase | QuotaTerms, Path]] = field(default_factory=dict)
    """By tier; None for clients in none of them."""
    limits: dict[str | None, Limit] = field(default_factory=dict)
    is_concurrency: bool = False
    split: int = 1
    region: str = "regional"
    quota: QuotaTerms | None = None
    """The terms that tiers and overrides change; None for a limit that is counted in the store."""

    @property
    def weights(self) -> Mapping[str, int]:
        """The weights of tiers, in a limit with fair shares."""
        return self.entry.fields["share"].weights if "share" in self.entry.fields else {}

    @property
    def is_shared(self) -> bool:
        return self.entry.get("share") is not None

    @property
    def counts(self) -> str:
        """The unit that it counts: requests, messages or bytes."""
        return str(self.entry.get("count", "requests"))

    def rule(self) -> Rule:
        given = self.entry.fields
        names = ("cost", "count_when", "shadow", "on_failure", "missing", "unit", "lease", "lists", "share")
        options: dict[str, Any] = {"unit": "concurrent-requests"} if self.is_concurrency else {}
        options |= {"cost": given["reserve"], "settled": True} if "reserve" in given else {}
        options |= {name: given[name] for name in (*names, "direction", "on_excess") if name in given}
        options["counts"] = self.counts
        if self.quota is not None:
            options |= {"is_quota": True, "outage_units": given.get("on_ledger_failure", 0), "lease": "never"}
        tiers = {tier: limit for tier, limit in self.limits.items() if tier is not None}
        own, where = self.limits.get(None), (self.templates, self.methods, self.classes)
        return Rule(self.name, own, self.by, tiers, *where, split=self.split, region=self.region, **options)


class RuleMatcher:
    """Finds the rules that apply to a route, with one match for all of up to a thousand rules."""

    def __init__(self, drafts: Collection[RuleDraft]) -> None:
        self._everywhere = [draft for draft in drafts if not draft.templates and not draft.classes]
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
        self._policy = policy
        self._classes = classes
        self._declared = {*classes}
        """The names of declared limits and of classes, which other names may misspell."""
        self._problems = problems
        self._limits: dict[tuple[str, Phrase, str | None], Limit] = {}
        self._quota_limits: dict[tuple[str, QuotaTerms], Limit] = {}
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
            if draft.quota is not None and ("/" in draft.name or len(draft.name) > MAX_QUOTA_NAME):
                problem = "the name of a quota is the first part of its accounts, like exports/acme"
                remedy = f"use at most {MAX_QUOTA_NAME} characters, and no slash"
                draft.entry.report("name", f"{problem}; {remedy}, and give it a name: if it has none")
            if draft.name.endswith(NET_SUFFIX):
                reserved = f"names that end in {NET_SUFFIX.strip()!r} are reserved for what Headgate adds"
                draft.entry.report("name", f"{reserved}; rename the limit")

    def limit(self, draft: RuleDraft, phrase: Phrase | QuotaTerms, algorithm: str | None = None) -> Limit:
        """The limit of a rule with these numbers, created once; raises InvalidLimit."""
        if draft.quota is not None:
            if algorithm is not None:
                raise InvalidLimit(NOT_OF_QUOTAS["algorithm"])
            return self._quota_limit(draft.name, _terms(phrase).or_else(draft.quota))
        if isinstance(phrase, QuotaTerms):
            given = [name for name, value in phrase.named().items() if value is not None]
            raise InvalidLimit(QUOTA_NUMBERS if "rollover" in given or "pay_as_you_go" in given else no_rate(given))
        algorithm = phrase.algorithm or algorithm or draft.algorithm
        asked = (draft.name, phrase, algorithm)
        made = self._limits.get(asked)
        if made is None:
            quota, period, burst = phrase.quota, phrase.period_for(algorithm), phrase.burst
            shape: Any = {"burst": burst, "split": draft.split, "region": draft.region}
            if draft.is_shared:
                if algorithm not in (None, DEFAULT_ALGORITHM):
                    raise InvalidLimit(f"a fair limit is a token bucket, not {algorithm}; leave the algorithm out")
                if isinstance(period, Calendar):
                    raise InvalidLimit(
                        f"a fair limit is a token bucket, which cannot count a calendar {period.unit}; use a length of "
                        "time, such as 30 days"
                    )
                made = FairLimit(quota, period, name=draft.name, burst=burst)
            else:
                made = Limit(quota, period, name=draft.name, algorithm=algorithm or DEFAULT_ALGORITHM, **shape)
            self._limits[asked] = made
        return made

    def _quota_limit(self, name: str, terms: QuotaTerms) -> Limit:
        made = self._quota_limits.get((name, terms))
        if made is None:
            made = self._quota_limits[name, terms] = terms.limit(name)
        return made

    def release(self) -> None:
        """Free the cache of limits in slices, as freeing all at once would delay other threads."""
        release(self._limits)

    def _declare(self, entry: StructValue) -> None:
        """Add a limit of the list `limits`."""
        paths = entry.get("path", ())
        draft = RuleDraft(
            "",
            entry,
            by=entry.get("by", () if "share" in entry.fields else ("client",)),
            templates=tuple([template for _, template in paths]),
            methods=self._methods(entry, paths),
            classes=entry.get("class", ()),
            split=entry.get("split", 1),
            region=entry.get("region", "regional"),
        )
        bucket = entry.get("bucket")
        if "quota" in entry.fields:
            self._declare_quota(draft, entry)
        elif bucket is not None:
            draft.numbers[None] = (bucket, entry.at("bucket"))
        if draft.quota is None:
            of_bucket = None if isinstance(bucket, QuotaTerms | None) else bucket.algorithm
            draft.algorithm = entry.get("algorithm") or of_bucket
        for tier, phrase in entry.get("tiers", {}).items():
            draft.numbers[tier] = (phrase, (*entry.at("tiers"), tier))
        if not entry.broken:
            self._check_entry(draft, entry)
        name = self._name(draft, entry)
        if name is None:
            self.is_complete = False
            return
        draft.name = name
        self._declared.add(name)
        twin = self.drafts.setdefault(name, draft)
        if twin is not draft:
            before, other = f"two limits are called {name!r}, the other at ", twin.entry.at("name")
            remedy = "rename one of them" if "name" in entry.fields else "give one of them a name:"
            entry.report("name", before, other=other, after=f"; {remedy}")

    def _declare_quota(self, draft: RuleDraft, entry: StructValue) -> None:
        try:
            draft.quota = _terms(entry.fields["quota"])
        except InvalidLimit as error:
            draft.quota = QuotaTerms()
            entry.report("quota", str(error))
            return
        if draft.quota.allowance is not None:  # else only tiers have one
            draft.numbers[None] = (draft.quota, entry.at("quota"))

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
            message = f"its name would be {made[:60]!r}, which headers cannot hold; give it a name:"
            self._problems.add(entry.path, message)
            return None

    def _methods(self, entry: StructValue, paths: tuple[tuple[str | None, Template], ...]) -> frozenset[str]:
        prefixes = {method for method, _ in paths}
        if prefixes <= {None}:
            return frozenset(entry.get("methods", ()))
        if len(prefixes) > 1:
            entry.report("path", "these paths differ in their methods; write a limit for each method")
        elif "methods" in entry.fields:
            entry.report("methods", METHODS_TWICE)
        return frozenset([method for method in prefixes if method is not None])

    def _check_entry(self, draft: RuleDraft, entry: StructValue) -> None:
        fields, report = entry.fields, entry.report
        if draft.is_shared:
            for name, problem in NOT_OF_SHARES.items():
                if name in fields:
                    report(name, problem)
            if draft.by:
                who = "+".join(draft.by)
                report("by", f"clients share a global limit, and this one counts by {who}; write by: global")
            draft.split, draft.region = 1, "regional"
        if "path" in fields and "class" in fields:
            report("class", "a limit is for paths or for classes; keep one, or write two limits")
        if draft.quota is not None:
            for name, problem in NOT_OF_QUOTAS.items():
                if name in fields:
                    report(name, problem)
            draft.split, draft.region = 1, "regional"
        elif "on_ledger_failure" in fields:
            report("on_ledger_failure", "only a quota is charged to the ledger; write on_failure, or quota: 1000/month")
        phrase, algorithm = fields.get("bucket"), fields.get("algorithm")
        if isinstance(phrase, QuotaTerms):
            return
        if phrase is not None and None not in (phrase.algorithm, algorithm) and phrase.algorithm != algorithm:
            report("algorithm", f"the numbers name {phrase.algorithm}, this field {algorithm}; keep one")
        if "cost" in fields and "reserve" in fields:
            report("reserve", "cost is the amount that is charged, reserve an estimate of it; keep one")
        if "count_when" in fields and "reserve" in fields:
            report("count_when", "count_when and reserve both say later what counts; keep one")
        for name in ("reserve", "count_when", "shadow", "unit") if draft.counts != "requests" else ():
            if fields.get(name) not in (None, False):
                report(
                    name, f"{name} is for limits that count requests, and this one counts {draft.counts}; leave it out"
                )
        for name in ("direction", "on_excess") if draft.counts == "requests" else ():
            if name in fields:
                report(name, f"{name} is for limits with count: messages or bytes; add one of them, or leave it out")
        if draft.split > 1 and draft.region != "regional":
            report("region", f"a limit is {draft.region} or split over several counters; keep one")
            draft.region = "regional"
        for name in ("count_when", "reserve"):
            if name in fields and fields.get("shadow"):
                report(name, f"{name} has no effect in shadow mode, where nothing is charged; leave out one of them")
            if name in fields and draft.split > 1:
                message = f"what {name} gives back has no place where a limit is split over several counters; keep one"
                report("split", message)

    def _add_numbers(self, numbers: dict[str, Phrase], tier: str | None, path: Path) -> None:
        """Add numbers by name, for a declared limit or for a new one."""
        for name, phrase in numbers.items():
            where = (*path, name)
            draft = self.drafts.get(name)
            if draft is None:
                known = name in self._classes
                # An undeclared name creates a limit for every route, which a misspelled name should not.
                if not known and (near := get_close_matches(name, self._declared, n=1, cutoff=0.8)):
                    message = f"no limit and no class is called {name!r}; did you mean {near[0]!r}?"
                    self._problems.add(where, message, at_key=True)
                    continue
                entry = StructValue(self._policy.record, {}, where, {}, False, self._problems)
                draft = self.drafts[name] = RuleDraft(name, entry, classes=(name,) if known else ())
            if tier in draft.numbers:
                before = f"tier {tier!r} has numbers for limit {name!r} already, at "
                self._problems.add(where, before, other=draft.numbers[tier][1], after="; keep one")
                continue
            draft.numbers[tier] = (phrase, where)

    def _make_limits(self, draft: RuleDraft) -> None:
        if not draft.numbers and not draft.entry.broken:
            message = 'a limit without numbers; add bucket: "10/minute", or numbers for tiers:'
            if draft.quota is not None:
                message = "a quota without an allowance; add one, like quota: 1000/month, or allowances for tiers:"
            self._problems.add(draft.entry.path, message)
        for tier, (phrase, path) in draft.numbers.items():
            try:
                draft.limits[tier] = self.limit(draft, phrase)
            except InvalidLimit as error:
                self._problems.add(path, str(error))
        algorithms = {limit.algorithm for limit in draft.limits.values()}
        unleased = sorted(algorithms.intersection(NEVER_LEASED))
        if unleased and draft.entry.get("lease") == "always":
            draft.entry.report("lease", f"a limit of {unleased[0]} is never prepaid; leave it out")
        draft.is_concurrency = CONCURRENCY in algorithms
        if not draft.is_concurrency:
            return
        if len(algorithms) > 1:
            self._problems.add(draft.entry.path, MIXED)
        if draft.counts != "requests":
            message = f"concurrency counts requests at once, not {draft.counts}; write a rate, like 100/second"
            draft.entry.report("count", message)
        if draft.entry.get("cost") == 0:
            message = "cost 0 would allow any number at once; write at least 1, or leave it out"
            draft.entry.report("cost", message)
        if draft.entry.get("shadow"):
            message = "concurrency counts admitted requests, and a limit in shadow mode admits none"
            draft.entry.report("shadow", f"{message}; leave shadow out, and start with a high number")
        for name in ("count_when", "reserve"):
            if draft.entry.get(name) is not None:
                message = f"{name} has no effect on concurrency, which returns everything; leave it out"
                draft.entry.report(name, message)


def _terms(numbers: Phrase | QuotaTerms) -> QuotaTerms:
    return numbers if isinstance(numbers, QuotaTerms) else terms_of(numbers)


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a message about an unknown name: the most similar one, some names, or what to do without any."""
    names = sorted(known)
    if len(names) > MOST_NAMES and not get_close_matches(word.lower(), names, n=1):
        return f"known are {', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"
    return suggest(word, names) if names else otherwise
