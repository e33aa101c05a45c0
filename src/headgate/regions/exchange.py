"""The exchange between regions: shares what this region has admitted, and imports what the others have.

Every process flushes its own admissions into the store of its region. One process of the region at a time, the agent,
reads the changes from the stores of the other regions, one call each, and applies them to its own region's counters.
A lease in the region's store chooses the agent. If two processes are agents for a moment, each step still applies once.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from headgate.decisions import Decision
from headgate.errors import StoreError
from headgate.limits import Limit
from headgate.regions.reconciled import (
    AdmissionCounter,
    ImportedUsage,
    UsageSlot,
    charged_amount,
    parse_field,
    parse_totals,
)
from headgate.regions.report import MAX_STATUS_AGE_US, WorkerStatus
from headgate.runtime import SYSTEM, Runtime
from headgate.stores.operations import Check, Leave, Refund, Reset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.keys import Key
    from headgate.stores.redis.region_client import ChangePage, RegionClient

__all__ = ["RegionExchange"]

logger = logging.getLogger("headgate")

CLEANUP_INTERVAL: Final = 60
"""Exchanges between two cleanups."""
READ_WAIT_S: Final = 0.5
"""An exchange waits so long for the other regions."""
MESSAGE_PREFIX: Final = "%message:"
MAX_MESSAGES: Final = 10_000
MAX_MESSAGE_AGE_US: Final = 3_600 * 1_000_000
_AGENT: Final = Limit(1, timedelta(seconds=10), algorithm="concurrency", name="%region agent").by()


class RegionExchange:
    """The exchange of one process. `clients` has the client of each region by its name, including the own one.

    Not thread-safe, except for `counter` and the methods that post messages.
    """

    def __init__(
        self,
        own: str,
        clients: Mapping[str, RegionClient],
        *,
        counter: AdmissionCounter | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.own, self.clients = own, dict(clients)
        self.counter = counter or AdmissionCounter()
        self.last_read: dict[str, float] = {}
        """When each other region was last read, on the monotonic clock."""
        self._monotonic = runtime.monotonic
        self._process = uuid4().hex
        self._outbox: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_MESSAGES)
        self._imports: dict[str, _Imports] = {}
        """Imports by region; empty while another process is the agent."""
        self._readings: dict[str, Future[list[ChangePage]]] = {}
        """Readings of other regions that were begun."""
        self._unreachable: set[str] = set()
        """Regions whose last reading failed."""
        self._executor = runtime.new_executor("headgate-region", max(1, len(self.others)))
        self._exchanges = 0
        self._now_us = 0  # by the clock of the own store, at the last exchange

    @property
    def others(self) -> list[str]:
        return [name for name in self.clients if name != self.own]

    @property
    def is_agent(self) -> bool:
        return bool(self._imports)

    def run_once(self) -> None:
        """Flush, and, as the agent of the region, import. Errors of other regions are logged; those of the own store
        are raised."""
        self.flush()
        if not self._acquire():
            self._imports.clear()
            self._readings.clear()
            return
        for region in self.others:
            if region not in self._imports:
                self._imports[region] = _Imports.load(self.clients[self.own], region)
            if region not in self._readings:
                self._readings[region] = self._executor.submit(self._read, region)
        # All are read at the same time, and one that does not answer does not delay the others: a later exchange
        # imports what it has read.
        wait(self._readings.values(), timeout=READ_WAIT_S)
        for region in self.others:
            if self._readings[region].done():
                self._import(region, self._readings.pop(region))
            self._imports[region].apply(self.clients[self.own])
        self._exchanges += 1
        if self._exchanges % CLEANUP_INTERVAL == 0:
            self._clean_up()

    def flush(self) -> None:
        """Add the admissions of this process to the totals of its region, and publish its messages."""
        number, usage = self.counter.begin_flush()
        if usage:
            fields = {slot.field: totals for slot, totals in usage.items()}
            self.clients[self.own].add_usage(fields, process=self._process, flush=number)
            self.counter.end_flush()
        self._send_messages()

    def owed(self, region: str) -> int:
        """Usage of another region that is known, and not yet charged to this region's counters."""
        imports = self._imports.get(region)
        return 0 if imports is None else sum(max(0, usage.balance) for usage in imports.usage.values())

    def publish(self, held: Mapping[tuple[str, str], int]) -> None:
        """Publish the state of this process; `held` are the tokens in the region's pools, by limit and identity."""
        now, own = self._monotonic(), self.clients[self.own]
        ages = {region: round(now - at, 3) for region, at in self.last_read.items()} if self.is_agent else {}
        own.publish_status(self._process, WorkerStatus(self._now_us, ages, dict(held)).text)

    def post_reset(self, key: Key) -> None:
        """Have all other regions reset a counter; like all messages, with the next exchange."""
        self._post(what="reset", slot=UsageSlot.at(key, 0).field)

    def post_block(self, kind: str, value: str, *, until_us: int | None, reason: str | None) -> None:
        self._post(what="block", kind=kind, value=value, until_us=until_us, reason=reason)

    def post_unblock(self, kind: str, value: str) -> None:
        self._post(what="unblock", kind=kind, value=value)

    def close(self) -> None:
        """Flush, and let another process of the region become the agent at once."""
        try:
            self.flush()
            if self.is_agent:
                self.clients[self.own].run_all([Leave(_AGENT, self._process)])
        except StoreError as error:
            logger.warning("region %s: usage of the last moment was not shared: %s", self.own, error)
        self._imports.clear()
        self._executor.shutdown(wait=False)
        for client in self.clients.values():
            client.close()

    def _acquire(self) -> bool:
        """Take or renew the lease of the agent."""
        answer = self._check_agent(1)
        self._now_us = answer.at_us
        return answer.allowed

    def _check_agent(self, cost: int) -> Decision:
        answer = self.clients[self.own].run_all([Check((_AGENT,), cost, self._process)])[0]
        if isinstance(answer, Decision):
            return answer
        raise answer

    def _read(self, region: str) -> list[ChangePage]:
        """The changes in another region since the last exchange."""
        imports = self._imports[region]
        pages: list[ChangePage] = []
        epoch, number = imports.epoch, imports.number
        while not pages or pages[-1].is_full:
            pages.append(self.clients[region].read_changes(epoch, number))
            epoch, number = pages[-1].epoch, pages[-1].number
        return pages

    def _import(self, region: str, reading: Future[list[ChangePage]]) -> None:
        imports = self._imports[region]
        try:
            for page in reading.result():
                imports.merge(page)
                self._deliver_messages(region, page)
            self.last_read[region] = self._monotonic()
            if region in self._unreachable:
                logger.warning("region %s: usage of region %s can be read again", self.own, region)
            self._unreachable.discard(region)
        except StoreError as error:
            if region not in self._unreachable:
                logger.warning("region %s: usage of region %s cannot be read: %s", self.own, region, error)
            self._unreachable.add(region)

    def _deliver_messages(self, region: str, page: ChangePage) -> None:
        own, imports = self.clients[self.own], self._imports[region]
        for field, text in page.fields.items():
            if field.startswith(MESSAGE_PREFIX) and field not in imports.messages:
                self._deliver(text)
                imports.messages.add(field)
                own.save_imported(region, {field: "1 0 0 0"})

    def _deliver(self, text: str) -> None:
        """Carry out a message, which is harmless to repeat; ignore one that is malformed."""
        own = self.clients[self.own]
        try:
            message: dict[str, Any] = json.loads(text)
            what = message["what"]
            if message["at_us"] < self._now_us - MAX_MESSAGE_AGE_US:
                return
            if what == "block":
                until_us, reason = message["until_us"], message["reason"]
                own.block(message["kind"], message["value"], until_us=until_us, reason=reason)
            elif what == "unblock":
                own.unblock(message["kind"], message["value"])
            elif what == "reset" and (slot := parse_field(message["slot"])) is not None:
                own.run_all([Reset((slot.key,))])
                for imports in self._imports.values():
                    imports.settle(slot)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("region %s: ignored a malformed message of another region: %s", self.own, error)

    def _post(self, **message: Any) -> None:
        self._outbox.append((f"{MESSAGE_PREFIX}{uuid4().hex}", message))

    def _send_messages(self) -> None:
        """Publish messages. One that fails is sent again with the same name."""
        while self._outbox:
            field, message = self._outbox[0]
            at_us = self._check_agent(0).at_us
            self.clients[self.own].post(field, json.dumps({**message, "at_us": at_us}))
            self._outbox.popleft()

    def _clean_up(self) -> None:
        """Drop old messages and usage, from this region's totals and from its records of others."""
        own = self.clients[self.own]
        oldest_us = self._now_us - MAX_MESSAGE_AGE_US
        statuses = {process: WorkerStatus.parse(text) for process, text in own.statuses().items()}
        own.drop_statuses(
            [
                process
                for process, each in statuses.items()
                if each is None or each.at_us < self._now_us - MAX_STATUS_AGE_US
            ]
        )
        shared = [field for field, text in own.shared_usage().items() if _is_over(field, text, oldest_us)]
        own.drop_usage(shared)
        for region, imports in self._imports.items():
            fields = [field for field in imports.usage if _is_over(field, "", oldest_us)]
            own.drop_imported(region, fields)
            for field in fields:
                del imports.usage[field]


class _Imports:
    """Usage of another region, as far as it is known, and how much of it was applied here."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.epoch, self.number = "", 0
        self.usage: dict[str, ImportedUsage] = {}
        self.messages: set[str] = set()
        self._changed: set[str] = set()

    @classmethod
    def load(cls, own: RegionClient, region: str) -> _Imports:
        """Continue where the previous agent has stopped."""
        imports = cls(region)
        for field, text in own.imported(region).items():
            if field == "%position":
                epoch, _, number = text.partition(" ")
                imports.epoch, imports.number = epoch, int(number) if number.isdecimal() else 0
            elif field.startswith(MESSAGE_PREFIX):
                imports.messages.add(field)
            else:
                imports.usage[field] = ImportedUsage.parse(text)
        return imports

    def merge(self, page: ChangePage) -> None:
        """Take in reports. After the other region has lost its data, its totals start anew, under another epoch."""
        self.epoch, self.number = page.epoch, page.number
        for field, text in page.fields.items():
            totals = parse_totals(text)
            if field.startswith("%") or totals is None or parse_field(field) is None:
                continue
            name = f"{page.epoch} {field}"
            self.usage[name] = self.usage.get(name, ImportedUsage()).merge(*totals)
            self._changed.add(name)

    def apply(self, own: RegionClient) -> None:
        """Apply balances to the region's counters, and record them."""
        due = {name: slot for name, usage in self.usage.items() if usage.balance and (slot := _slot(name)) is not None}
        if due:
            self._apply_due(own, due)
        self._save(own)

    def _apply_due(self, own: RegionClient, due: dict[str, UsageSlot]) -> None:
        (now,) = own.run_all([Check((next(iter(due.values())).key,), 0)])
        if not isinstance(now, Decision):
            raise now
        steps: dict[str, Any] = {}
        for name, slot in due.items():
            usage = self.usage[name]
            if slot.counts_at(now.at_us):
                steps[name] = usage.charge(slot, self._source(name)) or usage.refund(slot, self._source(name))
            else:
                self.usage[name] = usage.settled()
                self._changed.add(name)
        for (name, step), answer in zip(steps.items(), own.run_all([*steps.values()]), strict=True):
            if isinstance(answer, StoreError):
                continue
            if isinstance(step, Refund):
                self.usage[name] = self.usage[name].after_refund()
            else:
                self.usage[name] = self.usage[name].after_charge(charged_amount(answer) or 0)
            self._changed.add(name)

    def settle(self, reset: UsageSlot) -> None:
        """Forget what is owed on a counter that was reset."""
        for name, usage in self.usage.items():
            slot = _slot(name)
            if slot is not None and (slot.limit.space, slot.identity) == (reset.limit.space, reset.identity):
                self.usage[name] = usage.settled()
                self._changed.add(name)

    def _source(self, name: str) -> str:
        return f"{self.region}:{name.partition(' ')[0]}"

    def _save(self, own: RegionClient) -> None:
        """Record amounts, then the position: a report that is read again changes nothing."""
        if self._changed:
            own.save_imported(self.region, {name: self.usage[name].text for name in self._changed})
            own.note_position(self.region, f"{self.epoch} {self.number}")
            self._changed.clear()


def _slot(name: str) -> UsageSlot | None:
    return parse_field(name.partition(" ")[2])


def _is_over(name: str, text: str, before_us: int) -> bool:
    """True if usage has stopped to count, or a message was posted, before that instant."""
    if name.startswith(MESSAGE_PREFIX):
        return int(json.loads(text)["at_us"]) < before_us
    slot = parse_field(name) or _slot(name)
    return slot is not None and slot.end_us < before_us
