"""The header fields that tell a client how it stands (docs/http.md): here as Python, and compiled in `_fields.c`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

from headgate._compiled import compiled
from headgate.algorithms import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headgate.algorithms import Verdict

__all__ = ["LARGEST", "SECOND_US", "Fields", "Header", "PlainFields"]

Header: TypeAlias = tuple[bytes, bytes]

SECOND_US: Final = 1_000_000
LARGEST: Final = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651); quotas can be larger."""


class PlainFields:
    """The limits of one kind of request, as header fields tell them."""

    __slots__ = ("_filling", "_policy", "_quotas", "_ratelimit", "_template", "_x_ratelimit")

    def __init__(
        self,
        names: tuple[bytes, ...],
        quotas: tuple[Header, ...],
        filling: tuple[int, ...],
        policy: Header,
        x_ratelimit: bool,
        ratelimit: bool,
    ) -> None:
        """`names` are quoted, `quotas` the X-RateLimit-Limit of each, and `policy` is RateLimit-Policy. `filling`: for
        how many microseconds each goes on filling when the first of it is there; 0 where it comes all at once."""
        self._quotas = quotas
        self._filling = filling
        self._policy = policy
        self._template = b", ".join([name.replace(b"%", b"%%") + b";r=%d;t=%d" for name in names])
        self._x_ratelimit = x_ratelimit
        self._ratelimit = ratelimit

    def headers(self, verdicts: Sequence[Verdict], now_us: int, /) -> list[Header]:
        """The fields for an answer, from what each limit said, in the order of the names.

        X-RateLimit speaks of the tightest limit: of those that denied, the one with the longest wait; if none did,
        the one with the least left. This runs on every request, hence one loop and one formatting for all.
        """
        if not verdicts or not (self._x_ratelimit or self._ratelimit):
            return []
        numbers: list[int] = []
        least: float = inf
        tightest = verdicts[0]
        for verdict in verdicts:
            remaining, retry_us, reset_us, _ = verdict
            room: float
            if remaining and not retry_us:
                room, wait_us = remaining, reset_us
            else:
                room, wait_us = self._wanting(verdict, len(numbers) // 2)
            numbers += remaining, -(wait_us // -SECOND_US)
            # Of two that are equally tight the slower one, so that the order of the limits does not matter.
            if room < least or (room == least and reset_us > tightest[2]):
                least, tightest = room, verdict
        headers: list[Header] = []
        if self._x_ratelimit:
            remaining, _, reset_us, _ = tightest
            headers = [
                self._quotas[verdicts.index(tightest)],
                (b"x-ratelimit-remaining", b"%d" % remaining),
                (b"x-ratelimit-reset", b"%d" % -((now_us + reset_us) // -SECOND_US)),
            ]
        if self._ratelimit:
            if max(numbers) > LARGEST:
                numbers = [min(number, LARGEST) for number in numbers]
            headers += self._policy, (b"ratelimit", self._template % tuple(numbers))
        return headers

    def _wanting(self, verdict: Verdict, index: int) -> tuple[float, int]:
        """How much room a limit has that denied, or has nothing left, and how long it is until there is more."""
        _, retry_us, reset_us, _ = verdict
        if retry_us == NEVER:
            return -inf, reset_us
        if retry_us:
            return -retry_us, retry_us
        # Of nothing, the first comes before the rest; a node's own part, without the store, may fill sooner.
        filling_us = self._filling[index]
        return 0, reset_us - filling_us if reset_us >= filling_us else reset_us


Fields: type[PlainFields] = getattr(compiled("headgate.adapters._fields"), "Fields", PlainFields)
