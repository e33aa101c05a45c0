"""Rendezvous hashing: keys are balanced, and adding or removing a shard moves only what it must."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headgate.stores.redis.rendezvous import RendezvousHash

NAMES = st.lists(st.from_regex(r"[a-z0-9-]{1,12}", fullmatch=True), min_size=2, max_size=8, unique=True)
KEYS = [f"headgate:per-ip:token_bucket.1:198.51.{high}.{low}" for high in range(20) for low in range(256)]


@given(NAMES)
def test_keys_are_balanced(names: list[str]) -> None:
    counts = Counter(map(RendezvousHash(names).owner, KEYS))
    expected = len(KEYS) / len(names)
    for name in names:  # more than six standard deviations
        assert abs(counts[name] - expected) < 6 * expected**0.5


@given(NAMES)
def test_new_shard_takes_over_its_share_and_nothing_else_moves(names: list[str]) -> None:
    *before, new = names
    old, grown = RendezvousHash(before), RendezvousHash(names)
    moved = [key for key in KEYS if old.owner(key) != grown.owner(key)]
    assert {grown.owner(key) for key in moved} == {new}
    expected = len(KEYS) / len(names)
    assert abs(len(moved) - expected) < 6 * expected**0.5


@given(NAMES)
def test_order_of_names_does_not_matter(names: list[str]) -> None:
    shuffled = sorted(names, reverse=True)
    assert [*map(RendezvousHash(names).owner, KEYS[:200])] == [*map(RendezvousHash(shuffled).owner, KEYS[:200])]


def test_owners_never_change_between_versions() -> None:
    """Another hash would move the counters of every fleet that is upgraded node by node."""
    owners = [RendezvousHash(["eu1", "eu2", "eu3"]).owner(f"headgate:per-ip:gcra.1:{n}") for n in range(12)]
    assert " ".join(owners) == "eu2 eu1 eu3 eu2 eu1 eu3 eu3 eu2 eu3 eu1 eu1 eu3"
