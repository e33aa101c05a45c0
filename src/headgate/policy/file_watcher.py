"""Watches a policy file: a valid version replaces the previous one, an invalid one is logged and ignored."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from headgate._fork import reinit_after_fork
from headgate._pace import low_priority, release
from headgate.errors import InvalidInput
from headgate.policy.loader import decoded, file_content, read

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from headgate.policy.model import Policy

__all__ = ["PolicyWatcher", "summarize_changes"]

logger = logging.getLogger("headgate")

Made = TypeVar("Made")

_SECTIONS: Final[dict[str, tuple[str, Callable[[Any], object]]]] = {
    "limits": ("rules", lambda rule: rule.name),
    "routes": ("routes", lambda route: (route.template, route.methods)),
    "clients": ("clients", lambda client: client.identity),
    "overrides": ("overrides", lambda each: (each.identity, each.rule, each.route_class, each.validity)),
    "blocks": ("blocked", lambda block: (block.identity, block.validity)),
    "lists": ("lists", lambda each: each.name),
}
"""The sections of a policy: the attribute that holds one, and the part of an entry that identifies it."""

_SETTINGS: Final = ("identity", "answers", "store", "regions", "on_failure", "tiers", "default_tier", "name")


class PolicyWatcher(Generic[Made]):
    """The last valid version of a policy file, converted by `make`. The first version must be valid."""

    def __init__(self, path: str | PathLike[str], make: Callable[[Policy], Made], *, every: float | None = 1.0) -> None:
        """Check the file `every` so many seconds in a thread; None to check only on `look`."""
        self._path = Path(path)
        self._make = make
        self._every = every
        content = file_content(self._path)
        self._seen = self.version = _digest(content)
        """Hashes of the content that was checked last, and of the active content."""
        self._policy = self._read(content)
        self.current = make(self._policy)
        self.error: InvalidInput | None = None
        """The reason why the newest content is not active; None if it is."""
        self._stop = threading.Event()
        self._start()
        reinit_after_fork(self)

    def look(self) -> bool:
        """Check the file now; return True if a new version became active."""
        try:
            content = file_content(self._path)
        except InvalidInput as error:
            self._refuse("", error)
            return False
        seen = _digest(content)
        if seen == self._seen:
            return False
        with low_priority():
            return self._reload(content, seen)

    def _reload(self, content: bytes, seen: str) -> bool:
        try:
            policy = self._read(content)
            made = self._make(policy)
        except InvalidInput as error:
            self._refuse(seen, error)
            return False
        before, self._policy = self._policy, policy
        is_new, was_refused = seen != self.version, self.error is not None
        self.current, self.error = made, None
        self._seen = self.version = seen
        if is_new:
            logger.info("policy %s: version %s is in force: %s", self._path, seen, summarize_changes(before, policy))
        elif was_refused:
            logger.info("policy %s: version %s is in force again", self._path, seen)
        parts = before.parts()
        del before
        release(parts)
        return is_new

    def _refuse(self, seen: str, error: InvalidInput) -> None:
        if seen != self._seen:  # log each version once
            logger.error(
                "policy %s: the new version is refused, %s stays in force:\n%s", self._path, self.version, error
            )
        self._seen, self.error = seen, error

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def reset_after_fork(self) -> None:
        """Start a thread in the child process."""
        stopped = self._stop.is_set()
        self._stop = threading.Event()
        if stopped:
            self._stop.set()
        else:
            self._start()

    def _read(self, content: bytes) -> Policy:
        return read(decoded(content, self._path), file=str(self._path))

    def _start(self) -> None:
        if self._every is not None:
            arguments = weakref.ref(self), self._stop, self._every
            name = f"headgate-policy {self._path}"
            threading.Thread(target=_look_forever, args=arguments, name=name, daemon=True).start()


def _look_forever(watching: weakref.ref[PolicyWatcher[Any]], stop: threading.Event, every: float) -> None:
    """Check the file until the watcher is closed or garbage collected."""
    while not stop.wait(every):
        watch = watching()
        if watch is None:
            return
        try:
            watch.look()
        except Exception:  # a bug must not end the thread: the next version may be valid
            logger.exception("a policy could not be looked at; version %s stays in force", watch.version)
        del watch


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def summarize_changes(before: Policy, after: Policy) -> str:
    """The number of entries that differ, by section.

    >>> from headgate.policy import read
    >>> old = read("limits: [{name: a, by: ip, bucket: 5/minute}, {name: b, by: ip, bucket: 9/day}]")
    >>> new = read("{on_failure: closed, limits: [{name: a, by: ip, bucket: 6/minute}]}")
    >>> summarize_changes(old, new)
    'limits: 1 changed, 1 removed; settings: on_failure'
    >>> summarize_changes(old, old)
    'no entry changed'
    """
    found = []
    for section, (attribute, key) in _SECTIONS.items():
        old = {key(entry): entry for entry in getattr(before, attribute)}
        new = {key(entry): entry for entry in getattr(after, attribute)}
        counts = {
            "changed": sum(entry in new and new[entry] != old[entry] for entry in old),
            "added": len(new.keys() - old.keys()),
            "removed": len(old.keys() - new.keys()),
        }
        message = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if message:
            found.append(f"{section}: {message}")
    settings = [name for name in _SETTINGS if getattr(before, name) != getattr(after, name)]
    if settings:
        found.append(f"settings: {', '.join(settings)}")
    return "; ".join(found) or "no entry changed"
