"""Metering: reserves units of the ledger for requests to which quotas apply, and charges what they use.

Everything happens in memory, on leases of a `QuotaMeter`. A request waits only if the process has no lease for its
account yet, or a lease that is too small: by default for up to a second, after which the failure policy of the quota
applies. See docs/quotas.md.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import threading
import time
import weakref
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from headgate._fork import reinit_after_fork
from headgate.algorithms import NEVER
from headgate.decisions import Decision
from headgate.errors import InvalidConfiguration
from headgate.limits import QuotaLimit
from headgate.policy.region_settings import expand_variables
from headgate.policy.routes import METHODS
from headgate.policy.snapshot import client_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from headgate.algorithms import Verdict
    from headgate.clock import Clock
    from headgate.errors import HeadgateError
    from headgate.gate.admission import RequestInfo
    from headgate.keys import Key
    from headgate.policy.model import LedgerSettings, Rule
    from headgate.policy.snapshot import CompiledRule, Resolution

__all__ = ["LEDGER_UNAVAILABLE", "QuotaCharge", "QuotaDenial", "QuotaMetering", "QuotaRequest", "void"]

logger = logging.getLogger("headgate")

LEDGER_UNAVAILABLE: Final = "ledger unavailable"
"""`Decision.degraded` of requests that are refused because the ledger does not answer."""
UNAVAILABLE_RETRY_US: Final = 1_000_000
JOURNAL_SUFFIX: Final = "-usage"
MAX_SHOWN_KEY: Final = 100
MAX_SHOWN_ENDPOINT: Final = 300

Steps: TypeAlias = "Generator[Any, Any, Any]"


class QuotaRequest:
    """The charge of a client's requests on one quota."""

    __slots__ = ("account", "client", "cost", "key", "plan", "reference", "rule")

    def __init__(self, rule: CompiledRule, key: Key, resolution: Resolution) -> None:
        self.rule, self.key, self.cost = rule, key, rule.cost
        self.reference = _printable(resolution.route.endpoint)[:MAX_SHOWN_ENDPOINT]
        kind = client_kind(resolution.who)
        self.client = kind, resolution.who.get(kind, "")
        self.account = ""
        self.plan: Any = None
        """The terms of the account; None until its first request."""


class QuotaCharge:
    """Units of an account that are reserved or charged for one request."""

    __slots__ = ("_reservation", "amount", "is_repeated", "key", "rule")

    def __init__(self, request: QuotaRequest, reservation: Any) -> None:
        self._reservation = reservation
        self.rule: Rule = request.rule.rule
        self.key = request.key
        self.amount = request.cost
        """The estimate, and the actual amount once it is charged: 0 if the request was rejected."""
        self.is_repeated: bool = reservation.is_repeated
        """True for the repetition of a request that was charged before, if this process knows."""

    @property
    def name(self) -> str:
        """The name of the quota."""
        return self.rule.name

    @property
    def account(self) -> str:
        """The account of the ledger, such as "exports/acme"."""
        return self._reservation.account  # type: ignore[no-any-return]

    @property
    def paid_by(self) -> tuple[tuple[str, int], ...]:
        """The sources that pay for the estimate, such as "allowance" or "pay as you go", with their amounts.

        "outage" if the request was admitted without a lease, to be charged when the ledger is available again. None for
        the repetition of a request that another process has charged.
        """
        return self._reservation.paid_by  # type: ignore[no-any-return]

    @property
    def id(self) -> str:
        """The id of the usage record in the ledger."""
        return self._reservation.id  # type: ignore[no-any-return]

    @property
    def is_estimate(self) -> bool:
        """True if the actual amount is known only with the response."""
        return self.rule.settled or self.rule.count_when is not None

    @property
    def cost(self) -> int:
        """The estimate that was reserved."""
        return self.amount

    def __repr__(self) -> str:
        sources = ", ".join(f"{name}: {amount}" for name, amount in self.paid_by)
        return f"<{self.amount} of {self.account}, paid by {sources or 'nothing'}>"

    def settle(self, amount: int) -> None:
        """Charge the actual amount; with 0, the reservation ends without a charge."""
        if amount:
            self._reservation.commit(amount)
        else:
            self._reservation.void()
        self.amount = amount

    def verdict(self, now_us: int) -> Verdict:
        """The verdict of a quota that has admitted a request."""
        reservation = self._reservation
        return reservation.remaining, 0, _reset_us(self.key, reservation.period_end_us, now_us), 0


class QuotaDenial(NamedTuple):
    """The refusal of a request by a quota."""

    request: QuotaRequest
    decision: Decision


class QuotaMetering:
    """The ledger of a gate, and the meter that spends leases of it."""

    def __init__(
        self,
        ledger: Any,
        *,
        default_url: str | None,
        clock: Clock | None,
        new_waiter: Callable[[], Any],
        on_event: Callable[..., None],
        idempotency_key: Callable[[RequestInfo], str | None] | None,
    ) -> None:
        """`ledger` is a URL, a `Ledger`, or None for that of the policy, or else for `default_url`. `new_waiter` makes
        an object with `wake`, for the thread of the meter, and `wait`, for the request."""
        self._given, self._default_url, self._clock = ledger, default_url, clock
        self._new_waiter, self._on_event = new_waiter, on_event
        self._app_key = idempotency_key
        self._settings: LedgerSettings | None = None
        self._opened: tuple[Any, str | None] | None = None
        self._meters: list[Any] = []
        """The one in use, and those of earlier policies, on which requests may have reservations. When closed, the last
        one."""
        self._ledgers: list[Any] = []
        """Those that were opened here."""
        self._try_reserve: Any = None
        self._budget_s = 1.0
        self._header: str | None = None
        self._plans: dict[QuotaLimit, Any] = {}
        self.reset_after_fork()
        reinit_after_fork(self)

    def reset_after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    @property
    def meter(self) -> Any:
        """The meter in use; None without quotas."""
        return self._meters[-1] if self._meters else None

    def configure(self, settings: LedgerSettings) -> None:
        """Use these settings from now on. The meter is replaced only if the ledger or the journal changes."""
        url = settings.url and expand_variables(settings.url, "the ledger")
        ledger = self._given or url or self._default_url
        if ledger is None:
            raise InvalidConfiguration(
                "the policy has quotas, and there is no ledger to charge them to: write quotas: "
                "{ledger: sqlite:///quota.db} in the policy, or give ledger="
            )
        journal = settings.journal or _journal_beside(ledger)
        with self._lock:
            self._settings = settings
            self._budget_s, self._header = settings.budget.total_seconds(), settings.idempotency_header
            if self._opened != (ledger, journal):
                self._open(ledger, journal)

    def close(self) -> None:
        """Write all charges to the ledger, and return the leases."""
        with self._lock:
            if self._opened is None:
                return
            self._opened, self._try_reserve = None, self._reopen
            meters, ledgers = self._meters, self._ledgers
            self._meters, self._ledgers = meters[-1:], []
        for each in (*meters, *ledgers):
            each.close()

    def _open(self, ledger: Any, journal: str | None) -> None:
        quotas = importlib.import_module("headgate.quotas")
        opened = ledger
        if isinstance(ledger, str):
            if journal is None:
                logger.warning(
                    "quotas have no journal: charges of the last moments are lost if a process is killed; write "
                    "quotas: {journal: DIRECTORY} in the policy"
                )
            opened = quotas.Ledger(ledger, author="headgate", clock=self._clock, connect=False)
            self._ledgers.append(opened)
        meter = quotas.QuotaMeter(opened, journal=journal, wait_s=self._budget_s, on_change=self._report)
        self._meters = [meter] if self._opened is None else [*self._meters, meter]
        self._opened, self._try_reserve = (ledger, journal), meter.try_reserve
        _open_meterings.add(self)

    def _reopen(self, *args: Any, **options: Any) -> Any:
        """Reserve with a new meter: the gate is used again after it was closed, as with test clients, each of which
        starts and stops the app."""
        with self._lock:
            if self._opened is None and self._settings is not None:
                self.configure(self._settings)
        return self._try_reserve(*args, **options)

    # ------------------------------------------------------------------------------------ the path of a request

    def reserve_in_steps(
        self, request: RequestInfo, quotas: Sequence[QuotaRequest], budget_s: float | None = None
    ) -> Steps:
        """Reserve on all quotas or on none. Returns the charges, or a `QuotaDenial`.

        `budget_s` replaces the policy's limit on the time that the request may wait.
        """
        key = self._idempotency_key(request)
        charges: list[QuotaCharge] = []
        try:
            for each in quotas:
                made = self._reserve(request, each, key, None)
                if made == "pending":
                    made = yield from self._wait_in_steps(request, each, key, budget_s)
                if type(made) is str:
                    void(charges)
                    return self._denial(each, made)
                charges.append(QuotaCharge(each, made))
        except BaseException:  # also if the request is cancelled while it waits
            void(charges)
            raise
        return charges

    def join(self, resolution: Resolution, decision: Decision | None, charges: Sequence[QuotaCharge]) -> Decision:
        """The decision of the store, None if it was not asked, with the verdicts of quotas that have admitted."""
        now_us = self.now_us()
        verdicts = tuple([charge.verdict(now_us) for charge in charges])
        if decision is None:
            return Decision(True, resolution.keys, verdicts, None, None, now_us, 0, resolution.cost)
        allowed, _, decided, id, degraded, at_us, next_allowed_us, _ = decision  # `_replace` takes twice as long
        verdicts = (*decided, *verdicts)
        return Decision(allowed, resolution.keys, verdicts, id, degraded, at_us, next_allowed_us, resolution.cost)

    def now_us(self) -> int:
        """The time by the clock of the ledger."""
        return time.time_ns() // 1000 if self._clock is None else self._clock.now_us()

    def _reserve(self, request: RequestInfo, each: QuotaRequest, key: str | None, waiter: Any) -> Any:
        if each.plan is None:
            self._bind(each)
        method = request.method
        id, reference = None, f"{method if method in METHODS else 'OTHER'} {each.reference}"
        if key is not None:
            # The id contains the client, so that no client can use the key of another.
            id = f"request-{_hash(repr((each.account, each.client, method, request.path, key)))}"
            reference = f"{reference} {_printable(key)[:MAX_SHOWN_KEY]}"
        return self._try_reserve(
            each.account,
            each.cost,
            id=id,
            reference=reference,
            plan=each.plan,
            outage_units=each.rule.rule.outage_units,
            waiter=waiter,
        )

    def _wait_in_steps(
        self, request: RequestInfo, each: QuotaRequest, key: str | None, budget_s: float | None
    ) -> Steps:
        """Wait until the ledger has answered; returns a reservation or a refusal other than "pending"."""
        end = time.monotonic() + (self._budget_s if budget_s is None else budget_s)
        while (left := end - time.monotonic()) > 0:
            waiter = self._new_waiter()
            made = self._reserve(request, each, key, waiter.wake)
            if made != "pending":
                return made
            yield waiter.wait, left
        made = self._reserve(request, each, key, None)
        if made == "pending":
            self.meter.count_rejection(each.plan, made)
            return "unavailable"
        return made

    def _denial(self, each: QuotaRequest, refusal: str) -> QuotaDenial:
        now_us, limit = self.now_us(), each.key.limit
        remaining, period_end_us = self.meter.balance(each.account)
        reset_us = _reset_us(each.key, period_end_us, now_us)
        retry_us, degraded = reset_us, None
        if refusal == "unavailable":
            retry_us, degraded = UNAVAILABLE_RETRY_US, LEDGER_UNAVAILABLE
        elif isinstance(limit, QuotaLimit) and each.cost > limit.quota + limit.rollover + limit.pay_as_you_go:
            retry_us = NEVER  # not even the next period grants as much
        verdict = remaining, retry_us, reset_us, 0
        return QuotaDenial(each, Decision(False, (each.key,), (verdict,), None, degraded, now_us, 0, each.cost))

    def _bind(self, each: QuotaRequest) -> None:
        limit = each.key.limit
        assert isinstance(limit, QuotaLimit), "a quota has no other limits"
        plan = self._plans.get(limit)
        if plan is None:
            plans = importlib.import_module("headgate.quotas.plans")
            terms = limit.calendar, limit.rollover, limit.pay_as_you_go
            plan = self._plans[limit] = plans.QuotaPlan(limit.name, limit.quota, *terms)
        identity = each.key.identity
        each.account = plan.account(identity if identity.isprintable() else _hash(identity))
        each.plan = plan

    def _idempotency_key(self, request: RequestInfo) -> str | None:
        if self._app_key is not None and (key := self._app_key(request)) is not None:
            return str(key)
        return None if self._header is None else _header_key(request.header(self._header))

    def _report(self, error: HeadgateError | None) -> None:
        if error is None:
            self._on_event("ledger-back", "the ledger is available again: quotas take leases")
        else:
            self._on_event("ledger-lost", f"the ledger is unavailable, quotas spend their leases: {error}")


def void(charges: Iterable[QuotaCharge]) -> None:
    """End reservations without a charge."""
    for charge in charges:
        charge.settle(0)


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _printable(text: str) -> str:
    """The text as the ledger accepts it: without control characters and lone surrogates."""
    return text if text.isprintable() else "".join([letter if letter.isprintable() else "?" for letter in text])


def _header_key(lines: Sequence[str]) -> str | None:
    """The key of an Idempotency-Key field: a string of structured fields in quotes, or a plain word.

    >>> _header_key(['"8e03978e-40d5"']), _header_key(["8e03978e-40d5"]), _header_key(["a", "b"])
    ('8e03978e-40d5', '8e03978e-40d5', None)
    """
    if len(lines) != 1:
        return None
    key = lines[0].strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return key if key and key.isprintable() else None


def _reset_us(key: Key, period_end_us: int, now_us: int) -> int:
    """The time until the account's period ends. The ledger knows it best: a changed calendar may have lengthened it."""
    if period_end_us <= now_us:
        calendar = key.limit.calendar
        assert calendar is not None, "a quota has a calendar period"
        period_end_us = calendar.window(now_us)[1]
    return period_end_us - now_us


def _journal_beside(ledger: Any) -> str | None:
    """The directory for journals beside a SQLite file."""
    if not isinstance(ledger, str) or not ledger.startswith("sqlite"):
        return None
    path = Path(urlsplit(ledger).path.removeprefix("/"))
    return None if not path.name else f"{path}{JOURNAL_SUFFIX}"


_open_meterings: weakref.WeakSet[QuotaMetering] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Write the charges of gates that were not closed. What does not succeed is in their journals."""
    for metering in list(_open_meterings):
        metering.close()
