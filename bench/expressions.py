"""Compiles the expressions of contenders into functions."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

from bench.contenders import Contender
from bench.setups import Names, Setting


@contextmanager
def open_contender(contender: Contender, setting: Setting) -> Iterator[Names]:
    """Set up a contender; on exit, wait for its threads to end."""
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield contender.setup(setting, stack)
    for thread in set(threading.enumerate()) - before:
        thread.join(1)


def compiled(template: str, names: Names, **parts: str) -> Callable[..., Any]:
    """The function that the template defines, with the names as its globals."""
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
    """A function that returns True if a key is allowed, for libraries that return a bool, an object or raise."""
    denial: object = ()
    if contender.denies_with is not None:
        module, name = contender.denies_with
        denial = getattr(importlib.import_module(module), name)
    allowed = contender.allowed
    if check == contender.three:
        allowed = contender.three_allowed or allowed
    return compiled(_VERDICT, {"denial": denial, **names}, check=check, allowed=allowed, define=define)
