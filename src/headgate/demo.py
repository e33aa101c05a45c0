"""`python -m headgate.demo`: the seven algorithms answer the same requests, side by side, in a terminal.

Every mark is a real decision of a limiter on the memory store at the instant of its column. A `FakeClock` advances
from column to column.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from headgate.limiter import Limiter
from headgate.limits import Limit
from headgate.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["ARRIVALS", "PURPOSES", "Row", "main", "play"]

QUOTA: Final = 5
COLUMNS: Final = 48
COLUMN_US: Final = 50_000
START_US: Final = 600_000  # fixed windows start at whole seconds; the burst spans such a boundary
ARRIVALS: Final = (*range(3, 13), *range(19, 34, 2))
"""The columns of the requests: ten in half a second, then twice the rate of the limit."""
WORK_COLUMNS: Final = 12  # the duration of a request, for the concurrency limit

PURPOSES: Final = {
    "fixed_window": "One count per window: quotas and bills. Mind the boundary.",
    "sliding_window": "Two counts, the older fades out: cheap, for very many keys.",
    "sliding_log": "Never more than the quota in any second: logins, payments.",
    "token_bucket": "A burst, then an even rate: the default, for most APIs.",
    "gcra": "The token bucket's answers, out of one stored instant.",
    "leaky_bucket": "A queue that drains evenly: for backends that bear no burst.",
    "concurrency": "How many at once, not how fast: for slow and heavy work.",
}

EXAMPLE: Final = """\
from datetime import timedelta
from headgate import Limit, Limiter

limiter = Limiter("memory://")  # a fleet shares "redis://127.0.0.1:6379/0"
limit = Limit(5, timedelta(seconds=1), name="api")
for _ in range(6):
    decision = limiter.check(limit.by("tenant-7"))
print(decision.reason)
"""

NEXT: Final = {
    "README.md": "the same lines, installed in your own project",
    "docs/algorithms.md": "which algorithm to take, and what each promises",
    "make test": "every promise, held to on real Redis servers",
}

BOLD: Final = "1"
DIM: Final = "2"
CODE: Final = "36"


class Tick(Enum):
    """A mark in a column: its glyph, ASCII fallback and colour."""

    NOTHING = (" ", " ", "")
    ARRIVED = ("■", "|", BOLD)
    PASSED = ("■", "#", "32")
    WAITS = ("□", "o", "33")
    DENIED = ("×", "x", "31")
    INSIDE_1, INSIDE_2, INSIDE_3, INSIDE_4, INSIDE_5 = ((glyph, str(n), "34") for n, glyph in enumerate("▁▂▄▆█", 1))


@dataclass(frozen=True, slots=True)
class Row:
    """The decisions of one algorithm."""

    algorithm: str
    answers: Sequence[Tick]
    effect: Sequence[Tick]
    """When delayed requests proceed, or how many are in progress; empty for other algorithms."""
    peak: int
    """The most requests that reach the backend in any one second."""

    def passed(self, upto: int = COLUMNS) -> int:
        return sum(mark in (Tick.PASSED, Tick.WAITS) for mark in self.answers[:upto])


def play(algorithm: str) -> Row:
    """Run all requests through an algorithm."""
    clock = FakeClock()
    limiter = Limiter(clock=clock)
    key = Limit(QUOTA, timedelta(seconds=1), algorithm=algorithm, name=algorithm).by("tenant-7")
    answers, leaving, crowd = ([Tick.NOTHING] * COLUMNS for _ in range(3))
    through: list[int] = []
    inside: dict[int, str] = {}
    for column in range(COLUMNS):
        clock.set_us(START_US + column * COLUMN_US)
        if column in inside:
            limiter.leave(key, id=inside[column])
        if column in ARRIVALS:
            decision = limiter.check(key)
            answers[column] = Tick.DENIED
            if decision.allowed:
                leaves = column + decision.delay_us // COLUMN_US
                through.append(leaves)
                answers[column] = Tick.WAITS if leaves > column else Tick.PASSED
                leaving[leaves] = Tick.PASSED
                if decision.id is not None:
                    inside[column + WORK_COLUMNS] = decision.id
        if algorithm == "concurrency" and (held := QUOTA - limiter.peek(key).remaining):
            crowd[column] = Tick[f"INSIDE_{held}"]
    effect = {"leaky_bucket": leaving, "concurrency": crowd}.get(algorithm, [])
    second = range(1_000_000 // COLUMN_US)
    return Row(algorithm, answers, effect, max(sum(one - start in second for one in through) for start in through))


class DemoScreen:
    """Standard output: coloured or not, UTF-8 or ASCII, animated or not."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        size = os.get_terminal_size() if terminal else os.terminal_size((0, 0))
        self.moves = size.columns >= 80 and size.lines >= 24
        self.coloured = (terminal or "FORCE_COLOR" in os.environ) and not os.environ.get("NO_COLOR")
        self.unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.coloured and text.strip() else text

    def draw(self, mark: Tick) -> str:
        glyph, plain, style = mark.value
        return self.paint(glyph if self.unicode else plain, style)

    def show(self, frame: Callable[[int], list[str]]) -> None:
        """Print the final frame; if animated, after all frames before it."""
        for column in range(COLUMNS) if self.moves else ():
            lines = frame(column)
            print("\n".join(lines), end=f"\x1b[{len(lines) - 1}A\r", flush=True)
            time.sleep(0.025)
        print("\n".join(frame(COLUMNS)))


def chart(screen: DemoScreen, rows: list[Row], upto: int) -> list[str]:
    """The requests and the decisions of each algorithm, up to a column."""

    def line(title: str, cells: str, numbers: str = "", *, style: str = BOLD) -> str:
        return f"  {screen.paint(f'{title:<14}', style)}  {cells}  {numbers}".rstrip()

    def cells(marks: Sequence[Tick]) -> str:
        return "".join(screen.draw(mark if column < upto else Tick.NOTHING) for column, mark in enumerate(marks))

    axis = list(("─" if screen.unicode else "-") * COLUMNS)
    for second in range(1, -(-(START_US + COLUMNS * COLUMN_US) // 1_000_000)):
        column, label = (second * 1_000_000 - START_US) // COLUMN_US, f"{'┬' if screen.unicode else '+'} {second} s "
        axis[column : column + len(label)] = label
    arrived = [Tick.ARRIVED if column in ARRIVALS else Tick.NOTHING for column in range(COLUMNS)]
    head = line("", screen.paint("".join(axis), DIM), screen.paint("passed peak", DIM))
    lines = [head, line("requests", cells(arrived)), ""]
    for row in rows:
        peak = row.peak if upto == COLUMNS else ""
        lines.append(line(row.algorithm, cells(row.answers), f"{row.passed(upto):>6} {peak:>4}"))
        if row.effect:
            caption = "  inside" if row.algorithm == "concurrency" else "  leaving"
            lines.append(line(caption, cells(row.effect), style=DIM))
    return lines


def explain(screen: DemoScreen, rows: list[Row]) -> Iterator[str]:
    """The legend, the purpose of each algorithm, and an example with its output."""
    meanings = {Tick.PASSED: "passed", Tick.WAITS: "passed, but waits its turn", Tick.DENIED: "denied"}
    yield f"{'':18}" + "   ".join(f"{screen.draw(mark)} {meaning}" for mark, meaning in meanings.items())
    yield f"{'':18}peak: the most that got through in any one second\n"
    yield from (f"  {screen.paint(f'{row.algorithm:<14}', BOLD)}  {PURPOSES[row.algorithm]}" for row in rows)
    yield "\n  In your own code it is eight lines:\n"
    yield from (f"    {screen.paint(line, CODE)}".rstrip() for line in EXAMPLE.splitlines())
    yield "\n  They have just printed, as the sixth request was one too many:\n"
    printed: list[str] = []
    exec(EXAMPLE, {"print": printed.append})
    yield from ("    " + screen.paint(line, Tick.DENIED.value[2]) for line in wrap(printed[0], 75))
    yield "\n  Next:"
    yield from (f"    {screen.paint(f'{what:<18}', BOLD)}  {why}" for what, why in NEXT.items())


def main() -> None:
    """Run the demo."""
    screen = DemoScreen()
    rows = [play(algorithm) for algorithm in PURPOSES]
    name = screen.paint("headgate", BOLD)
    print(f"\n  {name}: the same {len(ARRIVALS)} requests, a limit of {QUOTA} per second, seven algorithms\n")
    screen.show(lambda upto: chart(screen, rows, upto))
    print("", *explain(screen, rows), "", sep="\n")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        # The reader is gone: redirect the interpreter's final flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
