"""Who did what, when and why: the versions of the configuration, and what is no version, as one list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.control.config.audit_log import list_entries
from headgate.control.service.models import AuditEntry, Page

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from headgate.control.config.audit_log import AuditRecord

__all__ = ["page"]


def page(connection: Connection, *, before: str | None, most: int, author: str | None, search: str) -> Page[AuditEntry]:
    """The newest first."""
    found = list_entries(connection, before=before, most=most + 1, author=author, search=search)
    entries = tuple(map(_entry, found[:most]))
    return Page(entries, entries[-1].id if len(found) > most else None)


def _entry(deed: AuditRecord) -> AuditEntry:
    if deed.action:
        what = f"{deed.action} {deed.what}".strip()
        return AuditEntry(deed.id, deed.at_us, deed.author, deed.action, deed.what, what, deed.reason, None)
    action, about = _told(deed)
    return AuditEntry(deed.id, deed.at_us, deed.author, action, about, deed.what, deed.reason, deed.number)


def _told(deed: AuditRecord) -> tuple[str, str]:
    """What was done, and to what: versions say it as "added override of tenant acme on limit search: 10/minute"."""
    if deed.restores is not None:
        return "restored", f"version {deed.restores}"
    verb, _, rest = deed.what.partition(" ")
    if verb not in ("added", "changed", "removed"):
        return "changed", deed.what
    return verb, rest.partition("; ")[0].partition(": ")[0]
