"""NetworkLists: the reputation lists of a gate, refreshed by one thread for each."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from datetime import UTC, datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from headgate._fork import reinit_after_fork
from headgate._pace import low_priority
from headgate.errors import InvalidInput
from headgate.local.networks import MAX_ADDRESS_LENGTH, pack, unwrap_nat64
from headgate.policy.lists.list_cache import ListCache, ListVersion
from headgate.policy.lists.list_formats import parse_list
from headgate.policy.lists.ranges import AddressRanges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headgate.policy.model import ListSource, Policy

__all__ = ["ListLookup", "ListStatus", "ListWatcher", "NetworkLists", "stored_lists"]

logger = logging.getLogger("headgate")

TICK_S: Final = 1.0
"""Time between checks whether a refresh is due."""
MIN_RETRY_S: Final = 10.0
MAX_RETRY_S: Final = 300.0
VERSION_BYTES: Final = 6


class ListLookup(Protocol):
    """Finds the lists that contain an address."""

    def find(self, address: str) -> list[str]:
        """The names of the lists that contain an address, in the order of the policy."""

    def describe(self, name: str) -> str:
        """A list and its version for people."""


class ListStatus(NamedTuple):
    """The state of a list."""

    name: str
    source: str
    networks: int
    ranges: int
    """Networks that overlap or adjoin are one range."""
    invalid: int
    version: str
    """Empty if no version was read yet."""
    changed_us: int
    """The time since which this version is in force."""
    checked_us: int
    """The time at which the source last had nothing newer."""
    error: str | None
    """The reason why the newest version is not in force; None if it is."""
    failed_us: int | None
    """The time of the first failure since the last success."""

    @property
    def is_loaded(self) -> bool:
        return bool(self.version)


class ListWatcher:
    """The last good version of one list."""

    def __init__(
        self,
        source: ListSource,
        cache: ListCache,
        on_change: Callable[[ListWatcher], Any] | None = None,
        now_us: Callable[[], int] | None = None,
    ) -> None:
        self.source = source
        self._cache = cache
        self._on_change = on_change
        self._now_us = now_us or _now_us
        self._exempt = AddressRanges.of(source.exempt)
        self.current: ListVersion | None = cache.read(source)
        """None before the first version."""
        self.error: str | None = None
        self.failed_us: int | None = None
        self._due_us = 0
        self._stop = threading.Event()

    def contains_packed(self, packed: bytes) -> bool:
        current = self.current
        return (
            current is not None and current.ranges.contains_packed(packed) and not self._exempt.contains_packed(packed)
        )

    def start(self) -> None:
        """Refresh the list in a thread, until the watcher is closed or garbage collected."""
        arguments = weakref.ref(self), self._stop
        name = f"headgate-list {self.source.name}"
        threading.Thread(target=_refresh_forever, args=arguments, name=name, daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def restart(self) -> None:
        """Start a new thread, in a forked child."""
        if not self._stop.is_set():
            self._stop = threading.Event()
            self.start()

    def refresh_if_due(self) -> bool:
        """Refresh the list if its time has come; True if another version is in force now."""
        return self._now_us() >= self._due_us and self.refresh()

    def refresh(self, *, force: bool = False) -> bool:
        """Refresh the list now; True if another version is in force. A failure keeps the current one.

        Without `force`, a version that another process of this machine has read recently is recent enough.
        """
        with self._cache.lock(self.source) as is_first:
            if not is_first:  # another process refreshes it, and this one reads the result at the next check
                return False
            before = self.current
            try:
                self.current = self._newest(force)
            except InvalidInput as error:
                self._fail(f"{error}")
                return False
        self._due_us = self.current.checked_us + self._refresh_us
        has_changed = before is None or before.version != self.current.version
        if has_changed or self.error is not None:
            had_failed, self.error, self.failed_us = self.error is not None, None, None
            number, again = self.current.networks, " again" if had_failed else ""
            logger.info(
                "list %s: version %s with %d networks is in force%s", self.source.name, self.version, number, again
            )
            self._notify()
        return has_changed

    @property
    def version(self) -> str:
        return "" if self.current is None else self.current.version

    @property
    def status(self) -> ListStatus:
        source, current = self.source, self.current
        shared = self.error, self.failed_us
        if current is None:
            return ListStatus(source.name, source.source, 0, 0, 0, "", 0, 0, *shared)
        found = current.networks, len(current.ranges), current.invalid
        times = current.version, current.changed_us, current.checked_us
        return ListStatus(source.name, source.source, *found, *times, *shared)

    def restore_error(self) -> None:
        """Take over the failure that a process has stored, to report it in another."""
        if (stored := self._cache.read_error(self.source)) is not None:
            self.error, self.failed_us = stored

    @property
    def _refresh_us(self) -> int:
        return round(self.source.refresh.total_seconds() * 1_000_000)

    def _newest(self, force: bool) -> ListVersion:
        """The newest version, from another process of this machine or from the source."""
        from headgate.policy.lists.list_download import download  # slow to import: for those who have lists

        current, now_us, source = self.current, self._now_us(), self.source
        stored = self._cache.read(source)
        if stored is not None and source.is_url:
            if current is None or stored.checked_us > current.checked_us:
                current = stored
            if not force and stored.checked_us <= now_us < stored.checked_us + self._refresh_us:
                return current
        with low_priority():
            etag, modified = (current.etag, current.modified) if current is not None else ("", "")
            found = download(source, etag, modified)
            if found is None and current is not None:
                newest = current._replace(checked_us=now_us)
                if source.is_url:
                    self._cache.write(source, newest)
                return newest
            if found is None:  # a server that reports no change to a request without validators
                raise InvalidInput("the server has sent no content")
            version = blake2b(found.data, digest_size=VERSION_BYTES).hexdigest()
            if current is not None and current.version == version:
                newest = current._replace(checked_us=now_us, etag=found.etag, modified=found.modified)
            else:
                content = parse_list(found.data, source)
                times = now_us, now_us
                numbers = content.networks, content.invalid
                newest = ListVersion(content.ranges, version, *numbers, *times, found.etag, found.modified)
            self._cache.write(source, newest)
            return newest

    def _fail(self, reason: str) -> None:
        now_us = self._now_us()
        retry_us = round(min(max(self._refresh_us / 10, MIN_RETRY_S * 1e6), MAX_RETRY_S * 1e6, self._refresh_us))
        self._due_us = now_us + retry_us
        is_new = reason != self.error
        self.error, self.failed_us = reason, self.failed_us or now_us
        if is_new:
            self._cache.write_error(self.source, reason, self.failed_us)
            self._notify()

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


def _refresh_forever(watching: weakref.ref[ListWatcher], stop: threading.Event) -> None:
    while True:
        watch = watching()
        if watch is None or stop.is_set():
            return
        try:
            watch.refresh_if_due()
        except Exception:  # a bug must not end the thread: the next version may be valid
            logger.exception("list %s could not be refreshed; version %s stays", watch.source.name, watch.version)
        del watch
        if stop.wait(TICK_S):
            return


class NetworkLists:
    """The lists of a policy; lists that a new policy does not change are kept."""

    def __init__(
        self,
        on_change: Callable[[ListWatcher], Any] | None = None,
        *,
        cache: ListCache | None = None,
        in_background: bool = True,
    ) -> None:
        """`on_change` is called, perhaps by several threads, when a list has another version or another error."""
        self._on_change = on_change
        self._cache = cache or ListCache()
        self._in_background = in_background
        self._watchers: dict[str, ListWatcher] = {}
        reinit_after_fork(self)

    def configure(self, sources: Sequence[ListSource]) -> None:
        """Use these lists from now on. New ones are read from disk here, and from their sources in the background."""
        before, watchers = self._watchers, dict[str, ListWatcher]()
        for source in sources:
            kept = before.get(source.name)
            if kept is not None and kept.source == source:
                watchers[source.name] = kept
                continue
            watchers[source.name] = ListWatcher(source, self._cache, self._on_change)
        self._watchers = watchers
        for name, each in watchers.items():
            if before.get(name) is not each and self._in_background:
                each.start()
        for name, each in before.items():
            if watchers.get(name) is not each:
                each.close()

    def find(self, address: str) -> list[str]:
        packed = pack(address) if len(address) <= MAX_ADDRESS_LENGTH else None
        if packed is None:
            return []
        packed = unwrap_nat64(packed)
        return [name for name, each in self._watchers.items() if each.contains_packed(packed)]

    def describe(self, name: str) -> str:
        watcher = self._watchers.get(name)
        current = None if watcher is None else watcher.current
        if current is None:
            return name
        since = datetime.fromtimestamp(current.changed_us // 1_000_000, UTC)
        return f"{name} (version {current.version} since {since:%Y-%m-%d %H:%M} UTC)"

    @property
    def watchers(self) -> Iterable[ListWatcher]:
        return self._watchers.values()

    @property
    def status(self) -> list[ListStatus]:
        return [each.status for each in self._watchers.values()]

    def close(self) -> None:
        for each in self._watchers.values():
            each.close()

    def reset_after_fork(self) -> None:
        """Start the threads in the child process."""
        if self._in_background:
            for each in self._watchers.values():
                each.restart()


def stored_lists(policy: Policy) -> NetworkLists | None:
    """The lists of a policy as they are on disk, without refreshing them; None if the policy has none."""
    if not policy.lists:
        return None
    lists = NetworkLists(in_background=False)
    lists.configure(policy.lists)
    for each in lists.watchers:
        each.restore_error()
        if not each.source.is_url:
            each.refresh()
    return lists


def _now_us() -> int:
    return time.time_ns() // 1000
