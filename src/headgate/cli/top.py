"""`headgate top`: what the fleet is doing, redrawn each second; once, in a pipe."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import UNANSWERED, AdminError
from headgate.cli.context import as_json, opened
from headgate.cli.options import add_server
from headgate.cli.sparklines import bar, condensed, count, duration, sparkline
from headgate.cli.table import table
from headgate.cli.terminal import BAD, BOLD, DIM, GOOD, ODD, clipped, printable
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Sequence

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "frame", "run"]

ABOUT = "show what the fleet is doing, live"
EXAMPLES = """
    headgate top
    headgate top --once
    headgate top --json

    q or Ctrl-C ends it; in a pipe it is shown once
    exit code: 0 shown, 1 refused, 2 it cannot be asked
"""

MOST_ROWS: Final = 8
"""Of each list: what is further down is nobody's first concern."""
WIDTH: Final = 100
"""Of a line in a pipe."""

SET_UP: Final = "\x1b[?1049h\x1b[?25l"
TAKE_DOWN: Final = "\x1b[?25h\x1b[?1049l"
"""A screen of its own, without a cursor; and back to what was shown before."""
BEGIN: Final = "\x1b[?2026h\x1b[H"
END: Final = "\x1b[J\x1b[?2026l"
"""From the top left on, over what is there; terminals that know how show it all at once."""
REST_OF_LINE: Final = "\x1b[K"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="show it once and end, as in a pipe")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=1.0, help="redraw so often; 1, if not given")
    add_server(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if not 0.2 <= arguments.every <= 3600:
        raise InvalidInput(f"--every {arguments.every:g} cannot be; give 0.2 to 3600 seconds")
    desk = opened(arguments, out, err)
    found = desk.api.get("overview")
    if arguments.json:
        return as_json(desk, found)
    if arguments.once or not out.is_terminal:
        out.say(*[line.rstrip() for line in frame(found, desk, width=out.width or WIDTH)])
        return 0
    with suppress(KeyboardInterrupt), _own_screen(out):
        _live(arguments, desk, found)
    return 0


def _live(arguments: Namespace, desk: CommandContext, found: dict[str, Any]) -> None:
    trouble = ""
    while True:
        started = time.monotonic()
        _draw(desk, found, trouble)
        if _wants_to_go(arguments.every - (time.monotonic() - started)):
            return
        try:
            found, trouble = desk.api.get("overview"), ""
        except AdminError as error:
            if error.code != UNANSWERED or error.status == 401:
                raise
            trouble = f"{error}"


def _draw(desk: CommandContext, found: dict[str, Any], trouble: str) -> None:
    """One write, so that nobody sees half of it."""
    width, height = desk.out.size()
    lines = [*frame(found, desk, width=width)]
    if trouble:
        lines.insert(1, desk.out.paint(f"This is old: {printable(trouble)}", BAD))
    # The last column stays free: a terminal that has written there would take it back with the rest of the line.
    fitting = [f"{clipped(line, width - 1)}{REST_OF_LINE}" for line in lines[:height]]
    desk.out.write(BEGIN + "\n".join(fitting) + END)


@contextmanager
def _own_screen(out: Terminal) -> Iterator[None]:
    """A screen that leaves no trace, and keys that are heard one by one."""
    before = None
    if sys.stdin.isatty():
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno())
    out.write(SET_UP)
    try:
        yield
    finally:
        out.write(TAKE_DOWN)
        if before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def _wants_to_go(seconds: float) -> bool:
    """Wait, and tell whether q was pressed."""
    until = time.monotonic() + max(0.0, seconds)
    while (left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
            continue
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b""):
            return True
    return False


# ------------------------------------------------------------------ what is drawn


def frame(found: dict[str, Any], desk: CommandContext, *, width: int) -> Iterator[str]:
    """The overview, line by line."""
    out, totals = desk.out, found["totals"]
    version = "unknown" if found["version"] is None else f"{found['version']}"
    yield f"{out.paint('headgate', BOLD)}  {desk.time(found['at_us'])} {desk.zone_name}  config version {version}"
    for each in found.get("troubles") or ():
        yield out.paint(f"trouble: {printable(f'{each}')}", ODD)
    if not any(each["state"] != "silent" for each in found["nodes"]):
        yield out.paint("No node is reporting, so no traffic is shown. Requests may be denied all the same.", BAD)
        yield "Connect each app with control=URL (of the config store), and give it the store of `headgate admin`."
        yield ""
        if not found["nodes"]:
            yield from _list("anomalies", ["when", "client", "what"], _steps(found, desk), out)
            return
    yield ""
    yield from _rates(found, out, width)
    yield (
        f"last minute: {count(totals['allowed'])} allowed, {count(totals['denied'])} denied, "
        f"{count(totals['blocked'])} blocked, {count(totals['unavailable'])} unavailable, "
        f"{count(totals['degraded'])} degraded; p50 {_time(totals['p50_us'])}, p99 {_time(totals['p99_us'])}"
    )
    yield ""
    yield from _list("nodes", ["node", "region", "state", "policy", "allowed", "denied", "p99"], _nodes(found), out)
    yield from _list("denied most", ["client", "denied", "allowed", ""], _denied(found), out)
    yield from _list("near their limit", ["client", "limit", "used", "left"], _near(found), out)
    yield from _list("hot keys", ["client", "limit", "a second"], _hot(found), out)
    yield from _list("anomalies", ["when", "client", "what"], _steps(found, desk), out)


def _rates(found: dict[str, Any], out: Terminal, width: int) -> Iterator[str]:
    series = found.get("series")
    if series is None:
        yield out.paint("nothing is known of the last minutes", DIM)
        return
    room = max(10, width - 26)
    refused = [sum(each) for each in zip(series["denied"], series["blocked"], series["unavailable"], strict=True)]
    for name, numbers, style in (("allowed/s", series["allowed"], GOOD), ("denied/s", refused, BAD)):
        drawn = condensed(numbers, room)
        # The second that is under way has not been counted whole.
        now = numbers[-2] if len(numbers) > 1 else 0
        most = out.paint(f"max {count(max(drawn))}", DIM)
        yield f"{name:<10}{count(now):>6} {out.paint(sparkline(drawn), style)} {most}"


def _list(name: str, titles: Sequence[str], rows: list[list[str]], out: Terminal) -> Iterator[str]:
    if not rows:
        return
    more = len(rows) - MOST_ROWS
    yield out.paint(name + (f" ({more} more)" if more > 0 else ""), BOLD)
    # Without a width nothing is wrapped: what is too wide is cut, so that lines stay where they are.
    first, *lines = table([titles, *rows[:MOST_ROWS]])
    yield f"  {out.paint(first, DIM)}"
    yield from [f"  {line}" for line in lines]
    yield ""


def _nodes(found: dict[str, Any]) -> list[list[str]]:
    order = {"degraded": 0, "silent": 1, "ready": 2}
    return [
        [
            each["name"],
            each.get("region") or "-",
            each["state"] + (f" for {duration(each['degraded_for_s'])}" if each.get("degraded_for_s") else ""),
            f"{each.get('policy_version') or '-'}",
            count(each["allowed"]),
            count(each["denied"]),
            _time(each.get("p99_us")),
        ]
        for each in sorted(found["nodes"], key=lambda each: order.get(each["state"], 0))
    ]


def _denied(found: dict[str, Any]) -> list[list[str]]:
    return [
        [_who(each), count(each["denied"]), count(each["allowed"]), bar(_share(each["denied"], each["allowed"]), 10)]
        for each in found["top_denied"]
    ]


def _near(found: dict[str, Any]) -> list[list[str]]:
    return [
        [_who(each), each["limit"], bar(1 - each["share"], 10), f"{count(each['left'])} of {count(each['capacity'])}"]
        for each in found["near"]
    ]


def _hot(found: dict[str, Any]) -> list[list[str]]:
    return [[_who(each), each["limit"], count(each["rate"])] for each in found["hot"]]


def _steps(found: dict[str, Any], desk: CommandContext) -> list[list[str]]:
    return [
        [desk.time(each.get("at_us")), _who(each), f"{each.get('text') or ''}"] for each in found.get("steps") or ()
    ]


def _who(each: dict[str, Any]) -> str:
    """A client by what it may be called, or by the begin of its hash."""
    return each.get("label") or f"{each.get('kind', '')} {each.get('key', '')[:17]}".strip()


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest else 0.0


def _time(us: int | None) -> str:
    return "-" if us is None else f"{us / 1000:.3g} ms"
