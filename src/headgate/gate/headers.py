"""RateLimit header fields (docs/http.md); `RateLimitHeaders` is compiled where possible."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from headgate import speedups
from headgate.algorithms import NEVER
from headgate.clock import SECOND_US

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.algorithms import Verdict

__all__ = ["LARGEST", "SECOND_US", "Header", "Pace", "PlainRateLimitHeaders", "RateLimitHeaders", "SeparateFields"]

Header: TypeAlias = tuple[bytes, bytes]

LARGEST: Final = 999_999_999_999_999
"""The largest integer in a structured field (RFC 9651); quotas can be larger."""


class Pace(NamedTuple):
    """The rate of a limit as RateLimit-Policy states it, for `t` of RateLimit."""

    quota: int
    window: int
    """In seconds; 0 for a limit that is not a rate."""
    ends_at_once: bool
    """True if the whole quota is restored at the end of a window, as with fixed_window."""


@dataclass(slots=True, eq=False, repr=False)
class PlainRateLimitHeaders:
    """The RateLimit header fields of requests to which the same limits apply at the same costs."""

    names: tuple[bytes, ...]
    """Quoted."""
    quotas: tuple[Header, ...]
    """X-RateLimit-Limit of each limit."""
    refill_us: tuple[int, ...]
    """The time from the first token of an empty limit until it is full; 0 where all tokens come at once."""
    costs: tuple[int, ...]
    """The cost of a request on each limit."""
    paces: tuple[Pace, ...]
    policy: Header
    """RateLimit-Policy."""
    x_ratelimit: bool
    ratelimit: bool
    template: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.template = b", ".join([name.replace(b"%", b"%%") + b";r=%d;t=%d" for name in self.names])

    def headers(self, verdicts: Sequence[Verdict], now_us: int, /) -> list[Header]:
        """The header fields of a response, given the verdict of each limit in the order of the names.

        X-RateLimit describes the tightest limit: of those that denied, the one with the longest wait; if none did, the
        one that admits the fewest further requests of the same cost. Runs on every request, hence a single loop.
        """
        if not verdicts or not (self.x_ratelimit or self.ratelimit):
            return []
        numbers: list[int] = []
        least: float = inf
        tightest = 0
        for index, verdict in enumerate(verdicts):
            remaining, retry_us, reset_us, _ = verdict
            cost = self.costs[index]
            room: float = remaining // cost if cost else inf
            if remaining and not retry_us:
                wait_us = reset_us
            else:
                denied, wait_us = self._rank_exhausted(verdict, index)
                room = denied or room
            numbers += self._remaining_and_window(remaining, wait_us, index)
            # Of two that admit the same number, the slower one, whatever the order of the limits.
            if room < least or (room == least and reset_us > verdicts[tightest][2]):
                least, tightest = room, index
        headers: list[Header] = []
        if self.x_ratelimit:
            remaining, _, reset_us, _ = verdicts[tightest]
            headers = [
                self.quotas[tightest],
                (b"x-ratelimit-remaining", b"%d" % remaining),
                (b"x-ratelimit-reset", b"%d" % -((now_us + reset_us) // -SECOND_US)),
            ]
        if self.ratelimit:
            headers += self._draft_fields(verdicts, tightest, numbers)
        return headers

    def _draft_fields(self, verdicts: Sequence[Verdict], tightest: int, numbers: list[int]) -> list[Header]:
        """The fields of the IETF draft; `numbers` are remaining and effective window of each limit in turn."""
        return [self.policy, (b"ratelimit", self.template % tuple(numbers))]

    def _remaining_and_window(self, remaining: int, wait_us: int, index: int) -> tuple[int, int]:
        """`r` and `t` of a limit. Clients may spread r over t seconds: r/t must not exceed the rate of the policy."""
        quota, window, ends_at_once = self.paces[index]
        left, seconds = min(remaining, LARGEST), -(wait_us // -SECOND_US)
        if left > 0 and window and not (ends_at_once and wait_us):
            seconds = max(seconds, -(left * window // -quota))
        return left, min(seconds, LARGEST)

    def _rank_exhausted(self, verdict: Verdict, index: int) -> tuple[float, int]:
        """The rank of a limit that denied (negative) or is exhausted (0), and the time until it has tokens again."""
        _, retry_us, reset_us, _ = verdict
        if retry_us == NEVER:
            return -inf, reset_us
        if retry_us:
            return -retry_us, retry_us
        # The first token comes before the rest; the share of a node without the store may fill sooner.
        refill_us = self.refill_us[index]
        return 0, reset_us - refill_us if reset_us >= refill_us else reset_us


class SeparateFields(PlainRateLimitHeaders):
    """Header fields of draft -06: one for each number, of the tightest limit."""

    def _draft_fields(self, verdicts: Sequence[Verdict], tightest: int, numbers: list[int]) -> list[Header]:
        remaining, _, reset_us, _ = verdicts[tightest]
        return [
            (b"ratelimit-limit", self.quotas[tightest][1]),
            self.policy,
            (b"ratelimit-remaining", b"%d" % min(remaining, LARGEST)),
            (b"ratelimit-reset", b"%d" % min(-(reset_us // -SECOND_US), LARGEST)),
        ]


RateLimitHeaders: type[PlainRateLimitHeaders] = speedups.pick("RateLimitHeaders", PlainRateLimitHeaders)
