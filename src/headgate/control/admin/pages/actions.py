"""The page of actions that scenarios have taken on clients, each with a button that ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.control.service import ChangeContext

if TYPE_CHECKING:
    from starlette.responses import Response

    from headgate.control.admin.pages.base import Visit

__all__ = ["actions", "undo"]

STATES: Final = (
    ("active", "In force"), ("shadow", "Shadow mode"), ("undone", "Undone"), ("ended", "Ended"), ("all", "All"),
)  # fmt: skip
UNDO_REASON: Final = "undone on the page Actions"


def actions(visit: Visit) -> Response:
    state = visit.query.get("state", "active")
    state = state if state in dict(STATES) else "active"
    trouble = visit.service.actions.trouble()
    found = None if trouble else visit.service.actions.list(state=state, after=visit.query.get("after") or None)
    return visit.page("actions.html", "/actions", found=found, trouble=trouble, state=state, states=STATES)


def undo(visit: Visit) -> Response:
    """End an action with one click: it can only help the client, and a scenario that is right finds it again."""
    change = ChangeContext(visit.actor, visit.form.get("reason") or UNDO_REASON)
    done = visit.service.actions.undo(change, visit.request.path_params["id"])
    return visit.redirect("/actions", f"{done.what[:1].upper()}{done.what[1:]}.", done.notes)
