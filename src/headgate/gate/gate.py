"""Gate and AsyncGate: admission control for threads and for asyncio.

Both run the same code of `GateBase` and differ only in how they wait for the store.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headgate.engine import AsyncEngine, SyncEngine
from headgate.errors import StoreError
from headgate.gate.admission import NOT_SERVED, Admission
from headgate.gate.base import GateBase, PendingCheck, PendingIdentities
from headgate.gate.settlement import EnterLease, ExitLease, finish, settle
from headgate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from datetime import datetime

    from headgate.gate.active_policy import ActivePolicy
    from headgate.gate.request import RequestInfo
    from headgate.gate.settlement import Steps
    from headgate.gate.view_limits import LimitDeclaration, ViewAdmissions, ViewRequest

__all__ = ["AsyncGate", "Gate"]


class Gate(GateBase):
    """Admission control for threads. Adapters create one from their own arguments."""

    _engine_type = SyncEngine
    _limiter_type = Limiter

    def admit(self, request: RequestInfo, policy: ActivePolicy | None = None) -> Admission:
        """Admit or refuse a request, by the policy in force or by the compiled limits of a view."""
        pending = self.prepare(request, policy)
        if isinstance(pending, Admission):
            return pending
        if isinstance(pending, PendingIdentities):
            raise pending.cancel()
        if pending.needs_steps:
            admission: Admission = self._drive(self.complete_in_steps(pending))
            return admission
        return self.complete(pending, self._decide(pending.check, self._failure_policy(pending)))

    def finish(self, admission: Admission, status: int) -> None:
        """Release leases and settle the cost of a request, after its response was sent with this status."""
        self._drive(finish(admission, status, self._defer))

    def admit_to_view(
        self, request: ViewRequest, declarations: tuple[LimitDeclaration, ...], admissions: ViewAdmissions
    ) -> Admission:
        """Admit or refuse a request by the limits of its view. A refusal refunds its earlier admissions."""
        admission = self.admit(request, self.view_policy(declarations, request.view))
        for earlier in admissions.add(admission):
            self._drive(settle(earlier, NOT_SERVED, self._defer))
        return admission

    def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Block a client on all nodes, within milliseconds: block("ip", "203.0.113.0/24")."""
        self._limiter.block(kind, self._stored_value(kind, value), until=until, reason=reason)

    def unblock(self, kind: str, value: str) -> bool:
        """End a block; True if there was one. Blocks of the policy file are not affected."""
        existed: bool = self._limiter.unblock(kind, self._stored_value(kind, value))
        return existed

    def close(self) -> None:
        """Stop following the policy, flush and disconnect the control plane, and close the store."""
        self._stop()
        if self.control is not None:
            self.control.close()
        self._limiter.close()

    def _drive(self, steps: Steps) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    result = self._run(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value

    def _run(self, step: Any) -> Any:
        if type(step) is PendingCheck:
            return self._decide(step.check, self._failure_policy(step))
        if type(step) is EnterLease:
            return step.hold.__enter__()
        if type(step) is ExitLease:
            return step.hold.__exit__(None, None, None)
        return self._answer(step)


class AsyncGate(GateBase):
    """Admission control for asyncio: `Gate` with methods to await, which never block the event loop."""

    _engine_type = AsyncEngine
    _limiter_type = AsyncLimiter

    async def admit(self, request: RequestInfo, policy: ActivePolicy | None = None) -> Admission:
        """Admit or refuse a request, by the policy in force or by the compiled limits of a view."""
        pending = self.prepare(request, policy)
        if isinstance(pending, PendingIdentities):
            pending = self.resolve(*await pending.wait())
        if isinstance(pending, Admission):
            return pending
        if pending.needs_steps:
            admission: Admission = await self._drive(self.complete_in_steps(pending))
            return admission
        return self.complete(pending, await self._decide(pending.check, self._failure_policy(pending)))

    async def finish(self, admission: Admission, status: int) -> None:
        """Release leases and settle the cost of a request, after its response was sent with this status."""
        await self._drive(finish(admission, status, self._defer))

    async def admit_to_view(
        self, request: ViewRequest, declarations: tuple[LimitDeclaration, ...], admissions: ViewAdmissions
    ) -> Admission:
        """Admit or refuse a request by the limits of its view. A refusal refunds its earlier admissions."""
        admission = await self.admit(request, self.view_policy(declarations, request.view))
        for earlier in admissions.add(admission):
            await self._drive(settle(earlier, NOT_SERVED, self._defer))
        return admission

    async def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Block a client on all nodes, within milliseconds: block("ip", "203.0.113.0/24")."""
        await self._limiter.block(kind, self._stored_value(kind, value), until=until, reason=reason)

    async def unblock(self, kind: str, value: str) -> bool:
        """End a block; True if there was one. Blocks of the policy file are not affected."""
        existed: bool = await self._limiter.unblock(kind, self._stored_value(kind, value))
        return existed

    async def close(self) -> None:
        """Stop following the policy, flush and disconnect the control plane, and close the store."""
        self._stop()
        if self.control is not None:
            await asyncio.to_thread(self.control.close)  # flushing the decision log may take seconds
        await self._limiter.close()

    async def _drive(self, steps: Steps) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._run(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value

    async def _run(self, step: Any) -> Any:
        if type(step) is PendingCheck:
            return await self._decide(step.check, self._failure_policy(step))
        if type(step) is EnterLease:
            return await step.hold.__aenter__()
        if type(step) is ExitLease:
            return await step.hold.__aexit__(None, None, None)
        return await self._answer(step)
