"""What `headgate demo` shows: the whole of it, in any terminal, and nothing that was not decided."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import pytest

from headgate import Limit
from headgate.algorithms import ALGORITHMS, concurrency
from headgate.demo import ARRIVALS, COLUMN_US, COLUMNS, EXAMPLE, PURPOSES, QUOTA, START_US, WORK_COLUMNS, Tick, play

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMAND = [sys.executable, "-m", "headgate.demo"]
PLAIN = {
    name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "PYTHONIOENCODING")
}
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@cache
def piped(**settings: str) -> str:
    """What a pipe gets."""
    environment = PLAIN | {"PYTHONUTF8": "1"} | settings
    return subprocess.run(COMMAND, env=environment, capture_output=True, check=True, timeout=20).stdout.decode()


def at_a_terminal(*, columns: int = 80, lines: int = 50, **settings: str) -> str:
    """What a terminal gets, with all that it overwrites on the way."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = PLAIN | {"PYTHONUTF8": "1", "TERM": "xterm-256color"} | settings
    with subprocess.Popen(COMMAND, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        chunks = []
        with suppress(OSError):  # how Linux says that the other end of a terminal is closed
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        assert process.wait(timeout=20) == 0
    os.close(ours)
    return b"".join(chunks).decode().replace("\r\n", "\n")


def totals(shown: str) -> Mapping[str, tuple[int, int]]:
    """The numbers at the end of each algorithm's row: how many passed, and the peak."""
    rows = re.findall(rf"^  ({'|'.join(ALGORITHMS)}) .* (\d+) +(\d+)$", shown, re.MULTILINE)
    return {name: (int(passed), int(peak)) for name, passed, peak in rows}


def decided(name: str) -> tuple[int, int]:
    """The same numbers, from the algorithm itself, without a limiter, a store or a clock."""
    limit = Limit(QUOTA, timedelta(seconds=1), algorithm=name)
    state, through_us, leaving = None, [], {}
    for column in range(COLUMNS):
        now_us = START_US + column * COLUMN_US
        if column in leaving:
            state, _ = concurrency.leave(state, now_us, leaving[column])
        if column in ARRIVALS:
            state, (_, retry_us, _, delay_us) = ALGORITHMS[name].decide(state, now_us, 1, limit, f"{column}")
            if not retry_us:
                through_us.append(now_us + delay_us)
                if name == "concurrency":
                    leaving[column + WORK_COLUMNS] = f"{column}"
    return len(through_us), max(sum(0 <= one - start < 1_000_000 for one in through_us) for start in through_us)


def test_totals_are_what_the_algorithms_decide() -> None:
    assert totals(piped()) == {name: decided(name) for name in ALGORITHMS}


def test_every_symbol_is_a_decision() -> None:
    for name in ALGORITHMS:
        row = play(name)
        asked = [column for column, mark in enumerate(row.answers) if mark is not Tick.NOTHING]
        assert tuple(asked) == ARRIVALS
        assert row.passed() == decided(name)[0]


def test_leaky_bucket_row_shows_when_requests_leave() -> None:
    row = play("leaky_bucket")
    assert row.effect.count(Tick.PASSED) == row.passed()


def test_every_algorithm_appears_with_its_purpose() -> None:
    shown = piped()
    assert set(PURPOSES) == set(ALGORITHMS)
    for name, purpose in PURPOSES.items():
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", shown, re.MULTILINE)


def test_code_is_eight_lines_and_its_denial_is_shown() -> None:
    shown = piped()
    assert len(EXAMPLE.splitlines()) == 8
    assert all(line in shown for line in EXAMPLE.splitlines())
    assert re.search(r"^    denied by api \(.*\): 0 left, passes in 0\.\d+ s$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    "settings", [{}, {"FORCE_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}], ids=["plain", "colour", "ascii"]
)
def test_pipe_gets_80_columns_at_once(settings: dict[str, str]) -> None:
    shown = piped(**settings)
    assert all(len(ESCAPE.sub("", line)) <= 79 for line in shown.splitlines())
    assert set(ESCAPE.findall(shown)) <= {
        "\x1b[0m",
        "\x1b[1m",
        "\x1b[2m",
        *(f"\x1b[{colour}m" for colour in range(31, 37)),
    }


def test_pipe_gets_colour_only_when_it_asks_for_it() -> None:
    assert "\x1b" not in piped()
    assert "\x1b" in piped(FORCE_COLOR="1")
    assert "\x1b" not in piped(FORCE_COLOR="1", NO_COLOR="1")


def test_terminal_that_does_not_speak_utf_8_gets_ascii() -> None:
    shown = piped(PYTHONIOENCODING="latin-1")
    assert shown.isascii()
    assert totals(shown) == totals(piped())


@pytest.mark.parametrize("settings", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_terminal_sees_time_pass_and_ends_with_the_same(settings: dict[str, str]) -> None:
    shown = at_a_terminal(**settings)
    *before, last = re.split(r"\x1b\[\d+A\r", shown)
    assert len(before) == COLUMNS
    assert "passes in" not in "".join(before)
    assert settled(ESCAPE.sub("", last)) == settled(piped().partition("\n\n")[2])
    assert ("\x1b[" in last) is (not settings)
    assert all(len(ESCAPE.sub("", line)) <= 79 for line in shown.replace("\r", "\n").splitlines())


@pytest.mark.parametrize("settings", [{"NO_COLOR": "1", "TERM": "dumb"}, {"TERM": "dumb"}])
def test_dumb_terminal_gets_plain_text(settings: dict[str, str]) -> None:
    assert settled(at_a_terminal(**settings)) == settled(piped())


@pytest.mark.parametrize("size", [{"columns": 60}, {"lines": 20}], ids=["narrow", "low"])
def test_nothing_moves_where_it_would_not_fit(size: dict[str, int]) -> None:
    assert "\x1b" not in at_a_terminal(**size, NO_COLOR="1")


def test_closed_pipe_prints_no_traceback() -> None:
    with subprocess.Popen(COMMAND, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0


def settled(text: str) -> str:
    """Without the one number that a run of the example makes by the real clock."""
    return re.sub(r"passes in [\d.]+ s", "passes in a while", text)
