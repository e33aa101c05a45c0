"""Regions of a simulated fleet: the usage that each one shares, and the clients that read and write it.

`RegionUsage` does in memory what `stores/redis/lua/region_usage.lua` does in Redis, which a test compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.regions.reconciled import parse_totals
from headgate.stores.redis.region_client import MAX_CHANGES, ChangePage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.simulation.simulated_store import SimulatedClient
    from headgate.stores.operations import Call

__all__ = ["RegionUsage", "SimulatedRegionClient"]


class RegionUsage:
    """The usage that one region shares, its record of what it has imported, and the states of its processes."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        """Another one after the data was lost."""
        self.number = 0
        self.shared: dict[str, str] = {}
        self.imports: dict[str, dict[str, str]] = {}
        self.statuses: dict[str, str] = {}
        self._changes: dict[str, int] = {}
        """The number of the last change of each field, in ascending order."""
        self._flushes: dict[str, int] = {}

    def add(self, usage: Mapping[str, tuple[int, int]], process: str, flush: int) -> None:
        if self._flushes.get(process, 0) >= flush:
            return  # carried out before, and its reply was lost
        self._flushes[process] = flush
        for field, amounts in usage.items():
            before = map(int, self.shared.get(field, "0 0").split())
            self.publish(field, " ".join([f"{old + new}" for old, new in zip(before, amounts, strict=True)]))

    def publish(self, field: str, text: str) -> None:
        self.shared[field] = text
        self.number += 1
        self._changes.pop(field, None)
        self._changes[field] = self.number

    def read(self, epoch: str, since: int) -> ChangePage:
        if not self.number:
            return ChangePage("", since if not epoch else 0, {})
        since = since if epoch == self.epoch else 0
        changed = [(field, number) for field, number in self._changes.items() if number > since][:MAX_CHANGES]
        last = changed[-1][1] if changed else since
        fields = {field: self.shared.get(field, "") for field, _ in changed}
        return ChangePage(self.epoch, last, fields, len(fields) == MAX_CHANGES)

    def report(self, reports: Mapping[str, str]) -> None:
        """Take in reports of another region: the larger one of two totals counts."""
        for field, text in reports.items():
            old, new = parse_totals(self.shared.get(field, "")), parse_totals(text)
            if old is not None and new is not None:
                text = " ".join([f"{max(pair)}" for pair in zip(old, new, strict=True)])
            if text != self.shared.get(field):
                self.publish(field, text)

    def save(self, region: str, values: Mapping[str, str]) -> None:
        """Record imports; numbers never decrease."""
        record = self.imports.setdefault(region, {})
        for field, text in values.items():
            old, new = [int(each) for each in record.get(field, "").split()], [int(each) for each in text.split()]
            old += [0] * (len(new) - len(old))
            record[field] = " ".join([f"{max(pair)}" for pair in zip(new, old, strict=False)])

    def drop(self, fields: Sequence[str]) -> None:
        for field in fields:
            self.shared.pop(field, None)
            self._changes.pop(field, None)


class SimulatedRegionClient:
    """The client of one region's store for background work. Like all background work, it is answered at once."""

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        return self._client.run_all(calls)

    def add_usage(self, usage: Mapping[str, tuple[int, int]], *, process: str, flush: int) -> None:
        self._usage().add(usage, process, flush)

    def post(self, field: str, text: str) -> None:
        self._usage().publish(field, text)

    def read_changes(self, epoch: str, number: int) -> ChangePage:
        return self._usage().read(epoch, number)

    def exchange(self, epoch: str, number: int, prefix: str, reports: Mapping[str, str]) -> ChangePage:
        usage = self._usage()
        usage.report(reports)
        page = usage.read(epoch, number)
        fields = {name: text for name, text in page.fields.items() if not (prefix and name.startswith(prefix))}
        return page._replace(fields=fields)

    def shared_usage(self) -> dict[str, str]:
        return dict(self._usage().shared)

    def drop_usage(self, fields: Sequence[str]) -> None:
        self._usage().drop(fields)

    def imported(self, region: str) -> dict[str, str]:
        return dict(self._usage().imports.get(region, {}))

    def save_imported(self, region: str, values: Mapping[str, str]) -> None:
        self._usage().save(region, values)

    def note_position(self, region: str, text: str) -> None:
        self._usage().imports.setdefault(region, {})["%position"] = text

    def drop_imported(self, region: str, fields: Sequence[str]) -> None:
        record = self._usage().imports.get(region, {})
        for field in fields:
            record.pop(field, None)

    def publish_status(self, process: str, text: str) -> None:
        self._usage().statuses[process] = text

    def statuses(self) -> dict[str, str]:
        return dict(self._usage().statuses)

    def drop_statuses(self, processes: Sequence[str]) -> None:
        statuses = self._usage().statuses
        for process in processes:
            statuses.pop(process, None)

    def close(self) -> None:
        """Nothing to close."""

    def _usage(self) -> RegionUsage:
        """The usage in the region's first server; raises a StoreError if that does not answer."""
        return self._client.home_shard().usage
