"""Show the actions that scenarios have taken on clients, and undo them.

headgate actions list
headgate actions list --state all --search 203.0.113
headgate actions undo 3f2a9c0d1e4b5a67 --reason "ticket 4711: a partner's crawler"

exit code: 0 done, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

from typing import Any

from headgate.cli.admin_client import build_path
from headgate.cli.context import CommandContext, change, fetch_pages, print_list
from headgate.cli.options import CHANGE, option, page_options

__all__ = ["ACTIONS"]


def list_rows(context: CommandContext) -> int:
    """List actions, newest first.

    headgate actions list
    headgate actions list --state undone
    """
    given = context.arguments
    found = fetch_pages(context, "actions", given.most, search=given.search, state=given.state)

    def row(each: dict[str, Any]) -> list[str]:
        times = context.time(each["at_us"]), context.time(each["until_us"])
        return [each["id"], context.client(each), *times, each["state"], f"{each['level']}", each["explanation"]]

    titles = ["id", "client", f"since ({context.zone_name})", "until", "state", "level", "explanation"]
    return print_list(context, found, titles, map(row, found["items"]), empty="No actions.")


def undo(context: CommandContext) -> int:
    """End an action on all nodes.

    headgate actions undo 3f2a9c0d1e4b5a67 --reason "ticket 4711: a partner's crawler"
    """
    return change(context, "DELETE", build_path("actions", context.arguments.action_id))


STATE = option(
    "--state", choices=("active", "shadow", "undone", "ended", "all"), default="active", help="default: %(default)s"
)

ACTIONS = {
    "list": (list_rows, STATE, *page_options(50)),
    "undo": (undo, option("action_id", metavar="ID", help="the action's ID from `list`"), *CHANGE),
}
