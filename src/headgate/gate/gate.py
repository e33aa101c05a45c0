"""Gate and AsyncGate: admission control for threads and for asyncio.

Both run the same code of `GateBase` and differ only in how they wait for the store.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from headgate.engine import AsyncEngine, SyncEngine
from headgate.errors import StoreError
from headgate.gate.admission import NOT_SERVED, Admission
from headgate.gate.base import GateBase, PendingIdentities
from headgate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from datetime import datetime

    from headgate.gate.active_policy import ActivePolicy
    from headgate.gate.admission import RequestInfo
    from headgate.gate.base import Steps
    from headgate.gate.messages import Direction, MessageMeter, MessageVerdict
    from headgate.gate.view_limits import LimitDeclaration, ViewAdmissions, ViewRequest

__all__ = ["AsyncGate", "Gate", "TaskWaiter", "ThreadWaiter"]


class ThreadWaiter:
    """Lets a thread wait for another one."""

    __slots__ = ("_event", "wake")

    def __init__(self) -> None:
        self._event = threading.Event()
        self.wake = self._event.set

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)


class TaskWaiter:
    """Lets a task wait for a thread, without blocking the event loop."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._future, seconds)


class Gate(GateBase):
    """Admission control for threads. Adapters create one from their own arguments."""

    _engine_type = SyncEngine
    _limiter_type = Limiter
    _waiter_type = ThreadWaiter
    _enter = methodcaller("__enter__")
    _exit = methodcaller("__exit__", None, None, None)
    _most_held = 10

    def admit(self, request: RequestInfo, policy: ActivePolicy | None = None) -> Admission:
        """Admit or refuse a request, by the policy in force or by the compiled limits of a view."""
        pending = self.prepare(request, policy)
        if isinstance(pending, Admission):
            return pending
        if isinstance(pending, PendingIdentities):
            raise pending.cancel()
        if pending.needs_steps:
            return self._drive(self.complete_in_steps(pending))  # type: ignore[no-any-return]
        return self.complete(pending, self._decide(pending.check, self._failure_policy(pending)))

    def finish(self, admission: Admission, status: int) -> None:
        """Release leases and settle the cost of a request, after its response was sent with this status."""
        self._drive(self.finish_in_steps(admission, status))

    def charge_messages(
        self, meter: MessageMeter, direction: Direction, messages: int, size: int, *, can_end: bool = True
    ) -> MessageVerdict:
        """Charge messages of a connection, and wait until they may pass."""
        return self._drive(  # type: ignore[no-any-return]
            meter.charge_in_steps(direction, messages, size, can_end=can_end)
        )

    def admit_to_view(
        self, request: ViewRequest, declarations: tuple[LimitDeclaration, ...], admissions: ViewAdmissions
    ) -> Admission:
        """Admit or refuse a request by the limits of its view. A refusal refunds its earlier admissions."""
        admission = self.admit(request, self.view_policy(declarations, request.view))
        for earlier in admissions.add(admission):
            self._drive(self.settle_in_steps(earlier, NOT_SERVED))
        return admission

    def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Block a client on all nodes, within milliseconds: block("ip", "203.0.113.0/24")."""
        self._limiter.block(kind, self._stored_value(kind, value), until=until, reason=reason)

    def unblock(self, kind: str, value: str) -> bool:
        """End a block; True if there was one. Blocks of the policy file are not affected."""
        return self._limiter.unblock(kind, self._stored_value(kind, value))  # type: ignore[no-any-return]

    def _pause(self, seconds: float) -> None:
        getattr(self._clock, "sleep", time.sleep)(seconds)

    def close(self) -> None:
        """Stop following the policy, flush and disconnect the control plane, and close the store."""
        self._stop()
        if self.control is not None:
            self.control.close()
        self._metering.close()
        self._limiter.close()

    def _drive(self, steps: Steps) -> Any:
        try:
            function, *arguments = next(steps)
            while True:
                try:
                    result = function(*arguments)
                except StoreError as error:
                    function, *arguments = steps.throw(error)
                else:
                    function, *arguments = steps.send(result)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()


class AsyncGate(GateBase):
    """Admission control for asyncio: `Gate` with methods to await, which never block the event loop."""

    _engine_type = AsyncEngine
    _limiter_type = AsyncLimiter
    _waiter_type = TaskWaiter
    _enter = methodcaller("__aenter__")
    _exit = methodcaller("__aexit__", None, None, None)
    _most_held = 1000

    async def admit(self, request: RequestInfo, policy: ActivePolicy | None = None) -> Admission:
        """Admit or refuse a request, by the policy in force or by the compiled limits of a view."""
        pending = self.prepare(request, policy)
        if isinstance(pending, PendingIdentities):
            pending = self.resolve(*await pending.wait())
        if isinstance(pending, Admission):
            return pending
        if pending.needs_steps:
            return await self._drive(self.complete_in_steps(pending))  # type: ignore[no-any-return]
        return self.complete(pending, await self._decide(pending.check, self._failure_policy(pending)))

    async def finish(self, admission: Admission, status: int) -> None:
        """Release leases and settle the cost of a request, after its response was sent with this status."""
        await self._drive(self.finish_in_steps(admission, status))

    async def charge_messages(
        self, meter: MessageMeter, direction: Direction, messages: int, size: int, *, can_end: bool = True
    ) -> MessageVerdict:
        """Charge messages of a connection, and wait until they may pass."""
        return await self._drive(  # type: ignore[no-any-return]
            meter.charge_in_steps(direction, messages, size, can_end=can_end)
        )

    async def admit_to_view(
        self, request: ViewRequest, declarations: tuple[LimitDeclaration, ...], admissions: ViewAdmissions
    ) -> Admission:
        """Admit or refuse a request by the limits of its view. A refusal refunds its earlier admissions."""
        admission = await self.admit(request, self.view_policy(declarations, request.view))
        for earlier in admissions.add(admission):
            await self._drive(self.settle_in_steps(earlier, NOT_SERVED))
        return admission

    async def block(self, kind: str, value: str, *, until: datetime | None = None, reason: str | None = None) -> None:
        """Block a client on all nodes, within milliseconds: block("ip", "203.0.113.0/24")."""
        await self._limiter.block(kind, self._stored_value(kind, value), until=until, reason=reason)

    async def unblock(self, kind: str, value: str) -> bool:
        """End a block; True if there was one. Blocks of the policy file are not affected."""
        return await self._limiter.unblock(kind, self._stored_value(kind, value))  # type: ignore[no-any-return]

    async def _pause(self, seconds: float) -> None:
        sleep = getattr(self._clock, "sleep", None)
        if sleep is not None:  # of a fake clock
            sleep(seconds)
        await asyncio.sleep(seconds if sleep is None else 0)

    async def close(self) -> None:
        """Stop following the policy, flush and disconnect the control plane, and close the store."""
        self._stop()
        if self.control is not None:
            await asyncio.to_thread(self.control.close)  # flushing the decision log may take seconds
        if self._metering.meter is not None:
            await asyncio.to_thread(self._metering.close)
        await self._limiter.close()

    async def _drive(self, steps: Steps) -> Any:
        try:
            function, *arguments = next(steps)
            while True:
                try:
                    result = await function(*arguments)
                except StoreError as error:
                    function, *arguments = steps.throw(error)
                else:
                    function, *arguments = steps.send(result)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()
