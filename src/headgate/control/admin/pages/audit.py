"""The audit log page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.control.admin.pages.search import redirect_without_key

if TYPE_CHECKING:
    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit

__all__ = ["audit"]


def audit(visit: Visit) -> Response:
    if (redirect := redirect_without_key(visit)) is not None:
        return redirect
    search, author, before = (visit.query.get(name, "") for name in ("search", "author", "before"))
    found = visit.service.audit.list(before=before or None, author=author or None, search=search)
    return visit.page("audit.html", here="/audit", found=found, search=search, author=author, after=before)
