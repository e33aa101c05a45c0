"""Right answers before fast ones: no contender is timed while it answers wrongly."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from bench.contenders import Contender
from bench.expressions import opened, verdict
from bench.openers import Names, Setting

THREE_THEN_NO_MORE = [True, True, True, False, True]


class WrongAnswerError(Exception):
    """Whatever the clock says about a contender that answers wrongly means nothing."""


def expect_right_answers(contender: Contender, setting: Setting) -> None:
    """A limit of three lets three pass and no more, and another key is none the wiser."""
    with opened(contender, setting) as names:
        passes = verdict(contender, names, contender.without_waiting or contender.one)
        _expect_three(contender, [passes(key) for key in "aaaab"])


async def expect_right_answers_async(contender: Contender, setting: Setting) -> None:
    async with AsyncExitStack() as stack:
        names = await contender.opened(setting, stack)
        for check in (contender.one, contender.three):
            passes = verdict(contender, names, check, define="async def")
            # The limit per IP is among the three: other keys for them than for the one.
            _expect_three(contender, [await passes(f"{key}{len(check)}") for key in "aaaab"])


@contextmanager
def all_allowed(contender: Contender, names: Names, keys: list[str]) -> Iterator[None]:
    """Keys that have something left afterwards were never denied while the clock ran."""
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
