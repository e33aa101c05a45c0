"""Builds a `Policy` from the parsed sections of a policy file, and reports contradictions between them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from headgate._pace import release
from headgate.errors import InvalidLimit
from headgate.policy import lint
from headgate.policy.model import (
    ADDRESSES,
    AnswerSettings,
    Block,
    Client,
    Identity,
    IdentitySettings,
    Override,
    Policy,
    RouteRule,
    StoreSettings,
    Validity,
)
from headgate.policy.rules import CONCURRENCY, MIXED, RuleMatcher, RuleTable, nearest
from headgate.policy.scalars import IDENTITIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.policy.formats.document import Path
    from headgate.policy.problems import PolicyProblems
    from headgate.policy.rules import RuleDraft
    from headgate.policy.schema_types import StructValue

__all__ = ["Builder"]

KIND_NAMES: Final = {"ip": "IP", "api_key": "API key"}
CLIENT_KINDS: Final = frozenset(["api_key", "tenant", "user", "ip"])
"""The kinds that `by: client` may count by."""


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
        self._tiers = self._all_tiers(self._rules.drafts.values())
        self._rule_matcher = RuleMatcher(self._rules.drafts.values())
        self._costs = lint.RouteCosts(
            self._rules.drafts.values(), [route for route, _ in self._routes], self._rule_matcher
        )
        self._validities: dict[tuple[datetime | None, datetime | None], Validity] = {}
        self._rules_by_class: dict[str, list[RuleDraft]] = {}

    def policy(self) -> Policy:
        entry, drafts = self._entry, list(self._rules.drafts.values())
        routes = [route for route, _ in self._routes]
        self._check_classes(drafts)
        lint.routes_given_twice(self._routes, self._problems)
        lint.costs(drafts, self._costs, self._problems)
        identity, clients, overrides = self._identity_settings(), self._clients(), self._overrides()
        if not identity.known_keys_only:
            lint.unknown_keys(drafts, routes, identity.unknown_key_factor, entry.get("tier"), self._warnings)
        elif "api_key" not in {*[each.identity.kind for each in clients], *[each.identity.kind for each in overrides]}:
            message = (
                "only API keys that are known count, and neither clients nor overrides name one: every request is one "
                "without a key; name some, or leave known_only out"
            )
            self._warnings.add((*entry.at("identity"), "api_key", "known_only"), message)
        lint.endpoints(drafts, routes, self._warnings)
        lint.identities(drafts, self._warnings)
        lint.queues(drafts, self._warnings)
        lint.free_limits(drafts, self._warnings)
        lint.unused_tier(entry.get("tier"), drafts, entry.at("tier"), self._warnings)
        if "limits" in entry.fields and not drafts:
            message = "there are no limits, so nothing is counted; add one, like {by: ip, bucket: 10/minute}"
            self._warnings.add(entry.at("limits"), message)
        self._rules.release()
        return Policy(
            rules=tuple([draft.rule() for draft in drafts]),
            routes=tuple(routes),
            tiers=self._tiers,
            default_tier=entry.get("tier"),
            clients=clients,
            overrides=overrides,
            blocked=self._blocked(),
            identity=identity,
            answers=self._answer_settings(),
            store=self._store_settings(),
            on_failure=entry.get("on_failure", "open"),
            name=entry.get("name", "policy"),
        )

    # ------------------------------------------------------------------ routes, classes, tiers

    def _all_routes(self) -> list[tuple[RouteRule, Path]]:
        made = []
        for entry in self._entry.get("routes", ()):
            if "path" not in entry.fields:
                if not entry.broken:
                    self._problems.add(entry.path, "a route without a path; add one like path: /search")
                continue
            method, template = entry.fields["path"]
            if method is not None and "methods" in entry.fields:
                self._problems.add(entry.at("methods"), "methods are given here and in front of the path; keep one")
            methods = frozenset(entry.get("methods", ()) if method is None else [method])
            rule = RouteRule(template, methods, entry.get("class"), entry.get("cost", 1), entry.get("on_failure"))
            made.append((rule, entry.path))
        return made

    def _check_classes(self, drafts: list[RuleDraft]) -> None:
        if not self._is_whole("routes"):
            return
        for draft in drafts:
            for unknown in [each for each in draft.classes if each not in self._classes]:
                self._problems.add(draft.at("class"), self._unknown_class(unknown))

    def _unknown_class(self, name: str) -> str:
        return f"no route is of class {name!r}; {nearest(name, self._classes, 'add class: to a route')}"

    def _all_tiers(self, drafts: Iterable[RuleDraft]) -> tuple[str, ...]:
        """All tiers with numbers, and the default tier."""
        tiers = dict.fromkeys([*self._entry.get("tiers", {}), *(tier for each in drafts for tier in each.numbers)])
        tiers.pop(None, None)
        default = self._entry.get("tier")
        # A default tier needs no numbers of its own, but one that resembles another tier is probably misspelled.
        if default is not None and default not in tiers:
            if near := get_close_matches(default, tiers, n=1):
                self._problems.add(
                    self._entry.at("tier"), f"no limit has numbers for tier {default!r}; did you mean {near[0]!r}?"
                )
            tiers[default] = None
        return tuple(tiers)

    def _is_whole(self, section: str) -> bool:
        """True if all entries of a section were parsed, so that unknown names can be reported."""
        written, read = self._entry.written.get(section), self._entry.get(section)
        if not isinstance(written, (dict, list)) or read is None:
            return section not in self._entry.written
        entries = read.values() if isinstance(read, dict) else read
        return len(read) == len(written) and not any(getattr(entry, "broken", False) for entry in entries)

    # ------------------------------------------------------------------ clients, overrides, blocks

    def _clients(self) -> tuple[Client, ...]:
        made: dict[Identity, tuple[Client, Path]] = {}
        for entry in self._entry.get("clients", ()):
            identity = self._identity(entry)
            if identity is None:
                continue
            if identity in made:
                before = f"this {identity.kind} is listed twice, first at "
                self._problems.add(entry.path, before, other=made[identity][1], after="; keep one")
            tier = entry.get("tier")
            if tier is not None and tier not in self._tiers and self._is_whole("limits") and self._is_whole("tiers"):
                self._problems.add(
                    entry.at("tier"),
                    f"no limit has numbers for tier {tier!r}; {nearest(tier, self._tiers, 'add it to tiers:')}",
                )
            made[identity] = (Client(identity, tier, entry.get("label")), entry.path)
        return tuple([client for client, _ in made.values()])

    def _overrides(self) -> tuple[Override, ...]:
        made: list[Override] = []
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
                self._problems.add(entry.at("bucket"), str(error))
                continue
            if draft.limits and (limit.algorithm == CONCURRENCY) != draft.is_concurrency:
                self._problems.add(entry.at("bucket"), MIXED)
            validity, route_class = self._validity(entry), fields.get("class")
            # One str, which the garbage collector does not track; no part contains a newline.
            which = "\n".join([*identity, draft.name, route_class or "", str(id(validity))])
            first = indices.setdefault(which, entry.path[-1])
            if first != entry.path[-1]:
                before = "the same client, limit and time as the override at "
                self._problems.add(entry.path, before, other=(*entry.path[:-1], first), after="; keep one")
            if (cannot := self._costs.objection(draft, limit, route_class)) is not None:
                self._problems.add(entry.at("bucket"), cannot)
            made.append(Override(identity, draft.name, limit, route_class, validity, fields.get("reason")))
        release(indices)
        return tuple(made)

    def _overridden(self, entry: StructValue, identity: Identity) -> RuleDraft | None:
        """The rule of an override; None if a problem was added."""
        name, route_class = entry.get("limit"), entry.get("class")
        if route_class is not None and route_class not in self._classes:
            if self._is_whole("routes"):
                self._problems.add(entry.at("class"), self._unknown_class(route_class))
            return None
        if name is None:
            return self._only_rule(entry, identity, route_class)
        draft = self._rules.drafts.get(name)
        if draft is None:
            if self._rules.is_complete and self._is_whole("limits"):
                message = f"no limit is called {name!r}; {nearest(name, self._rules.drafts, 'there are none')}"
                self._problems.add(entry.at("limit"), message)
            return None
        if not _counts(draft, identity.kind):
            per = "per-" + "+".join(KIND_NAMES.get(kind, kind) for kind in draft.by) if draft.by else "global"
            kind = KIND_NAMES.get(identity.kind, identity.kind)
            article = "an" if kind[0] in "AIaeio" else "a"
            message = f'"{name}" is a {per} limit, so it can\'t be overridden for {article} {kind}'
            self._problems.add(entry.at(identity.kind), message)
            return None
        if route_class is not None and draft not in self._rules_of_class(route_class):
            self._problems.add(
                entry.at("class"), f"limit {name!r} meets no route of class {route_class!r}; leave class out"
            )
            return None
        return draft

    def _only_rule(self, entry: StructValue, identity: Identity, route_class: str | None) -> RuleDraft | None:
        if route_class is None:
            self._problems.add(
                entry.path, "this override names no limit; add limit: with the name of a limit, or class:"
            )
            return None
        found = [draft for draft in self._rules_of_class(route_class) if _counts(draft, identity.kind)]
        if len(found) == 1:
            return found[0]
        names = ", ".join([repr(draft.name) for draft in found]) or "none"
        self._problems.add(
            entry.at("class"),
            f"which limit? counted by {identity.kind} (or client) on routes of class {route_class!r}: {names}; "
            + ("name one of them with limit:" if found else "add one, or name another with limit:"),
        )
        return None

    def _rules_of_class(self, route_class: str) -> list[RuleDraft]:
        """The rules that apply to the routes of a class."""
        if route_class not in self._rules_by_class:
            routes = [route for route, _ in self._routes if route.route_class == route_class]
            met = [self._rule_matcher.find(route.template, route.methods, route_class) for route in routes]
            self._rules_by_class[route_class] = list(dict.fromkeys(draft for drafts in met for draft in drafts))
        return self._rules_by_class[route_class]

    def _blocked(self) -> tuple[Block, ...]:
        made = []
        for entry in self._entry.get("blocked", ()):
            identity = self._identity(entry)
            if identity is not None:
                made.append(Block(identity, self._validity(entry), entry.get("reason")))
                if identity.kind in ADDRESSES and identity.value.endswith("/0"):
                    message = (
                        f"{identity.value} matches every address: all requests are rejected, except to routes of cost 0"
                    )
                    self._warnings.add(entry.path, message)
        return tuple(made)

    def _identity(self, entry: StructValue) -> Identity | None:
        found = [kind for kind in entry.fields if kind in self._kinds]
        if len(found) == 1:
            return Identity(found[0], entry.fields[found[0]])
        kinds = [kind for kind in entry.record.fields if kind in self._kinds]
        self._problems.add(
            entry.path,
            f"{' and '.join(found)} in one entry; write an entry for each"
            if found
            else f"who? add one of {', '.join(kinds)}",
        )
        return None

    def _validity(self, entry: StructValue) -> Validity:
        ends = (since, until) = entry.fields.get("valid_from"), entry.fields.get("valid_until")
        if until is not None:
            if since is not None and until <= since:
                message = f"it ends {until.isoformat()}, before it starts; put it after valid_from"
                self._problems.add(entry.at("valid_until"), message)
            elif until <= self._now and not self._warnings.full:
                message = f"it ended {until.isoformat()} and no longer applies; remove the entry"
                self._warnings.add(entry.at("valid_until"), message)
        # Many entries have the same validity and share one object.
        return self._validities.get(ends) or self._validities.setdefault(ends, Validity(since, until))

    # ------------------------------------------------------------------ settings

    def _identity_settings(self) -> IdentitySettings:
        entry = self._entry.get("identity")
        if entry is None:
            return IdentitySettings()
        subnet, api_key = _fields(entry, "subnet"), _fields(entry, "api_key")
        given = {
            "proxies": entry.get("proxies"),
            "forwarded_by": entry.get("forwarded_by"),
            "ipv6_prefix": entry.get("ipv6_prefix"),
            "subnet_ipv4": subnet.get("ipv4"),
            "subnet_ipv6": subnet.get("ipv6"),
            "bearer_token": api_key.get("bearer"),
            "known_keys_only": api_key.get("known_only"),
        }
        # For these, None is a value.
        fields = {"api_key_header": "header", "unknown_key_factor": "unknown_factor"}
        optional = {field: api_key[name] for field, name in fields.items() if name in api_key}
        return IdentitySettings(**{name: value for name, value in given.items() if value is not None}, **optional)

    def _answer_settings(self) -> AnswerSettings:
        entry = self._entry.get("answers")
        if entry is None:
            return AnswerSettings()
        headers = entry.get("headers", ("x-ratelimit", "ratelimit"))
        return AnswerSettings(
            x_ratelimit="x-ratelimit" in headers,
            ratelimit="ratelimit" in headers,
            draft=entry.get("draft", 11),
            jitter=entry.get("jitter", timedelta()),
            doc_url=entry.get("doc_url"),
        )

    def _store_settings(self) -> StoreSettings:
        entry = self._entry.get("store")
        return StoreSettings() if entry is None else StoreSettings(**entry.fields)


def _fields(entry: StructValue, name: str) -> dict[str, Any]:
    inner = entry.get(name)
    return {} if inner is None else inner.fields


def _counts(draft: RuleDraft, kind: str) -> bool:
    """True if a rule counts by this kind of identity."""
    return kind in draft.by or ("client" in draft.by and kind in CLIENT_KINDS)
