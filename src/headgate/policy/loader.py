"""Reads a policy: strictly, whole or not at all, and with every mistake told at once and by its place."""

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

__all__ = ["UnreadablePolicy", "build", "decoded", "file_content", "load", "no_search_for_cycles", "read"]


class UnreadablePolicy(InvalidPolicy):
    """A policy file that cannot be opened, or that is not a regular file."""


def load(path: str | PathLike[str]) -> Policy:
    """The policy in a file: .yaml, .yml, .toml or .json; InvalidPolicy, if it has mistakes."""
    return read(decoded(file_content(path), path), file=str(path))


def read(text: str, *, file: str = "policy.yaml", format: str | None = None) -> Policy:
    """The policy in a text; InvalidPolicy, if it has mistakes. `file` is what they are told about.

    `format` is "yaml", "toml" or "json"; by the file's name, if not given.

    >>> read("limits: [{by: ip, bucket: 10/minute}]").rules[0].name
    'every route by ip'
    >>> read("limits: [{by: ip, bukcet: 10/minute}]")
    Traceback (most recent call last):
        ...
    headgate.errors.InvalidPolicy: policy.yaml:1:19: unknown field 'bukcet'; did you mean 'bucket'?
    """
    with no_search_for_cycles():
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
    """The bytes of a policy file, at once and never without end: no pipe is waited for, no device is read."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnreadablePolicy([f"{path}: not a regular file; write the policy to one"])
            if status.st_size > LARGEST:
                raise InvalidPolicy([f"{path}: {TOO_LARGE}"])
            return file.read(status.st_size)  # and no more, should it grow meanwhile
    except OSError as error:
        raise UnreadablePolicy([f"{path}: cannot be read: {error.strerror}"]) from None


def decoded(content: bytes, path: str | PathLike[str]) -> str:
    """The text of a policy file."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPolicy([f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8"]) from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def build(value: object, problems: PolicyProblems, warnings: PolicyProblems) -> Policy:
    """The policy, as far as there are no problems."""
    if value in (None, {}):
        # Half a file that was being written is no reason to let everybody in.
        problems.add((), "holds nothing; a policy has at least limits:")
        return Policy()
    kinds = _kinds_of_the_app(value)
    entry = schema.policy(kinds).read(value, (), problems)
    if not isinstance(entry, StructValue) or problems.full:
        return Policy()
    return Builder(entry, kinds, problems, warnings).policy()


def _kinds_of_the_app(value: object) -> list[str]:
    """The identities that limits count by and only the app knows: clients and overrides may name them, too."""
    limits = value.get("limits") if isinstance(value, dict) else None
    kinds: dict[str, None] = {}
    for limit in limits if isinstance(limits, list) else ():
        try:
            kinds.update(dict.fromkeys(scalars.by(limit.get("by"))) if isinstance(limit, dict) else {})
        except InvalidInput:
            continue  # told when the limit is read
    return [kind for kind in kinds if kind not in scalars.IDENTITIES]


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """A policy may be a hundred thousand values, none in a cycle: to look for some took a fourth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
