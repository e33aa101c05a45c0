"""Reads the decision log, from any thread. A log that nobody has written yet is empty, and that is told."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.control.service.errors import LogUnavailable, NotFound, discreet
from headgate.control.service.models import Slot, Timeline
from headgate.errors import HeadgateError, InvalidConfiguration, InvalidInput
from headgate.telemetry.decision_log.record import id_prefix
from headgate.telemetry.decision_log.sinks import REJECTED, open_reader, without_password
from headgate.telemetry.why.report import why

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.policy.model import Policy
    from headgate.telemetry.decision_log.record import DecisionRecord
    from headgate.telemetry.decision_log.sinks import Reader
    from headgate.telemetry.human_time import Span
    from headgate.telemetry.why.report import ClientQuery, RejectionReport

__all__ = ["DecisionLogReader"]

MOST_RECENT: Final = 50
MOST_RECORDS: Final = 1000
MOST_SLOTS: Final = 1000
LONGEST_US: Final = 400 * 86_400_000_000
OUTCOMES: Final = ("allowed", "denied", "blocked", "unavailable", "lost", REJECTED)

CANNOT_BE_READ: Final = "the decision log cannot be read"
NONE: Final = "no decision log was given to the admin server; start it with --log"


class DecisionLogReader:
    """The log that a URL names, or none. A reader is opened for each question: SQLite's are of one thread."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        if url is not None:
            with suppress(LogUnavailable), self._reader():  # it may be back, or be made at this moment
                pass

    @property
    def trouble(self) -> str | None:
        """Why there is nothing to read."""
        if self._url is None:
            return NONE
        try:
            with self._reader() as reader:
                return None if reader is not None else self._not_yet()
        except LogUnavailable as error:
            return str(error)

    def why(self, asked: ClientQuery, span: Span, *, policy: Policy | None) -> RejectionReport:
        """What became of a client's requests."""
        if self._url is None:
            raise NotFound(NONE)
        with self._reader() as reader:
            return why(reader or _EmptyLog(), asked, span, policy=policy)

    def timeline(self, keys: Sequence[str], *, since_us: int, until_us: int, slots: int) -> Timeline:
        """What became of a client's requests, in equal parts of a time."""
        if not 1 <= slots <= MOST_SLOTS:
            raise InvalidInput(f"a timeline has 1 to {MOST_SLOTS} slots, not {slots}")
        if not 0 <= since_us < until_us or until_us - since_us > LONGEST_US or until_us >= 2**53:
            raise InvalidInput("the time must end after it begins, and be no longer than 400 days")
        width_us = -((since_us - until_us) // slots)
        counts = [dict.fromkeys(("allowed", "denied", "blocked", "unavailable", "degraded"), 0.0) for _ in range(slots)]
        recent: list[DecisionRecord] = []
        troubles: tuple[str, ...] = (NONE,) if self._url is None else ()
        if keys and self._url is not None:
            with self._reader() as reader:
                if reader is None:
                    troubles = (self._not_yet(),)
                else:
                    for each in reader.counts(keys, since_us=since_us, until_us=until_us, width_us=width_us):
                        if each.slot < slots and each.outcome in counts[each.slot]:
                            counts[each.slot][each.outcome] += each.requests
                            counts[each.slot]["degraded"] += each.degraded
                    recent = _newest(reader, keys, since_us, until_us)
        made = [
            Slot(since_us + index * width_us, **{name: round(number) for name, number in each.items()})
            for index, each in enumerate(counts)
        ]
        return Timeline(since_us, until_us, tuple(made), tuple(recent), troubles)

    def decisions(
        self, keys: Sequence[str], *, after: str, before: str, outcome: str | None, most: int
    ) -> list[DecisionRecord]:
        """The newest, or the first after an id, or the last before one; newest last."""
        if outcome is not None and outcome not in OUTCOMES:
            raise InvalidInput(f"there is no such outcome; known are {', '.join(OUTCOMES)}")
        if not 1 <= most <= MOST_RECORDS:
            raise InvalidInput(f"1 to {MOST_RECORDS} records can be asked for, not {most}")
        for name, id, seen in (("after", after, "last"), ("before", before, "first")):
            if id and not (id.isascii() and id.isalnum() and len(id) <= 64):
                raise InvalidInput(f"{name} is no id of a record; give that of the {seen} one that was seen")
        with self._reader() as reader:
            found = (
                None if reader is None else reader.recent(keys, after=after, before=before, outcome=outcome, most=most)
            )
        return found or []

    def last(self, *keys: str) -> DecisionRecord | None:
        """The newest record with one of these keys."""
        with self._reader() as reader:
            found = [] if reader is None else reader.recent(keys, most=1)
        return found[-1] if found else None

    @contextmanager
    def _reader(self) -> Iterator[Reader | None]:
        """None, if there is no log, or not yet."""
        reader: Any = None
        if self._url is not None:
            try:
                reader = open_reader(self._url)
            except InvalidConfiguration as error:
                if "is no decision log" not in str(error):
                    raise  # a URL that means nothing
                if "there is no decision log at" not in str(error):
                    raise LogUnavailable(discreet(CANNOT_BE_READ, error)) from None
        try:
            yield reader
        except HeadgateError:
            raise
        except Exception as error:  # of SQLite, or of ClickHouse's client
            raise LogUnavailable(discreet(CANNOT_BE_READ, error)) from error
        finally:
            if reader is not None:
                reader.close()

    def _not_yet(self) -> str:
        return f"there is no decision log at {without_password(self._url or '')} yet"


class _EmptyLog:
    """A log in which nothing stands."""

    def find(self, *_: Any, **__: Any) -> list[DecisionRecord]:
        return []

    def nearest(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    def recent(self, *_: Any, **__: Any) -> list[DecisionRecord]:
        return []

    def counts(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def close(self) -> None: ...


def _newest(reader: Reader, keys: Sequence[str], since_us: int, until_us: int) -> list[DecisionRecord]:
    """Of that time, the newest first."""
    found = reader.recent(keys, before=id_prefix(until_us), most=MOST_RECENT)
    return [record for record in reversed(found) if record.at_us >= since_us]
