"""How a change is signed: a reason that can be kept, one writer at a time, no API key in what is said of it, and
written as it was judged."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from headgate.control.config.writing import ConcurrentChange
from headgate.control.service import guardrails
from headgate.control.service.models import Change
from headgate.control.service.redaction import LOOKS_SECRET, discreetly, looks_secret
from headgate.errors import InvalidInput
from headgate.policy import scalars

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from headgate.control.config.history import Version
    from headgate.control.config.store import ConfigStore
    from headgate.control.service.client_lookup import ClientLookup
    from headgate.control.service.errors import Risk
    from headgate.control.service.models import Actor, ClientRef

__all__ = ["checked_reason", "done", "in_the_past", "judged", "signed", "told_of"]

LOOKS: Final = 5
"""So often a change is looked at while others write, before that is said to be a conflict."""
LONGEST_REASON: Final = 500
LONGEST_NAME: Final = 200


@contextmanager
def signed(
    finder: ClientLookup, lock: threading.Lock, actor: Actor, reason: str, texts: Sequence[str | None]
) -> Iterator[dict[str, str]]:
    """While somebody writes: author and reason, as the config store takes them."""
    by = {"author": _checked_name(actor.name), "reason": checked_reason(reason)}
    finder.refuse_known_keys(reason, *texts)
    if any(looks_secret(text) for text in (reason, *texts) if text):
        raise InvalidInput(LOOKS_SECRET)
    with discreetly(*texts), lock:
        yield by


def checked_reason(reason: str) -> str:
    """InvalidInput, if there is none, or one that cannot be kept."""
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidInput("give a reason: whoever reads this later wants to know why")
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        raise InvalidInput(f"a reason is one line of up to {LONGEST_REASON} characters that can be printed")
    return reason


def in_the_past(until: datetime | None, now_us: int) -> None:
    """InvalidInput for an end that has been."""
    if until is not None and scalars.instant(until) <= datetime.fromtimestamp(now_us / 1_000_000, UTC):
        raise InvalidInput(f"{until.isoformat()} is over already; give a time to come, or none")


def judged(
    config: ConfigStore,
    judge: Callable[[], Iterable[Risk]],
    confirm: Collection[str],
    write: Callable[[ConfigStore], Version | None],
) -> Change:
    """What came of a change that is harmless, or confirmed. If somebody writes between the look and the write, also at
    another admin server, it is looked at again: what was confirmed is what happens."""
    looks = LOOKS
    while True:
        looks -= 1
        store = config.expecting(config.version)  # before the look: what comes after it is noticed
        guardrails.confirmed(judge(), confirm)
        try:
            return done(write(store))
        except ConcurrentChange:
            if not looks:
                raise


def done(version: Version | None, *notes: str) -> Change:
    """What came of it."""
    if version is None:
        return Change(None, ("Nothing to change: it was already set.", *notes), "nothing to change")
    return Change(version, notes, version.what)


def told_of(who: ClientRef) -> tuple[str, ...]:
    """What is said of somebody, but an API key, which is hashed."""
    return () if who[0] == "api_key" else (str(who[1]),)


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise InvalidInput(f"whoever does something has a name of up to {LONGEST_NAME} characters")
    return name
