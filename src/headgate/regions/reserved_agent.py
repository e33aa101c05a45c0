"""The agent of reserved limits: leases tokens from the home region for the keys that this process's clients use.

Every process has one. A lock in the region's store lets one of them lease for a key at a time. Tokens of a lease whose
answer is lost stay charged in the home region and are never spent: fewer requests pass, never more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from headgate.decisions import Decision
from headgate.errors import StoreError
from headgate.limits import Limit
from headgate.regions.reserved import HomeState
from headgate.stores.operations import Check, Deposit, Refund, TakeBack

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.keys import Key
    from headgate.regions.reserved import Demand, KeyDemand, Reservation
    from headgate.stores.operations import Call
    from headgate.stores.redis.region_client import RegionClient

__all__ = ["KeyLeases", "ReservedAgent"]

logger = logging.getLogger("headgate")

LEASE_INTERVAL_S: Final = 1.05
"""Between two calls for the keys in use, all of which they serve: fewer than one per second. Tokens for a new key are
leased at once, and then with those for the others."""
RETURN_AT: Final = 0.86
"""Part of a lease after which unspent tokens go back to the home region."""
TAKEN_UNTIL: Final = 1.05
"""Tokens of later leases that expire until then, as a part of the lease, are returned together with them."""
CHUNKS: Final = 4
"""A lease is requested in parts: near the limit, those that still fit are granted."""
IDLE_S: Final = 30.0
CLEANUP_INTERVAL_S: Final = 10.0
RETURN_INTERVAL_S: Final = 1.05
LOCK_S: Final = 3
_LOCK: Final = Limit(1, timedelta(seconds=LOCK_S), algorithm="concurrency", name="%reserved agent")


class _LeasedBatch(NamedTuple):
    """Tokens of one lease in the pool."""

    return_at: float
    charged_us: int


class KeyLeases:
    """The leases of one key, as this process knows them."""

    def __init__(self, key: Key, reservation: Reservation, now: float) -> None:
        self.key, self.reservation = key, reservation
        self.lock = _LOCK.by(key.limit.space, key.identity)
        self.rate = 0.0
        """The region's consumption in tokens per second."""
        self.spent = self.denied = 0
        """Demand since the rate was last measured."""
        self.left = 0
        """Tokens in the pool, as last seen."""
        self.leased = 0
        """Tokens leased by this process so far."""
        self.returned = self.to_return = 0
        """Tokens that went back to the home region, and those that are about to."""
        self._batches: deque[_LeasedBatch] = deque()
        """The leases of which tokens may be in the pool, in their order."""
        self.charged_us = 0
        """When the home region charged the last lease, on its clock."""
        self._returned_us = 0
        """When it charged the first of those that are about to go back."""
        self.asked_us = 0
        """When the last lease was requested, on the clock of the own region."""
        self.home_left: int | None = None
        self.next_lease = 0.0
        self.used_at = self.measured_at = now
        self.reset_us = 0
        """Until the home counter is full or its window is over, by its last answer."""
        self._level = 0
        """Tokens in the pool after the last deposit of this process."""
        self._expires = 0.0

    def note(self, demand: KeyDemand, now: float) -> None:
        self.spent += demand.spent
        self.denied += demand.denied
        self.left, self.used_at = demand.left, now

    def measure(self, left: int, now: float) -> None:
        """Update the rate. The pool shows what all processes of the region have spent, until its tokens expire."""
        elapsed = max(now - self.measured_at, 1)
        taken = max(self.spent, self._level - left) if now < self._expires else self.spent
        rate = (taken + self.denied) / elapsed
        self.rate = max(rate, (rate + self.rate) / 2) if elapsed < self.lease_s else rate
        self.left, self.spent, self.measured_at = left, 0, now

    @property
    def lease_s(self) -> float:
        return self.reservation.lease_us / 1_000_000

    def wanted(self, regions: int) -> int:
        return self.reservation.wanted(
            rate=self.rate, left=self.left, denied=self.denied, home_left=self.home_left, regions=regions
        )

    @property
    def home_key(self) -> Key:
        return self.key._replace(limit=self.reservation.home)

    def take_refund(self) -> Refund:
        """The refund of what is to be returned. If it fails, the tokens stay charged."""
        amount, self.to_return = self.to_return, 0
        self.returned += amount
        return Refund(self.home_key, amount, uuid4().hex, self._returned_us)

    def record_return(self, tokens: int, charged_us: int) -> None:
        """Return tokens of leases, the first of which was charged at that time: too early returns less, never more."""
        self._returned_us = min(self._returned_us, charged_us) if self.to_return else charged_us
        self.to_return += tokens

    @property
    def return_at(self) -> float | None:
        """When unspent tokens are taken out of the pool; None if it has none."""
        return self._batches[0].return_at if self._batches else None

    def record_taken(self, tokens: int, now: float) -> None:
        """Return tokens that were taken out of the pool before they expired."""
        charged_us = self._batches[0].charged_us
        while self._batches and self._batches[0].return_at <= now + self.lease_s * (TAKEN_UNTIL - 1):
            self._batches.popleft()
        self.record_return(tokens, charged_us)
        self._level -= tokens  # not spent

    def record_deposit(self, tokens: int, now: float) -> None:
        self.leased += tokens
        self.left += tokens
        self._level, self._expires = self.left, now + self.lease_s
        self._batches.append(_LeasedBatch(now + self.lease_s * RETURN_AT, self.charged_us))


class ReservedAgent:
    """Leases tokens for one process. Not thread-safe."""

    def __init__(
        self,
        own: RegionClient,
        home: RegionClient,
        demand: Demand,
        *,
        regions: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys: dict[Key, KeyLeases] = {}
        self.home_calls = 0
        self.home_error: StoreError | None = None
        """The error of the last call to the home region; None after an answer."""
        self._own, self._home, self._demand, self._regions = own, home, demand, regions
        self._monotonic = monotonic
        self._process = uuid4().hex
        self._next_lease = self._next_return = self._next_cleanup = 0.0
        self._scheduled: dict[Key, KeyLeases] = {}
        """Keys in use: each is looked at when its next lease is due."""
        self._returning: dict[Key, KeyLeases] = {}
        """Keys with tokens in the pool, or on their way back to the home region."""
        demand.scheduled = self._scheduled

    def run_once(self) -> float | None:
        """Lease what is due; return the seconds until more may be due, None if nothing will be without new demand."""
        now = self._monotonic()
        for leases in [*self._scheduled.values()]:
            if now >= leases.next_lease and not (leases.spent or leases.denied):
                del self._scheduled[leases.key]  # before demand is taken: new demand on it wakes the agent from now on
        for demand in self._demand.take():
            leases = self.keys.get(demand.key) or KeyLeases(demand.key, demand.reservation, now)
            self.keys[demand.key] = self._scheduled[demand.key] = leases
            leases.note(demand, now)
        self._take_back(now)
        due = [each for each in self._scheduled.values() if now >= each.next_lease and (each.spent or each.denied)]
        self._call_home(self._lock(due, now) if due else [])
        if now >= self._next_cleanup:
            self._forget_idle(now)
        times = [leases.next_lease for leases in self._scheduled.values()]
        times += [leases.return_at for leases in self._returning.values() if leases.return_at is not None]
        if self._demand.refunds or any(leases.to_return for leases in self._returning.values()):
            times.append(self._next_return)
        return max(0.02, min(times) - self._monotonic()) if times else None

    def held(self) -> dict[tuple[str, str], int]:
        """The tokens in the region's pools, as last seen, by limit and identity."""
        now = self._monotonic()
        alive = [each for each in [*self.keys.values()] if now - each.used_at < IDLE_S]
        return {(each.key.limit.name, each.key.identity): each.left for each in alive}

    def close(self) -> None:
        self._own.close()
        self._home.close()

    def _lock(self, due: list[KeyLeases], now: float) -> list[tuple[KeyLeases, int]]:
        """Those keys for which this process may lease, and the tokens to lease."""
        calls = [call for each in due for call in (Check((each.lock,), 1, self._process), Check((each.key,), 0))]
        answers = self._own.run_all(calls)
        locked = []
        if now >= self._next_lease:
            self._next_lease = now + LEASE_INTERVAL_S
        for leases, lock, pool in zip(due, answers[::2], answers[1::2], strict=True):
            leases.next_lease = self._next_lease
            if isinstance(lock, Decision) and isinstance(pool, Decision):
                leases.measure(pool.verdicts[0][0], now)
                leases.asked_us = pool.at_us
                wanted = leases.wanted(self._regions)
                leases.denied = 0
                if lock.allowed and wanted:
                    locked.append((leases, wanted))
        return locked

    def _take_back(self, now: float) -> None:
        """Take unspent tokens out of pools before they expire."""
        due = [each for each in self._returning.values() if each.return_at is not None and now >= each.return_at]
        if not due:
            return
        soon = [round(leases.reservation.lease_us * (TAKEN_UNTIL - RETURN_AT)) for leases in due]
        answers = self._own.run_all(
            [TakeBack(leases.key, leases.key.limit.quota, within) for leases, within in zip(due, soon, strict=True)]
        )
        for leases, answer in zip(due, answers, strict=True):
            leases.record_taken(answer if type(answer) is int else 0, now)
            if not leases.to_return and leases.return_at is None:
                del self._returning[leases.key]

    def _call_home(self, wanted: list[tuple[KeyLeases, int]]) -> None:
        """Lease tokens and return unspent ones, in one call."""
        parts = [(leases, part) for leases, tokens in wanted for part in _parts(tokens)]
        calls: list[Call] = [Check((leases.home_key,), part) for leases, part in parts]
        refunds: list[Refund] = []
        sent = self._monotonic()
        if calls or sent >= self._next_return:
            returning = [leases for leases in self._returning.values() if leases.to_return]
            calls += [leases.take_refund() for leases in returning]
            for leases in returning:
                if leases.return_at is None:
                    del self._returning[leases.key]
            refunds = self._demand.take_refunds()
            calls += refunds
        if not calls:
            return
        self.home_calls += 1
        self._next_return = sent + RETURN_INTERVAL_S
        try:
            answers = self._home.run_all(calls)
        except StoreError as error:
            answers = [error] * len(calls)
        for refund, answer in zip(refunds, answers[len(calls) - len(refunds) :], strict=True):
            if isinstance(answer, StoreError):
                self._demand.refunds.append(refund)  # with its id: it counts once
        granted: dict[KeyLeases, int] = {}
        for (leases, part), answer in zip(parts, answers[: len(parts)], strict=True):
            self._read_answer(leases, answer)
            if isinstance(answer, Decision) and answer.allowed:
                granted[leases] = granted.get(leases, 0) + part
        self._deposit(granted, sent)

    def _read_answer(self, leases: KeyLeases, answer: Any) -> None:
        if not isinstance(answer, Decision):
            if self.home_error is None:
                logger.warning("the home region grants no tokens, regions spend their safe shares: %s", answer)
            self.home_error = answer
            return
        self.home_error = None
        left, retry_us, reset_us, _ = answer.verdicts[0]
        leases.home_left, leases.charged_us = left, answer.at_us
        wait_us = max(retry_us, 0) if not answer.allowed else reset_us
        self._demand.set_home(leases.key, HomeState(left, leases.asked_us + wait_us))
        leases.reset_us = reset_us

    def _deposit(self, granted: dict[KeyLeases, int], sent: float) -> None:
        """Deposit granted tokens, for the rest of their lifetime since before they were requested: by the clock of the
        own store, so that they expire in time wherever the request or the deposit is delayed."""
        elapsed_s = self._monotonic() - sent
        deposits = []
        for leases, tokens in granted.items():
            lifetime_us = leases.reservation.lifetime_us(tokens, leases.left, leases.reset_us)
            if lifetime_us > 0 and elapsed_s < LOCK_S / 2:
                deposits.append((leases, Deposit(leases.key, tokens, lifetime_us, uuid4().hex, leases.asked_us)))
            else:
                self._return(leases, tokens)
        answers = self._own.run_all([deposit for _, deposit in deposits]) if deposits else []
        for (leases, deposit), answer in zip(deposits, answers, strict=True):
            if type(answer) is int:
                leases.record_deposit(answer, sent)
                self._return(leases, deposit.tokens - answer)  # came too late, or the pool was full

    def _return(self, leases: KeyLeases, tokens: int) -> None:
        """Send tokens back to the home region that were not deposited."""
        leases.record_return(tokens, leases.charged_us)
        self._returning[leases.key] = leases

    def _forget_idle(self, now: float) -> None:
        self._next_cleanup = now + CLEANUP_INTERVAL_S
        for key, leases in list(self.keys.items()):
            if now - leases.used_at > IDLE_S and key not in self._scheduled and key not in self._returning:
                del self.keys[key]
                self._demand.forget(key)


def _parts(tokens: int) -> list[int]:
    """Nearly equal parts.

    >>> _parts(10), _parts(3)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    count = min(tokens, CHUNKS)
    return [tokens // count + (index < tokens % count) for index in range(count)]
