"""The steps that all changes share: attribution, guardrails with confirmation, and the audit log."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from headgate.control.config import audit_log
from headgate.control.config.engine import write_transaction
from headgate.control.config.writing import ConcurrentChange
from headgate.control.service import guardrails
from headgate.control.service.models import Change
from headgate.control.service.redaction import LOOKS_SECRET, looks_secret, redact_errors
from headgate.errors import InvalidInput
from headgate.policy import scalars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headgate.control.config.history import Version
    from headgate.control.config.store import ConfigStore
    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import Actor, ChangeContext

__all__ = ["attributed", "audited", "require_future", "to_change", "write_confirmed"]

MAX_ATTEMPTS: Final = 5
"""Attempts at a change while others write, before it fails with a conflict."""
MAX_REASON_LENGTH: Final = 500
MAX_AUTHOR_LENGTH: Final = 200
MAX_ACTION_LENGTH: Final = 100
MAX_SUBJECT_LENGTH: Final = 600


@contextmanager
def attributed(deps: ServiceDependencies, change: ChangeContext, *texts: str | None) -> Iterator[dict[str, Any]]:
    """Hold the write lock, and yield author, reason and base version as keyword arguments of a config store write.

    `texts` are the texts that the change would store. InvalidInput if the author or the reason cannot be stored, or if
    a text contains an API key; errors raised inside the block do not repeat a text that may be one.
    """
    attribution = {
        "author": _check_author(change.actor.name),
        "reason": _check_reason(change.reason),
        "based_on": change.based_on,
    }
    deps.lookup.refuse_known_keys(change.reason, *texts)
    if any(looks_secret(text) for text in (change.reason, *texts) if text):
        raise InvalidInput(LOOKS_SECRET)
    with redact_errors(*texts), deps.write_lock:
        yield attribution


def write_confirmed(
    deps: ServiceDependencies,
    change: ChangeContext,
    find_risks: Callable[[], Iterable[Risk]],
    write: Callable[[ConfigStore], Version | None],
) -> Change:
    """Write a change whose risks are all confirmed; raise NeedsConfirmation otherwise.

    If another process, such as another admin server, writes between the check and the write, the risks are checked
    again, so that the confirmed change is the one that is written.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        store = deps.config.expecting(deps.config.version)  # before the check: later writes are then noticed
        guardrails.require_confirmation(find_risks(), change.confirmed)
        try:
            return to_change(write(store))
        except ConcurrentChange:
            if attempt == MAX_ATTEMPTS:
                raise
    raise AssertionError


def to_change(version: Version | None, *notes: str) -> Change:
    """The result of a write that created this version, or None if it changed nothing."""
    if version is None:
        return Change(None, ("Nothing to change: it was already set.", *notes), "nothing to change")
    return Change(version, notes, version.what)


@contextmanager
def audited(deps: ServiceDependencies, actor: Actor, action: str, subject: str, *, reason: str = "") -> Iterator[None]:
    """Record an action in the audit log if the block succeeds. The block does not run if the log cannot be written."""
    entry = {
        "action": action[:MAX_ACTION_LENGTH],
        "about": subject[:MAX_SUBJECT_LENGTH],
        "author": actor.name[:MAX_AUTHOR_LENGTH],
    }
    if not action or not all(text.isprintable() for text in entry.values()):
        raise InvalidInput("an audit entry must be one line of printable characters")
    reason = _check_reason(reason) if reason else ""
    with write_transaction(deps.config.engine) as connection:
        audit_log.record(connection, at_us=deps.now_us(), reason=reason, **entry)
        yield


def require_future(end: datetime | None, now_us: int) -> None:
    """InvalidInput if the end of a validity is in the past."""
    if end is not None and scalars.instant(end) <= datetime.fromtimestamp(now_us / 1_000_000, UTC):
        raise InvalidInput(f"{end.isoformat()} is in the past; give a future time, or none")


def _check_reason(reason: str) -> str:
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidInput("give a reason; it is shown in the audit log")
    if len(reason) > MAX_REASON_LENGTH or not reason.isprintable():
        raise InvalidInput(f"a reason is one line of up to {MAX_REASON_LENGTH} printable characters")
    return reason


def _check_author(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_AUTHOR_LENGTH or not name.isprintable():
        raise InvalidInput(f"an actor needs a name of up to {MAX_AUTHOR_LENGTH} printable characters")
    return name
