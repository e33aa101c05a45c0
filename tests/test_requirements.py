"""Locks: requirements/ has a version and hashes of everything that the repository's commands install."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS, GROUPS = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
LOCKS = {
    "run": (("admin", "fastapi", "redis", "yaml"), ("run",)),
    "test": (("all",), ("test", "check")),
    "bench": ((), ("bench",)),
    "release": ((), ("release",)),
    "gateways": ((), ("gateways",)),
}
"""For each lock, the extras and groups of pyproject.toml that it is derived from."""


def pins(lock: str) -> dict[str, list[tuple[Requirement, int]]]:
    """The pinned requirements of a lock by name, with the number of their hashes."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    for entry in text.replace(" \\\n", " ").splitlines():
        pin, *hashes = entry.split(" --hash=sha256:")
        requirement = Requirement(pin.strip())
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return found


def direct(lock: str) -> list[Requirement]:
    """What pyproject.toml asks for, with headgate's own extras resolved."""
    extras, groups = LOCKS[lock]
    waiting = [*(f"headgate[{extra}]" for extra in extras), *(each for group in groups for each in GROUPS[group])]
    found = []
    for text in waiting:
        requirement = Requirement(text)
        if requirement.name == "headgate":
            waiting += [each for extra in requirement.extras for each in EXTRAS[extra]]
        else:
            found.append(requirement)
    return found


def closure(roots: list[Requirement]) -> set[str]:
    """The names of all packages that an installation of these leads to on this machine."""
    waiting, seen = [(root, extra) for root in roots for extra in ("", *root.extras)], set()
    while waiting:
        requirement, extra = waiting.pop()
        if (name := canonicalize_name(requirement.name), extra) in seen:
            continue
        seen.add((name, extra))
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                waiting += [(each, inner) for inner in ("", *each.extras)]
    return {name for name, _ in seen}


def applying(lock: str) -> Iterator[Requirement]:
    for entries in pins(lock).values():
        yield from (each for each, _ in entries if each.marker is None or each.marker.evaluate())


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_satisfies_the_project_file(lock: str) -> None:
    locked = {canonicalize_name(each.name): each for each in applying(lock)}
    for requirement in direct(lock):
        pin = locked.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in requirements/{lock}.txt: run make lock"
        version = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"requirements/{lock}.txt has {pin}: run make lock"


@pytest.mark.parametrize("lock", ["run", "test"])
def test_lock_is_complete_and_has_nothing_else(lock: str) -> None:
    """The other locks contain packages that the tests do not install."""
    assert {canonicalize_name(each.name) for each in applying(lock)} == closure(direct(lock)), "run make lock"


@pytest.mark.parametrize("lock", LOCKS)
def test_all_versions_are_exact_and_hashed(lock: str) -> None:
    for entries in pins(lock).values():
        for requirement, hashes in entries:
            assert [each.operator for each in requirement.specifier] == ["=="], requirement
            assert hashes, requirement
            assert requirement.url is None


def test_locks_agree_on_versions() -> None:
    """They are installed into one environment; that of the gateways is a separate one."""
    versions: dict[str, set[str]] = {}
    for lock in ("run", "test", "bench", "release"):
        for each in applying(lock):
            versions.setdefault(canonicalize_name(each.name), set()).add(str(each.specifier))
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_every_lock_is_checked() -> None:
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == set(LOCKS)
