"""What every check asks of its event loop, in the quickest way that the loop has."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["maker_of_futures", "self_aware"]


class _Unaware:
    _thread_id: Final = None


def self_aware(loop: asyncio.AbstractEventLoop) -> Any:
    """What has the thread that the loop runs in as its `_thread_id`: asyncio's own loops do, those of others never say.

    Whoever finds its own thread there knows which loop runs. To ask for that takes five times as long, as it is a call
    of the system on Python 3.11.
    """
    return loop if isinstance(loop, asyncio.BaseEventLoop) else _Unaware


def maker_of_futures(loop: asyncio.AbstractEventLoop) -> Callable[[], asyncio.Future[Any]]:
    """The loop's own, without the step of Python that is around it in asyncio's."""
    if type(loop).create_future is asyncio.BaseEventLoop.create_future:
        return partial(asyncio.Future, loop=loop)
    return loop.create_future
