"""Envoy's rate limit service: from a request with descriptors to one status for each.

The order of a request is written once, in `_ServiceBase._answer`; the two services only differ in how they wait for
the store. Where envoyproxy/ratelimit charges every descriptor on its own, even of a rejected request, the limits of
one request are charged together or not at all; `charge_refused: true` in a file restores its behaviour for a domain.
"""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from envoy.config.core.v3 import base_pb2  # type: ignore[import-untyped]
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2  # type: ignore[import-untyped]
from envoy.service.ratelimit.v3 import rls_pb2  # type: ignore[import-untyped]
from google.protobuf import json_format, struct_pb2, text_format, unknown_fields

from headgate._pace import low_priority, release
from headgate.calendars import Calendar
from headgate.clock import SystemClock
from headgate.errors import HeadgateError, InvalidInput, StoreError
from headgate.limits import Limit
from headgate.server.envoy.config import UNIT_SECONDS, DescriptorRule, limit_name, load
from headgate.server.envoy.descriptor_decisions import DescriptorDecisions
from headgate.server.envoy.settings import ServiceSettings
from headgate.server.envoy.stats import ServiceStats, near_limit_threshold
from headgate.stores.operations import checked_refund

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from typing import Self

    from headgate import AsyncLimiter, Decision, Key, Limiter
    from headgate.server.envoy.config import Configuration, DomainRules

__all__ = ["AsyncRateLimitService", "DescriptorLine", "Match", "RateLimitService", "ServiceError"]

OK: Final = 1
OVER_LIMIT: Final = 2
MAX_UINT32: Final = 2**32 - 1
MONTH: Final = 5
CALENDAR_MONTH: Final = Calendar("month")

UNBOUNDED_QUOTA: Final = 2**51
"""The quota of counters in domains that charge rejected requests, which may exceed the limit of the rule."""

NEGATIVE_HITS_FIELD: Final = 4
"""The number of `is_negative_hits`, which the generated classes of older releases do not have."""
HAS_NEGATIVE_HITS: Final = NEGATIVE_HITS_FIELD in ratelimit_pb2.RateLimitDescriptor.DESCRIPTOR.fields_by_number

MAX_CACHED_DESCRIPTORS: Final = 10_000
MAX_CACHED_BYTES: Final = 1000
"""The size of a descriptor beyond which it is not cached."""
_OVERRIDE: Final = "override-"
"""The beginning of the unit in counters of limits that requests bring along, which are apart from those of rules."""
MAX_BUCKET_ENTRIES: Final = 6
"""Entries of a bucket, whose orders are all tried."""


class ServiceError(HeadgateError):
    """A request without an answer; the text is that of the gRPC status."""


class Match(NamedTuple):
    """The rule that applies to a descriptor, with its counter, and what follows from both for every request."""

    rule: DescriptorRule
    stats_key: str
    parts: tuple[str, ...]
    """The identity of the counter: domain, unit, and key and value of each entry."""
    key: Key | None
    """The counter; None if the rule is unlimited or allows nothing."""
    is_quota: bool
    is_optional: bool
    """True if the limit does not reject a request on its own."""
    near_limit: int
    """The usage above which hits count as near the limit."""
    window_s: int
    """The length of windows that all rules of the unit share; 0 if there are none."""

    @classmethod
    def of(cls, rule: DescriptorRule, stats_key: str, parts: tuple[str, ...], settings: ServiceSettings) -> Match:
        key = None if rule.limit is None else rule.limit.by(*parts)
        is_quota = rule.quota_mode or settings.quota_mode
        near_limit = near_limit_threshold(rule.requests_per_unit, settings.near_limit_ratio)
        has_windows = rule.limit is None or rule.limit.algorithm == "fixed_window"
        if rule.unit == MONTH and settings.use_calendar_month_rate_limit:
            has_windows = False
        window_s = UNIT_SECONDS.get(rule.unit, 0) if has_windows else 0
        return cls(rule, stats_key, parts, key, is_quota, is_quota or rule.shadow_mode, near_limit, window_s)


class _Descriptor(NamedTuple):
    """The content of a descriptor, and the rule that applies to it."""

    entries: tuple[tuple[str, str], ...]
    hits: int | None
    """None for those of the request."""
    is_refund: bool
    match: Match | None

    @classmethod
    def read(cls, descriptor: Any, match: Match | None) -> _Descriptor:
        hits = descriptor.hits_addend.value if descriptor.HasField("hits_addend") else None
        return cls(_entries(descriptor), hits, _is_refund(descriptor), match)


@dataclass(slots=True)
class DescriptorLine:
    """A descriptor of a request, on its way to a status."""

    entries: tuple[tuple[str, str], ...]
    hits: int
    is_refund: bool
    match: Match | None = None
    is_unlimited: bool = False
    limit: Limit | None = None
    """None if the rule allows nothing."""
    before: int = 0
    """The usage before the request."""
    remaining: int = 0
    is_over: bool = False
    denies: bool = False
    """True if it is over its limit, and the request is rejected for that unless SHADOW_MODE is set."""
    retry_us: int = 0
    """The time until the same hits pass, if it is over; NEVER if they exceed the limit."""
    reset_us: int = 0
    at_us: int = 0
    """The instant of the decision by the store's clock; 0 if the store was not asked."""
    degraded: str | None = None
    """The failure mode that decided in place of the store."""
    is_cached: bool = False
    """True if the denial cache answered."""


@dataclass(slots=True)
class _Group:
    """The lines of a request that share a counter, which is usually one."""

    key: Key
    lines: list[DescriptorLine]
    cost: int
    """The hits of all lines."""
    is_cached: bool = False
    """True if the denial cache has answered for its counter."""

    def record(self, decision: Decision, index: int, *, charged: int, charges_refused: bool = False) -> None:
        """Take over the verdict for the key at `index`; `charged` is the cost in it."""
        verdict = decision.verdicts[index]
        capacity = self.key.limit.capacity
        available = left = verdict[0] + charged
        for line in self.lines:
            quota = line.match.rule.requests_per_unit if line.match is not None else 0
            beyond = capacity - quota if charges_refused else 0
            line.before = max(0, quota + beyond - left)
            line.is_over = line.hits > left - beyond
            if decision.degraded:
                line.is_over = line.hits > 0 and not decision.allowed
            if line.is_refund:
                line.is_over = False
            elif charges_refused or not line.is_over:
                left -= line.hits
            shown = (left if charged else available) - beyond
            line.remaining = 0 if line.is_over else min(max(shown, 0), MAX_UINT32)
            line.retry_us = verdict[1] or max(verdict[2], 1)
            line.reset_us = (verdict[1] if line.is_over and verdict[1] > 0 else 0) or verdict[2]
            line.at_us, line.degraded, line.is_cached = decision.at_us, decision.degraded, self.is_cached


class _Check(NamedTuple):
    groups: Sequence[_Group]
    costs: tuple[int, ...]

    @property
    def keys(self) -> list[Key]:
        return [group.key for group in self.groups]


class _GiveBack(NamedTuple):
    key: Key
    amount: int
    decision: Decision | None = None


class _ServiceBase:
    """Everything but waiting for the store."""

    _limiter: Any

    def __init__(self, limiter: Any, env: Mapping[str, str] | None = None) -> None:
        self._limiter = limiter
        self._env: Mapping[str, str] = os.environ if env is None else env
        self._settings = ServiceSettings.from_env(self._env)
        self._configuration: Configuration | None = None
        self._descriptors: dict[tuple[str, bytes], _Descriptor] = {}
        self._counters = ServiceStats()
        self._engine = limiter.engine
        self._clock = limiter.engine.clock or SystemClock()
        self._cache = limiter.engine.local.denial_cache
        self._checks = 0
        self.decisions = DescriptorDecisions(limiter)
        """The source of the events of its decisions, for observers."""

    @classmethod
    def from_texts(
        cls, texts: Sequence[tuple[str, str]], limiter: Any, *, env: Mapping[str, str] | None = None
    ) -> Self:
        """Create a service from configuration files, given as pairs of name and text.

        The limiter is a `Limiter` or, for the asynchronous service, an `AsyncLimiter`. `env` replaces the environment
        variables of the process.
        """
        service = cls(limiter, env)
        service.reload(texts)
        return service

    def reload(self, texts: Sequence[tuple[str, str]]) -> None:
        """Replace the configuration by that of the files, given as pairs of name and text.

        The environment is read again, too. Raises `ConfigError` and keeps the previous configuration if a file is
        invalid.
        """
        self._use(*self._load(texts))

    def _load(self, texts: Sequence[tuple[str, str]]) -> tuple[ServiceSettings, Configuration]:
        """Read files and environment, without using them yet."""
        try:
            settings = ServiceSettings.from_env(self._env)
            configuration = load(texts, merge_domains=settings.merge_domain_config)
        except InvalidInput as error:
            self._counters.count("config_load_error")
            self.decisions.policy_error = str(error)
            raise
        if not settings.sanitize_descriptor_metric_dots:  # whose names are known with the first request
            for rule in configuration.rules():
                if not rule.unlimited:
                    self._counters.declare(rule.full_key)
        return settings, configuration

    def _use(self, settings: ServiceSettings, configuration: Configuration) -> list[Any]:
        """Use another configuration from now on; returns the large parts of the previous one."""
        before = self._configuration
        parts: list[Any] = [self._descriptors]
        if before is not None:
            parts += [each.root.children for each in before.domains.values()]
        self._settings, self._configuration, self._descriptors = settings, configuration, {}
        self._counters.count("config_load_success")
        self.decisions.reset_rules(configuration.version)
        return parts

    def stats(self) -> dict[str, int]:
        """The counters under the names of envoyproxy/ratelimit."""
        return self._counters.snapshot()

    def server_stats(self) -> dict[str, int]:
        """The counters, with those of the process: response times, and denials from the cache."""
        return {**self.stats(), **self._counters.response_times(), "ratelimit.localcache.hitCount": self._cache.hits}

    @property
    def has_remote_store(self) -> bool:
        """True if counters are in another process, so that calls gain from reaching it in batches."""
        return self._engine.memory is None

    @property
    def configuration(self) -> Configuration | None:
        """The configuration in use; None before the first."""
        return self._configuration

    def find_bucket(self, domain: str, entries: tuple[tuple[str, str], ...]) -> Match | None:
        """The rule of a bucket of Envoy's quota service, whose entries have no order."""
        rules = None if self._configuration is None else self._configuration.domains.get(domain)
        if rules is None or len(entries) > MAX_BUCKET_ENTRIES:
            return None
        matches = (_find(rules, domain, order, self._settings) for order in permutations(entries))
        return next((match for match in matches if match is not None), None)

    def _answer(self, request: Any) -> Generator[list[_Check | _GiveBack], list[Any], Any]:
        """Decide a request: yields operations on the store that do not depend on each other, returns the response."""
        configuration = self._configuration
        if not request.domain:
            raise ServiceError("rate limit domain must not be empty")
        if not request.descriptors:
            raise ServiceError("rate limit descriptor list must not be empty")
        if configuration is None:
            raise ServiceError("no rate limit configuration loaded")
        settings = self._settings
        received_us = self._clock.now_us()
        lines = self._lines(configuration, request)
        domain = configuration.domains.get(request.domain)
        yield from self._charge(lines, domain, settings)
        response = self._response(request, lines, settings)
        if domain is not None:
            is_denied = response.overall_code == OVER_LIMIT
            self.decisions.emit(request.domain, lines, is_denied=is_denied, received_us=received_us)
        return response

    def _lines(self, configuration: Configuration, request: Any) -> list[DescriptorLine]:
        """Match all descriptors, and drop the limits that another one of the request replaces."""
        lines: list[DescriptorLine] = []
        replaced: set[str] = set()
        domain = request.domain
        rules = configuration.domains.get(domain)
        default_hits = request.hits_addend or 1
        for descriptor in request.descriptors:
            found = self._descriptor(rules, domain, descriptor)
            match = found.match
            line = DescriptorLine(found.entries, default_hits if found.hits is None else found.hits, found.is_refund)
            lines.append(line)
            if match is None:
                continue
            rule = match.rule
            line.hits *= rule.cost
            if rule.replaces:
                replaced.update(rule.replaces)
            if rule.unlimited:
                line.is_unlimited = True
            else:
                line.match, line.limit = match, rule.limit
        if replaced:
            for line in lines:
                if line.match is not None and line.match.rule.name in replaced:
                    line.match = line.limit = None
        return lines

    def _descriptor(self, rules: DomainRules | None, domain: str, descriptor: Any) -> _Descriptor:
        """The content of a descriptor, with the rule that applies; clients send the same ones over and over."""
        if rules is None:
            self._counters.count_unknown_domain(domain)
            return _Descriptor.read(descriptor, None)
        content = descriptor.SerializeToString()
        found = self._descriptors.get((domain, content))
        if found is None:
            found = _Descriptor.read(descriptor, _match(rules, domain, descriptor, self._settings))
            if len(self._descriptors) >= MAX_CACHED_DESCRIPTORS:
                self._descriptors.clear()
            if len(content) <= MAX_CACHED_BYTES:
                self._descriptors[domain, content] = found
        return found

    def _charge(
        self, lines: list[DescriptorLine], domain: DomainRules | None, settings: ServiceSettings
    ) -> Generator[list[_Check | _GiveBack], list[Any], None]:
        if domain is None:
            return
        charges_refused = domain.charge_refused
        if len(lines) == 1 and not charges_refused:  # most requests, in the shortest way
            line = lines[0]
            if line.match is None:
                return
            if line.limit is not None and not line.is_refund and not line.match.is_optional:
                groups = self._groups(lines, settings)
                decision = (yield [_Check(groups, (line.hits,))])[0]
                groups[0].record(decision, 0, charged=line.hits if decision.allowed else 0)
                return
        refunded: list[DescriptorLine] = []
        refunded_later: list[DescriptorLine] = []
        """Those of a counter that the request charges before."""
        enforced: list[DescriptorLine] = []
        optional: list[DescriptorLine] = []
        is_denied = False
        for line in lines:
            match = line.match
            if match is None:
                continue
            if line.limit is None:  # a rule that allows nothing
                line.is_over = line.hits > 0 and not line.is_refund
            if line.is_refund:
                is_charged = any(each.match and each.match.parts == match.parts for each in (*enforced, *optional))
                (refunded_later if is_charged else refunded).append(line)
            elif charges_refused or not match.is_optional:
                enforced.append(line)
                is_denied = is_denied or line.is_over
            else:
                optional.append(line)
        if refunded:
            yield from self._refund(self._groups(refunded, settings, charges_refused), charges_refused)
        groups = self._groups(enforced, settings, charges_refused)
        if charges_refused:
            yield from self._charge_each(groups, stops=settings.stop_cache_key_increment_when_overlimit)
        else:
            yield from self._charge_together(groups, optional, lines, settings, is_denied=is_denied)
        if refunded_later:
            yield from self._refund(self._groups(refunded_later, settings, charges_refused), charges_refused)

    def _refund(
        self, groups: list[_Group], charges_refused: bool
    ) -> Generator[list[_Check | _GiveBack], list[Any], None]:
        yield [_GiveBack(group.key, group.cost) for group in groups]
        yield from self._look(groups, charges_refused=charges_refused)

    def _charge_together(
        self,
        groups: list[_Group],
        optional: list[DescriptorLine],
        lines: list[DescriptorLine],
        settings: ServiceSettings,
        *,
        is_denied: bool,
    ) -> Generator[list[_Check | _GiveBack], list[Any], None]:
        """Charge all counters or none; those of limits that do not reject the request on their own, each by itself."""
        decision = None
        if groups and is_denied:
            yield from self._look(groups)
        elif groups:
            costs = tuple([group.cost for group in groups])
            decision = (yield [_Check(groups, costs)])[0]
            is_denied = not decision.allowed
            for index, group in enumerate(groups):
                group.record(decision, index, charged=0 if is_denied else costs[index])
        if not optional:
            return
        quotas = self._groups(optional, settings)
        if is_denied:
            yield from self._look(quotas)
        else:
            results = yield [_Check([group], (group.cost,)) for group in quotas]
            for group, each in zip(quotas, results, strict=True):
                group.record(each, 0, charged=group.cost if each.allowed else 0)
        if decision is not None and decision.allowed and _is_quota_exhausted(lines, settings):
            yield [_GiveBack(group.key, group.cost, decision) for group in groups if group.cost]
            yield from self._look(groups)

    def _run_in_memory(self, operation: _Check | _GiveBack) -> Any:
        """Run an operation on a store in this process, which answers at once and has no cache of denials."""
        memory = self._engine.memory
        if isinstance(operation, _Check):
            groups, costs = operation
            if len(groups) == 1:
                return memory.check(groups[0].key, cost=costs[0])
            return memory.check(*operation.keys, cost=costs)
        return memory.run(checked_refund(operation.key, operation.amount, None, operation.decision))

    def _begin_check(self) -> tuple[int, int]:
        self._checks += 1
        return self._checks, self._cache.hits

    def _end_check(self, check: _Check, decision: Decision, before: tuple[int, int]) -> None:
        """Note a denial from the cache: it needs no waiting, so that no other check has begun in between."""
        checks, hits = before
        if not decision.allowed and hits != self._cache.hits and checks == self._checks:
            for group in check.groups:
                group.is_cached = True

    def _look(
        self, groups: list[_Group], *, charges_refused: bool = False
    ) -> Generator[list[_Check | _GiveBack], list[Any], None]:
        """Read the counters without charging them."""
        results = yield [_Check([group], (0,)) for group in groups]
        for group, decision in zip(groups, results, strict=True):
            group.record(decision, 0, charged=0, charges_refused=charges_refused)

    def _charge_each(
        self, groups: list[_Group], *, stops: bool
    ) -> Generator[list[_Check | _GiveBack], list[Any], None]:
        """Charge every counter on its own, also beyond its limit; if `stops` and one is over, only those that are."""
        charged = groups
        if stops and len(groups) > 1:
            yield from self._look(groups, charges_refused=True)
            over = [group for group in groups if any(line.is_over for line in group.lines)]
            charged = over or groups
            for line in [line for group in groups if group not in charged for line in group.lines]:
                line.before -= line.hits  # its hits are not among those that were used
        results = yield [_Check([group], (group.cost,)) for group in charged]
        for group, decision in zip(charged, results, strict=True):
            # Rejected are only hits that exceed even the counter.
            group.record(decision, 0, charged=group.cost if decision.allowed else 0, charges_refused=True)

    def _groups(
        self, lines: list[DescriptorLine], settings: ServiceSettings, charges_refused: bool = False
    ) -> list[_Group]:
        """The counters of lines that have one."""
        groups: dict[tuple[str, str], _Group] = {}
        for line in lines:
            match = line.match
            if match is None:
                continue
            key = match.key
            if charges_refused or (settings.use_calendar_month_rate_limit and match.rule.unit == MONTH):
                key = _special_key(match, settings, charges_refused)
            if key is None:
                continue
            identity = key.limit.space, key.identity
            group = groups.get(identity)
            if group is None:
                groups[identity] = _Group(key, [line], line.hits)
            else:
                group.lines.append(line)
                group.cost += line.hits
        return [*groups.values()]

    def _response(self, request: Any, lines: list[DescriptorLine], settings: ServiceSettings) -> Any:
        response = rls_pb2.RateLimitResponse()
        now_us = self._clock.now_us()
        shown: tuple[int, Any] | None = None
        passed: list[DescriptorLine] = []
        is_over = has_quotas = False
        for line in lines:
            status = response.statuses.add()
            if line.is_unlimited:
                status.code, status.limit_remaining = OK, MAX_UINT32
                continue
            code = self._fill(status, line, now_us)
            if line.match is not None and (shown is None or status.limit_remaining < shown[0]):
                shown = status.limit_remaining, status
            is_quota = _is_quota(line, settings)
            has_quotas = has_quotas or is_quota
            if code != OVER_LIMIT:
                passed.append(line)
            elif not is_quota:
                is_over, line.denies, shown = True, True, (0, status)
        is_exhausted = has_quotas and _is_quota_exhausted(lines, settings)
        if is_exhausted:
            for line in lines:
                line.denies = line.denies or (line.is_over and _is_quota(line, settings))
        if is_over or is_exhausted:
            if settings.shadow_mode:
                self._counters.count("global_shadow_mode")
                is_over = False
            else:
                is_over = True
        response.overall_code = OVER_LIMIT if is_over else OK
        if shown is not None and settings.adds_headers:
            _add_headers(response, shown[1], settings)
        if settings.response_dynamic_metadata:
            response.dynamic_metadata.CopyFrom(_metadata(request, passed))
        return response

    def _fill(self, status: Any, line: DescriptorLine, now_us: int) -> int:
        """Fill in the status of a descriptor, and count it. Returns the code."""
        match = line.match
        if match is None:
            status.code = OK
            return OK
        rule = match.rule
        code = OVER_LIMIT if line.is_over and not rule.shadow_mode else OK
        status.code = code
        current = status.current_limit
        current.requests_per_unit = rule.requests_per_unit
        current.unit = rule.unit
        current.name = rule.name
        status.limit_remaining = line.remaining
        reset, window_s = status.duration_until_reset, match.window_s
        if window_s:
            reset.seconds = window_s - (line.at_us or now_us) // 1_000_000 % window_s
        else:
            reset.seconds = _seconds_until_reset(rule, line, line.at_us or now_us)
            reset.SetInParent()  # also if it is 0
        self._counters.count_limit(match.stats_key, _counts(line, match))
        return code


class RateLimitService(_ServiceBase):
    """The service for threads. `AsyncRateLimitService` is the same for asyncio.

    >>> from headgate import Limiter
    >>> from headgate.testing import FakeClock
    >>> text = '''
    ... domain: shop
    ... descriptors:
    ...   - key: user
    ...     rate_limit: {unit: minute, requests_per_unit: 1}
    ... '''
    >>> service = RateLimitService.from_texts([("shop.yaml", text)], Limiter(clock=FakeClock()), env={})
    >>> request = rls_pb2.RateLimitRequest(domain="shop")
    >>> _ = request.descriptors.add().entries.add(key="user", value="ada")
    >>> [service.should_rate_limit(request).overall_code for _ in range(2)]
    [1, 2]
    """

    _limiter: Limiter

    def should_rate_limit(self, request: Any) -> Any:
        """Answer a `RateLimitRequest` with a `RateLimitResponse`. Raises `ServiceError` if there is no answer."""
        started_ns = perf_counter_ns()
        steps = self._answer(request)
        try:
            operations = next(steps)
            run = self._run if self._engine.memory is None else self._run_in_memory
            while True:
                operations = steps.send([run(each) for each in operations])
        except StopIteration as stop:
            return stop.value
        except (ServiceError, StoreError) as error:
            raise _count_error(self._counters, error) from error
        finally:
            self._counters.record_call((perf_counter_ns() - started_ns) // 1000)

    def _run(self, operation: _Check | _GiveBack) -> Any:
        if isinstance(operation, _Check):
            before = self._begin_check()
            decision = self._limiter.check(*operation.keys, cost=operation.costs)
            self._end_check(operation, decision, before)
            return decision
        return self._limiter.refund(operation.key, operation.amount, of=operation.decision)


class AsyncRateLimitService(_ServiceBase):
    """The service for asyncio: the same as `RateLimitService`, with methods to await."""

    _limiter: AsyncLimiter

    async def reload_in_background(self, texts: Sequence[tuple[str, str]]) -> None:
        """Replace the configuration like `reload`, in a thread that lets the event loop run meanwhile."""
        parts = self._use(*await asyncio.to_thread(self._load_slowly, texts))
        await asyncio.to_thread(_release_slowly, parts)

    def _load_slowly(self, texts: Sequence[tuple[str, str]]) -> tuple[ServiceSettings, Configuration]:
        with low_priority():
            loaded = self._load(texts)
            if gc.get_freeze_count():  # as in `headgate serve`, whose objects are excluded from garbage collection
                gc.freeze()
            return loaded

    async def should_rate_limit(self, request: Any) -> Any:
        """Answer a `RateLimitRequest` with a `RateLimitResponse`. Raises `ServiceError` if there is no answer."""
        started_ns = perf_counter_ns()
        steps = self._answer(request)
        try:
            operations = next(steps)
            while True:
                if self._engine.memory is not None:
                    results = [self._run_in_memory(each) for each in operations]
                elif len(operations) == 1:
                    results = [await self._run(operations[0])]
                else:
                    results = list(await asyncio.gather(*map(self._run, operations)))
                operations = steps.send(results)
        except StopIteration as stop:
            return stop.value
        except (ServiceError, StoreError) as error:
            raise _count_error(self._counters, error) from error
        finally:
            self._counters.record_call((perf_counter_ns() - started_ns) // 1000)

    async def _run(self, operation: _Check | _GiveBack) -> Any:
        if isinstance(operation, _Check):
            before = self._begin_check()
            decision = await self._limiter.check(*operation.keys, cost=operation.costs)
            self._end_check(operation, decision, before)
            return decision
        return await self._limiter.refund(operation.key, operation.amount, of=operation.decision)


def _release_slowly(parts: list[Any]) -> None:
    """Free the parts of a configuration that is no longer used; requests in progress have found their rules."""
    with low_priority():
        while parts:
            release(parts.pop())


def _count_error(counters: ServiceStats, error: Exception) -> ServiceError:
    kind = "service_error" if isinstance(error, ServiceError) else "redis_error"
    counters.count(f"call.should_rate_limit.{kind}")
    return error if isinstance(error, ServiceError) else ServiceError(str(error))


def _match(rules: DomainRules, domain: str, descriptor: Any, settings: ServiceSettings) -> Match | None:
    """The limit that a descriptor brings along, or the rule that applies to it."""
    entries = _entries(descriptor)
    if descriptor.HasField("limit"):
        return _override(domain, entries, descriptor.limit.requests_per_unit, descriptor.limit.unit, settings)
    return _find(rules, domain, entries, settings)


def _find(
    rules: DomainRules, domain: str, entries: tuple[tuple[str, str], ...], settings: ServiceSettings
) -> Match | None:
    """The rule at the depth of a descriptor, with the name of its statistics."""
    node = rules.root
    counted: list[tuple[str, str]] = []
    named: list[tuple[str, str]] = []
    shares = False
    for depth, (key, value) in enumerate(entries):
        child, by_pattern = node.find(key, value)
        if child is None or (depth < len(entries) - 1 and not child.children):
            return None
        pattern = child.label.removeprefix(f"{key}_") if by_pattern else ""
        is_shared = by_pattern and child.share_threshold
        counted.append((key, pattern if is_shared else value))
        is_named = child.value_to_metric or (child.value is not None and not by_pattern)
        named.append((key, value if is_named and not is_shared else pattern))
        shares = shares or is_shared
        node = child
    rule = node.rule
    if rule is None:
        return None
    unit = str(rule.unit or rule.limit)  # that of the rule itself: tiers and overrides keep the counter
    rule = rule.for_value(entries[-1][1], rules.clients)
    labels = [f"{key}_{value}" if value else key for key, value in (counted if rule.detailed_metric else named)]
    if rule.detailed_metric and not shares:
        labels = [f"{key}_{value}" for key, value in counted]  # also without a value
    parts = domain, unit, *[text for pair in counted for text in pair]
    return Match.of(rule, _stats_key(domain, labels, settings), parts, settings)


def _override(
    domain: str, entries: tuple[tuple[str, str], ...], requests_per_unit: int, unit: int, settings: ServiceSettings
) -> Match:
    """The limit that a request brings along."""
    if unit not in UNIT_SECONDS:
        raise ServiceError(f"invalid rate limit unit {unit} in the limit override of a descriptor; use 1 to 7")
    labels = [f"{key}_{value}" if value else key for key, value in entries]
    full_key = f"{domain}.{'.'.join(labels)}"
    parts = domain, f"{_OVERRIDE}{unit}", *[text for entry in entries for text in entry]
    limit = None
    if requests_per_unit:
        period = timedelta(seconds=UNIT_SECONDS[unit])
        limit = Limit(requests_per_unit, period, algorithm="fixed_window", name=_override_name(parts))
    rule = DescriptorRule(full_key, requests_per_unit, unit, limit=limit, origin="override")
    return Match.of(rule, _stats_key(domain, labels, settings), parts, settings)


def _override_name(parts: tuple[str, ...]) -> str:
    return limit_name(".".join((parts[0], *parts[2::2], "override")))


def _special_key(match: Match, settings: ServiceSettings, charges_refused: bool) -> Key | None:
    """The counter of a calendar month, or of a domain that charges rejected requests; it may exceed the limit."""
    rule, limit = match.rule, match.rule.limit
    if charges_refused and limit is None and rule.unit:  # a rule that allows nothing has usage, too
        name = _override_name(match.parts) if match.parts[1].startswith(_OVERRIDE) else limit_name(rule.full_key)
        limit = Limit(1, timedelta(seconds=UNIT_SECONDS[rule.unit]), name=name)
    if limit is None:
        return None
    if settings.use_calendar_month_rate_limit and rule.unit == MONTH:
        limit = Limit(limit.quota, CALENDAR_MONTH, name=limit.name)
    if charges_refused:
        limit = Limit(UNBOUNDED_QUOTA, limit.period, algorithm="fixed_window", name=limit.name)
    return limit.by(*match.parts)


def _stats_key(domain: str, labels: list[str], settings: ServiceSettings) -> str:
    if settings.sanitize_descriptor_metric_dots:
        labels = [label.replace(".", "_") for label in labels]
    return f"{domain}.{'.'.join(labels)}"


def _entries(descriptor: Any) -> tuple[tuple[str, str], ...]:
    return tuple([(entry.key, entry.value) for entry in descriptor.entries])


def _is_refund(descriptor: Any) -> bool:
    """True if the hits of a descriptor are returned instead of charged."""
    if HAS_NEGATIVE_HITS:
        return bool(descriptor.is_negative_hits)
    fields: Any = unknown_fields.UnknownFieldSet(descriptor)
    return any(each.field_number == NEGATIVE_HITS_FIELD and each.data == 1 for each in fields)


def _is_quota(line: DescriptorLine, settings: ServiceSettings) -> bool:
    return settings.quota_mode if line.match is None else line.match.is_quota


def _is_quota_exhausted(lines: list[DescriptorLine], settings: ServiceSettings) -> bool:
    """True if the request has quotas, and all of them are used up."""
    has_quotas = False
    for line in lines:
        if _is_quota(line, settings) and not line.is_unlimited:
            if not line.is_over or line.match is None or line.match.rule.shadow_mode:
                return False
            has_quotas = True
    return has_quotas


def _counts(line: DescriptorLine, match: Match) -> dict[str, int]:
    """The counters that a request adds to. Hits on both sides of a threshold are divided."""
    hits, before, limit = line.hits, line.before, match.rule.requests_per_unit
    if line.is_refund:
        return {"total_negative_hits": hits}
    after, near = before + hits, match.near_limit
    counts = {"total_hits": hits}
    if line.is_over:
        counts["over_limit"] = hits if before >= limit else after - limit
        if line.is_cached:
            counts["over_limit_with_local_cache"] = counts["over_limit"]
        if before < limit:
            counts["near_limit"] = limit - max(near, before)
        if match.rule.shadow_mode:
            counts["shadow_mode"] = counts["over_limit"]
        return counts
    if after > near:
        counts["near_limit"] = hits if before >= near else after - near
    counts["within_limit"] = hits
    return counts


def _seconds_until_reset(rule: DescriptorRule, line: DescriptorLine, now_us: int) -> int:
    """The whole seconds until the month of the calendar ends or, for other algorithms, the counter is as new."""
    if not rule.unit or (rule.limit is not None and rule.limit.algorithm != "fixed_window"):
        return -(-line.reset_us // 1_000_000)
    return (CALENDAR_MONTH.window(now_us)[1] - now_us // 1_000_000 * 1_000_000) // 1_000_000


def _add_headers(response: Any, status: Any, settings: ServiceSettings) -> None:
    values = (
        status.current_limit.requests_per_unit,
        status.limit_remaining,
        status.duration_until_reset.seconds,
    )
    if settings.limit_response_headers_enabled:
        names = settings.limit_limit_header, settings.limit_remaining_header, settings.limit_reset_header
        response.response_headers_to_add.extend(_headers(names, values))
    if settings.limit_request_headers_enabled:
        names = (
            settings.limit_request_limit_header,
            settings.limit_request_remaining_header,
            settings.limit_request_reset_header,
        )
        response.request_headers_to_add.extend(_headers(names, values))


def _headers(names: Iterable[str], values: Iterable[int]) -> list[Any]:
    return [base_pb2.HeaderValue(key=name, value=str(value)) for name, value in zip(names, values, strict=True)]


def _metadata(request: Any, passed: list[DescriptorLine]) -> struct_pb2.Struct:
    """The request and the metadata of the descriptors that passed, for the next filters of Envoy."""
    content: dict[str, Any] = {"domain": request.domain, "descriptors": []}
    for descriptor in request.descriptors:
        each: dict[str, Any] = {"entries": [f"{entry.key}={entry.value}" for entry in descriptor.entries]}
        if descriptor.HasField("limit"):
            each["limit"] = text_format.MessageToString(descriptor.limit, as_one_line=True).replace(": ", ":")
        if descriptor.HasField("hits_addend"):
            each["hitsAddend"] = descriptor.hits_addend.value
        content["descriptors"].append(each)
    if request.hits_addend:
        content["hitsAddend"] = request.hits_addend
    merged: dict[str, Any] = {}
    for line in passed:
        if line.match is not None and line.match.rule.metadata:
            _merge(merged, line.match.rule.metadata)
    if merged:
        content["metadata"] = merged
    result = struct_pb2.Struct()
    json_format.ParseDict(content, result)
    return result


def _merge(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Add what is missing; mappings are merged, and otherwise the first value stays."""
    for key, value in source.items():
        if key not in target:
            target[key] = _copy(value)
        elif isinstance(target[key], dict) and isinstance(value, dict):
            _merge(target[key], value)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value
