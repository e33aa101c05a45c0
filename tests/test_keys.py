"""Keys that a limit keeps made are those that it would make anew, and never too many."""

from __future__ import annotations

import math
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidKey, Limit
from headgate.limits import MAX_CACHED_KEYS
from support.limiter_probe import HOUR

if TYPE_CHECKING:
    from support.limiter_probe import LimiterProbe

MINUTE = timedelta(minutes=1)


@given(st.lists(st.text("ab%|:{}\n", max_size=3), max_size=40))
def test_key_that_is_asked_for_again_is_as_if_made_anew(texts: list[str]) -> None:
    limit = Limit(5, MINUTE)
    for text in texts:
        assert limit.by(text) == Limit(5, MINUTE).by(text)
        assert limit.by(text).limit is limit


def test_key_of_a_returning_client_is_reused() -> None:
    limit = Limit(5, MINUTE)
    assert limit.by("ada") is limit.by("ada")


def test_never_more_keys_are_kept_than_said() -> None:
    limit = Limit(5, MINUTE)
    for number in range(3 * MAX_CACHED_KEYS):
        limit.by(f"client-{number}")
        assert len(limit._keys) <= MAX_CACHED_KEYS  # nobody else can see the bound
    assert limit.by("client-0").identity == "client-0"


@pytest.mark.parametrize("part", [True, 1.0, None, ["1"], b"1"])
def test_what_is_no_identity_finds_no_key_of_another(part: object) -> None:
    limit = Limit(5, MINUTE)
    limit.by(1)
    limit.by("1")
    with pytest.raises(InvalidKey):
        limit.by(part)  # type: ignore[arg-type]


def test_copy_in_another_process_takes_no_clients_along() -> None:
    limit = Limit(5, MINUTE, burst=7, algorithm="gcra", name="posts")
    limit.by("ada@example.org")
    sent = pickle.dumps(limit)
    assert b"ada" not in sent
    copy = pickle.loads(sent)
    assert (copy, copy.full) == (limit, limit.full)
    assert copy.by("ada@example.org").limit is copy


def test_no_two_identities_share_a_counter(probe: LimiterProbe) -> None:
    """Pitfall P7: parts joined by a separator collide where a part contains it."""
    limit = Limit(1, HOUR, name="identities")
    identities = [
        ("a/b", "c"),
        ("a", "b/c"),
        ("a:b", "c"),
        ("a", "b:c"),
        ("a", "b", "c"),
        ("a%3Ab", "c"),
        ("a\\:b", "c"),
        ("abc",),
        ("{abc}",),
        ("a", "bc"),
        ("A", "bc"),
        ("é",),
        ("e\u0301",),
        ("a\nb",),
        ("a\0b",),
        ("x" * 1_000,),
        ("x" * 1_001,),
    ]
    refused = [parts for parts in identities if not probe.limiter.check(limit.by(probe.identity, *parts))]
    assert refused == []


def test_no_two_limits_share_a_counter(probe: LimiterProbe) -> None:
    """Pitfall P7: nor do a name and an identity run into each other."""
    keys = [
        Limit(1, HOUR, name="a").by(probe.identity, "b"),
        Limit(1, HOUR, name="b").by(probe.identity, "a"),
        Limit(1, HOUR, name=f"a-{probe.identity}").by("b"),
        Limit(1, HOUR, name="a").by(f"{probe.identity}-b"),
    ]
    assert [probe.limiter.check(key).allowed for key in keys] == [True] * len(keys)


@pytest.mark.parametrize("part", [1.5, True, b"x", (), ["ada"], math.nan, object])
def test_identity_of_another_type_is_rejected(part: Any) -> None:
    message = f"{part!r} cannot identify a client: by() takes text and whole numbers"
    for parts in ((part,), ("tenant", part), (part, "user")):
        with pytest.raises(InvalidKey) as raised:
            Limit(5, HOUR).by(*parts)
        assert str(raised.value) == message


def test_none_is_not_an_identity() -> None:
    """The commonest mistake of all: a user who is not logged in, counted together with all others like them."""
    with pytest.raises(InvalidKey) as raised:
        Limit(5, HOUR).by(None)  # type: ignore[arg-type]
    assert str(raised.value) == (
        "None cannot identify a client: by() takes text and whole numbers; "
        "decide what callers without an identity are counted by"
    )
