"""Loads policies. Parsing is strict, and all mistakes are reported at once with their positions."""

from __future__ import annotations

import gc
import os
import stat
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from headgate.errors import InvalidInput, InvalidPolicy
from headgate.policy import scalars, schema
from headgate.policy.builder import Builder
from headgate.policy.model import Policy
from headgate.policy.problems import PolicyProblems
from headgate.policy.schema_types import StructValue
from headgate.policy.source import LARGEST, TOO_LARGE, Source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

__all__ = ["UnreadablePolicy", "build", "decoded", "file_content", "gc_paused", "load", "read"]


class UnreadablePolicy(InvalidPolicy):
    """A policy file that cannot be opened, or that is not a regular file."""


def load(path: str | PathLike[str]) -> Policy:
    """Load a policy file (.yaml, .yml, .toml or .json); raise InvalidPolicy if it has mistakes."""
    return read(decoded(file_content(path), path), file=str(path))


def read(text: str, *, file: str = "policy.yaml", format: str | None = None) -> Policy:
    """Parse the text of a policy; raise InvalidPolicy if it has mistakes. `file` is the file name in messages.

    `format` is "yaml", "toml" or "json"; the default depends on the file name.

    >>> read("limits: [{by: ip, bucket: 10/minute}]").rules[0].name
    'every route by ip'
    >>> read("limits: [{by: ip, bukcet: 10/minute}]")
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidPolicy: policy.yaml:1:19: unknown field 'bukcet'; did you mean 'bucket'?
    """
    with gc_paused():
        source = Source(text, file, format)
        try:
            problems, warnings = PolicyProblems(), PolicyProblems()
            policy = build(source.value, problems, warnings)
            if refusal := source.refusal(problems):
                raise refusal
            return replace(policy, warnings=tuple(source.tell(warnings))) if warnings else policy
        finally:
            source.release()


def file_content(path: str | PathLike[str]) -> bytes:
    """Read a policy file without blocking: only regular files of limited size are read."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnreadablePolicy([f"{path}: not a regular file; write the policy to one"])
            if status.st_size > LARGEST:
                raise InvalidPolicy([f"{path}: {TOO_LARGE}"])
            return file.read(status.st_size)  # not more, even if the file grows
    except OSError as error:
        raise UnreadablePolicy([f"{path}: cannot be read: {error.strerror}"]) from None


def decoded(content: bytes, path: str | PathLike[str]) -> str:
    """Decode the content of a policy file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPolicy([f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8"]) from None


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def build(value: object, problems: PolicyProblems, warnings: PolicyProblems) -> Policy:
    """Build the policy; it is only valid if no problem was added."""
    if value in (None, {}):
        # An empty file may be one that is being written; it must not remove all limits.
        problems.add((), "is empty; a policy has at least limits:")
        return Policy()
    kinds = _custom_kinds(value)
    entry = schema.policy(kinds).read(value, (), problems)
    if not isinstance(entry, StructValue) or problems.full:
        return Policy()
    return Builder(entry, kinds, problems, warnings).policy()


def _custom_kinds(value: object) -> list[str]:
    """The custom kinds of identity in `by`, which clients and overrides may use, too."""
    limits = value.get("limits") if isinstance(value, dict) else None
    kinds: dict[str, None] = {}
    for limit in limits if isinstance(limits, list) else ():
        try:
            kinds.update(dict.fromkeys(scalars.by(limit.get("by"))) if isinstance(limit, dict) else {})
        except InvalidInput:
            continue  # reported when the limit is parsed
    return [kind for kind in kinds if kind not in scalars.IDENTITIES]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector: it took a quarter of the time for large policies, which have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
