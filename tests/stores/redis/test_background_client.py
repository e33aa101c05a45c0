"""Parsing of pub/sub messages about blocks."""

from __future__ import annotations

import pytest

from headgate.stores.redis.background_client import read_block


@pytest.mark.parametrize("until_us", [-1, 2**53, 10**30])
def test_block_with_an_invalid_end_is_ignored(until_us: int) -> None:
    assert read_block(b'{"kind":"ip","value":"10.0.0.1","until_us":%d}' % until_us) is None
    assert read_block(b'{"kind":"ip","value":"10.0.0.1","until_us":%d}' % (2**53 - 1)) is not None


def test_deeply_nested_message_is_no_block() -> None:
    assert read_block(b"[" * 1_000_000) is None
