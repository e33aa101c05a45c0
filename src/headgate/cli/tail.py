"""Follow decisions as they are logged.

headgate tail
headgate tail acme --outcome denied
headgate tail --json --lines 1000 --no-follow

exit code: 0 done or Ctrl-C, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

from headgate.cli.admin_client import EXIT_UNREACHABLE, AdminError
from headgate.cli.context import CommandContext, resolve_client
from headgate.cli.options import CLIENT_HELP, SERVER, option
from headgate.cli.terminal import DIM, GREEN, RED, YELLOW, printable
from headgate.errors import InvalidInput
from headgate.telemetry.decision_log.record import DecisionRecord, Outcome, id_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    option("client", metavar="CLIENT", nargs="?", help=f"show only this client: {CLIENT_HELP}"),
    option("--outcome", choices=get_args(Outcome), help="show only these"),
    option("--lines", metavar="N", type=int, default=10, help="start with the last N; default: %(default)s"),
    option("--no-follow", action="store_true", help="print these and exit"),
    *SERVER,
)

STYLES: Final = {"allowed": GREEN, "denied": RED, "blocked": RED, "unavailable": YELLOW, "lost": YELLOW}
POLL_INTERVAL_S: Final = 1.0
PAGE_SIZE: Final = 500
MAX_DELAY_US: Final = 30_000_000
"""Delay after which a record may still appear in the log: nodes write in batches, and retry."""
MAX_REREAD: Final = 2000
"""Records that are read again in each poll, to find late ones."""
FIRST_ID: Final = "0"
MAX_FAILURES: Final = 60
"""Failed polls in a row before the command gives up."""


def run(context: CommandContext) -> int:
    given = context.arguments
    if not 0 <= given.lines <= 10_000:
        raise InvalidInput(f"--lines {given.lines} is out of range; give 0 to 10000")
    query: dict[str, Any] = {"outcome": given.outcome}
    if given.client is not None:
        query |= resolve_client(context, given.client).fields
    with suppress(KeyboardInterrupt):
        _follow(context, query)
    return 0


class LogTail:
    """Yields each new record of the log once, including records that appear after newer ones: every poll reads the
    latest records again and skips known IDs."""

    def __init__(
        self, fetch: Callable[..., Any], shown: list[dict[str, Any]], newest_us: Callable[[], int | None] | None = None
    ) -> None:
        self._fetch = fetch
        self._newest_us = newest_us
        """The time of the newest record of any outcome, if only one outcome is followed."""
        self._seen = {each["id"]: each["at_us"] for each in shown}
        self._after = shown[0]["id"] if shown else FIRST_ID
        """Records up to this ID are not read again."""

    def more(self) -> Iterator[list[dict[str, Any]]]:
        """New records, page by page: the log may grow faster than it is read."""
        if self._newest_us is not None and (newest_us := self._newest_us()) is not None:
            # An outcome may be rare: do not scan the records between its occurrences again in every poll.
            self._after = max(self._after, id_prefix(_reread_since_us(newest_us)))
        after = self._after
        while True:
            found = self._fetch(after=after, most=PAGE_SIZE)["items"]
            new = [each for each in found if each["id"] not in self._seen]
            self._seen |= {each["id"]: each["at_us"] for each in new}
            self._forget()
            yield new
            if len(found) < PAGE_SIZE:
                break
            after = found[-1]["id"]

    def _forget(self) -> None:
        if self._seen:
            since_us = _reread_since_us(max(self._seen.values()))
            ids = sorted(self._seen)
            kept = [id for id in ids[-MAX_REREAD:] if self._seen[id] >= since_us]
            if len(kept) < len(ids):
                self._after = ids[-len(kept) - 1]
                self._seen = {id: self._seen[id] for id in kept}


def _reread_since_us(newest_us: int) -> int:
    """Records from this time on are read again. A node whose clock is ahead must not hide the others."""
    return min(newest_us, time.time_ns() // 1000) - MAX_DELAY_US


def _fetch_last(fetch: Callable[..., Any], lines: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        most = min(lines - len(found), PAGE_SIZE)
        some = fetch(most=most, before=found[0]["id"] if found else None)["items"]
        found = [*some, *found]
        if len(some) < most or len(found) == lines:
            return found


def _newest_us(context: CommandContext) -> int | None:
    return next((each["at_us"] for each in context.api.get("decisions", most=1)["items"]), None)


def _follow(context: CommandContext, query: dict[str, Any]) -> None:
    given = context.arguments
    fetch = partial(context.api.get, "decisions", **query)
    first = _fetch_last(fetch, max(1, given.lines))
    _print(first[-given.lines :] if given.lines else [], context)
    if not first:
        context.err.print("No records." if given.no_follow else "No records yet, waiting.")
    if given.no_follow:
        return
    tail = LogTail(fetch, first, partial(_newest_us, context) if given.outcome else None)
    failures = 0
    while True:
        time.sleep(POLL_INTERVAL_S)
        try:
            for found in tail.more():
                _print(found, context)
        except AdminError as error:
            failures += 1
            if error.code != EXIT_UNREACHABLE or error.status == 401 or failures > MAX_FAILURES:
                raise
            if failures == 1:
                context.err.print(f"{context.err.paint('waiting:', YELLOW)} {error}")
            continue
        failures = 0


def _print(records: list[dict[str, Any]], context: CommandContext) -> None:
    is_json = context.arguments.json
    lines = [json.dumps(each, separators=(",", ":")) if is_json else _line(each, context) for each in records]
    context.out.write("".join([f"{line}\n" for line in lines]))


def _line(each: dict[str, Any], context: CommandContext) -> str:
    record = DecisionRecord.from_dict(each)
    words = printable(record.words).removeprefix(record.outcome)
    when = context.out.paint(context.time(record.at_us), DIM)
    node = context.out.paint(printable(f" @{record.node}"), DIM) if record.node else ""
    return f"{when} {context.out.paint(f'{record.outcome:<8}', STYLES.get(record.outcome, YELLOW))}{words}{node}"
