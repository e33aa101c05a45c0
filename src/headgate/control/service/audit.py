"""The audit log: versions of the configuration, and actions that create none, such as sign-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.control.config.audit_log import list_entries
from headgate.control.service.changes import audited
from headgate.control.service.listing import check_page
from headgate.control.service.models import AuditEntry, Page

if TYPE_CHECKING:
    from headgate.control.config.audit_log import AuditRecord
    from headgate.control.service.dependencies import ServiceDependencies
    from headgate.control.service.models import Actor

__all__ = ["AuditService"]


class AuditService:
    """Reads and writes the audit log."""

    def __init__(self, deps: ServiceDependencies) -> None:
        self._deps = deps

    def list(
        self, *, before: str | None = None, most: int = 50, author: str | None = None, search: str = ""
    ) -> Page[AuditEntry]:
        """The entries, newest first."""
        for text in (search, author or ""):
            check_page(text, "all", most)
        with self._deps.reading() as connection:
            found = list_entries(connection, before=before, most=most + 1, author=author, search=search)
        entries = tuple(map(_to_entry, found[:most]))
        return Page(entries, entries[-1].id if len(found) > most else None)

    def record(self, actor: Actor, action: str, subject: str, *, reason: str = "") -> None:
        """Record an action that creates no version, such as a sign-in or a new token."""
        with audited(self._deps, actor, action, subject, reason=reason):
            pass


def _to_entry(record: AuditRecord) -> AuditEntry:
    if record.action:
        what = f"{record.action} {record.what}".strip()
        return AuditEntry(record.id, record.at_us, record.author, record.action, record.what, what, record.reason, None)
    action, subject = _split_summary(record)
    return AuditEntry(
        record.id, record.at_us, record.author, action, subject, record.what, record.reason, record.number
    )


def _split_summary(record: AuditRecord) -> tuple[str, str]:
    """Action and subject of a version: its summary is "added override of tenant acme on limit search: 10/minute"."""
    if record.restores is not None:
        return "restored", f"version {record.restores}"
    verb, _, rest = record.what.partition(" ")
    if verb not in ("added", "changed", "removed"):
        return "changed", record.what
    return verb, rest.partition("; ")[0].partition(": ")[0]
