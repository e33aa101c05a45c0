"""RateLimit header fields (docs/http.md); `RateLimitHeaders` is compiled where possible."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from headgate import speedups
from headgate.algorithms import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.algorithms import Verdict

__all__ = ["LARGEST", "SECOND_US", "Header", "Pace", "PlainRateLimitHeaders", "RateLimitHeaders", "SeparateFields"]

Header: TypeAlias = tuple[bytes, bytes]

SECOND_US: Final = 1_000_000
LARGEST: Final = 999_999_999_999_999
"""The largest integer in a structured field (RFC 9651); quotas can be larger."""


class Pace(NamedTuple):
    """The rate of a limit as RateLimit-Policy states it, for `t` of RateLimit."""

    quota: int
    window: int
    """In seconds; 0 for a limit that is not a rate."""
    ends_at_once: bool
    """True if the whole quota is restored at the end of a window, as with fixed_window."""


class PlainRateLimitHeaders:
    """The RateLimit header fields of requests to which the same limits apply at the same costs."""

    __slots__ = ("_costs", "_paces", "_policy", "_quotas", "_ratelimit", "_refill_us", "_template", "_x_ratelimit")

    def __init__(
        self,
        names: tuple[bytes, ...],
        quotas: tuple[Header, ...],
        refill_us: tuple[int, ...],
        costs: tuple[int, ...],
        paces: tuple[Pace, ...],
        policy: Header,
        x_ratelimit: bool,
        ratelimit: bool,
    ) -> None:
        """`names` are quoted, `quotas` the X-RateLimit-Limit of each, `costs` what the request costs on each, and
        `policy` is RateLimit-Policy. `refill_us` is the time in microseconds from the first token of an empty limit
        until it is full; 0 where all tokens come at once."""
        self._quotas = quotas
        self._refill_us = refill_us
        self._costs = costs
        self._paces = paces
        self._policy = policy
        self._template = b", ".join([name.replace(b"%", b"%%") + b";r=%d;t=%d" for name in names])
        self._x_ratelimit = x_ratelimit
        self._ratelimit = ratelimit

    def headers(self, verdicts: Sequence[Verdict], now_us: int, /) -> list[Header]:
        """The header fields of a response, given the verdict of each limit in the order of the names.

        X-RateLimit describes the tightest limit: of those that denied, the one with the longest wait; if none did, the
        one that admits the fewest further requests of the same cost. Runs on every request, hence a single loop.
        """
        if not verdicts or not (self._x_ratelimit or self._ratelimit):
            return []
        numbers: list[int] = []
        least: float = inf
        tightest = 0
        for index, verdict in enumerate(verdicts):
            remaining, retry_us, reset_us, _ = verdict
            cost = self._costs[index]
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
        if self._x_ratelimit:
            remaining, _, reset_us, _ = verdicts[tightest]
            headers = [
                self._quotas[tightest],
                (b"x-ratelimit-remaining", b"%d" % remaining),
                (b"x-ratelimit-reset", b"%d" % -((now_us + reset_us) // -SECOND_US)),
            ]
        if self._ratelimit:
            headers += self._draft_fields(verdicts, tightest, numbers)
        return headers

    def _draft_fields(self, verdicts: Sequence[Verdict], tightest: int, numbers: list[int]) -> list[Header]:
        """The fields of the IETF draft; `numbers` are remaining and effective window of each limit in turn."""
        return [self._policy, (b"ratelimit", self._template % tuple(numbers))]

    def _remaining_and_window(self, remaining: int, wait_us: int, index: int) -> tuple[int, int]:
        """`r` and `t` of a limit. Clients may spread r over t seconds: r/t must not exceed the rate of the policy."""
        quota, window, ends_at_once = self._paces[index]
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
        refill_us = self._refill_us[index]
        return 0, reset_us - refill_us if reset_us >= refill_us else reset_us


class SeparateFields(PlainRateLimitHeaders):
    """Header fields of draft -06: one for each number, of the tightest limit."""

    def _draft_fields(self, verdicts: Sequence[Verdict], tightest: int, numbers: list[int]) -> list[Header]:
        remaining, _, reset_us, _ = verdicts[tightest]
        return [
            (b"ratelimit-limit", self._quotas[tightest][1]),
            self._policy,
            (b"ratelimit-remaining", b"%d" % min(remaining, LARGEST)),
            (b"ratelimit-reset", b"%d" % min(-(reset_us // -SECOND_US), LARGEST)),
        ]


RateLimitHeaders: type[PlainRateLimitHeaders] = speedups.pick("RateLimitHeaders", PlainRateLimitHeaders)
