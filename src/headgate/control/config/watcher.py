"""Takes the policy of a gate from the config store: changes arrive within a second, and the last good one stays."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

from headgate._fork import at_work, reinit_after_fork
from headgate._pace import politely, release
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
"""Seconds after which the store is asked, whatever was or was not heard."""

Made = TypeVar("Made")


class ConfigSource:
    """The config store at a URL, as the policy of a gate: `Headgate(app, ConfigFeed("postgresql://..."))`.

    `cache` is a file in which the node keeps a copy of what it runs on. With it, a node starts while the store is down.
    """

    def __init__(self, url: str, *, cache: str | PathLike[str] | None = None) -> None:
        self._url = url
        self._cache = cache
        # A URL that cannot be read is reported where it is written.
        self.name = display_url(open_engine(url, create=False))

    def follow(self, make: Callable[[Policy], Made], *, every: float | None = POLL_INTERVAL_S) -> ConfigWatcher[Made]:
        """The newest good version, made ready by `make`; never looked for by itself, if `every` is None."""
        return ConfigWatcher(self._url, make, cache=self._cache, every=every)


class _InForce(NamedTuple):
    """What is in force. Replaced as a whole, so that a child that is forked at any moment finds one."""

    stamp: VersionStamp
    assembly: PolicyAssembly


class ConfigWatcher(Generic[Made]):
    """The newest good version of a config store, made ready by `make`; it has the face of a watched file."""

    def __init__(
        self,
        url: str,
        make: Callable[[Policy], Made],
        *,
        cache: str | PathLike[str] | None = None,
        every: float | None = POLL_INTERVAL_S,
    ) -> None:
        """Listens from a thread of its own, and asks the store `every` so many seconds at least, at most 60."""
        self._url = url
        self._make = make
        self._copy = None if cache is None else DiskCache(cache)
        self._is_watching = every is not None
        self._engine: Engine = open_engine(url, create=False)
        self.name = display_url(self._engine)
        self._lock = threading.Lock()
        self.error: HeadgateError | None = None
        """Why the newest version is not in force, or is not known; None if it is."""
        self.source: Literal["store", "copy"] = "store"
        """Where what is in force was read."""
        self.seen_us = 0
        """When the store was last known to have nothing newer."""
        self._unkept: ConfigContents | ConfigChanges | None = None
        """What the copy on disk lacks: to write it takes longer than a gate wants to wait for its first request."""
        self._state: _InForce
        self.current: Made
        self._begin()
        self._looked_at = self._state.stamp
        if not self._is_watching:
            self._keep()
        self._stop = threading.Event()
        self._start()
        reinit_after_fork(self)

    @property
    def version(self) -> str:
        return str(self._state.stamp.version)

    @property
    def age(self) -> float:
        """Seconds since the store was known to have nothing newer."""
        return max(0.0, (time.time_ns() // 1000 - self.seen_us) / 1_000_000)

    def look(self) -> bool:
        """Ask the store now; whether a new version is in force."""
        with self._lock:
            self._keep()
            try:
                found = self._newer()
                self._in_touch()
                if found is None:
                    self._restore_copy()
            except ConfigUnavailable as error:
                self._out_of_touch(error)
                return False
            if found is None:
                return False
            self._looked_at = found.stamp
            try:
                self._put_in_force(found)
            except InvalidInput as error:
                refused = found.stamp.version
                logger.error(
                    "%s: version %d is refused, %s stays in force:\n%s", self.name, refused, self.version, error
                )
                self.error = error
                return False
            logger.info("%s: version %s is in force: %s", self.name, self.version, _summary(found))
            self._keep()
            return True

    def is_current(self) -> None:
        """Whoever waits for news says that there is nothing newer than what was looked at last."""
        with self._lock:
            if not isinstance(self.error, ConfigUnavailable):  # then nothing was looked at
                self.seen_us = time.time_ns() // 1000

    def close(self) -> None:
        """Follow no more."""
        self._stop.set()

    def reset_after_fork(self) -> None:
        """Threads, locks and connections stay with the parent; a child follows by itself."""
        self._lock = threading.Lock()
        self._engine = open_engine(self._url, create=False)
        stopped = self._stop.is_set()
        self._stop = threading.Event()
        if stopped:
            self._stop.set()
        else:
            self._start()

    # ------------------------------------------------------------------ within

    def _begin(self) -> None:
        """From the store; or from the copy, if the store cannot be asked, or has what this node cannot read."""
        found: ConfigContents | None = None
        try:
            with read_transaction(self._engine) as connection:
                found = read_contents(connection, newest_stamp(connection))
            self._put_in_force(found)
            self.seen_us = time.time_ns() // 1000
        except (ConfigUnavailable, InvalidInput) as error:
            kept = self._kept()
            if kept is None:
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
            self.error, self.source, self.seen_us = error, "copy", self._copy.seen_us if self._copy else 0
            with politely():
                assembly = PolicyAssembly(kept.frame, kept.rows)
                self.current = self._make(assembly.policy)
            self._state = _InForce(kept.stamp, assembly)
            logger.error(
                "%s\nrunning on version %s of %s ago, out of the copy on disk", error, self.version, self._old()
            )

    def _kept(self) -> ConfigContents | None:
        try:
            return None if self._copy is None else self._copy.read()
        except ConfigUnavailable as error:
            logger.error("the copy on disk cannot be read: %s", error)
            return None

    def _newer(self) -> ConfigContents | ConfigChanges | None:
        """What is to be put in force; None if the newest version has been looked at."""
        with read_transaction(self._engine) as connection:
            newest = newest_stamp(connection)
            if newest == self._looked_at:
                return None
            with politely():
                # A store that was set back, as from a backup, has another past: there is only all of it to take.
                found = read_changes(connection, self._state.stamp, newest)
                return read_contents(connection, newest) if found is None or found.touch_frame else found

    def _put_in_force(self, found: ConfigContents | ConfigChanges) -> None:
        before = getattr(self, "_state", None)
        with politely():
            if isinstance(found, ConfigContents):
                assembly = PolicyAssembly(found.frame, found.rows)
            else:
                assembly = self._state.assembly.changed(found.rows)
            self.current = self._make(assembly.policy)
            self._state = _InForce(found.stamp, assembly)
            self.error, self.source = None, "store"
            self._unkept = found
            if isinstance(found, ConfigContents) and before is not None:
                before.assembly.release()

    def _keep(self) -> None:
        """Bring the copy on disk up to date, if there is one."""
        found, self._unkept = self._unkept, None
        if found is None:
            return
        with politely():
            try:
                if self._copy is not None and not self._copy.keep(found):
                    with read_transaction(self._engine) as connection:
                        self._copy.keep(read_contents(connection, found.stamp))
            except (ConfigUnavailable, OSError) as error:
                logger.error("version %s is in force, but not kept on disk: %s", self.version, error)
            for rows in found.rows.values():
                release(rows)

    def _in_touch(self) -> None:
        self.seen_us = time.time_ns() // 1000
        if isinstance(self.error, ConfigUnavailable):
            self.error, self.source = None, "store"
            logger.warning("%s answers again; version %s is in force", self.name, self.version)

    def _restore_copy(self) -> None:
        """Note in the copy on disk that it is current. Write it again if it was deleted meanwhile."""
        if self._copy is None or self._looked_at != self._state.stamp or self._copy.touch():
            return
        logger.warning("the copy on disk is missing; writing it again")
        with read_transaction(self._engine) as connection:
            self._unkept = read_contents(connection, self._state.stamp)
        self._keep()

    def _out_of_touch(self, error: ConfigUnavailable) -> None:
        if not isinstance(self.error, ConfigUnavailable):  # told once, however often it is asked
            logger.error("%s\nversion %s stays in force, %s old", error, self.version, self._old())
        self.error = error

    def _old(self) -> str:
        return str(timedelta(seconds=round(self.age)))

    def _start(self) -> None:
        if self._is_watching:
            arguments = weakref.ref(self), self._stop, open_engine(self._url, create=False)
            threading.Thread(
                target=_follow_forever, args=arguments, name=f"headgate-config {self.name}", daemon=True
            ).start()


def _follow_forever(following: weakref.ref[ConfigWatcher[Any]], stop: threading.Event, engine: Engine) -> None:
    """Until it is closed, or forgotten with what it was made for."""
    news = open_notifications(engine)

    def wanted(seconds: float) -> bool:
        return not stop.wait(seconds) and following() is not None

    def nothing() -> None:
        if (each := following()) is not None:
            each.is_current()

    pause = POLL_INTERVAL_S
    try:
        while wanted(0):
            news.wait(pause, wanted, nothing)
            each = following()
            if each is None or stop.is_set():
                return
            try:
                with at_work():
                    each.look()
            except Exception:  # a bug of ours must not end it: the next version may be read
                logger.exception("%s could not be looked at; version %s stays in force", each.name, each.version)
            # Who could not look has missed what was told meanwhile, and is told of it no more.
            pause = RETRY_INTERVAL_S if isinstance(each.error, ConfigUnavailable) else POLL_INTERVAL_S
            del each
    finally:
        news.close()


def _summary(found: ConfigContents | ConfigChanges) -> str:
    """The number of entries that were read or have changed, by section."""
    counts = ", ".join(f"{section} {len(rows)}" for section, rows in found.rows.items() if rows)
    return (
        f"read anew ({counts or 'nothing'})" if isinstance(found, ConfigContents) else f"changed: {counts or 'nothing'}"
    )
