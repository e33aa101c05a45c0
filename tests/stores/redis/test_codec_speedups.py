"""Batches in C are those in Python: the keys that go out, and the decisions that come back."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Decision, Key, Limit
from headgate.stores.operations import Check
from headgate.stores.redis.decoding import answers, plain_answers
from headgate.stores.redis.encoding import CommandEncoder, pack_keys, plain_pack_keys
from support.growth import assert_nothing_grows

MINUTE = timedelta(minutes=1)
NOW = 1_763_251_200_000_000
LIMITS = tuple(Limit(5, MINUTE, name=name) for name in ("ip", "key", "all"))
WIRE = CommandEncoder("headgate", None)

who = st.text("ab", max_size=3) | st.sampled_from(["x" * 1000, "a/b", "%7B", "\x7f", "\r\n"])


def keys_of(*whose: str) -> tuple[Key, ...]:
    return tuple([limit.by(each) for limit, each in zip(LIMITS, whose, strict=False)])


def alike(checks: list[Check]) -> tuple[Any, ...]:
    limits = tuple([key.limit for key in checks[0].keys])
    return checks, limits, WIRE._heads(limits)


@given(st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[who] * width), min_size=1, max_size=40)))
def test_keys_of_a_batch_in_c_are_those_in_python(whose: list[tuple[str, ...]]) -> None:
    args = alike([Check(keys_of(*each), 1) for each in whose])
    assert pack_keys(*args) == plain_pack_keys(*args)
    assert plain_pack_keys(*args) is not None


@pytest.mark.parametrize("size", [1, 2, 31, 256])
def test_repeated_key_is_detected_at_any_position(size: int) -> None:
    for first in {0, size // 2}:
        for last in {size // 2, size - 1} - {first}:
            whose = [("ip", str(number)) for number in range(size)]
            whose[last] = ("ip", str(first))
            names = [Check(keys_of(*each)[1:], 1) for each in whose]
            assert pack_keys(*alike(names))[2] is True  # type: ignore[index] # they are alike
    strangers = [Check(keys_of("ip", str(number))[1:], 1) for number in range(size)]
    assert pack_keys(*alike(strangers))[2] is False  # type: ignore[index]


def test_same_name_under_two_limits_is_no_meeting() -> None:
    args = alike([Check(keys_of("ada", "bob"), 1), Check(keys_of("bob", "ada"), 1)])
    assert pack_keys(*args) == plain_pack_keys(*args)
    assert pack_keys(*args)[2] is False  # type: ignore[index]


def test_equal_costs_need_not_be_one_object() -> None:
    many = [Check(keys_of("a", "b"), int("1000")), Check(keys_of("a", "c"), int("1000"))]
    each = [Check(keys_of("a", "b"), (1, int("1000"))), Check(keys_of("a", "c"), (1, int("1000")))]
    for checks in (many, each):
        args = alike(checks)
        assert pack_keys(*args) == plain_pack_keys(*args) is not None


ONE = Check(keys_of("ada", "bob"), 1)


class Nobody:
    def __eq__(self, other: object) -> bool:
        raise OSError("nobody is like me")

    __hash__ = None  # type: ignore[assignment] # nor is it asked for


@pytest.mark.parametrize(
    "other",
    [
        ONE._replace(cost=2),
        ONE._replace(cost=(1, 2)),
        ONE._replace(cost=Nobody()),  # type: ignore[arg-type]
        ONE._replace(id="a lease"),
        ONE._replace(keys=ONE.keys[:1]),
        ONE._replace(keys=ONE.keys[::-1]),
        ONE._replace(keys=(LIMITS[0].by("{ada}"), ONE.keys[1])),
        ONE._replace(keys=(LIMITS[0].by("ädä"), ONE.keys[1])),
        ONE._replace(keys=(LIMITS[0].by("\ud800"), ONE.keys[1])),
        ONE._replace(keys=(Key(LIMITS[0], ("x" * 100_000,), "x" * 100_000), ONE.keys[1])),
        ONE._replace(keys=(("no", "key"), ONE.keys[1])),  # type: ignore[arg-type]
        ONE._replace(keys=[*ONE.keys]),  # type: ignore[arg-type]
        ("no", "check"),
        None,
    ],
)
def test_what_is_not_alike_or_not_stored_as_it_is_is_left_to_python(other: Any) -> None:
    assert pack_keys([ONE, other], *alike([ONE])[1:]) is None


@pytest.mark.parametrize(
    "heads", [("a:", "a:"), ("{a}:", "b:"), ("ä:", "b:"), ("a:", "}"), ("a:", b"b:"), ("a:", "b" * 100_000)]
)
def test_limits_whose_keys_are_not_stored_as_they_are_are_left_to_python(heads: tuple[Any, ...]) -> None:
    assert pack_keys([ONE], alike([ONE])[1], heads) is None


def test_empty_batch_is_left_to_python() -> None:
    assert pack_keys([], *alike([ONE])[1:]) is None
    assert pack_keys([ONE._replace(keys=())], (), ()) is None


@pytest.mark.parametrize("args", [(), ([ONE],), ((ONE,), LIMITS, ("a", "b", "c")), ([ONE], LIMITS, ("a", "b"))])
def test_invalid_arguments_are_rejected(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="pack_keys"):
        pack_keys(*args)
    with pytest.raises(TypeError, match="decode_allowed"):
        answers(*args[:1])


# ------------------------------------------------------------------- what comes back

counts = st.integers(0, 5) | st.integers(0, 2**53 - 1)


@given(st.lists(st.tuples(st.integers(1, 3), st.none() | st.just("lease")), min_size=1, max_size=20), st.data())
def test_usual_reply_means_in_c_what_it_means_in_python(
    asked: list[tuple[int, str | None]], data: st.DataObject
) -> None:
    checks = [Check(keys_of(*"abc"[:width]), 1, lease) for width, lease in asked]
    total = 2 * sum([width for width, _ in asked])
    reply = [NOW, data.draw(st.lists(counts, min_size=total, max_size=total)), [], []]
    found = answers(checks, reply)
    assert found == plain_answers(checks, reply)
    assert [type(each) for each in found or ()] == [Decision] * len(checks)


@pytest.mark.parametrize(
    "reply",
    [
        [NOW, [4, 60, 3, 60], [0, 5, 0], []],
        [NOW, [4, 60, 3, 60], [], [0, 5]],
        [NOW, [-1, 0, -1, 0], [], []],
        [NOW, [4, 60, 3, -60], [], []],
        [NOW, [4, 60, 3, 2**64], [], []],
        [NOW, [4, 60, 3], [], []],
        [NOW, [4, 60, 3, 60, 2, 60], [], []],
        [NOW, [4, 60, 3, b"60"], [], []],
        [NOW, [4, 60, 3, True], [], []],
        [b"now", [4, 60, 3, 60], [], []],
        [NOW, (4, 60, 3, 60), [], []],
        [NOW, [4, 60, 3, 60], None, []],
        [NOW, [4, 60, 3, 60]],
        (),
        None,
        b"OK",
    ],
    ids=str,
)
def test_what_a_reply_says_that_is_unusual_is_left_to_python(reply: Any) -> None:
    assert answers([ONE], reply) is None


@pytest.mark.parametrize("checks", [(ONE,), [None], [("no", "check")], [ONE._replace(keys=[*ONE.keys])]])
def test_what_was_not_asked_is_not_answered(checks: Any) -> None:
    assert answers(checks, [NOW, [4, 60, 3, 60], [], []]) is None


def test_batches_give_back_all_that_they_have_borrowed() -> None:
    checks = [Check(keys_of("ada", str(number)), 1) for number in range(3)]
    reply = [NOW, [2**40, 2**41] * 6, [], []]

    def once() -> None:
        pack_keys(*alike(checks))
        pack_keys([*checks, None], *alike(checks)[1:])
        pack_keys([*checks, ONE._replace(cost=Nobody())], *alike(checks)[1:])  # type: ignore[arg-type]
        answers(checks, reply)
        answers([*checks, ONE], reply)
        answers(checks, [NOW, [2**40] * 11, [], []])
        with suppress(TypeError):
            pack_keys()

    assert_nothing_grows(once)
