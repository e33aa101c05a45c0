"""Show a live overview of the fleet.

headgate top
headgate top --once
headgate top --json

q or Ctrl-C exits; in a pipe, the overview is printed once
exit code: 0 done, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import EXIT_UNREACHABLE, AdminError
from headgate.cli.options import SERVER, option
from headgate.cli.terminal import (
    BOLD,
    DIM,
    GREEN,
    RED,
    YELLOW,
    Terminal,
    bar,
    clip,
    condense,
    count,
    duration,
    printable,
    sparkline,
    table,
)
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headgate.cli.context import CommandContext

__all__ = ["OPTIONS", "frame", "run"]

OPTIONS = (
    option("--once", action="store_true", help="print the overview once and exit"),
    option("--every", metavar="SECONDS", type=float, default=1.0, help="refresh interval; default: 1"),
    *SERVER,
)
MAX_ROWS: Final = 8
PIPE_WIDTH: Final = 100

ENTER_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
LEAVE_SCREEN: Final = "\x1b[?25h\x1b[?1049l"
"""Switch to the alternate screen and hide the cursor, and back."""
BEGIN_FRAME: Final = "\x1b[?2026h\x1b[H"
END_FRAME: Final = "\x1b[J\x1b[?2026l"
"""A synchronized update from the top left corner."""
CLEAR_LINE: Final = "\x1b[K"

_STATE_ORDER: Final = {"degraded": 0, "silent": 1, "ready": 2}


def run(context: CommandContext) -> int:
    given, out = context.arguments, context.out
    if not 0.2 <= given.every <= 3600:
        raise InvalidInput(f"--every {given.every:g} is out of range; give 0.2 to 3600 seconds")
    found = context.api.get("overview")
    if given.json or given.once or not out.is_terminal:
        return context.show(found, map(str.rstrip, frame(found, context, width=out.width or PIPE_WIDTH)))
    with suppress(KeyboardInterrupt), _alternate_screen(out):
        _live(context, found)
    return 0


def _live(context: CommandContext, found: dict[str, Any]) -> None:
    trouble = ""
    while True:
        started = time.monotonic()
        _draw(context, found, trouble)
        if _is_quit_within(context.arguments.every - (time.monotonic() - started)):
            return
        try:
            found, trouble = context.api.get("overview"), ""
        except AdminError as error:
            if error.code != EXIT_UNREACHABLE or error.status == 401:
                raise
            trouble = f"{error}"


def _draw(context: CommandContext, found: dict[str, Any], trouble: str) -> None:
    """Draw a frame with a single write, so that it does not flicker."""
    width, height = context.out.size()
    lines = [*frame(found, context, width=width)]
    if trouble:
        lines.insert(1, context.out.paint(f"Outdated: {printable(trouble)}", RED))
    # The last column stays free: clearing the line after it would erase its character in some terminals.
    fitting = [f"{clip(line, width - 1)}{CLEAR_LINE}" for line in lines[:height]]
    context.out.write(BEGIN_FRAME + "\n".join(fitting) + END_FRAME)


@contextmanager
def _alternate_screen(out: Terminal) -> Iterator[None]:
    """The alternate screen, with unbuffered keyboard input."""
    before = None
    if sys.stdin.isatty():
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno())
    out.write(ENTER_SCREEN)
    try:
        yield
    finally:
        out.write(LEAVE_SCREEN)
        if before is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def _is_quit_within(seconds: float) -> bool:
    """Wait; True as soon as q is pressed."""
    until = time.monotonic() + max(0.0, seconds)
    while (left := until - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
            continue
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b""):
            return True
    return False


def frame(found: dict[str, Any], context: CommandContext, *, width: int) -> Iterator[str]:
    out, totals = context.out, found["totals"]
    version = "unknown" if found["version"] is None else f"{found['version']}"
    yield f"{out.paint('headgate', BOLD)}  {context.time(found['at_us'])} {context.zone_name}  config version {version}"
    for each in found.get("troubles") or ():
        yield out.paint(f"trouble: {printable(f'{each}')}", YELLOW)
    anomalies = [
        [context.time(each.get("at_us")), _who(each), f"{each.get('text') or ''}"] for each in found.get("steps") or ()
    ]
    if not any(each["state"] != "silent" for each in found["nodes"]):
        yield out.paint("No node is reporting, so no traffic is shown. Requests may still be denied.", RED)
        yield "Connect each app with control=URL (the config store), and with the store of `headgate admin`."
        yield ""
    if found["nodes"]:
        yield ""
        yield from _rates(found, out, width)
        yield (
            f"last minute: {count(totals['allowed'])} allowed, {count(totals['denied'])} denied, "
            f"{count(totals['blocked'])} blocked, {count(totals['unavailable'])} unavailable, "
            f"{count(totals['degraded'])} degraded; p50 {_time(totals['p50_us'])}, p99 {_time(totals['p99_us'])}"
        )
        yield ""
        nodes = sorted(found["nodes"], key=lambda each: _STATE_ORDER.get(each["state"], 0))
        hot = [[_who(each), each["limit"], count(each["rate"])] for each in found["hot"]]
        titles = ["node", "region", "state", "policy", "allowed", "denied", "p99"]
        yield from _list("nodes", titles, map(_node, nodes), out)
        yield from _list("denied most", ["client", "denied", "allowed", ""], map(_denied, found["top_denied"]), out)
        yield from _list("near their limit", ["client", "limit", "used", "left"], map(_near, found["near"]), out)
        yield from _list("hot keys", ["client", "limit", "a second"], hot, out)
        titles = ["limit", "counters", "held", "of each", "over the limit", "bound"]
        yield from _list("quotas held by proxies", titles, map(_quota, found.get("quotas") or ()), out)
    yield from _list("anomalies", ["when", "client", "what"], anomalies, out)


def _rates(found: dict[str, Any], out: Terminal, width: int) -> Iterator[str]:
    series = found.get("series")
    if series is None:
        yield out.paint("no data for the last minutes", DIM)
        return
    columns = max(10, width - 26)
    rejected = [sum(each) for each in zip(series["denied"], series["blocked"], series["unavailable"], strict=True)]
    for name, numbers, style in (("allowed/s", series["allowed"], GREEN), ("denied/s", rejected, RED)):
        drawn = condense(numbers, columns)
        # The current second is incomplete.
        now = numbers[-2] if len(numbers) > 1 else 0
        most = out.paint(f"max {count(max(drawn))}", DIM)
        yield f"{name:<10}{count(now):>6} {out.paint(sparkline(drawn), style)} {most}"


def _list(name: str, titles: Sequence[str], entries: Iterable[list[str]], out: Terminal) -> Iterator[str]:
    rows = [*entries]
    if not rows:
        return
    more = len(rows) - MAX_ROWS
    yield out.paint(name + (f" ({more} more)" if more > 0 else ""), BOLD)
    # Without a width: long lines are clipped instead of wrapped, so that rows do not move.
    first, *lines = table([titles, *rows[:MAX_ROWS]])
    yield f"  {out.paint(first, DIM)}"
    yield from [f"  {line}" for line in lines]
    yield ""


def _node(each: dict[str, Any]) -> list[str]:
    state = each["state"] + (f" for {duration(each['degraded_for_s'])}" if each.get("degraded_for_s") else "")
    policy, counts = f"{each.get('policy_version') or '-'}", [count(each["allowed"]), count(each["denied"])]
    policy += " (canary)" if each.get("canary") == "candidate" else ""
    return [each["name"], each.get("region") or "-", state, policy, *counts, _time(each.get("p99_us"))]


def _denied(each: dict[str, Any]) -> list[str]:
    denied, allowed = each["denied"], each["allowed"]
    return [_who(each), count(denied), count(allowed), bar(denied / ((denied + allowed) or 1), 10)]


def _near(each: dict[str, Any]) -> list[str]:
    left = f"{count(each['left'])} of {count(each['capacity'])}"
    return [_who(each), each["limit"], bar(1 - each["share"], 10), left]


def _quota(each: dict[str, Any]) -> list[str]:
    return [each["limit"], *[count(each[name]) for name in ("counters", "held", "capacity", "excess", "bound")]]


def _who(each: dict[str, Any]) -> str:
    """The label of a client, or the start of its hash."""
    return each.get("label") or f"{each.get('kind', '')} {each.get('key', '')[:17]}".strip()


def _time(us: int | None) -> str:
    return "-" if us is None else f"{us / 1000:.3g} ms"
