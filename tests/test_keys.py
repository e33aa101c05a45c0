"""Keys that a limit keeps made are those that it would make anew, and never too many."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidKey, Limit
from headgate.limits import MAX_CACHED_KEYS

MINUTE = timedelta(minutes=1)


@given(st.lists(st.text("ab%|:{}\n", max_size=3), max_size=40))
def test_a_key_that_is_asked_for_again_is_as_if_made_anew(texts: list[str]) -> None:
    limit = Limit(5, MINUTE)
    for text in texts:
        assert limit.by(text) == Limit(5, MINUTE).by(text)
        assert limit.by(text).limit is limit


def test_a_client_that_comes_again_gets_the_key_it_had() -> None:
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


def test_a_copy_in_another_process_takes_no_clients_along() -> None:
    limit = Limit(5, MINUTE, burst=7, algorithm="gcra", name="posts")
    limit.by("ada@example.org")
    sent = pickle.dumps(limit)
    assert b"ada" not in sent
    copy = pickle.loads(sent)
    assert (copy, copy.full) == (limit, limit.full)
    assert copy.by("ada@example.org").limit is copy
