"""Usage alerts: an account has used 50, 80 or 100 % of the allowance of its period.

They are detected in the transaction that writes the usage, by whichever process writes it. So each of them is recorded
once, and exactly if the usage is. An admin server sends them to a webhook.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import delete, func, insert, select

from headgate.control.webhooks import WebhookEvent, WebhookQueue
from headgate.errors import InvalidInput
from headgate.quotas.tables import ALERTS, THRESHOLDS, USAGE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Self

    from sqlalchemy import Connection

    from headgate.control.webhooks import Webhook
    from headgate.quotas.account import AccountState
    from headgate.quotas.ledger import Ledger

__all__ = ["DEFAULT_THRESHOLDS", "UsageAlert", "UsageMonitor", "UsageNotifier"]

DEFAULT_THRESHOLDS: Final = (50, 80, 100)
"""In percent of the allowance."""
MAX_THRESHOLDS: Final = 20
MAX_ACCOUNTS: Final = 10_000
"""Accounts that a process remembers; of others, the thresholds and the usage of open leases are read again."""
STOP_TIMEOUT_S: Final = 2.0


class UsageAlert(NamedTuple):
    """A threshold that an account has reached in a period, and the state of its delivery."""

    id: str
    account: str
    percent: int
    at_us: int
    period_end_us: int
    """The end of the period, exclusive."""
    used: int
    """Units of the allowance that were charged when the threshold was reached."""
    allowance: int
    """The allowance of the period."""
    delivered_us: int | None = None
    """When the webhook has accepted it."""
    error: str | None = None
    """The last failure of a delivery."""

    @property
    def text(self) -> str:
        end = datetime.fromtimestamp(self.period_end_us / 1_000_000, UTC)
        return (
            f"{self.account} has used {self.used:,} of {self.allowance:,} units, "
            f"{self.percent} % of the allowance of the period that ends at {end:%Y-%m-%d %H:%M} UTC."
        )


_COLUMNS: Final = [ALERTS.c[name] for name in UsageAlert._fields]


class UsageMonitor:
    """Records the thresholds that accounts reach, in the transactions of one ledger. Not thread-safe."""

    def __init__(self) -> None:
        self._reached: dict[str, tuple[int, set[int]]] = {}
        """The end of an account's period, and the thresholds that were recorded in it."""
        self._usage: dict[str, tuple[int, dict[str, int]]] = {}
        """The last usage record that was counted for an account, and the sums of its open leases up to it."""

    def check(self, connection: Connection, states: Iterable[AccountState], now_us: int) -> None:
        """Record the thresholds that these accounts have reached, and that were not recorded before."""
        active = [state for state in states if state.period_end_us and state.period_allowance]
        if not active:
            return
        for remembered in (self._reached, self._usage):
            if len(remembered) > MAX_ACCOUNTS:
                remembered.clear()
        thresholds = read_thresholds(connection)
        for state in active:
            if due := self._due(connection, state, thresholds, state.allowance_taken()):
                used = state.allowance_used(self._usage_of_leases(connection, state))
                self._record(connection, state, self._due(connection, state, due, used), used, now_us)

    def forget(self, accounts: Collection[str]) -> None:
        """Forget accounts whose transaction was rolled back."""
        for account in accounts:
            self._reached.pop(account, None)
            self._usage.pop(account, None)

    def _due(self, connection: Connection, state: AccountState, thresholds: Sequence[int], used: int) -> list[int]:
        end_us, recorded = self._reached.get(state.account, (0, set()))
        known = recorded if end_us == state.period_end_us else set()
        due = [
            percent for percent in thresholds if percent not in known and used * 100 >= percent * state.period_allowance
        ]
        if due:  # another process may have recorded them
            recorded = read_reached(connection, state.account, state.period_end_us)
            self._reached[state.account] = state.period_end_us, recorded
        return [percent for percent in due if percent not in recorded]

    def _usage_of_leases(self, connection: Connection, state: AccountState) -> dict[str, int]:
        """The sums of the usage records of open leases. Each record is read once."""
        leases = state.leases()
        last, sums = self._usage.get(state.account, (0, {}))
        newest = connection.scalar(select(func.max(USAGE.c.number))) or 0
        query = select(USAGE.c.lease, func.sum(USAGE.c.amount)).where(USAGE.c.lease.in_(leases), USAGE.c.number > last)
        rows = connection.execute(query.group_by(USAGE.c.lease)).all() if leases else ()
        added = {lease: int(amount) for lease, amount in rows}
        sums = {lease: sums.get(lease, 0) + added.get(lease, 0) for lease in leases}
        self._usage[state.account] = newest, sums
        return sums

    def _record(
        self, connection: Connection, state: AccountState, percents: Sequence[int], used: int, now_us: int
    ) -> None:
        _, recorded = self._reached[state.account]
        for percent in percents:
            alert = UsageAlert(
                _alert_id(state.account, state.period_end_us, percent),
                state.account,
                percent,
                now_us,
                state.period_end_us,
                used,
                state.period_allowance,
            )
            connection.execute(insert(ALERTS).values({**alert._asdict(), "attempts": 0, "next_us": now_us}))
            recorded.add(percent)


class UsageNotifier:
    """Sends the usage alerts of a ledger to a webhook: `UsageNotifier(ledger, webhook).start()`.

    Several may run: each alert is sent by one of them.
    """

    def __init__(self, ledger: Ledger, webhook: Webhook) -> None:
        self._ledger, self._webhook = ledger, webhook
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Run in a background thread until `stop`."""
        if self._thread is None:
            self._stop = threading.Event()
            arguments = (USAGE_QUEUE, self._ledger.engine, self._ledger.clock, self._stop)
            self._thread = threading.Thread(
                target=self._webhook.deliver_forever, args=arguments, name="headgate-usage-alerts", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None

    close = stop


def read_alerts(connection: Connection, account: str, most: int) -> list[UsageAlert]:
    """The alerts of an account, newest first."""
    query = select(*_COLUMNS).where(ALERTS.c.account == account)
    newest = query.order_by(ALERTS.c.period_end_us.desc(), ALERTS.c.percent.desc()).limit(most)
    return [UsageAlert(*row) for row in connection.execute(newest)]


def read_reached(connection: Connection, account: str, period_end_us: int) -> set[int]:
    """The thresholds that were recorded in a period."""
    query = select(ALERTS.c.percent).where(ALERTS.c.account == account, ALERTS.c.period_end_us == period_end_us)
    return {*connection.scalars(query)}


def read_thresholds(connection: Connection) -> tuple[int, ...]:
    """The thresholds of all accounts, in percent."""
    return tuple(sorted(connection.scalars(select(THRESHOLDS.c.percent)))) or DEFAULT_THRESHOLDS


def write_thresholds(connection: Connection, percents: Iterable[int]) -> None:
    given = [*percents]
    for percent in given:
        if type(percent) is not int or not 1 <= percent <= 100:
            raise InvalidInput(f"a threshold must be a whole number of percent from 1 to 100, got {percent!r:.100}")
    if not 1 <= len(given) <= MAX_THRESHOLDS:
        raise InvalidInput(f"expected 1 to {MAX_THRESHOLDS} thresholds, got {len(given)}")
    if set(given) != set(read_thresholds(connection)):
        connection.execute(delete(THRESHOLDS))
        connection.execute(insert(THRESHOLDS), [{"percent": percent} for percent in sorted({*given})])


def _alert_id(account: str, period_end_us: int, percent: int) -> str:
    """The same for the same threshold, also after a backup was restored: receivers recognize a repetition."""
    return sha256(f"{account}\n{period_end_us}\n{percent}".encode()).hexdigest()[:24]


def _event(row: Any) -> WebhookEvent:
    alert = UsageAlert(*[getattr(row, name) for name in UsageAlert._fields])
    content = alert._asdict() | {"text": alert.text}
    for name in ("id", "at_us", "delivered_us", "error"):
        del content[name]
    return WebhookEvent("quota-usage", alert.id, alert.at_us, {"usage": content})


USAGE_QUEUE: Final = WebhookQueue(ALERTS, "at_us", 1, _event)
"""The usage alerts that wait for a webhook."""
