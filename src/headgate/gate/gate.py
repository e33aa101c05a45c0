"""The gate that adapters put in front of an app: two drivers of the one way of a request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headgate.errors import InvalidConfiguration, StoreError
from headgate.gate.admission import NOT_SERVED, UNLIMITED, ActivePolicy, Admission, Shadow, settle
from headgate.gate.base import GateBase
from headgate.gate.identity import PENDING
from headgate.gate.view_limits import bound
from headgate.limiter import AsyncLimiter, Limiter
from headgate.stores.operations import Check

if TYPE_CHECKING:
    from datetime import datetime

    from headgate.gate.admission import RequestInfo
    from headgate.gate.identity import AppIdentities
    from headgate.gate.responses import HeaderTemplate
    from headgate.gate.view_limits import LimitDeclaration, ViewAdmissions
    from headgate.policy.snapshot import Resolution

__all__ = ["AsyncGate", "Gate"]


class Gate(GateBase):
    """Lets requests in, or not, for code with threads. Adapters make one from their own arguments."""

    _limiter_type = Limiter

    def admit(self, arrival: RequestInfo, rules: ActivePolicy | None = None) -> Admission:
        """The admission of a request, or its refusal: by the policy, or by the rules of a view that it is going to."""
        if not self.is_on:
            return UNLIMITED
        if self._health_path is not None and self._health_path in (arrival.path, arrival.below):
            return self._say_how_it_is()
        rules = rules or self.rules
        route = rules.snapshot.route(arrival.method, arrival.path, arrival.below)
        if route.is_exempt:
            return UNLIMITED
        kinds = self._kinds(route)
        told = rules.identities.told(arrival, kinds)
        if told and PENDING in told:
            raise _asynchronous_function(told)
        met, check, described, now_us = self._meet(rules, route, arrival, kinds, told)
        if check is None or met.block is not None:
            admission = rules.unasked(met, now_us)
        elif route.leases:
            admission = self._entered(rules, met, described, now_us)
        else:
            if self._memory is not None:  # what is remembered or prepaid spares no round trip here
                decision = self._memory.decide(check)
            else:
                decision = self._decide(check, self._fallbacks[route.on_failure])
            admission = rules.conclude(met, decision, described, now_us)
        if route.shadows and admission.allowed:
            with suppress(StoreError):  # nothing depends on it
                admission.shadows = [Shadow(one, self._answer(Check((one.key,), one.cost))) for one in met.shadows]
        return self._emit(arrival, admission) if self._is_observed else admission

    def finish(self, admission: Admission, status: int) -> None:
        """The answer is out: leave what was held, settle what was reserved."""
        if admission.held is not None:
            admission.held.__exit__(None, None, None)
        self._settle(admission, status)

    def admit_to_view(
        self, arrival: Any, declarations: tuple[LimitDeclaration, ...], admissions: ViewAdmissions
    ) -> Admission:
        """The admission of a request by the limits of its view, beside those that it has; a refusal settles these."""
        admission = self.admit(arrival, bound(self, declarations, arrival.view))
        if admission.refusal is None:
            admissions.grant(admission)
        else:
            for earlier in admissions.refuse(admission):
                self._settle(earlier, NOT_SERVED)
        return admission

    def _settle(self, admission: Admission, status: int) -> None:
        steps = settle(admission, status)
        with suppress(StopIteration):
            step = next(steps)
            while True:
                try:
                    answer = self._answer(step)
                except StoreError as error:
                    self._front.keep(step, error)
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)

    def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Keep somebody out from now on, on all nodes within milliseconds: block("ip", "203.0.113.0/24")."""
        self._limiter.block(kind, self._stored(kind, value), until=until, reason=reason)

    def unblock(self, kind: str, value: str) -> bool:
        """Let somebody in again; whether there was such a block. Those of the policy file stay."""
        ended: bool = self._limiter.unblock(kind, self._stored(kind, value))
        return ended

    def close(self) -> None:
        """Stop following the policy, flush and disconnect the control plane, and close the store."""
        if self._watch is not None:
            self._watch.close()
        self.is_closed = True
        self.flush_events()
        if self.control is not None:
            self.control.close()
        self._limiter.close()

    def _entered(self, rules: ActivePolicy, met: Resolution, described: HeaderTemplate, now_us: int) -> Admission:
        """The same for requests that take leases, which the admission holds until `finish`."""
        try:
            held: Any = self._limiter.hold(*met.keys, cost=met.cost)
            decision = held.__enter__()
        except StoreError as error:
            held, decision = self._held_without_store(met, error)
        admission = rules.conclude(met, decision, described, now_us)
        if admission.allowed:
            admission.hold(held)
        elif held is not None:
            held.__exit__(None, None, None)
        return admission


class AsyncGate(GateBase):
    """The same as `Gate`, with methods to await; nothing in it blocks the event loop."""

    _limiter_type = AsyncLimiter

    async def admit(self, arrival: RequestInfo, rules: ActivePolicy | None = None) -> Admission:
        """The admission of a request, or its refusal: by the policy, or by the rules of a view that it is going to."""
        if not self.is_on:
            return UNLIMITED
        if self._health_path is not None and self._health_path in (arrival.path, arrival.below):
            return self._say_how_it_is()
        rules = rules or self.rules
        route = rules.snapshot.route(arrival.method, arrival.path, arrival.below)
        if route.is_exempt:
            return UNLIMITED
        kinds = self._kinds(route)
        told = rules.identities.told(arrival, kinds)
        if told and PENDING in told:
            for kind in told.pop(PENDING):
                told[kind] = await rules.identities.awaited(kind, told[kind])
        met, check, described, now_us = self._meet(rules, route, arrival, kinds, told)
        if check is None or met.block is not None:
            admission = rules.unasked(met, now_us)
        elif route.leases:
            admission = await self._entered(rules, met, described, now_us)
        else:
            if self._memory is not None:
                decision = self._memory.decide(check)
            else:
                decision = await self._decide(check, self._fallbacks[route.on_failure])
            admission = rules.conclude(met, decision, described, now_us)
        if route.shadows and admission.allowed:
            with suppress(StoreError):  # nothing depends on it
                admission.shadows = [
                    Shadow(one, await self._answer(Check((one.key,), one.cost))) for one in met.shadows
                ]
        return self._emit(arrival, admission) if self._is_observed else admission

    async def finish(self, admission: Admission, status: int) -> None:
        """The answer is out: leave what was held, settle what was reserved."""
        if admission.held is not None:
            await admission.held.__aexit__(None, None, None)
        await self._settle(admission, status)

    async def admit_to_view(
        self, arrival: Any, declarations: tuple[LimitDeclaration, ...], admissions: ViewAdmissions
    ) -> Admission:
        """The admission of a request by the limits of its view, beside those that it has; a refusal settles these."""
        admission = await self.admit(arrival, bound(self, declarations, arrival.view))
        if admission.refusal is None:
            admissions.grant(admission)
        else:
            for earlier in admissions.refuse(admission):
                await self._settle(earlier, NOT_SERVED)
        return admission

    async def _settle(self, admission: Admission, status: int) -> None:
        steps = settle(admission, status)
        with suppress(StopIteration):
            step = next(steps)
            while True:
                try:
                    answer = await self._answer(step)
                except StoreError as error:
                    self._front.keep(step, error)
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)

    async def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Keep somebody out from now on, on all nodes within milliseconds: block("ip", "203.0.113.0/24")."""
        await self._limiter.block(kind, self._stored(kind, value), until=until, reason=reason)

    async def unblock(self, kind: str, value: str) -> bool:
        """Let somebody in again; whether there was such a block. Those of the policy file stay."""
        ended: bool = await self._limiter.unblock(kind, self._stored(kind, value))
        return ended

    async def close(self) -> None:
        """Stop following the policy, flush and disconnect the control plane, and close the store."""
        if self._watch is not None:
            self._watch.close()
        self.is_closed = True
        self.flush_events()
        if self.control is not None:
            await asyncio.to_thread(self.control.close)  # the log is flushed, which may take seconds
        await self._limiter.close()

    async def _entered(self, rules: ActivePolicy, met: Resolution, described: HeaderTemplate, now_us: int) -> Admission:
        """The same for requests that take leases, which the admission holds until `finish`."""
        try:
            held: Any = self._limiter.hold(*met.keys, cost=met.cost)
            decision = await held.__aenter__()
        except StoreError as error:
            held, decision = self._held_without_store(met, error)
        admission = rules.conclude(met, decision, described, now_us)
        if admission.allowed:
            admission.hold(held)
        elif held is not None:
            await held.__aexit__(None, None, None)
        return admission


def _asynchronous_function(told: AppIdentities) -> InvalidConfiguration:
    kinds = told[PENDING]
    for kind in kinds:
        close = getattr(told[kind], "close", None)
        if close is not None:  # so that nobody is warned of what was never awaited
            close()
    return InvalidConfiguration(
        f"the function for {kinds[0]!r} is asynchronous, but this app runs with threads: give a plain function"
    )
