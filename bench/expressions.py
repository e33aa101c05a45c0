"""Contenders made ready to call: their names opened, and functions compiled around their expressions."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

from bench.contenders import Contender
from bench.openers import Names, Setting


@contextmanager
def opened(contender: Contender, setting: Setting) -> Iterator[Names]:
    """The names of a contender, and afterwards a process in which none of its threads is left."""
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield contender.opened(setting, stack)
    for thread in set(threading.enumerate()) - before:
        thread.join(1)


def compiled(template: str, names: Names, **parts: str) -> Callable[..., Any]:
    """The function `compiled` of the template, with the names as its globals."""
    scope = {"clock": perf_counter, **names}
    exec(template.format(**parts), scope)
    function: Callable[..., Any] = scope["compiled"]
    return function


_VERDICT = """
{define} compiled(key):
    try:
        answer = {check}
    except denial:
        return False
    return {allowed}
"""


def verdict(contender: Contender, names: Names, check: str, *, define: str = "def") -> Callable[[str], Any]:
    """Whether a key passes, in a bool: contenders say it in a bool, an object, or an exception."""
    denial: object = ()
    if contender.denies_with is not None:
        module, name = contender.denies_with
        denial = getattr(importlib.import_module(module), name)
    allowed = contender.allowed
    if check == contender.three:
        allowed = contender.three_allowed or allowed
    return compiled(_VERDICT, {"denial": denial, **names}, check=check, allowed=allowed, define=define)
