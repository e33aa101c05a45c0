"""The config store as the policy source of a gate: changes apply within a second, and the last valid policy stays."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from headgate._fork import block_forks, reinit_after_fork
from headgate._pace import low_priority, release
from headgate.control.config import ConfigUnavailable
from headgate.control.config.compose import PolicyAssembly
from headgate.control.config.disk_cache import DiskCache
from headgate.control.config.engine import ConfigMissing, display_url, open_engine, read_transaction
from headgate.control.config.notifications import RETRY_INTERVAL_S, open_notifications
from headgate.control.config.reading import (
    ConfigChanges,
    ConfigContents,
    VersionStamp,
    newest_stamp,
    read_changes,
    read_contents,
)
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from sqlalchemy import Engine

    from headgate.policy.model import Policy

__all__ = ["ConfigSource", "ConfigWatcher"]

logger = logging.getLogger("headgate")

POLL_INTERVAL_S: Final = 60.0
"""Interval at which the store is checked without a notification."""

Made = TypeVar("Made")


class ConfigSource:
    """A config store as the policy source of a gate: `HeadgateMiddleware(app, ConfigSource("postgresql://..."))`.

    `cache` is a file for a local copy of the configuration, with which a node can start while the store is down.
    """

    def __init__(self, url: str, *, cache: str | PathLike[str] | None = None) -> None:
        self._url = url
        self._cache = cache
        self.name = display_url(open_engine(url, create=False))  # raises for an invalid URL

    def follow(self, make: Callable[[Policy], Made], *, every: float | None = POLL_INTERVAL_S) -> ConfigWatcher[Made]:
        """A watcher of the newest valid version, converted by `make`. With `every=None` it does not watch by itself."""
        return ConfigWatcher(self._url, make, cache=self._cache, every=every)


class _InForce(NamedTuple):
    """The version in force, replaced as a whole so that a fork always sees a consistent one."""

    stamp: VersionStamp
    assembly: PolicyAssembly


class ConfigWatcher(Generic[Made]):
    """Follows the newest valid version of a config store, like a policy `FileWatcher`."""

    def __init__(
        self,
        url: str,
        make: Callable[[Policy], Made],
        *,
        cache: str | PathLike[str] | None = None,
        every: float | None = POLL_INTERVAL_S,
    ) -> None:
        """Start watching in a background thread, unless `every` is None."""
        self._url = url
        self._make = make
        self._cache = None if cache is None else DiskCache(cache)
        self._is_watching = every is not None
        self._engine: Engine = open_engine(url, create=False)
        self.name = display_url(self._engine)
        self._lock = threading.Lock()
        self.error: HeadgateError | None = None
        """Why the newest version is unknown or not in force; None if it is in force."""
        self.source: Literal["store", "copy"] = "store"
        """Where the version in force was read from."""
        self.checked_us = 0
        """When the store was last known to have nothing newer."""
        self._uncached: ConfigContents | ConfigChanges | None = None
        """Applied but not yet in the cache: writing takes longer than a gate should wait for its first request."""
        self._state: _InForce
        self.current: Made
        self._load()
        self._checked = self._state.stamp
        if not self._is_watching:
            self._update_cache()
        self._stop = threading.Event()
        self._start()
        reinit_after_fork(self)

    @property
    def version(self) -> str:
        return str(self._state.stamp.version)

    @property
    def age(self) -> float:
        """Seconds since the store was known to have nothing newer."""
        return max(0.0, (time.time_ns() // 1000 - self.checked_us) / 1_000_000)

    def look(self) -> bool:
        """Check the store now. Returns True if a new version is in force."""
        with self._lock:
            self._update_cache()
            try:
                found = self._read_newer()
                self._on_available()
                if found is None:
                    self._touch_cache()
            except ConfigUnavailable as error:
                self._on_unavailable(error)
                return False
            if found is None:
                return False
            self._checked = found.stamp
            try:
                self._apply(found)
            except InvalidInput as error:
                rejected = found.stamp.version
                logger.error(
                    "%s: version %d is invalid, %s stays in force:\n%s", self.name, rejected, self.version, error
                )
                self.error = error
                return False
            logger.info("%s: version %s is in force: %s", self.name, self.version, _summary(found))
            self._update_cache()
            return True

    def mark_current(self) -> None:
        """Record that the store has nothing newer than what was checked last."""
        with self._lock:
            if not isinstance(self.error, ConfigUnavailable):  # otherwise nothing was read
                self.checked_us = time.time_ns() // 1000

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def reset_after_fork(self) -> None:
        """Start over in the child, without the threads, locks and connections of the parent."""
        self._lock = threading.Lock()
        self._engine = open_engine(self._url, create=False)
        stopped = self._stop.is_set()
        self._stop = threading.Event()
        if stopped:
            self._stop.set()
        else:
            self._start()

    # ------------------------------------------------------------------ internals

    def _load(self) -> None:
        """Load from the store, or from the cache if the store is unavailable or its newest version is invalid."""
        found: ConfigContents | None = None
        try:
            with read_transaction(self._engine) as connection:
                found = read_contents(connection, newest_stamp(connection))
            self._apply(found)
            self.checked_us = time.time_ns() // 1000
        except (ConfigUnavailable, InvalidInput) as error:
            cached = self._read_cache()
            if cached is None:
                if found is not None and not found.stamp.version:
                    raise InvalidConfiguration(
                        f"{self.name} has no policy yet: save one with `headgate policy put FILE`, or give the app a "
                        "policy file and control=, which saves it as the first version"
                    ) from None
                if isinstance(error, ConfigMissing):
                    raise ConfigMissing(
                        f"{error}; start `headgate admin --config {self.name}` first, which creates it, or give the "
                        "app a policy file and control=, which creates it with that policy"
                    ) from None
                raise
            self.error, self.source, self.checked_us = error, "copy", self._cache.checked_us if self._cache else 0
            with low_priority():
                assembly = PolicyAssembly(cached.template, cached.rows)
                self.current = self._make(assembly.policy)
            self._state = _InForce(cached.stamp, assembly)
            logger.error(
                "%s\nrunning on version %s from the local cache, %s old", error, self.version, self._age_text()
            )

    def _read_cache(self) -> ConfigContents | None:
        try:
            return None if self._cache is None else self._cache.read()
        except ConfigUnavailable as error:
            logger.error("the local cache cannot be read: %s", error)
            return None

    def _read_newer(self) -> ConfigContents | ConfigChanges | None:
        """The version to apply; None if the newest one has been checked."""
        with read_transaction(self._engine) as connection:
            newest = newest_stamp(connection)
            if newest == self._checked:
                return None
            with low_priority():
                # A store restored from a backup has another history: read everything.
                found = read_changes(connection, self._state.stamp, newest)
                return read_contents(connection, newest) if found is None or found.affect_template else found

    def _apply(self, found: ConfigContents | ConfigChanges) -> None:
        before = getattr(self, "_state", None)
        with low_priority():
            if isinstance(found, ConfigContents):
                assembly = PolicyAssembly(found.template, found.rows)
            else:
                assembly = self._state.assembly.with_changes(found.rows)
            self.current = self._make(assembly.policy)
            self._state = _InForce(found.stamp, assembly)
            self.error, self.source = None, "store"
            self._uncached = found
            if isinstance(found, ConfigContents) and before is not None:
                before.assembly.release()

    def _update_cache(self) -> None:
        """Write the applied version to the cache, if there is one."""
        found, self._uncached = self._uncached, None
        if found is None:
            return
        with low_priority():
            try:
                if self._cache is not None and not self._cache.update(found):
                    with read_transaction(self._engine) as connection:
                        self._cache.update(read_contents(connection, found.stamp))
            except (ConfigUnavailable, OSError) as error:
                logger.error("version %s is in force, but could not be cached: %s", self.version, error)
            for rows in found.rows.values():
                release(rows)

    def _on_available(self) -> None:
        self.checked_us = time.time_ns() // 1000
        if isinstance(self.error, ConfigUnavailable):
            self.error, self.source = None, "store"
            logger.warning("%s is available again; version %s is in force", self.name, self.version)

    def _touch_cache(self) -> None:
        """Record in the cache that it is current; write it again if it was deleted."""
        if self._cache is None or self._checked != self._state.stamp or self._cache.touch():
            return
        logger.warning("the local cache is missing; writing it again")
        with read_transaction(self._engine) as connection:
            self._uncached = read_contents(connection, self._state.stamp)
        self._update_cache()

    def _on_unavailable(self, error: ConfigUnavailable) -> None:
        if not isinstance(self.error, ConfigUnavailable):  # log only once
            logger.error("%s\nversion %s stays in force, %s old", error, self.version, self._age_text())
        self.error = error

    def _age_text(self) -> str:
        return str(timedelta(seconds=round(self.age)))

    def _start(self) -> None:
        if self._is_watching:
            arguments = weakref.ref(self), self._stop, open_engine(self._url, create=False)
            threading.Thread(
                target=_watch_forever, args=arguments, name=f"headgate-config {self.name}", daemon=True
            ).start()


def _watch_forever(watcher: weakref.ref[ConfigWatcher[Any]], stop: threading.Event, engine: Engine) -> None:
    """Run until the watcher is closed or garbage-collected."""
    notifications = open_notifications(engine)

    def pause(seconds: float) -> bool:
        return not stop.wait(seconds) and watcher() is not None

    def mark_current() -> None:
        if (each := watcher()) is not None:
            each.mark_current()

    timeout_s = POLL_INTERVAL_S
    try:
        while pause(0):
            notifications.wait(timeout_s, pause, mark_current)
            each = watcher()
            if each is None or stop.is_set():
                return
            try:
                with block_forks():
                    each.look()
            except Exception:  # keep watching: the next version may load
                logger.exception("checking %s failed; version %s stays in force", each.name, each.version)
            # Notifications received during a failed check are lost: retry soon.
            timeout_s = RETRY_INTERVAL_S if isinstance(each.error, ConfigUnavailable) else POLL_INTERVAL_S
            del each
    finally:
        notifications.close()


def _summary(found: ConfigContents | ConfigChanges) -> str:
    """The number of rows read or changed, by section."""
    counts = ", ".join(f"{section} {len(rows)}" for section, rows in found.rows.items() if rows)
    return f"reloaded ({counts or 'empty'})" if isinstance(found, ConfigContents) else f"changed: {counts or 'nothing'}"
