"""Compares two versions of a policy, for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from headgate.policy.model import Policy

__all__ = ["summarize_changes"]

_SECTIONS: Final[dict[str, tuple[str, Callable[[Any], object]]]] = {
    "limits": ("rules", lambda rule: rule.name),
    "routes": ("routes", lambda route: (route.template, route.methods)),
    "clients": ("clients", lambda client: client.identity),
    "overrides": ("overrides", lambda each: (each.identity, each.rule, each.route_class, each.validity)),
    "blocks": ("blocked", lambda block: (block.identity, block.validity)),
}
"""The sections of a policy: the attribute that holds one, and the part of an entry that identifies it."""

_SETTINGS: Final = ("identity", "answers", "store", "on_failure", "tiers", "default_tier", "name")


def summarize_changes(before: Policy, after: Policy) -> str:
    """The number of entries that differ, by section.

    >>> from headgate.policy import read
    >>> old = read("limits: [{name: a, by: ip, bucket: 5/minute}, {name: b, by: ip, bucket: 9/day}]")
    >>> new = read("{on_failure: closed, limits: [{name: a, by: ip, bucket: 6/minute}]}")
    >>> summarize_changes(old, new)
    'limits: 1 changed, 1 removed; settings: on_failure'
    >>> summarize_changes(old, old)
    'no entry changed'
    """
    found = []
    for section, (attribute, key) in _SECTIONS.items():
        old = {key(entry): entry for entry in getattr(before, attribute)}
        new = {key(entry): entry for entry in getattr(after, attribute)}
        counts = {
            "changed": sum(entry in new and new[entry] != old[entry] for entry in old),
            "added": len(new.keys() - old.keys()),
            "removed": len(old.keys() - new.keys()),
        }
        message = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if message:
            found.append(f"{section}: {message}")
    settings = [name for name in _SETTINGS if getattr(before, name) != getattr(after, name)]
    if settings:
        found.append(f"settings: {', '.join(settings)}")
    return "; ".join(found) or "no entry changed"
