"""The config store as the policy source of a gate: changes apply within a second, and the last valid policy stays."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import weakref
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from sqlalchemy.exc import DBAPIError

from headgate._fork import block_forks, reinit_after_fork
from headgate._node import node_name
from headgate._pace import low_priority, release
from headgate.control.config import ConfigUnavailable
from headgate.control.config.canary import CanaryPart
from headgate.control.config.compose import PolicyAssembly
from headgate.control.config.disk_cache import DiskCache
from headgate.control.config.engine import NOTIFY_CHANNEL, ConfigMissing, display_url, open_engine, read_transaction
from headgate.control.config.isolation import changed_counters, isolate
from headgate.control.config.reading import ConfigRows, VersionStamp, newest_stamp, read_changes, read_contents
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from os import PathLike

    from sqlalchemy import Connection, Engine

    from headgate.policy.model import Policy

__all__ = ["ConfigSource", "ConfigWatcher"]

logger = logging.getLogger("headgate")

POLL_INTERVAL_S: Final = 60.0  # interval at which the store is checked without a notification
SQLITE_POLL_INTERVAL_S: Final = 0.2  # polling reads the change counter of the file, which takes microseconds
STOP_CHECK_INTERVAL_S: Final = 0.5  # interval at which a waiting thread checks whether it should stop
RETRY_INTERVAL_S: Final = 1.0  # pause after a failed attempt
VERSION_CHECK_INTERVAL_S: Final = 5.0
"""Interval of queries while listening: a dead connection sends no notifications either."""

MAX_ERROR_LENGTH: Final = 500

Made = TypeVar("Made")


class ConfigSource:
    """A config store as the policy source of a gate: `HeadgateMiddleware(app, ConfigSource("postgresql://..."))`.

    `cache` is a file for a local copy of the configuration, with which a node can start while the store is down. `node`
    is the name by which a canary selects this node (default: HEADGATE_NODE, else the
    host name).
    """

    def __init__(self, url: str, *, cache: str | PathLike[str] | None = None, node: str | None = None) -> None:
        self._url = url
        self._cache = cache
        self._node = node
        self.name = display_url(open_engine(url, create=False))  # raises for an invalid URL

    def follow(self, make: Callable[[Policy], Made], *, every: float | None = POLL_INTERVAL_S) -> ConfigWatcher[Made]:
        """A watcher of the newest valid version, converted by `make`. With `every=None` it does not watch by itself."""
        return ConfigWatcher(self._url, make, cache=self._cache, node=self._node, every=every)


class _InForce(NamedTuple):
    """The version in force, replaced as a whole so that a fork always sees a consistent one."""

    stamp: VersionStamp
    assembly: PolicyAssembly
    part: CanaryPart | None
    """None while no canary is running."""
    isolated: frozenset[str] = frozenset()
    """Limits with counters of their own, on a node that applies a candidate."""


class _CandidateInvalid(Exception):
    """The candidate that this node applies became invalid by a change of other rows."""


class ConfigWatcher(Generic[Made]):
    """Follows the newest valid version of a config store, like a policy `FileWatcher`."""

    def __init__(
        self,
        url: str,
        make: Callable[[Policy], Made],
        *,
        cache: str | PathLike[str] | None = None,
        node: str | None = None,
        every: float | None = POLL_INTERVAL_S,
    ) -> None:
        """Start watching in a background thread, unless `every` is None."""
        self._url, self._make = url, make
        self._node = node_name(node)
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
        self._uncached: ConfigRows | None = None
        """Applied but not yet in the cache: writing takes longer than a gate should wait for its first request."""
        self._invalid_candidate: tuple[str, str] | None = None
        """The canary whose candidate this node cannot apply, and the reason."""
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
    def canary(self) -> CanaryPart | None:
        """The part of this node in the running canary; None while there is none."""
        return self._state.part

    @property
    def age(self) -> float:
        """Seconds since the store was known to have nothing newer."""
        return max(0.0, (time.time_ns() // 1000 - self.checked_us) / 1_000_000)

    @property
    def _age(self) -> timedelta:
        return timedelta(seconds=round(self.age))

    def look(self) -> bool:
        """Check the store now. Returns True if a new version is in force."""
        with self._lock:
            self._update_cache()
            try:
                found = self._read_newer()
                self.checked_us = time.time_ns() // 1000
                if isinstance(self.error, ConfigUnavailable):
                    self.error, self.source = None, "store"
                    logger.warning("%s is available again; version %s is in force", self.name, self.version)
                if found is None:
                    self._touch_cache()
                    return False
            except ConfigUnavailable as error:
                if not isinstance(self.error, ConfigUnavailable):  # log only once
                    logger.error("%s\nversion %s stays in force, %s old", error, self.version, self._age)
                self.error = error
                return False
            self._checked = found.stamp
            try:
                try:
                    self._apply(found)
                except _CandidateInvalid:
                    with read_transaction(self._engine) as connection:
                        found = read_contents(connection, found.stamp)
                    self._apply(found)
            except InvalidInput as error:
                versions = found.stamp.version, self.version
                logger.error("%s: version %d is invalid, %s stays in force:\n%s", self.name, *versions, error)
                self.error = error
                return False
            role = "" if self.canary is None else f" as a {self.canary.role} node of a canary"
            logger.info("%s: version %s is in force%s: %s", self.name, self.version, role, _summary(found))
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
        stopped, self._stop = self._stop.is_set(), threading.Event()
        if stopped:
            self._stop.set()
        else:
            self._start()

    def _load(self) -> None:
        """Load from the store, or from the cache if the store is unavailable or its newest version is invalid."""
        found: ConfigRows | None = None
        try:
            with read_transaction(self._engine) as connection:
                found = read_contents(connection, newest_stamp(connection))
            self._apply(found)
            self.checked_us = time.time_ns() // 1000
        except (ConfigUnavailable, InvalidInput) as error:
            cached = None
            try:
                cached = None if self._cache is None else self._cache.read()
            except ConfigUnavailable as unreadable:
                logger.error("the local cache cannot be read: %s", unreadable)
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
            self._apply(cached)
            self._uncached = None
            self.error, self.source, self.checked_us = error, "copy", self._cache.checked_us if self._cache else 0
            logger.error("%s\nrunning on version %s from the local cache, %s old", error, self.version, self._age)

    def _read_newer(self) -> ConfigRows | None:
        """The version to apply; None if the newest one has been checked."""
        with read_transaction(self._engine) as connection:
            newest = newest_stamp(connection)
            if newest == self._checked:
                return None
            with low_priority():
                # A store restored from a backup has another history: read everything.
                found = read_changes(connection, self._state.stamp, newest)
                is_partial = found is not None and not found.affects_template and not self._changes_role(found)
                return found if is_partial else read_contents(connection, newest)

    def _changes_role(self, found: ConfigRows) -> bool:
        """True if a canary has started or ended that includes this node."""
        part, canary = self._state.part, found.running_canary
        is_candidate = part is not None and part.role == "candidate"
        return bool(found.rows["canaries"]) and (is_candidate or (canary is not None and canary.includes(self._node)))

    def _apply(self, found: ConfigRows) -> None:
        before: Any = getattr(self, "_state", None)
        with low_priority():
            is_whole = before is None or found.since is None
            self._state = self._assemble(found) if is_whole else self._update(before, found)
            self.error, self.source = None, "store"
            self._uncached = found
            if is_whole and before is not None:
                before.assembly.release()

    def _update(self, before: _InForce, found: ConfigRows) -> _InForce:
        """Activate the version in force with some changed rows."""
        part, canary = before.part, found.running_canary
        if found.rows["canaries"]:  # one that does not include this node: see `_changes_role`
            part = None if canary is None else CanaryPart(canary.canary, "stable")
        after = before._replace(stamp=found.stamp, part=part)
        if not found.affects_lists:
            return after
        try:
            return self._activate(after._replace(assembly=before.assembly.with_changes(found.rows)))
        except Exception as error:
            if part is None or part.role != "candidate":
                raise
            self._reject_candidate(part.canary, error)
            raise _CandidateInvalid from error

    def _assemble(self, found: ConfigRows) -> _InForce:
        """Activate the candidate of a canary that includes this node; otherwise, or if it is invalid here, the policy
        of the other nodes."""
        canary = found.running_canary
        if canary is None:
            return self._activate(_InForce(found.stamp, PolicyAssembly(found), None))
        if canary.includes(self._node) and (self._invalid_candidate or ("", ""))[0] != canary.canary:
            try:
                template = found.candidate_template(canary)
                isolated = changed_counters(found.template.compose({}), template.compose({}))
                part = CanaryPart(canary.canary, "candidate")
                return self._activate(_InForce(found.stamp, PolicyAssembly(found, template), part, isolated))
            except Exception as error:  # whatever is wrong with it, the other policy is known to work
                self._reject_candidate(canary.canary, error)
        invalid, reason = self._invalid_candidate or ("", "")
        part = CanaryPart(canary.canary, "stable", reason if invalid == canary.canary else None)
        return self._activate(_InForce(found.stamp, PolicyAssembly(found), part))

    def _activate(self, state: _InForce) -> _InForce:
        self.current = self._make(isolate(state.assembly.policy, state.isolated))
        return state

    def _reject_candidate(self, canary: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"
        logger.error("%s: this node cannot apply the candidate of the canary:\n%s", self.name, reason)
        self._invalid_candidate = canary, reason[:MAX_ERROR_LENGTH]

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

    def _touch_cache(self) -> None:
        """Record in the cache that it is current; write it again if it was deleted."""
        if self._cache is None or self._checked != self._state.stamp or self._cache.touch():
            return
        logger.warning("the local cache is missing; writing it again")
        with read_transaction(self._engine) as connection:
            self._uncached = read_contents(connection, self._state.stamp)
        self._update_cache()

    def _start(self) -> None:
        if self._is_watching:
            arguments = weakref.ref(self), self._stop, open_engine(self._url, create=False)
            name = f"headgate-config {self.name}"
            threading.Thread(target=_watch_forever, args=arguments, name=name, daemon=True).start()


def _watch_forever(watcher: weakref.ref[ConfigWatcher[Any]], stop: threading.Event, engine: Engine) -> None:
    """Run until the watcher is closed or garbage-collected."""
    timeout_s = POLL_INTERVAL_S

    def pause(seconds: float) -> bool:
        return not stop.wait(seconds) and watcher() is not None

    def mark_current() -> None:
        if (each := watcher()) is not None:
            each.mark_current()

    wait = _listen_on_postgresql if engine.dialect.name == "postgresql" else _poll_sqlite
    with closing(wait(engine, lambda: timeout_s, pause, mark_current)) as changes:
        for _ in changes:
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


# The following generators yield whenever the caller has to check for a new version, at the latest after `timeout()`
# seconds. `pause` waits so many seconds and returns False to stop: the caller then has to close the generator.
# `on_unchanged` is called whenever the store is known to have nothing new.


def _listen_on_postgresql(
    engine: Engine, timeout: Callable[[], float], pause: Callable[[float], bool], on_unchanged: Callable[[], None]
) -> Generator[None, None, None]:
    errors: Any = engine.dialect.dbapi
    while True:
        connection: Connection | None = None
        retry_s = min(timeout(), RETRY_INTERVAL_S)
        try:
            connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql(f"LISTEN {NOTIFY_CHANNEL}")
            driver: Any = connection.connection.driver_connection
            newest, retry_s = _read_stamp(connection), 0.0
            yield  # versions written before LISTEN send no notification
            while True:
                began = checked = time.monotonic()
                while time.monotonic() < began + timeout() and pause(0):
                    is_notified = bool(list(driver.notifies(timeout=STOP_CHECK_INTERVAL_S, stop_after=1)))
                    if is_notified or time.monotonic() >= checked + VERSION_CHECK_INTERVAL_S:
                        before, newest = newest, _read_stamp(connection)
                        if is_notified or newest != before:
                            break
                        checked = time.monotonic()
                        on_unchanged()
                yield
        except (errors.Error, DBAPIError, ConfigUnavailable):
            pause(retry_s)
            yield
        finally:
            if connection is not None:
                connection.invalidate()
                connection.close()


def _read_stamp(connection: Connection) -> VersionStamp:
    with block_forks():
        return newest_stamp(connection)


def _poll_sqlite(
    engine: Engine, timeout: Callable[[], float], pause: Callable[[float], bool], on_unchanged: Callable[[], None]
) -> Generator[None, None, None]:
    file = str(engine.url.database)
    while True:
        connection: sqlite3.Connection | None = None
        try:
            with block_forks():
                connection = sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, timeout=RETRY_INTERVAL_S)
            counter = _read_counter(connection, file)
            yield  # earlier changes are not counted
            end = time.monotonic() + timeout()
            while time.monotonic() < end and pause(SQLITE_POLL_INTERVAL_S):
                if (now := _read_counter(connection, file)) == counter:
                    on_unchanged()
                else:
                    counter = now
                    yield
                    end = time.monotonic() + timeout()
        except (sqlite3.Error, OSError):
            pause(min(timeout(), RETRY_INTERVAL_S))
            yield
        finally:
            if connection is not None:
                with block_forks():
                    connection.close()


def _read_counter(connection: sqlite3.Connection, file: str) -> tuple[int, ...]:
    """A value that changes with every commit, and when the file is replaced, as by a restored backup."""
    with block_forks():
        changes, found = int(connection.execute("PRAGMA data_version").fetchone()[0]), os.stat(file)
        return changes, found.st_dev, found.st_ino


def _summary(found: ConfigRows) -> str:
    """The number of rows read or changed, by section."""
    counts = ", ".join(f"{section} {len(rows)}" for section, rows in found.rows.items() if rows)
    return f"reloaded ({counts or 'empty'})" if found.since is None else f"changed: {counts or 'nothing'}"
