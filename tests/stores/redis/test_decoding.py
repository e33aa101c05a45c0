"""Replies of the store: only what can be the reply to a command is accepted, and nothing is allocated unseen."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from hiredis import ReplyError
from hypothesis import given
from hypothesis import strategies as st

from headgate import Decision, Limit
from headgate.errors import ScriptError, StoreUnavailable
from headgate.stores.operations import Check, Leave, Refund, Renew, Reset
from headgate.stores.redis.decoding import INCOMPLETE, MAX_REPLY_BYTES, ReplyReader, UnexpectedReply, accept, decode
from headgate.stores.redis.encoding import NO_KEYS, Command, Node, Undo
from headgate.stores.redis.topology import Cluster, Sentinel

LIMIT = Limit(5, timedelta(hours=1), name="per-user")
KEY = LIMIT.by("ada")
ONE = Check((KEY,), 1)
TWO = Check((KEY, Limit(9, timedelta(hours=1), name="other").by("ada")), 1)
NOW = 1_763_251_200_000_000

scalars = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.binary() | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=8), max_leaves=20)
"""Anything that a server could reply but an error."""


def numbers_in(value: Any) -> list[Any]:
    return [number for each in value for number in numbers_in(each)] if isinstance(value, list) else [value]


# What is a reply to which command


@pytest.mark.parametrize(
    "reply",
    [
        *(b"abc", b"OK", 7, None, True, "", {}, [], [5], [NOW, 4], [NOW, b"4", 0], [NOW, None, 0], [NOW, 4.0, 0]),
        *(
            [NOW, True, 0],
            [NOW, -2, 0],
            [NOW, 4, -1],
            [-1, 4, 0],
            [NOW, 2**53, 0],
            [NOW, 4, 0, 0, 0],
            [NOW, 4, 0, [], 0, 0],
        ),
        *([NOW, 4, 0, -2, 0, 0], [NOW, 4, 0, 0, -1, 0], [NOW, 4, 0, 0, 0, -1], [NOW, 4, 0, 0, 0, 0, 0], [[NOW, 4, 0]]),
    ],
    ids=repr,
)
def test_what_is_not_the_reply_to_a_check_of_one_limit_is_not_accepted(reply: Any) -> None:
    with pytest.raises(UnexpectedReply, match="which is not a reply to the command"):
        decode([ONE], reply)


def test_reply_that_was_not_expected_leaves_open_what_has_happened() -> None:
    assert UnexpectedReply("").may_have_happened


@pytest.mark.parametrize(
    "reply",
    [
        *(b"abc", None, 7, [], [NOW, 4, 0], [NOW, [4, 60, 3, 60], [], [], []], [NOW, [4, 60], [], []]),
        *([NOW, [4, 60, 3, 60, 2, 60], [], []], [NOW, [4, 60, 3, b"60"], [], []], [NOW, [4, 60, 3, True], [], []]),
        *([NOW, [4, 60, 3, -1], [], []], [NOW, [-2, 60, 3, 1], [], []], [NOW, [4, 60, 3, 2**53], [], []]),
        *(
            [NOW, [4, 60, 3, 60], [2, 5, 0], []],
            [NOW, [4, 60, 3, 60], [-1, 5, 0], []],
            [NOW, [4, 60, 3, 60], [0, 5], []],
        ),
        *(
            [NOW, [4, 60, 3, 60], [0, -2, 0], []],
            [NOW, [4, 60, 3, 60], [0, 5, -1], []],
            [NOW, [4, 60, 3, 60], [], [2, 5]],
        ),
        *([NOW, [4, 60, 3, 60], [], [-1, 5]], [NOW, [4, 60, 3, 60], [], [0]], [b"now", [4, 60, 3, 60], [], []]),
        *([NOW, [4, 60, 3, 60], None, []], [2**53, [4, 60, 3, 60], [], []]),
    ],
    ids=repr,
)
def test_what_is_not_the_reply_to_a_check_of_several_limits_is_not_accepted(reply: Any) -> None:
    with pytest.raises(UnexpectedReply):
        decode([TWO], reply)
    with pytest.raises(UnexpectedReply):
        decode([ONE, ONE], reply)


@pytest.mark.parametrize("call", [Reset((KEY,)), Renew(KEY, "a"), Leave(KEY, "a"), Refund(KEY, 1), Undo(ONE, KEY, NOW)])
@pytest.mark.parametrize(
    "reply", [b"OK", None, [], True, -2, 2**53, [b"1", 4, 0, 0, 0], [1, 4, 0, 0], [-2, 0, 0, 0, 0]]
)
def test_what_is_not_the_reply_to_another_call_is_not_accepted(call: Any, reply: Any) -> None:
    with pytest.raises(UnexpectedReply):
        decode([call], reply)


@given(st.sampled_from([[ONE], [TWO], [ONE, TWO], [ONE] * 3]), values)
def test_whatever_a_server_says_a_check_is_answered_by_whole_numbers_or_not_at_all(
    checks: list[Check], reply: Any
) -> None:
    try:
        answers = decode(checks, reply)
    except UnexpectedReply:
        return
    assert len(answers) == len(checks)
    for answer in answers:
        assert isinstance(answer, Decision | ScriptError)
    assert {type(number) for number in numbers_in(reply)} == {int}


def test_error_of_the_server_is_a_reply_to_any_command() -> None:
    for command in (Command(None, NO_KEYS, (), [ONE]), Command(None, NO_KEYS, ("CLUSTER", "SLOTS"), expects=list)):
        accept(command, ReplyError("LOADING"))
        assert str(command.reply) == "LOADING"


def test_commands_without_calls_say_of_which_type_their_reply_is() -> None:
    with pytest.raises(UnexpectedReply):
        accept(Command(None, NO_KEYS, ("CLUSTER", "SLOTS"), expects=list), b"OK")


@pytest.mark.parametrize(
    "reply",
    [
        *([], [7], [[0, 16383]], [[0, 16383, []]], [[b"0", 5, [b"host", 1]]], [[0, 16384, [b"host", 1]]]),
        *([[5, 4, [b"host", 1]]], [[0, 5, [b"\xff", 1]]], [[0, 5, [7, 1]]], [[0, 2**62, [b"host", 1]]], None),
    ],
    ids=repr,
)
def test_slots_that_cannot_be_are_not_believed(reply: Any) -> None:
    cluster = Cluster([Node("127.0.0.1", 1)])
    refreshing = cluster.refresh()
    (command,) = next(refreshing)
    command.reply = reply
    with pytest.raises(StoreUnavailable, match="no server of the cluster reported its slots"):
        refreshing.send(None)
    assert cluster.primaries() == []


@pytest.mark.parametrize(
    "reply", [[], [b"host"], [b"host", b"port"], [7, 7], [b"\xff", b"1"], [b"a", b"1", b"2"]], ids=repr
)
def test_primary_that_cannot_be_is_not_believed(reply: Any) -> None:
    sentinel = Sentinel([Node("127.0.0.1", 1, "sentinel")], "main")
    refreshing = sentinel.refresh()
    (command,) = next(refreshing)
    command.reply = reply
    with pytest.raises(StoreUnavailable, match="no sentinel could name the primary"):
        refreshing.send(None)


# What is read


def read(*pieces: bytes, max_bytes: int = MAX_REPLY_BYTES) -> list[Any]:
    reader = ReplyReader(max_bytes)
    found = []
    for piece in pieces:
        reader.feed(piece, len(piece))
        while (reply := reader.next_reply()) is not INCOMPLETE:
            found.append(reply)
    return found


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(st.integers(1, 40), st.binary(max_size=60), st.integers(0, 2**62))
def test_replies_are_read_in_pieces_of_any_size(size: int, text: bytes, number: int) -> None:
    data = b"*3\r\n:%d\r\n$%d\r\n%b\r\n*1\r\n+OK\r\n$-1\r\n-ERR no\r\n*0\r\n" % (number, len(text), text)
    first, *others = read(*pieces_of(data, size))
    assert first == [number, text, [b"OK"]]
    assert (others[0], str(others[1]), others[2]) == (None, "ERR no", [])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 100])
@pytest.mark.parametrize(
    "header",
    [
        *(
            b"*150000000\r\n",
            b"*2000000000\r\n",
            b"*1000001\r\n",
            b">150000000\r\n",
            b"$200000000\r\n",
            b"*99999999999999999999",
        ),
        *(b"*2\r\n:1\r\n*150000000\r\n", b"*3\r\n*900000\r\n*900000\r\n", b":1\r\n$99999999999\r\n"),
    ],
)
def test_header_that_announces_too_much_is_refused_before_anything_is_allocated(header: bytes, size: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UnexpectedReply, match="too large"):
            read(*pieces_of(header, size))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_arrays_that_announce_much_between_them_are_refused() -> None:
    with pytest.raises(UnexpectedReply, match="too large"):
        read(b"*1000\r\n" + b"*9999\r\n" * 1000)


def test_reply_without_an_end_is_refused() -> None:
    for start, more in ((b"+", b"a" * 400), (b"*100000\r\n", b"+a\r\n" * 100)):
        with pytest.raises(UnexpectedReply, match="more than 10000 bytes"):
            read(start, *[more] * 30, max_bytes=10_000)


def test_text_may_say_what_looks_like_a_header() -> None:
    text = b'{"reason":"*150000000 $200000000 >5"}'
    assert read(*pieces_of(b"$%d\r\n%b\r\n" % (len(text), text), 9)) == [text]


@pytest.mark.parametrize("data", [b"hello\r\n", b"*x\r\n", b"$-7\r\n", b":1a\r\n", b"*1\r\n\x00\r\n"])
def test_what_is_not_the_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(UnexpectedReply):
        read(data)


def test_bytes_beyond_the_last_reply_are_noticed() -> None:
    reader = ReplyReader()
    reader.feed(b":1\r\n+O", 6)
    assert reader.next_reply() == 1
    assert reader.has_leftover()
    reader.feed(b"K\r\n", 3)
    assert reader.next_reply() == b"OK"
    assert not reader.has_leftover()
