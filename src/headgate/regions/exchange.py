"""The exchange between regions: shares what this region has admitted, and imports what the others have.

Every process flushes its own admissions into the store of its region. One process of the region at a time, the agent,
exchanges usage with the others by one call: it leaves the reports of its region in the store of the home region, and
reads those that the others have left there. While the home region does not answer, it does the same with the store of
each other region. A lease in the region's store chooses the agent. If two processes are agents for a moment, or a
report arrives on several ways, each step still applies once.
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
from headgate.regions.relay import MAX_REPORTS, Outbox, parse_relayed, relayed_field, relayed_prefix
from headgate.regions.report import MAX_STATUS_AGE_US, WorkerStatus
from headgate.runtime import SYSTEM, Runtime
from headgate.stores.operations import Check, Leave, Refund, Reset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
USAGE_MARGIN_US: Final = 60 * 1_000_000
"""Usage that does not count any more is kept for so long, as the clocks of regions differ."""
_AGENT: Final = Limit(1, timedelta(seconds=10), algorithm="concurrency", name="%region agent").by()


class RegionExchange:
    """The exchange of one process. `clients` has the client of each region by its name, including the own one; `home`
    is the region whose store the reports pass through.

    Not thread-safe, except for `counter` and the methods that post messages.
    """

    def __init__(
        self,
        own: str,
        clients: Mapping[str, RegionClient],
        *,
        home: str,
        counter: AdmissionCounter | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.own, self.home, self.clients = own, home, dict(clients)
        self.counter = counter or AdmissionCounter()
        self.last_read: dict[str, float] = {}
        """When each other region was last heard of, on the monotonic clock."""
        self.is_agent = False
        self._monotonic = runtime.monotonic
        self._process = uuid4().hex
        self._outbox: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_MESSAGES)
        self._imports: dict[str, _Imports] = {}
        """Imports by region; empty while another process is the agent."""
        self._epoch, self._number = "", 0
        """The last change in the own store that was read."""
        self._outboxes: dict[str, Outbox] = {}
        """Reports for the stores of other regions: the home region, and the others while that does not answer."""
        self._calls: dict[str, Future[list[ChangePage]]] = {}
        """Calls to other regions that were begun."""
        self._unreachable: set[str] = set()
        """Regions that did not answer the last call."""
        self._is_recorded = True
        """False if reports were exchanged since the positions were recorded."""
        self._executor = runtime.new_executor("headgate-region", max(1, len(self.others)))
        self._is_closed = False
        self._exchanges = 0
        self._now_us = 0  # by the clock of the own store, at the last exchange

    @property
    def others(self) -> list[str]:
        return [name for name in self.clients if name != self.own]

    def run_once(self) -> None:
        """Flush, and, as the agent of the region, exchange usage. Errors of other regions are logged; those of the own
        store are raised."""
        self.flush()
        if not self._acquire():
            self._resign()
            return
        self._exchange()
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
        """Share the last usage, and let another process of the region become the agent at once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.flush()
            if self._acquire():
                self._exchange()
                self.clients[self.own].run_all([Leave(_AGENT, self._process)])
        except (StoreError, RuntimeError) as error:  # the latter while the interpreter ends
            logger.warning("region %s: usage of the last moment was not shared: %s", self.own, error)
        self._resign()
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

    def _resign(self) -> None:
        """Leave the exchange to another process, which continues where this one has recorded."""
        self.is_agent = False
        self._imports, self._outboxes, self._calls = {}, {}, {}

    def _begin(self) -> None:
        """Continue where the previous agent has recorded."""
        own = self.clients[self.own]
        self._imports = {region: _Imports.load(own, region) for region in self.others}
        self._epoch, self._number = _parse_position(own.imported(self.own).get("%position", ""))
        self._outboxes = {self.home: Outbox()} if self.home != self.own else {}
        self.is_agent = True

    def _exchange(self) -> None:
        if not self.is_agent:
            self._begin()
        self._read_own()
        for region, outbox in self._outboxes.items():
            if region not in self._calls:
                imports = self._imports[region]
                reports = {**outbox.take(), relayed_field(self.own, "", "%time"): f"{self._now_us}"}
                call = self._executor.submit(self._call, region, imports.epoch, imports.number, reports)
                self._calls[region] = call
        # All are called at the same time, and one that does not answer does not delay the others: a later exchange
        # imports its answer.
        wait(self._calls.values(), timeout=READ_WAIT_S)
        for region, call in [*self._calls.items()]:
            if call.done():
                del self._calls[region]
                self._receive(region, call)
        self._choose_regions()
        for imports in self._imports.values():
            imports.apply(self.clients[self.own])
        self._record_positions()

    def _choose_regions(self) -> None:
        """Call the home region next time, and the others, too, while it does not answer."""
        if (outbox := self._outboxes.get(self.home)) is None:
            return
        is_late = self.home in self._calls or self.home in self._unreachable
        others = [region for region in self.others if is_late and region != self.home]
        self._outboxes = {self.home: outbox} | {
            region: self._outboxes.get(region) or Outbox(outbox.reports) for region in others
        }

    def _read_own(self) -> None:
        """Read what has changed in the own store: usage of the region to report, and reports of other regions."""
        has_more = True
        while has_more:
            page = self.clients[self.own].read_changes(self._epoch, self._number)
            self._report(
                {field: text for field, text in page.fields.items() if parse_relayed(field) is None}, page.epoch
            )
            self._merge(self.own, page)
            if page.fields:
                self._is_recorded = False
            self._epoch, self._number, has_more = page.epoch, page.number, page.has_more

    def _own_fields(self) -> Iterator[tuple[str, str]]:
        """All usage and messages in the own store, in pages: a large reply would delay requests."""
        epoch, number, has_more = "", 0, True
        while has_more:
            page = self.clients[self.own].read_changes(epoch, number)
            yield from page.fields.items()
            epoch, number, has_more = page.epoch, page.number, page.has_more

    def _report(self, fields: Mapping[str, str], epoch: str) -> None:
        for outbox in self._outboxes.values():
            outbox.add({relayed_field(self.own, epoch, field): text for field, text in fields.items()})

    def _call(self, region: str, epoch: str, number: int, reports: dict[str, str]) -> list[ChangePage]:
        """Leave reports in another region's store, and read what has changed there."""
        client, prefix = self.clients[region], relayed_prefix(self.own)
        items = [*reports.items()]
        pages: list[ChangePage] = []
        while not pages or items or pages[-1].has_more:
            items, sent = items[MAX_REPORTS:], items[:MAX_REPORTS]
            pages.append(client.exchange(epoch, number, prefix, dict(sent)))
            epoch, number = pages[-1].epoch, pages[-1].number
        return pages

    def _receive(self, region: str, call: Future[list[ChangePage]]) -> None:
        """Take in the answer of another region."""
        imports, outbox = self._imports[region], self._outboxes.get(region)
        try:
            pages = call.result()
        except StoreError as error:
            if region not in self._unreachable:
                logger.warning("region %s: no usage is exchanged with region %s: %s", self.own, region, error)
            self._unreachable.add(region)
            if outbox is not None:
                outbox.put_back()
            return
        if region in self._unreachable:
            logger.warning("region %s: usage is exchanged with region %s again", self.own, region)
            self._unreachable.discard(region)
        if outbox is not None:
            outbox.confirm()
        if imports.epoch and pages[-1].epoch != imports.epoch:  # it has lost its data, and with it earlier reports
            fields = {field: text for field, text in self._own_fields() if parse_relayed(field) is None}
            self._report(fields, self._epoch)
        for page in pages:
            self._merge(region, page)
        imports.epoch, imports.number = pages[-1].epoch, pages[-1].number
        self.last_read[region] = self._monotonic()

    def _merge(self, store: str, page: ChangePage) -> None:
        """Take in reports that were read from the store of a region."""
        for field, text in page.fields.items():
            region, epoch, name = parse_relayed(field) or (store, page.epoch, field)
            imports = self._imports.get(region)
            if imports is None:  # of the own region, or of one that is not configured here
                continue
            self.last_read[region] = self._monotonic()
            if name.startswith(MESSAGE_PREFIX):
                self._deliver_once(imports, name, text)
            elif imports.merge(epoch, name, text):
                self._is_recorded = False

    def _record_positions(self) -> None:
        """Record how far the stores were read, so that the next agent reads on; to read a report again is harmless."""
        outbox = self._outboxes.get(self.home)
        if self._is_recorded or (outbox is not None and outbox.reports):
            return
        own = self.clients[self.own]
        own.note_position(self.own, f"{self._epoch} {self._number}")
        for region in self._outboxes:
            imports = self._imports[region]
            own.note_position(region, f"{imports.epoch} {imports.number}")
        self._is_recorded = True

    def _deliver_once(self, imports: _Imports, field: str, text: str) -> None:
        if field not in imports.messages:
            self._deliver(text)
            imports.messages[field] = self._now_us
            self.clients[self.own].save_imported(imports.region, {field: f"1 {self._now_us} 0 0"})

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
        statuses = {process: WorkerStatus.parse(text) for process, text in own.statuses().items()}
        own.drop_statuses(
            [
                process
                for process, each in statuses.items()
                if each is None or each.at_us < self._now_us - MAX_STATUS_AGE_US
            ]
        )
        shared = [field for field, text in self._own_fields() if _is_over(field, text, self._now_us)]
        own.drop_usage(shared)
        reported = [relayed_field(self.own, self._epoch, field) for field in shared if parse_relayed(field) is None]
        if reported and self.home != self.own:
            self._executor.submit(self._drop_at_home, reported)
        for region, imports in self._imports.items():
            fields = [field for field in imports.usage if _is_over(field, "", self._now_us)]
            # A message that is read again later is too old to be delivered.
            messages = [
                field for field, at_us in imports.messages.items() if at_us < self._now_us - 2 * MAX_MESSAGE_AGE_US
            ]
            own.drop_imported(region, [*fields, *messages])
            for field in fields:
                del imports.usage[field]
            for field in messages:
                del imports.messages[field]

    def _drop_at_home(self, fields: Sequence[str]) -> None:
        try:
            self.clients[self.home].drop_usage(fields)
        except StoreError as error:
            logger.warning("region %s: old reports stay in region %s: %s", self.own, self.home, error)


class _Imports:
    """Usage of another region, as far as it is known, and how much of it was applied here."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.epoch, self.number = "", 0
        self.usage: dict[str, ImportedUsage] = {}
        self.messages: dict[str, int] = {}
        """When each message was delivered, which happens once."""
        self._changed: set[str] = set()

    @classmethod
    def load(cls, own: RegionClient, region: str) -> _Imports:
        """Continue where the previous agent has stopped."""
        imports = cls(region)
        for field, text in own.imported(region).items():
            if field == "%position":
                imports.epoch, imports.number = _parse_position(text)
            elif field.startswith(MESSAGE_PREFIX):
                imports.messages[field] = ImportedUsage.parse(text).refunded
            else:
                imports.usage[field] = ImportedUsage.parse(text)
        return imports

    def merge(self, epoch: str, field: str, text: str) -> bool:
        """Take in a report; False if it is none. After the region has lost its data, its totals start anew, under
        another epoch."""
        totals = parse_totals(text)
        if field.startswith("%") or totals is None or parse_field(field) is None:
            return False
        name = f"{epoch} {field}"
        self.usage[name] = self.usage.get(name, ImportedUsage()).merge(*totals)
        self._changed.add(name)
        return True

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
        if self._changed:
            own.save_imported(self.region, {name: self.usage[name].text for name in self._changed})
            self._changed.clear()


def _parse_position(text: str) -> tuple[str, int]:
    """The epoch and the number of a change."""
    epoch, _, number = text.partition(" ")
    return epoch, int(number) if number.isdecimal() else 0


def _slot(name: str) -> UsageSlot | None:
    return parse_field(name.partition(" ")[2])


def _is_over(name: str, text: str, now_us: int) -> bool:
    """True if usage does not count any more, or a message is old or malformed."""
    relayed = parse_relayed(name)
    if relayed is not None:
        name = relayed[2]
    if name.startswith(MESSAGE_PREFIX):
        try:
            return int(json.loads(text)["at_us"]) < now_us - MAX_MESSAGE_AGE_US
        except (ValueError, TypeError, KeyError):
            return True
    slot = parse_field(name) or _slot(name)
    return slot is not None and slot.end_us < now_us - USAGE_MARGIN_US
