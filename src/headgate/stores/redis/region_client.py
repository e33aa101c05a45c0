"""The client of a region's store for the exchange between regions: shared usage, messages, and what was imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from headgate.errors import StoreUnavailable
from headgate.stores.redis.encoding import Command, Keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headgate.stores.operations import Call
    from headgate.stores.redis.background_client import BackgroundClient

__all__ = ["ChangePage", "RegionClient"]

MAX_CHANGES: Final = 2_000
"""Fields in one reply: the server is busy with them for about a millisecond."""
MAX_FIELDS: Final = 500
"""Fields in one command that writes."""


class ChangePage(NamedTuple):
    """Changes of shared usage, in their order."""

    epoch: str
    """Identifies the data: another one after the store has lost it."""
    number: int
    """The number of the last change, from which to read on."""
    fields: dict[str, str]
    has_more: bool = False
    """True if there may be more changes."""


class RegionClient:
    """Blocking client of one region's store. Every method may raise a StoreError."""

    def __init__(self, client: BackgroundClient) -> None:
        self._client = client
        name = client.encoder.own_name("regions:usage")
        self._usage = Keys.of(name, f"{{{name}}}:changes")
        self._statuses = Keys.of(client.encoder.own_name("regions:status"))

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers to operations on counters, with StoreErrors among them."""
        return self._client.run_all(calls)

    def add_usage(self, usage: Mapping[str, tuple[int, int]], *, process: str, flush: int) -> None:
        """Add admitted and refunded amounts to the region's totals, once for each flush of a process."""
        args: list[Any] = [
            part for field, (admitted, refunded) in usage.items() for part in (field, admitted, refunded)
        ]
        self._execute(self._usage, int, "add", uuid4().hex, process, flush, *args)

    def post(self, field: str, text: str) -> None:
        """Publish a message under a field of its own."""
        self._execute(self._usage, int, "post", uuid4().hex, field, text)

    def read_changes(self, epoch: str, number: int) -> ChangePage:
        """The shared usage that has changed since; all of it if the epoch is another one."""
        return self._page(self._execute(self._usage, list, "read", "", epoch, number, MAX_CHANGES))

    def exchange(self, epoch: str, number: int, prefix: str, reports: Mapping[str, str]) -> ChangePage:
        """Leave reports, of which the largest totals count, and read changes that do not begin with the prefix."""
        args = [part for item in reports.items() for part in item]
        return self._page(
            self._execute(self._usage, list, "exchange", uuid4().hex, epoch, number, MAX_CHANGES, prefix, *args)
        )

    def shared_usage(self) -> dict[str, str]:
        """All shared usage of this region; fields that start with "%" are not usage."""
        return _pairs(self._texts(self._execute(self._usage, list, "load")))

    def drop_usage(self, fields: Sequence[str]) -> None:
        for start in range(0, len(fields), MAX_FIELDS):
            self._execute(self._usage, int, "drop", *fields[start : start + MAX_FIELDS])

    def imported(self, region: str) -> dict[str, str]:
        """The record of what was imported from a region."""
        return _pairs(self._texts(self._execute(self._imports(region), list, "load")))

    def save_imported(self, region: str, values: Mapping[str, str]) -> None:
        """Record imports. Numbers never decrease: an agent that was replaced meanwhile cannot undo later records."""
        items = list(values.items())
        for start in range(0, len(items), MAX_FIELDS):
            args = [part for item in items[start : start + MAX_FIELDS] for part in item]
            self._execute(self._imports(region), int, "save", *args)

    def note_position(self, region: str, text: str) -> None:
        self._execute(self._imports(region), int, "note", "%position", text)

    def drop_imported(self, region: str, fields: Sequence[str]) -> None:
        for start in range(0, len(fields), MAX_FIELDS):
            self._execute(self._imports(region), int, "drop", *fields[start : start + MAX_FIELDS])

    def publish_status(self, process: str, text: str) -> None:
        """Publish the state of a process, for reports."""
        self._execute(self._statuses, int, "note", process, text)

    def statuses(self) -> dict[str, str]:
        """The published states by process."""
        return _pairs(self._texts(self._execute(self._statuses, list, "load")))

    def drop_statuses(self, processes: Sequence[str]) -> None:
        for start in range(0, len(processes), MAX_FIELDS):
            self._execute(self._statuses, int, "drop", *processes[start : start + MAX_FIELDS])

    def block(self, kind: str, value: str, *, until_us: int | None, reason: str | None) -> None:
        self._client.block(kind, value, until_us=until_us, reason=reason)

    def unblock(self, kind: str, value: str) -> None:
        self._client.unblock(kind, value)

    def close(self) -> None:
        self._client.close()

    def _imports(self, region: str) -> Keys:
        return Keys.of(self._client.encoder.own_name(f"regions:imported:{region}"))

    def _execute(self, keys: Keys, expects: type, *args: Any) -> Any:
        return self._client.execute(
            Command(self._client.encoder.own_script("region_usage"), keys, args, expects=expects)
        )

    def _page(self, reply: list[Any]) -> ChangePage:
        texts = self._texts(reply, 4)
        if not texts[1].isdecimal():
            raise _unexpected(texts)
        return ChangePage(texts[0], int(texts[1]), _pairs(texts[4:]), texts[3] == "1")

    def _texts(self, reply: list[Any], least: int = 0) -> list[str]:
        if len(reply) % 2 or len(reply) < least or {*map(type, reply)} - {bytes}:
            raise _unexpected(reply)
        return [text.decode("utf-8", "replace") for text in reply]


def _pairs(texts: list[str]) -> dict[str, str]:
    return dict(_by_two(texts))


def _by_two(texts: list[str]) -> Iterable[tuple[str, str]]:
    return zip(texts[::2], texts[1::2], strict=True)


def _unexpected(reply: Any) -> StoreUnavailable:
    return StoreUnavailable(f"the store answered {str(reply)[:100]}, expected usage of a region")
