"""Validation of limits and the syntax of `Limit.parse`. Each row of a table is a call and its whole error message."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headgate import Calendar, InvalidLimit, Limit

if TYPE_CHECKING:
    from collections.abc import Callable


SECOND = timedelta(seconds=1)
ALGORITHMS = "token_bucket, gcra, leaky_bucket, fixed_window, sliding_window, sliding_log, concurrency"
WHOLE = "is not a whole number; give an int of at least 1"
NOTHING = "lets nothing pass; it must be at least 1"
NAME = "use 1 to 100 printable ASCII characters, as it appears in headers"
INEXACT = (
    "beyond 2**53, where they stop being exact; use a smaller quota or burst, or a quota that divides the period's "
    "microseconds"
)
INVALID_LIMITS: list[tuple[Callable[[], Limit], str]] = [
    *[
        (lambda quota=quota: Limit(quota, SECOND), f"quota {quota!r} {WHOLE}")
        for quota in (1.0, 1.5, True, None, "5", b"5", math.nan, math.inf, [5])
    ],
    *[(lambda quota=quota: Limit(quota, SECOND), f"quota {quota} {NOTHING}") for quota in (0, -1, -(10**30))],
    *[
        (lambda burst=burst: Limit(5, SECOND, burst=burst), f"burst {burst!r} {WHOLE}")
        for burst in (1.0, True, "5", math.nan)
    ],
    *[(lambda burst=burst: Limit(5, SECOND, burst=burst), f"burst {burst} {NOTHING}") for burst in (0, -1)],
    *[
        (
            lambda period=period: Limit(5, period),
            f"period {period!r} is not a timedelta; {remedy}",
        )
        for period, remedy in (
            (60, "write timedelta(seconds=60) if it is seconds"),
            (60.0, "write timedelta(seconds=60.0) if it is seconds"),
            ("60", "write timedelta(seconds=60) if it is seconds"),
            ("minute", 'write timedelta(minutes=1), or the whole limit in words: Limit.parse("10/minute")'),
            ("Hours", 'write timedelta(hours=1), or the whole limit in words: Limit.parse("10/hour")'),
            ("fortnight", 'write it like timedelta(minutes=1), or the whole limit in words: Limit.parse("10/minute")'),
            (True, "write it like timedelta(minutes=1)"),
            (math.nan, "write it like timedelta(minutes=1)"),
            (None, "write it like timedelta(minutes=1)"),
        )
    ],
    (lambda: Limit(5, timedelta(0)), "period 0:00:00 is not positive; the shortest is one microsecond"),
    (
        lambda: Limit(5, timedelta(seconds=-1)),
        "period -1 day, 23:59:59 is not positive; the shortest is one microsecond",
    ),
    (
        lambda: Limit(5, timedelta(days=3661)),
        "period 3661 days, 0:00:00 is longer than ten years, the longest that is counted exactly",
    ),
    *[
        (
            lambda algorithm=algorithm: Limit(5, SECOND, algorithm=algorithm),
            f"unknown algorithm {algorithm!r}; did you mean {meant!r}?",
        )
        for algorithm, meant in (
            ("token-bucket", "token_bucket"),
            ("TOKEN_BUCKET", "token_bucket"),
            ("gcraa", "gcra"),
            ("slidingwindow", "sliding_window"),
        )
    ],
    *[
        (
            lambda algorithm=algorithm: Limit(5, SECOND, algorithm=algorithm),
            f"unknown algorithm {algorithm!r}; known are {ALGORITHMS}",
        )
        for algorithm in ("", "xyz", None, 5)
    ],
    (
        lambda: Limit(5, SECOND, burst=6, algorithm="fixed_window"),
        (
            "burst 6 means nothing to fixed_window, which lets 5 pass at once; leave it out, "
            "or use token_bucket, gcra or leaky_bucket"
        ),
    ),
    *[
        (lambda name=name: Limit(5, SECOND, name=name), f"limit name {name!r}: {NAME}")
        for name in ("", "x" * 101, "ü", "a\n", "\0", "\ud800", None, 5)
    ],
]


@pytest.mark.parametrize(("make", "message"), INVALID_LIMITS, ids=[message for _, message in INVALID_LIMITS])
def test_invalid_limit_is_rejected_by_the_constructor(make: Callable[[], Limit], message: str) -> None:
    with pytest.raises(InvalidLimit) as raised:
        make()
    assert str(raised.value) == message


@pytest.mark.parametrize("algorithm", ALGORITHMS.split(", "))
def test_limit_beyond_exact_arithmetic_is_rejected(algorithm: str) -> None:
    with pytest.raises(InvalidLimit) as raised:
        Limit(2**53, timedelta(hours=1), algorithm=algorithm, name="wide")
    assert str(raised.value).startswith("limit 'wide' (9007199254740992 ")
    assert str(raised.value).endswith(INEXACT)


def test_limit_that_fills_too_slowly_is_rejected() -> None:
    with pytest.raises(InvalidLimit) as raised:
        Limit(1, timedelta(days=365), burst=11, name="slow")
    assert str(raised.value).endswith("takes more than ten years to fill; use a smaller burst or a faster rate")
    assert Limit(1, timedelta(days=365), burst=10).capacity == 10


FORM = 'write it like "10/minute", "5 per 30 seconds", "1000/minute, burst 200" or "3/2h, sliding_window"'
UNITS = "microsecond, millisecond, second, minute, hour, day, week, month, year"
SEVERAL = "where one is expected; Limit.parse_many reads several, separated by semicolons"
READABLE: dict[str, tuple[int, timedelta | Calendar, int, str]] = {
    "10/minute": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10/m": (10, timedelta(minutes=1), 10, "token_bucket"),
    " 10 / MINUTE ": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10\n/\tminutes\n": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10 per minute": (10, timedelta(minutes=1), 10, "token_bucket"),
    "10 Per Min": (10, timedelta(minutes=1), 10, "token_bucket"),
    "5 per 30 seconds": (5, timedelta(seconds=30), 5, "token_bucket"),
    "3/2h": (3, timedelta(hours=2), 3, "token_bucket"),
    "3/2 hrs": (3, timedelta(hours=2), 3, "token_bucket"),
    "1/us": (1, timedelta(microseconds=1), 1, "token_bucket"),
    "5/100ms": (5, timedelta(milliseconds=100), 5, "token_bucket"),
    "5/sec": (5, timedelta(seconds=1), 5, "token_bucket"),
    "5/d": (5, timedelta(days=1), 5, "token_bucket"),
    "5/2 weeks": (5, timedelta(weeks=2), 5, "token_bucket"),
    "5/1 week": (5, timedelta(weeks=1), 5, "token_bucket"),
    "5/week, gcra": (5, timedelta(weeks=1), 5, "gcra"),
    "5/week, burst 9": (5, timedelta(weeks=1), 9, "token_bucket"),
    "5/week": (5, Calendar("week"), 5, "fixed_window"),
    "5 per w, starts 7": (5, Calendar("week", starts=7), 5, "fixed_window"),
    "5/month": (5, Calendar("month"), 5, "fixed_window"),
    "5/1 Month, fixed_window": (5, Calendar("month"), 5, "fixed_window"),
    "5/mo Timezone Asia/Tokyo STARTS 31": (5, Calendar("month", starts=31, timezone="Asia/Tokyo"), 5, "fixed_window"),
    "5/year, starts 04-01": (5, Calendar("year", starts="04-01"), 5, "fixed_window"),
    "5/day, timezone UTC": (5, Calendar("day"), 5, "fixed_window"),
    "5/1 day, timezone Etc/GMT+5": (5, Calendar("day", timezone="Etc/GMT+5"), 5, "fixed_window"),
    "1_000_000/day": (1_000_000, timedelta(days=1), 1_000_000, "token_bucket"),
    "1000/minute, burst 200": (1000, timedelta(minutes=1), 200, "token_bucket"),
    "1000/minute burst 1_000": (1000, timedelta(minutes=1), 1000, "token_bucket"),
    "1000/minute,BURST 2000": (1000, timedelta(minutes=1), 2000, "token_bucket"),
    "10/minute, sliding_window": (10, timedelta(minutes=1), 10, "sliding_window"),
    "10/minute Fixed_Window": (10, timedelta(minutes=1), 10, "fixed_window"),
    "10/minute, gcra, burst 5": (10, timedelta(minutes=1), 5, "gcra"),
    "10/minute, burst 5, leaky_bucket": (10, timedelta(minutes=1), 5, "leaky_bucket"),
    "10 per day, sliding_log": (10, timedelta(days=1), 10, "sliding_log"),
    "5/60s, concurrency": (5, timedelta(minutes=1), 5, "concurrency"),
}
UNREADABLE: dict[Any, str] = {
    **{
        text: f"cannot read the limit {text!r}: {FORM}"
        for text in ("", " ", "10", "/minute", "10/", "minute", "ten/minute", "10 perminute", "10per minute")
    },
    **{
        text: f"cannot read the limit {text!r}: {FORM}"
        for text in ("-1/minute", "+1/minute", "1.5/minute", "1e3/minute", "10//minute", "0x10/minute")
    },
    **{text: f"{text!r} is not the text of a limit: {FORM}" for text in (None, 5, b"10/minute", 1.5)},
    **{
        f"{digits}/minute": f"'{digits}/minute': {digits!r} is not a plain number; write it like 1000 or 1_000"
        for digits in ("010", "1_00", "_1", "1__000", "1_0000", "٣")
    },
    "1,000/minute": "cannot read the limit '1,000/minute': write the number without commas, \"1000/minute\"",
    "5/minute; 100/hour": f"'5/minute; 100/hour' holds 2 limits {SEVERAL}: \"5/minute; 100/hour\"",
    "5/minute, burst 2, 9/hour": f"'5/minute, burst 2, 9/hour': cannot read '9/hour'; {FORM}",
    "5/minute, 100/hour": f"'5/minute, 100/hour' holds 2 limits {SEVERAL}: \"5/minute; 100/hour\"",
    "5/minute|100 per day|9/s": f"'5/minute|100 per day|9/s' holds 3 limits {SEVERAL}: \"5/minute; 100 per day; 9/s\"",
    "10/fortnight": f"'10/fortnight': unknown unit 'fortnight'; known are {UNITS}",
    "10/minit": "'10/minit': unknown unit 'minit'; did you mean 'minute'?",
    "10/dya": "'10/dya': unknown unit 'dya'; did you mean 'day'?",
    "10/2 months": (
        "'10/2 months': a calendar period is a single month; write one month, or a number of days, "
        'like "1000/30 days"'
    ),
    "10/1.5y": (
        "'10/1.5y': a calendar period is a single year; write one year, or a number of days, like \"1000/365 days\""
    ),
    "10/month, burst 5": (
        "'10/month, burst 5': burst means nothing to a calendar month, which lets all pass at once; leave it out"
    ),
    "10/month, gcra": (
        "gcra cannot count a calendar month, only fixed_window can; leave the algorithm out, or use a length of time, "
        "such as 30 days"
    ),
    "10/month, starts 32": "'10/month, starts 32': starts 32 is not a day of a month; use 1 to 31",
    "10/week, starts 0": "'10/week, starts 0': starts 0 is not a day of a week; use 1 (Monday) to 7 (Sunday)",
    "10/year, starts 02-30": (
        "'10/year, starts 02-30': starts '02-30' is not a day of a year; write month and day, like \"04-01\""
    ),
    "10/day, starts 2": ("'10/day, starts 2': starts 2 means nothing to a day, which starts at midnight; leave it out"),
    "10/month, starts": f"'10/month, starts': cannot read 'starts'; {FORM}",
    "10/month, starts 1, starts 2": "'10/month, starts 1, starts 2': starts is given twice; keep one",
    "10/month, timezone Europe/Berln": (
        "'10/month, timezone Europe/Berln': unknown time zone 'Europe/Berln'; did you mean 'Europe/Berlin'?"
    ),
    "10/hour, timezone UTC": (
        "'10/hour, timezone UTC': timezone applies to a calendar day, week, month or year only; leave it out, or write "
        'it like "1000/month, timezone Europe/Berlin"'
    ),
    "10/2 days, starts 15": (
        "'10/2 days, starts 15': starts applies to a calendar day, week, month or year only; leave it out, or write it "
        'like "1000/month, starts 15"'
    ),
    "10/1.5h": "'10/1.5h': a period is a whole number of units; write 1.5 h in a smaller unit",
    "10/9999999999 weeks": "'10/9999999999 weeks': the period 9999999999 weeks is too long; at most ten years",
    "10/0 minutes": "period 0:00:00 is not positive; the shortest is one microsecond",
    "0/minute": "quota 0 lets nothing pass; it must be at least 1",
    "10/minute, burst 0": "burst 0 lets nothing pass; it must be at least 1",
    "10/minute/second": f"'10/minute/second': cannot read '/second'; {FORM}",
    "10/minute; burst 5": f"'10/minute; burst 5': cannot read '; burst 5'; {FORM}",
    "10/minute, burst": f"'10/minute, burst': cannot read 'burst'; {FORM}",
    "10/minute, burst x": f"'10/minute, burst x': cannot read 'burst x'; {FORM}",
    "10/minute, burst -5": f"'10/minute, burst -5': cannot read 'burst -5'; {FORM}",
    "10/minute, burst=5": f"'10/minute, burst=5': cannot read 'burst=5'; {FORM}",
    "10/minute\0": f"'10/minute\\x00': cannot read '\\x00'; {FORM}",
    "10/minute,": f"'10/minute,': cannot read ','; {FORM}",
    "10/minute, burst 5 burst 6": "'10/minute, burst 5 burst 6': burst is given twice; keep one",
    "10/minute, gcra, gcra": "'10/minute, gcra, gcra': two algorithms, 'gcra' and 'gcra'; keep one",
    "10/minute, sliding_windw": "unknown algorithm 'sliding_windw'; did you mean 'sliding_window'?",
    "10/minute, foo": f"unknown algorithm 'foo'; known are {ALGORITHMS}",
    f"{'9' * 30}/s": f"'{'9' * 30}/s': {'9' * 30} is beyond 2**53, where counting stops being exact",
}


@pytest.mark.parametrize(("text", "meaning"), READABLE.items(), ids=READABLE)
def test_limit_syntax_is_parsed(text: str, meaning: tuple[int, timedelta, int, str]) -> None:
    limit = Limit.parse(text, name="x")
    assert (limit.quota, limit.period, limit.burst, limit.algorithm) == meaning
    assert limit.name == "x"


@pytest.mark.parametrize(("text", "message"), UNREADABLE.items(), ids=map(ascii, UNREADABLE))
def test_invalid_limit_syntax_names_the_remedy(text: Any, message: str) -> None:
    with pytest.raises(InvalidLimit) as raised:
        Limit.parse(text)
    assert str(raised.value) == message


def test_parse_many_reads_several_limits() -> None:
    assert Limit.parse_many("5/minute; 100/hour, burst 20; 1000/day", name="login") == (
        Limit(5, timedelta(minutes=1), name="login 5/minute"),
        Limit(100, timedelta(hours=1), burst=20, name="login 100/hour, burst 20"),
        Limit(1000, timedelta(days=1), name="login 1000/day"),
    )
    assert Limit.parse_many("5/minute;", name="login", algorithm="gcra") == (
        Limit(5, timedelta(minutes=1), algorithm="gcra", name="login"),
    )


@pytest.mark.parametrize("text", [";", "5/minute;;9/hour", "; 5/minute"])
def test_parse_many_rejects_an_empty_limit(text: str) -> None:
    with pytest.raises(InvalidLimit, match="there is no limit between two semicolons"):
        Limit.parse_many(text)


@pytest.mark.parametrize("text", [None, 5, ["5/minute"]])
def test_parse_many_reads_text_only(text: Any) -> None:
    with pytest.raises(InvalidLimit, match="is not the text of a limit"):
        Limit.parse_many(text)


@pytest.mark.parametrize("digits", [30, 5_000])
@pytest.mark.parametrize("text", ["{}/s", "1/{} s", "1/s, burst {}"], ids=["quota", "period", "burst"])
def test_very_long_number_is_rejected_with_its_length(text: str, digits: int) -> None:
    """Python itself refuses to read 5,000 digits, with an error that is none of ours."""
    with pytest.raises(InvalidLimit):
        Limit.parse(text.format("9" * digits))


def test_period_accepts_ascii_digits_only() -> None:
    with pytest.raises(InvalidLimit):
        Limit.parse("10/\uff11minute")


def test_repeated_algorithm_is_rejected() -> None:
    assert Limit.parse("10/minute", algorithm="gcra") == Limit.parse("10/minute, GCRA", algorithm="gcra")
    with pytest.raises(InvalidLimit) as raised:
        Limit.parse("10/minute, gcra", algorithm="sliding_log")
    assert str(raised.value) == "'10/minute, gcra' names 'gcra', the caller 'sliding_log'; keep one"
