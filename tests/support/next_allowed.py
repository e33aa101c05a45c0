"""When the same request would pass again: what a store in memory says if it is asked once more at the same instant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate import Decision


def with_again(answer: Decision, cost: int | tuple[int, ...], once_more: Callable[[], Decision]) -> Decision:
    """The answer, with the `next_allowed_us` that Redis has to give. To ask once more changes nothing: it is denied."""
    costs = cost if isinstance(cost, tuple) else (cost,) * len(answer.keys)
    is_leased = any(key.limit.algorithm == "concurrency" for key in answer.keys)
    is_exhausted = any(left < each for (left, *_), each in zip(answer.verdicts, costs, strict=True))
    if not answer.allowed or not is_exhausted or is_leased:
        return answer
    denied = once_more()
    assert not denied
    assert denied.retry_after_us
    return answer._replace(next_allowed_us=denied.retry_after_us)
