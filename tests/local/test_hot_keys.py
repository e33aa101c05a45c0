"""Hot-key detection: sustained load is found quickly, short bursts are not hot, and memory is bounded."""

from __future__ import annotations

import pytest

from headgate.local.hot_keys import SAMPLED_EVERY, WINDOW_US, HotKeyDetector

SECOND = 1_000_000
START_US = 77 * SECOND
HOT = ("busy:token_bucket.1", "ada")


def feed(detector: HotKeyDetector, per_second: int, start_us: int, length_us: int) -> list[int]:
    """Send checks at even intervals, one in sixteen sampled; return when each became hot, in microseconds from the
    start.
    """
    since_us = [number * SECOND // per_second for number in range(0, per_second * length_us // SECOND, SAMPLED_EVERY)]
    return [each_us for each_us in since_us if detector.record_sample(HOT, start_us + each_us)]


@pytest.mark.parametrize(
    ("per_second", "length_us", "is_hot"),
    [
        (1_100, 1 * SECOND, True),
        (900, 10 * SECOND, False),
        (5_000, 1 * SECOND, True),
        (100_000, 300_000, False),
        (10_000, 300_000, False),
        (10_000, 310_000, True),
    ],
)
def test_hot_means_1000_per_second_in_three_windows(per_second: int, length_us: int, is_hot: bool) -> None:
    assert bool(feed(HotKeyDetector(), per_second, START_US, length_us)) is is_hot


def test_key_becomes_hot_once_after_three_windows() -> None:
    (hot_us,) = feed(HotKeyDetector(), 20_000, START_US, SECOND)
    assert 3 * WINDOW_US <= hot_us < 3 * WINDOW_US + SECOND * SAMPLED_EVERY // 20_000


def test_partial_window_is_judged_by_its_count() -> None:
    (hot_us,) = feed(HotKeyDetector(), 20_000, START_US + WINDOW_US // 2, SECOND)
    assert hot_us >= 2 * WINDOW_US + WINDOW_US // 2


def test_short_bursts_are_never_hot() -> None:
    detector = HotKeyDetector()
    for burst in range(20):
        assert feed(detector, 50_000, START_US + burst * 400_000, 2 * WINDOW_US) == []


def test_key_cools_down_below_half_the_threshold() -> None:
    detector = HotKeyDetector()
    assert feed(detector, 10_000, START_US, SECOND)
    assert feed(detector, 640, START_US + SECOND, 3 * SECOND) == []
    assert detector.take_cold(START_US + 4 * SECOND) == []
    feed(detector, 160, START_US + 4 * SECOND, 9 * WINDOW_US)
    assert detector.take_cold(START_US + 4 * SECOND + 9 * WINDOW_US) == []
    assert detector.take_cold(START_US + 5 * SECOND) == [HOT]
    assert detector.take_cold(START_US + 5 * SECOND) == [], "it is told once"
    assert feed(detector, 10_000, START_US + 6 * SECOND, SECOND), "and can become hot again"


def test_unused_key_is_cold_after_a_second() -> None:
    detector = HotKeyDetector()
    detector.add(HOT, START_US)
    assert detector.take_cold(START_US + 9 * WINDOW_US) == []
    assert detector.take_cold(START_US + 10 * WINDOW_US) == [HOT]


def test_flood_of_keys_is_bounded_and_hides_no_hot_key() -> None:
    detector = HotKeyDetector()
    hot_us = []
    samples = 62_500 // 2  # half a second at a million keys per second
    for number in range(samples):
        now_us = START_US + number * SECOND // 62_500
        detector.record_sample(("flood:gcra.1", f"key-{number}"), now_us)
        if number % 100 == 99 and detector.record_sample(HOT, now_us):  # 10,000 checks per second
            hot_us.append(now_us)
    assert len(hot_us) == 1
    assert sum(map(len, (detector._samples, detector._busy, detector._streaks, detector._idle))) < 2_100
