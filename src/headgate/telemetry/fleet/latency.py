"""Latency histograms with exponential buckets, compact enough to be sent every second.

Buckets are exact below 8 microseconds; beyond, each power of two has four, so that no bucket is wider than a quarter
of its lower bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUCKETS", "BUCKET_TABLE", "bucket_of", "quantile"]

EXACT_US: Final = 8
BUCKETS: Final = EXACT_US + 4 * 21


def bucket_of(duration_us: int) -> int:
    """The bucket of a duration."""
    if duration_us < EXACT_US:
        return max(duration_us, 0)
    doublings = duration_us.bit_length() - 3
    return min(EXACT_US + 4 * (doublings - 1) + (duration_us >> doublings) - 4, BUCKETS - 1)


BUCKET_TABLE: Final = bytes([bucket_of(duration_us) for duration_us in range(16_384)])
"""The buckets of common durations."""


def quantile(counts: Mapping[int, int], share: float) -> int | None:
    """The latency that a share of the requests did not exceed, interpolated within its bucket; None without any."""
    rank = share * sum(counts.values())
    cumulative = 0
    for bucket in sorted(counts):
        count = counts[bucket]
        if cumulative + count >= rank and count:
            low, width = _lower_bound_us(bucket), _lower_bound_us(bucket + 1) - _lower_bound_us(bucket)
            return low + round((width - 1) * max(0.0, rank - cumulative) / count)
        cumulative += count
    return None


def _lower_bound_us(bucket: int) -> int:
    if bucket < EXACT_US:
        return bucket
    doublings, quarter = divmod(bucket - EXACT_US, 4)
    return (4 + quarter) << (doublings + 1)
