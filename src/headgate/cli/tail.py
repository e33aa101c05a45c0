"""`headgate tail`: decisions as they are made, one line each."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

from headgate.cli.admin_client import UNANSWERED, AdminError
from headgate.cli.context import client_of, opened
from headgate.cli.options import CLIENT, add_server
from headgate.cli.terminal import BAD, DIM, GOOD, ODD, printable
from headgate.errors import InvalidInput
from headgate.telemetry.decision_log.record import DecisionRecord, Outcome, id_prefix

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "show decisions as they are made, one line each"
EXAMPLES = """
    headgate tail
    headgate tail acme --outcome denied
    headgate tail --json --lines 1000 --no-follow

    exit code: 0 also for Ctrl-C, 1 refused, 2 it cannot be asked
"""

OUTCOMES: Final = get_args(Outcome)
STYLES: Final = {"allowed": GOOD, "denied": BAD, "blocked": BAD, "unavailable": ODD, "lost": ODD}
EVERY: Final = 1.0
MOST: Final = 500
"""Records that are asked for at once."""
LATE_US: Final = 30_000_000
"""How much later than others that are newer a record may be written: nodes write in batches, and try again."""
MANY: Final = 2000
"""Records that are looked at again each time, at most."""
FIRST: Final = "0"
"""Before all ids."""
AWAY: Final = 60
"""So often in a row the server may fail to answer before that is the end."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", nargs="?", help=f"only of this client: {CLIENT}")
    parser.add_argument("--outcome", choices=OUTCOMES, help="only those")
    parser.add_argument("--lines", metavar="N", type=int, default=10, help="begin with the last N; 10, if not given")
    parser.add_argument("--no-follow", action="store_true", help="end after these")
    add_server(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if not 0 <= arguments.lines <= 10_000:
        raise InvalidInput(f"--lines {arguments.lines} cannot be; give 0 to 10000")
    desk = opened(arguments, out, err)
    asked: dict[str, Any] = {"outcome": arguments.outcome}
    if arguments.client is not None:
        asked |= client_of(desk, arguments.client).plain
    with suppress(KeyboardInterrupt):  # it is how one says that it was enough
        _follow(arguments, desk, asked)
    return 0


class _Tail:
    """What is new in the log whenever it is asked for, also if it was written after others that are newer: the last of
    what was seen is looked at again, and known by its ids."""

    def __init__(
        self,
        ask: Callable[..., Any],
        shown: list[dict[str, Any]],
        newest_us: Callable[[], int | None] | None = None,
    ) -> None:
        self._ask = ask
        self._newest_us = newest_us
        """Of all that is logged, where only some of it is asked for."""
        self._seen = {each["id"]: each["at_us"] for each in shown}
        self._before = FIRST
        """An id; nothing up to it is shown any more."""
        if shown:
            self._before = shown[0]["id"]

    def more(self) -> Iterator[list[dict[str, Any]]]:
        """In pieces: nobody waits for the end of a log that grows faster than it is read."""
        if self._newest_us is not None and (newest_us := self._newest_us()) is not None:
            # Of one outcome there may be few, or none: what lies between them is not looked through again and again.
            self._before = max(self._before, id_prefix(_late_us(newest_us)))
        after = self._before
        while True:
            found = self._ask(after=after, most=MOST)["items"]
            new = [each for each in found if each["id"] not in self._seen]
            self._seen |= {each["id"]: each["at_us"] for each in new}
            self._forget()
            yield new
            if len(found) < MOST:
                break
            after = found[-1]["id"]

    def _forget(self) -> None:
        """All but the last seconds, and of these what is not too much to be looked at again."""
        if self._seen:
            late_us = _late_us(max(self._seen.values()))
            ids = sorted(self._seen)
            kept = [id for id in ids[-MANY:] if self._seen[id] >= late_us]
            if len(kept) < len(ids):
                self._before = ids[-len(kept) - 1]
                self._seen = {id: self._seen[id] for id in kept}


def _late_us(newest_us: int) -> int:
    """What is older is not waited for. A node whose clock is ahead must not hide the others."""
    return min(newest_us, time.time_ns() // 1000) - LATE_US


def _last(ask: Callable[..., Any], lines: int) -> list[dict[str, Any]]:
    """The newest, in as many pieces as that takes."""
    found: list[dict[str, Any]] = []
    while True:
        most = min(lines - len(found), MOST)
        some = ask(most=most, before=found[0]["id"] if found else None)["items"]
        found = [*some, *found]
        if len(some) < most or len(found) == lines:
            return found


def _newest_us(desk: CommandContext) -> int | None:
    return next((each["at_us"] for each in desk.api.get("decisions", most=1)["items"]), None)


def _follow(arguments: Namespace, desk: CommandContext, asked: dict[str, Any]) -> None:
    first = _last(partial(desk.api.get, "decisions", **asked), max(1, arguments.lines))
    _say(first[-arguments.lines :] if arguments.lines else [], arguments, desk)
    if not first:
        desk.err.say("Nothing of that is logged." if arguments.no_follow else "Nothing of that is logged yet: waiting.")
    if arguments.no_follow:
        return
    tail = _Tail(
        partial(desk.api.get, "decisions", **asked), first, partial(_newest_us, desk) if arguments.outcome else None
    )
    failed = 0
    while True:
        time.sleep(EVERY)
        try:
            for found in tail.more():
                _say(found, arguments, desk)
        except AdminError as error:
            failed += 1
            if error.code != UNANSWERED or error.status == 401 or failed > AWAY:
                raise
            if failed == 1:
                desk.err.say(f"{desk.err.paint('waiting:', ODD)} {error}")
            continue
        failed = 0


def _say(records: list[dict[str, Any]], arguments: Namespace, desk: CommandContext) -> None:
    for each in records:
        desk.out.say(json.dumps(each, separators=(",", ":")) if arguments.json else _line(each, desk))
    desk.out.flush()


def _line(each: dict[str, Any], desk: CommandContext) -> str:
    record = DecisionRecord.from_dict(each)
    words = printable(record.words).removeprefix(record.outcome)
    when = desk.out.paint(desk.time(record.at_us), DIM)
    node = desk.out.paint(printable(f" @{record.node}"), DIM) if record.node else ""
    return f"{when} {desk.out.paint(f'{record.outcome:<8}', STYLES.get(record.outcome, ODD))}{words}{node}"
