"""Reads the decision log. A log that has not been written yet is reported as empty."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.control.service.errors import LogUnavailable, NotFound, log_and_summarize
from headgate.control.service.models import Slot, Timeline
from headgate.errors import HeadgateError, InvalidInput
from headgate.replay.sources import DecisionRecords
from headgate.telemetry.decision_log.record import DecisionRecord, id_prefix
from headgate.telemetry.decision_log.sinks import REJECTED, InvalidLog, MissingLog, open_reader, without_password
from headgate.telemetry.why.report import ClientQuery, RejectionReport, why

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headgate.policy.model import Policy
    from headgate.replay.suggest import Suggestion, SuggestionRun
    from headgate.telemetry.decision_log.sinks import Reader
    from headgate.telemetry.human_time import Span

__all__ = ["DecisionLogReader"]

MAX_RECENT: Final = 50
MAX_RECORDS: Final = 1000
MAX_SLOTS: Final = 1000
MAX_SPAN_US: Final = 400 * 86_400_000_000
OUTCOMES: Final = ("allowed", "denied", "blocked", "unavailable", "lost", REJECTED)

UNREADABLE: Final = "the decision log cannot be read"
NO_LOG: Final = "no decision log was given to the admin server; start it with --log"


class DecisionLogReader:
    """Reads the log at a URL, or none. Thread-safe: it opens a reader for each query, as SQLite readers belong to one
    thread."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        if url is not None:
            with suppress(LogUnavailable), self._reader():  # raises for an invalid URL; the log may appear later
                pass

    @property
    def trouble(self) -> str | None:
        """The reason why there is nothing to read; None if the log can be read."""
        try:
            with self._reader() as reader:
                return self._trouble(reader)
        except LogUnavailable as error:
            return str(error)

    def why(self, asked: ClientQuery, span: Span, *, policy: Policy | None) -> RejectionReport:
        """A report on the rejected requests of a client."""
        if self._url is None:
            raise NotFound(NO_LOG)
        with self._reader() as reader:
            return why(reader, asked, span, policy=policy)

    def timeline(self, keys: Sequence[str], *, since_us: int, until_us: int, slots: int) -> Timeline:
        """The outcomes of a client's requests in equal time slots, and the newest records."""
        if not 1 <= slots <= MAX_SLOTS:
            raise InvalidInput(f"a timeline has 1 to {MAX_SLOTS} slots, not {slots}")
        if not 0 <= since_us < until_us or until_us - since_us > MAX_SPAN_US or until_us >= 2**53:
            raise InvalidInput("the time must end after it begins, and be no longer than 400 days")
        width_us = -((since_us - until_us) // slots)
        counts = [dict.fromkeys(("allowed", "denied", "blocked", "unavailable", "degraded"), 0.0) for _ in range(slots)]
        recent: list[DecisionRecord] = []
        with self._reader() as reader:
            trouble = self._trouble(reader)
            if keys:
                for each in reader.counts(keys, since_us=since_us, until_us=until_us, width_us=width_us):
                    if each.slot < slots and each.outcome in counts[each.slot]:
                        counts[each.slot][each.outcome] += each.requests
                        counts[each.slot]["degraded"] += each.degraded
                newest = reader.recent(keys, before=id_prefix(until_us), most=MAX_RECENT)
                recent = [record for record in reversed(newest) if record.at_us >= since_us]
        filled = [
            Slot(since_us + index * width_us, **{name: round(number) for name, number in each.items()})
            for index, each in enumerate(counts)
        ]
        return Timeline(since_us, until_us, tuple(filled), tuple(recent), () if trouble is None else (trouble,))

    def decisions(
        self, keys: Sequence[str], *, after: str, before: str, outcome: str | None, most: int
    ) -> list[DecisionRecord]:
        """The newest records, the first ones after an id, or the last ones before one; newest last."""
        if outcome is not None and outcome not in OUTCOMES:
            raise InvalidInput(f"there is no such outcome; known are {', '.join(OUTCOMES)}")
        if not 1 <= most <= MAX_RECORDS:
            raise InvalidInput(f"ask for 1 to {MAX_RECORDS} records, not {most}")
        for name, id in (("after", after), ("before", before)):
            if id and not (id.isascii() and id.isalnum() and len(id) <= 64):
                raise InvalidInput(f"{name} must be the id of a record")
        with self._reader() as reader:
            return reader.recent(keys, after=after, before=before, outcome=outcome, most=most)

    def suggest(self, run: SuggestionRun, *, since_us: int, most: int) -> Suggestion | None:
        """Suggested limits for the newest requests, at most so many; None if there are none since that time."""
        with self._reader() as reader:
            return run.learn(DecisionRecords(reader, since_us, most), run.options.hasher())

    def last(self, *keys: str) -> DecisionRecord | None:
        """The newest record with one of these keys; None if there is none, or if the log cannot be read."""
        with suppress(LogUnavailable), self._reader() as reader:
            if found := reader.recent(keys, most=1):
                return found[-1]
        return None

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        """An open reader, which is empty if there is no log yet."""
        reader: Reader = _EmptyLog()
        try:
            if self._url is not None:
                with suppress(MissingLog):
                    reader = open_reader(self._url)
            yield reader
        except InvalidLog as error:
            raise LogUnavailable(log_and_summarize(UNREADABLE, error)) from None
        except HeadgateError:
            raise
        except Exception as error:  # of SQLite or of the ClickHouse client
            raise LogUnavailable(log_and_summarize(UNREADABLE, error)) from error
        finally:
            reader.close()

    def _trouble(self, reader: Reader) -> str | None:
        if self._url is None:
            return NO_LOG
        is_missing = isinstance(reader, _EmptyLog)
        return f"there is no decision log at {without_password(self._url)} yet" if is_missing else None


class _EmptyLog:
    """A reader without records."""

    def find(self, *_: Any, **__: Any) -> list[Any]:
        return []

    recent = counts = find

    def nearest(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    def close(self) -> None: ...
