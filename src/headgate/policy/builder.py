"""Builds a `Policy` from the parsed sections of a policy file, and reports contradictions between them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from headgate._pace import release
from headgate.calendars import Calendar
from headgate.errors import InvalidLimit
from headgate.policy import model
from headgate.policy.abuse_settings import build_abuse_settings
from headgate.policy.lint import (
    RouteCosts,
    check_costs,
    check_limits,
    check_routes_given_twice,
    check_unknown_keys,
    check_unused_tier,
)
from headgate.policy.quota_terms import QuotaTerms
from headgate.policy.region_settings import build_region_settings, check_region_modes, region_objection
from headgate.policy.rules import CONCURRENCY, METHODS_TWICE, MIXED, RuleDraft, RuleMatcher, RuleTable, nearest
from headgate.policy.scalars import IDENTITIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate._limit_syntax import Phrase
    from headgate.policy.formats.document import Path
    from headgate.policy.loader import PolicyProblems
    from headgate.policy.schema import StructValue

__all__ = ["Builder"]

FILE_REFRESH: Final = timedelta(seconds=10)
"""Between two checks of a list in a file, which read it only if it has changed."""
KIND_NAMES: Final = {"ip": "IP", "api_key": "API key"}
CLIENT_KINDS: Final = frozenset(["api_key", "tenant", "user", "ip"])


class Builder:
    """Builds one policy and adds to `problems` and `warnings`."""

    def __init__(
        self, entry: StructValue, kinds: Iterable[str], problems: PolicyProblems, warnings: PolicyProblems
    ) -> None:
        self._entry = entry
        self._problems = problems
        self._warnings = warnings
        self._kinds = frozenset([*IDENTITIES, *kinds])
        self._now = datetime.now(UTC)
        self._routes = self._all_routes()
        self._classes = {route.route_class for route, _ in self._routes if route.route_class is not None}
        self._rules = RuleTable(entry, self._classes, problems)
        drafts = self._rules.drafts.values()
        self._tiers = self._all_tiers(drafts)
        self._rule_matcher = RuleMatcher(drafts)
        self._costs = RouteCosts(drafts, [route for route, _ in self._routes], self._rule_matcher)
        section = entry.get("regions")
        self._regions = None if section is None else build_region_settings(section, problems)
        self._validities: dict[tuple[datetime | None, datetime | None], model.Validity] = {}
        self._rules_by_class: dict[str, list[RuleDraft]] = {}

    def policy(self) -> model.Policy:
        entry, drafts = self._entry, list(self._rules.drafts.values())
        routes = [route for route, _ in self._routes]
        self._check_classes(drafts)
        check_routes_given_twice(self._routes, self._problems)
        self._check_concurrency()
        check_costs(drafts, self._costs, self._problems)
        check_region_modes(drafts, self._regions, self._problems)
        identity, answers, store = self._settings()
        clients, overrides, default_tier = self._clients(), self._overrides(), entry.get("tier")
        if not identity.known_keys_only:
            check_unknown_keys(drafts, routes, identity.unknown_key_factor, default_tier, self._warnings)
        elif "api_key" not in {*[each.identity.kind for each in clients], *[each.identity.kind for each in overrides]}:
            message = (
                "only API keys that are known count, and neither clients nor overrides name one: every request is one "
                "without a key; name some, or leave known_only out"
            )
            self._warnings.add((*entry.at("identity"), "api_key", "known_only"), message)
        check_limits(drafts, self._warnings, has_paths=bool(routes) or any(draft.templates for draft in drafts))
        check_unused_tier(default_tier, drafts, entry.at("tier"), self._warnings)
        if "limits" in entry.fields and not drafts:
            message = "there are no limits, so nothing is counted; add one, like {by: ip, bucket: 10/minute}"
            self._warnings.add(entry.at("limits"), message)
        self._rules.release()
        rules = tuple([draft.rule() for draft in drafts])
        blocked = self._blocked()
        made = model.Policy(rules, tuple(routes), self._tiers, default_tier, clients, overrides, blocked)
        named = {name: entry.fields[name] for name in ("overload", "on_failure", "name") if name in entry.fields}
        settings: dict[str, Any] = {"identity": identity, "answers": answers, "store": store, "regions": self._regions}
        if "abuse" in entry.fields:
            section, path = entry.fields["abuse"], entry.at("abuse")
            settings["abuse"] = build_abuse_settings(section, path, self._problems, self._warnings, self._identity)
        ledger = model.LedgerSettings(**entry.fields["quotas"].fields) if "quotas" in entry.fields else made.ledger
        settings["raises"] = self._raises()
        return replace(made, lists=self._lists(drafts, blocked), ledger=ledger, **settings, **named)

    def _raises(self) -> dict[str, model.GrowthTerms]:
        made = {}
        for tier, entry in self._entry.get("tiers", {}).items():
            terms = entry.get("raise")
            if terms is None:
                continue
            missing = [name for name in ("factor", "for") if name not in terms.fields]
            if missing and not terms.broken:
                terms.report(missing[0], "a raise needs a factor and a duration, like {factor: 3, for: 24 hours}")
            elif not terms.broken:
                made[tier] = model.GrowthTerms(terms.get("factor"), terms.get("for"))
        return made

    def _all_routes(self) -> list[tuple[model.RouteRule, Path]]:
        made = []
        for entry in self._entry.get("routes", ()):
            if "path" not in entry.fields:
                if not entry.broken:
                    self._problems.add(entry.path, "a route without a path; add one like path: /search")
                continue
            method, template = entry.fields["path"]
            if method is not None and "methods" in entry.fields:
                entry.report("methods", METHODS_TWICE)
            methods = frozenset(entry.get("methods", ()) if method is None else [method])
            settings = {name: entry.get(name) for name in ("on_failure", "overload")}
            settings["priority"] = entry.get("priority", "normal")
            rule = model.RouteRule(template, methods, entry.get("class"), entry.get("cost", 1), **settings)
            if "priority" in entry.fields and rule.overload is None and "overload" not in self._entry.written:
                message = "priority has no effect without a concurrency limit; add overload: adaptive"
                self._warnings.add(entry.at("priority"), message)
            made.append((rule, entry.path))
        return made

    def _check_concurrency(self) -> None:
        """Report routes that share a concurrency limit and give it different numbers."""
        first: dict[str, model.RouteRule] = {}
        for route, path in self._routes:
            if route.route_class is not None and isinstance(route.overload, model.OverloadSettings):
                other = first.setdefault(route.route_class, route)
                if other.overload != route.overload:
                    before = f"routes of class {route.route_class!r} share one concurrency limit, and "
                    message = f"{before}{other.template.text} has other settings; write the same, or change the class"
                    self._problems.add((*path, "overload"), message)

    def _check_classes(self, drafts: list[RuleDraft]) -> None:
        if not self._is_whole("routes"):
            return
        for draft in drafts:
            for unknown in [each for each in draft.classes if each not in self._classes]:
                draft.entry.report("class", self._unknown_class(unknown))

    def _unknown_class(self, name: str) -> str:
        return f"no route is of class {name!r}; {nearest(name, self._classes, 'add class: to a route')}"

    def _all_tiers(self, drafts: Iterable[RuleDraft]) -> tuple[str, ...]:
        """All tiers with numbers, and the default tier."""
        named = [tier for each in drafts for tier in (*each.numbers, *each.weights)]
        tiers = dict.fromkeys([*self._entry.get("tiers", {}), *named])
        tiers.pop(None, None)
        default = self._entry.get("tier")
        # A default tier needs no numbers of its own, but one that resembles another tier is probably misspelled.
        if default is not None and default not in tiers:
            if near := get_close_matches(default, tiers, n=1):
                self._entry.report("tier", f"no limit has numbers for tier {default!r}; did you mean {near[0]!r}?")
            tiers[default] = None
        return tuple(tiers)

    def _is_whole(self, section: str) -> bool:
        """True if all entries of a section were parsed, so that unknown names can be reported."""
        written, read = self._entry.written.get(section), self._entry.get(section)
        if not isinstance(written, (dict, list)) or read is None:
            return section not in self._entry.written
        entries = read.values() if isinstance(read, dict) else read
        return len(read) == len(written) and not any(getattr(entry, "broken", False) for entry in entries)

    def _clients(self) -> tuple[model.Client, ...]:
        made: dict[model.Identity, tuple[model.Client, Path]] = {}
        for entry in self._entry.get("clients", ()):
            identity = self._identity(entry)
            if identity is None:
                continue
            if identity in made:
                before = f"this {identity.kind} is listed twice, first at "
                self._problems.add(entry.path, before, other=made[identity][1], after="; keep one")
            tier = entry.get("tier")
            if tier is not None and tier not in self._tiers and self._is_whole("limits") and self._is_whole("tiers"):
                remedy = nearest(tier, self._tiers, "add it to tiers:")
                entry.report("tier", f"no limit has numbers for tier {tier!r}; {remedy}")
            more = entry.get("timezone"), entry.get("starts"), entry.get("weight")
            made[identity] = (model.Client(identity, tier, entry.get("label"), *more), entry.path)
        return tuple([client for client, _ in made.values()])

    def _overrides(self) -> tuple[model.Override, ...]:
        made: list[model.Override] = []
        indices: dict[str, str | int] = {}
        for entry in self._entry.get("overrides", ()):
            identity, fields = self._identity(entry), entry.fields
            draft = None if identity is None else self._overridden(entry, identity)
            phrase = fields.get("bucket")
            if phrase is None:
                self._problems.add(entry.path, 'an override without numbers; add bucket: "10000/minute"')
            if identity is None or draft is None or phrase is None:
                continue
            try:
                limit = self._rules.limit(draft, phrase, fields.get("algorithm"))
            except InvalidLimit as error:
                entry.report("bucket", str(error))
                continue
            if draft.limits and (limit.algorithm == CONCURRENCY) != draft.is_concurrency:
                entry.report("bucket", MIXED)
            validity, route_class = self._validity(entry), fields.get("class")
            # One str, which the garbage collector does not track; no part contains a newline.
            which = "\n".join([*identity, draft.name, route_class or "", str(id(validity))])
            first = indices.setdefault(which, entry.path[-1])
            if first != entry.path[-1]:
                before = "the same client, limit and time as the override at "
                self._problems.add(entry.path, before, other=(*entry.path[:-1], first), after="; keep one")
            if (cannot := self._costs.objection(draft, limit, route_class)) is not None:
                entry.report("bucket", cannot)
            if self._regions is not None and (cannot := region_objection(limit, self._regions)) is not None:
                entry.report("bucket", cannot)
            named = _named_calendar(phrase)
            made.append(
                model.Override(identity, draft.name, limit, route_class, validity, fields.get("reason"), *named)
            )
        release(indices)
        return tuple(made)

    def _overridden(self, entry: StructValue, identity: model.Identity) -> RuleDraft | None:
        """The rule of an override; None if a problem was added."""
        name, route_class = entry.get("limit"), entry.get("class")
        if route_class is not None and route_class not in self._classes:
            if self._is_whole("routes"):
                entry.report("class", self._unknown_class(route_class))
            return None
        if name is None:
            return self._only_rule(entry, identity, route_class)
        draft = self._rules.drafts.get(name)
        if draft is None:
            if self._rules.is_complete and self._is_whole("limits"):
                message = f"no limit is called {name!r}; {nearest(name, self._rules.drafts, 'there are none')}"
                entry.report("limit", message)
            return None
        if not _counts(draft, identity.kind):
            per = "per-" + "+".join(KIND_NAMES.get(kind, kind) for kind in draft.by) if draft.by else "global"
            kind = KIND_NAMES.get(identity.kind, identity.kind)
            article = "an" if kind[0] in "AIaeio" else "a"
            message = f'"{name}" is a {per} limit, so it can\'t be overridden for {article} {kind}'
            entry.report(identity.kind, message)
            return None
        if route_class is not None and draft not in self._rules_of_class(route_class):
            entry.report("class", f"limit {name!r} applies to no route of class {route_class!r}; leave class out")
            return None
        return draft

    def _only_rule(self, entry: StructValue, identity: model.Identity, route_class: str | None) -> RuleDraft | None:
        if route_class is None:
            message = "this override names no limit; add limit: with the name of a limit, or class:"
            self._problems.add(entry.path, message)
            return None
        found = [draft for draft in self._rules_of_class(route_class) if _counts(draft, identity.kind)]
        if len(found) == 1:
            return found[0]
        names = ", ".join([repr(draft.name) for draft in found]) or "none"
        remedy = "name one of them with limit:" if found else "add one, or name another with limit:"
        question = f"which limit? counted by {identity.kind} (or client) on routes of class {route_class!r}: {names}"
        entry.report("class", f"{question}; {remedy}")
        return None

    def _rules_of_class(self, route_class: str) -> list[RuleDraft]:
        if route_class not in self._rules_by_class:
            routes = [route for route, _ in self._routes if route.route_class == route_class]
            applied = [self._rule_matcher.find(route.template, route.methods, route_class) for route in routes]
            self._rules_by_class[route_class] = list(dict.fromkeys(draft for drafts in applied for draft in drafts))
        return self._rules_by_class[route_class]

    def _blocked(self) -> tuple[model.Block, ...]:
        made = []
        for entry in self._entry.get("blocked", ()):
            identity = self._blocked_identity(entry)
            if identity is not None:
                made.append(model.Block(identity, self._validity(entry), entry.get("reason")))
                if identity.kind in model.ADDRESSES and identity.value.endswith("/0"):
                    effect = "all requests are rejected, except to routes of cost 0"
                    self._warnings.add(entry.path, f"{identity.value} matches every address: {effect}")
        return tuple(made)

    def _blocked_identity(self, entry: StructValue) -> model.Identity | None:
        """The identity of a block; None if a problem was added."""
        name = entry.get("list")
        if name is None:
            return self._identity(entry)
        others = [kind for kind in entry.fields if kind in self._kinds]
        if others:
            entry.report("list", f"list and {others[0]} in one entry; write an entry for each")
        if not self._is_known_list(name):
            entry.report("list", self._unknown_list(name))
        return model.Identity(model.LIST, name)

    def _is_known_list(self, name: str) -> bool:
        return name in self._entry.get("lists", {}) or not self._is_whole("lists")

    def _unknown_list(self, name: str) -> str:
        known = self._entry.get("lists", {})
        return f"no list is called {name!r}; {nearest(name, known, 'add it to lists:')}"

    def _lists(self, drafts: list[RuleDraft], blocked: Iterable[model.Block]) -> tuple[model.ListSource, ...]:
        used = {each.identity.value for each in blocked if each.identity.kind == model.LIST}
        for draft in drafts:
            names = draft.entry.get("lists", ())
            used.update(names)
            for name in names:
                if not self._is_known_list(name):
                    draft.entry.report("lists", self._unknown_list(name))
        made = []
        for name, entry in self._entry.get("lists", {}).items():
            path = (*self._entry.at("lists"), name)
            if name not in used:
                remedy = f"block it with {{list: {name}}} under blocked, or name it under lists: of a limit"
                self._warnings.add(path, f"list {name!r} has no effect; {remedy}")
            fields = {"source": entry} if isinstance(entry, str) else dict(entry.fields)
            if "source" not in fields:
                if not entry.broken:
                    message = "a list without a source; add one like source: https://lists.example/bad.netset"
                    self._problems.add(path, message)
                continue
            self._check_list(fields, entry)
            fields["exempt"] = fields.pop("except", ())
            if not fields["source"].startswith(model.URL_SCHEMES):
                fields.setdefault("refresh", FILE_REFRESH)
            made.append(model.ListSource(name, **fields))
        return tuple(made)

    def _check_list(self, fields: dict[str, Any], entry: Any) -> None:
        """Report fields that have no effect in the format or for the source."""
        format = fields.get("format", "plain")
        for name, owner in (("column", "csv"), ("key", "json")):
            if name in fields and format != owner:
                entry.report(name, f"{name} is for format: {owner}, and this list is {format}; change one of them")
        if "headers" in fields and not fields["source"].startswith(model.URL_SCHEMES):
            entry.report("headers", "headers are for a URL, and the source is a file; leave them out")

    def _identity(self, entry: StructValue) -> model.Identity | None:
        found = [kind for kind in entry.fields if kind in self._kinds]
        if len(found) == 1:
            return model.Identity(found[0], entry.fields[found[0]])
        kinds = ", ".join([kind for kind in entry.record.fields if kind in self._kinds])
        several = f"{' and '.join(found)} in one entry; write an entry for each"
        self._problems.add(entry.path, several if found else f"who? add one of {kinds}")
        return None

    def _validity(self, entry: StructValue) -> model.Validity:
        ends = (since, until) = entry.fields.get("valid_from"), entry.fields.get("valid_until")
        if until is not None:
            if since is not None and until <= since:
                message = f"it ends {until.isoformat()}, before it starts; put it after valid_from"
                entry.report("valid_until", message)
            elif until <= self._now and not self._warnings.full:
                message = f"it ended {until.isoformat()} and no longer applies; remove the entry"
                self._warnings.add(entry.at("valid_until"), message)
        # Many entries have the same validity and share one object.
        return self._validities.get(ends) or self._validities.setdefault(ends, model.Validity(since, until))

    def _settings(self) -> tuple[model.IdentitySettings, model.AnswerSettings, model.StoreSettings]:
        identity, answers, store = [
            dict(entry.fields) if (entry := self._entry.get(section)) is not None else {}
            for section in ("identity", "answers", "store")
        ]
        for section in ("subnet", "api_key"):
            if (inner := identity.pop(section, None)) is not None:
                identity |= inner.fields
        if (headers := answers.pop("headers", None)) is not None:
            answers |= {"x_ratelimit": "x-ratelimit" in headers, "ratelimit": "ratelimit" in headers}
        return model.IdentitySettings(**identity), model.AnswerSettings(**answers), model.StoreSettings(**store)


def _named_calendar(numbers: Phrase | QuotaTerms) -> tuple[bool, bool]:
    """True for a time zone and for a first day that the numbers name."""
    if isinstance(numbers, QuotaTerms):
        return numbers.timezone is not None, numbers.starts is not None
    period = numbers.period
    if not isinstance(period, Calendar):
        return False, False
    return period.timezone != "UTC", period.starts != Calendar(period.unit, timezone=period.timezone).starts


def _counts(draft: RuleDraft, kind: str) -> bool:
    return kind in draft.by or ("client" in draft.by and kind in CLIENT_KINDS)
