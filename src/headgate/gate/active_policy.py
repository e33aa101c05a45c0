"""ActivePolicy: the policy in force, compiled for requests, with a cache of what applies to each known client."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.gate.admission import Admission
from headgate.gate.metering import QuotaRequest
from headgate.stores.operations import Check

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headgate.decisions import Decision
    from headgate.errors import Overloaded
    from headgate.gate.admission import RequestInfo
    from headgate.gate.identity import AppIdentities, IdentityExtractor
    from headgate.gate.responses import Header, HeaderTemplate, Rejection, ResponseBuilder
    from headgate.policy.model import Block
    from headgate.policy.snapshot import Resolution, RoutePlan, Snapshot

__all__ = ["ActivePolicy", "ClientCache", "ResolvedRequest"]

SHARED_KINDS: Final = frozenset({"endpoint"})
"""The kinds of `by` that name no client."""

MAX_CLIENTS: Final = 4096
MAX_MISSES: Final = 16 * MAX_CLIENTS
"""Cache misses tolerated while the cache is full before it is cleared; bounds the cost of a flood of new clients."""

MAX_IDENTITY_CHARS: Final = 512
"""Total length of the identities of a client that is cached: bounds the cache at seven megabytes."""


class ResolvedRequest(NamedTuple):
    """The limits that apply to a request, the check to send to the store, and the header template of the response."""

    resolution: Resolution
    check: Check | None
    """None for a request that is blocked or to which no limit applies."""
    header_template: HeaderTemplate
    quotas: tuple[QuotaRequest, ...] = ()
    """The charges to the ledger."""


class ClientCache(dict[Any, ResolvedRequest]):
    """Bounded cache of resolved requests; call `has_room` before adding an entry."""

    __slots__ = ("_misses",)

    def __init__(self) -> None:
        super().__init__()
        self._misses = 0

    def has_room(self) -> bool:
        """Return True if an entry can be added; call it once for each miss. Clears the cache after MAX_MISSES."""
        if len(self) < MAX_CLIENTS:
            return True
        self._misses += 1
        if self._misses >= MAX_MISSES:
            self._misses = 0
            self.clear()
        return False


class ActivePolicy:
    """A policy compiled for requests: snapshot, identity extraction, responses and client cache."""

    __slots__ = ("_header_templates", "_period", "_responses", "_transitions_us", "identities", "snapshot")

    def __init__(self, snapshot: Snapshot, responses: ResponseBuilder, identities: IdentityExtractor) -> None:
        self.snapshot = snapshot
        self.identities = identities
        self._responses = responses
        self._header_templates: dict[Any, HeaderTemplate] = {}
        """Keyed by ids of limits, among others; the snapshot keeps these limits alive."""
        self._transitions_us = [-sys.maxsize, *snapshot.policy.transition_times_us, sys.maxsize]
        self._period: tuple[int, int, ClientCache] = (0, 0, ClientCache())
        """Start and end of the time in which no entry of the policy begins or ends, and the clients seen in it."""

    @property
    def cached_clients(self) -> ClientCache:
        return self._period[2]

    def forget_clients(self) -> None:
        """Resolve the next request of every client anew, because lists have changed."""
        start_us, end_us, _ = self._period
        self._period = start_us, end_us, ClientCache()

    def resolve(
        self, route: RoutePlan, request: RequestInfo, kinds: frozenset[str], from_app: AppIdentities, now_us: int
    ) -> ResolvedRequest:
        """Resolve the limits that apply to a request; `kinds` are the identities needed, `from_app` those of the app.

        A client that was seen before is answered from the cache, until an entry of the policy begins or ends.
        """
        start_us, end_us, clients = self._period
        if not start_us <= now_us < end_us:
            clients = self._start_period(now_us)
        identities = self.identities
        sent = identities.cache_key(request, route, kinds)
        key = (sent, *from_app.items()) if from_app else sent
        found = clients.get(key)
        if found is not None:
            return found
        who, is_cacheable = identities.extract(request, kinds)
        resolution = self.snapshot.resolve(route, {**who, **from_app}, now_us)
        check: Check | None = None
        quotas: tuple[QuotaRequest, ...] = ()
        needs_check = bool(resolution.block is None and resolution.keys)
        if needs_check and not route.quotas:
            check = Check(resolution.keys, resolution.cost)
        elif needs_check:
            check, quotas = _split(resolution)
        resolved = ResolvedRequest(resolution, check, self.header_template(resolution), quotas)
        is_cacheable = is_cacheable and sent is not None and needs_check
        if is_cacheable and clients.has_room() and _is_short(sent, resolution):
            clients[key] = resolved
        return resolved

    def tighten(self, resolved: ResolvedRequest, factor: int) -> ResolvedRequest:
        """The same limits divided by a factor, for a client under an action.

        Quotas, which are bought, and limits that all clients share stay as they are.
        """
        resolution = resolved.resolution
        keys = [
            key if rule.rule.is_quota or rule.rule.share is not None or SHARED_KINDS.issuperset(rule.rule.by)
            else key._replace(limit=self.snapshot.tightened(key.limit, factor))
            for rule, key in zip(resolution.rules, resolution.keys, strict=True)
        ]  # fmt: skip
        # A list of its own: the header template of the route is for the limits as they are.
        tightened = resolution._replace(keys=tuple(keys), rules=[*resolution.rules])
        check = None if resolved.check is None else Check(tuple(keys[: len(resolved.check.keys)]), resolved.check.cost)
        return resolved._replace(resolution=tightened, check=check, header_template=self.header_template(tightened))

    @property
    def responses(self) -> ResponseBuilder:
        return self._responses

    def conclude(
        self, resolution: Resolution, decision: Decision | None, header_template: HeaderTemplate, received_us: int
    ) -> Admission:
        """The admission of a request, given the decision of the store; None if no check was needed."""
        settles = resolution.route.settles
        if decision is None:
            block = resolution.block
            refusal = None if block is None else self._responses.blocked(_remaining_us(block, received_us))
            return Admission(resolution, None, refusal, None, received_us, settles)
        if decision.degraded is not None and resolution.route.on_failure != "local":
            # The state of the limits is unknown, so no headers are sent.
            refusal = None if decision.allowed else self._responses.unavailable(decision)
            return Admission(resolution, decision, refusal, None, received_us, settles)
        refusal = None if decision.allowed else self._responses.denied(decision, header_template)
        return Admission(resolution, decision, refusal, header_template, received_us, settles)

    def shed(self, resolution: Resolution, retry_us: int, received_us: int) -> Admission:
        """The admission of a request that is refused because its process has too many in progress."""
        refusal = self._responses.overloaded(retry_us, resolution.route.priority)
        return Admission(resolution, None, refusal, None, received_us)

    def overloaded(self, error: Overloaded) -> Rejection:
        """The response to a request whose handler has raised `Overloaded`."""
        return self._responses.overloaded(int(error.retry_after * 1_000_000), error.priority)

    def headers_of(self, admissions: Iterable[Admission]) -> list[Header]:
        """The header fields of several admissions of the same request, merged."""
        found = [(each, headers) for each in admissions if (headers := each.headers)]
        if len(found) < 2:
            return found[0][1] if found else []
        decisions = [each.decision for each, _ in found if each.decision is not None]
        rules = [rule for each, _ in found if each.resolution is not None for rule in each.resolution.rules]
        template = self._responses.header_template(
            [key.limit for decision in decisions for key in decision.keys],
            [rule.rule.unit for rule in rules],
            [rule.cost for rule in rules],
        )
        return template.headers([each for decision in decisions for each in decision.verdicts], decisions[-1].at_us)

    def conclude_without_ledger(self, resolution: Resolution, decision: Decision, received_us: int) -> Admission:
        """The refusal of a request whose quota needs the ledger, which is unavailable."""
        return Admission(resolution, decision, self._responses.unavailable(decision), None, received_us)

    def header_template(self, resolution: Resolution) -> HeaderTemplate:
        """The header template of the limits of a request, created once."""
        # Depends on the tier alone, unless some rules do not apply or have overrides.
        if resolution.rules is resolution.route.rules and not resolution.route.has_overrides:
            key: Any = resolution.route, resolution.tier
        else:
            key = resolution.cost, *[id(key.limit) for key in resolution.keys]
        template = self._header_templates.get(key)
        if template is None:
            template = self._header_templates[key] = self._responses.header_template(
                [key.limit for key in resolution.keys],
                [rule.rule.unit for rule in resolution.rules],
                [rule.cost for rule in resolution.rules],
            )
        return template

    def _start_period(self, now_us: int) -> ClientCache:
        index = bisect_right(self._transitions_us, now_us)
        clients = ClientCache()
        self._period = self._transitions_us[index - 1], self._transitions_us[index], clients
        return clients


def _split(resolution: Resolution) -> tuple[Check | None, tuple[QuotaRequest, ...]]:
    """The check of a request's limits, and the charges on its quotas, which are its last rules."""
    rules, keys, cost = resolution.rules, resolution.keys, resolution.cost
    count = sum([not rule.rule.is_quota for rule in rules])
    quotas = [QuotaRequest(rule, key, resolution) for rule, key in zip(rules[count:], keys[count:], strict=True)]
    check = Check(keys[:count], cost[:count] if isinstance(cost, tuple) else cost) if count else None
    return check, tuple(quotas)


def _is_short(sent: Any, resolution: Resolution) -> bool:
    _, _, peer, forwarded, *_ = sent
    return sum([len(text) for text in (peer, *forwarded, *resolution.who.values()) if text]) <= MAX_IDENTITY_CHARS


def _remaining_us(block: Block, now_us: int) -> int | None:
    until = block.validity.until
    return None if until is None else max(0, int(until.timestamp() * 1_000_000) - now_us)
