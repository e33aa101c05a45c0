"""What the tests of failures are given: limiters of both kinds, and servers to be broken."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.faults import Gate, Looped, Threaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=[Threaded, Looped], ids=["sync", "async"])
def open_gate(request: pytest.FixtureRequest) -> Iterator[Callable[..., Gate]]:
    with ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(request.param(url, **options))


@pytest.fixture
def nothing_is_left_open() -> Iterator[None]:
    """A connection that was lost but never closed is Python's warning, and with it an error, in its own test."""
    yield
    gc.collect()
