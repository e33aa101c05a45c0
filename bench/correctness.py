"""Checks that a contender enforces its limit, before and after it is timed."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from bench.contenders import Contender
from bench.expressions import open_contender, verdict
from bench.setups import Names, Setting

THREE_THEN_NO_MORE = [True, True, True, False, True]


class WrongAnswerError(Exception):
    """A contender did not enforce its limit, or denied a request within it."""


def expect_right_answers(contender: Contender, setting: Setting) -> None:
    """Raise unless a limit of three allows three requests, denies the fourth and allows another key."""
    with open_contender(contender, setting) as names:
        passes = verdict(contender, names, contender.without_waiting or contender.one)
        _expect_three(contender, [passes(key) for key in "aaaab"])


async def expect_right_answers_async(contender: Contender, setting: Setting) -> None:
    async with AsyncExitStack() as stack:
        names = await contender.setup(setting, stack)
        for check in (contender.one, contender.three):
            passes = verdict(contender, names, check, define="async def")
            # The limit per IP is one of the three: use different keys for both checks.
            _expect_three(contender, [await passes(f"{key}{len(check)}") for key in "aaaab"])


@contextmanager
def all_allowed(contender: Contender, names: Names, keys: list[str]) -> Iterator[None]:
    """Raise if any key was used up in the block, so that no denial was timed."""
    yield
    passes = verdict(contender, names, contender.one)
    _expect_all(contender, [passes(key) for key in keys[:10]])


async def expect_allowed_async(contender: Contender, names: Names, check: str, keys: list[str]) -> None:
    passes = verdict(contender, names, check, define="async def")
    _expect_all(contender, [await passes(key) for key in keys[:10]])


def _expect_three(contender: Contender, verdicts: list[bool]) -> None:
    if verdicts != THREE_THEN_NO_MORE:
        raise WrongAnswerError(f"{contender.name}: a limit of 3 answered {verdicts} to a, a, a, a, b")


def _expect_all(contender: Contender, verdicts: list[bool]) -> None:
    if not all(verdicts):
        raise WrongAnswerError(f"{contender.name}: denied a key that was within its limit")
