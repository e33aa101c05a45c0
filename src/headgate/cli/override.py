"""Override the limits of a client, optionally for a period.

headgate override add acme 10000/minute --limit search --until friday --reason "contract 4711"
headgate override list acme
headgate override change 17 20000/minute --reason "contract 4712"
headgate override remove 17 --reason "the contract has ended"

exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
"""

from __future__ import annotations

from typing import Any, Final

from headgate.cli.admin_client import build_path
from headgate.cli.context import CommandContext, change, fetch_pages, future, print_list, resolve_client
from headgate.cli.options import CHANGE, CLIENT, CLIENT_HELP, option, page_options
from headgate.cli.who import override_cells
from headgate.errors import InvalidInput

__all__ = ["ACTIONS", "STATE", "UNTIL"]

STATE: Final = option(
    "--state", choices=("all", "active", "future", "expired"), default="all", help="default: %(default)s"
)
UNTIL: Final = option(
    "--until", metavar="TIME", help='end: "friday" (inclusive), "friday 18:00", "in 2 hours"; default: no end'
)


def add(context: CommandContext) -> int:
    """Override a limit for a client.

    headgate override add acme 10000/minute --limit search --until friday --reason "contract 4711"
    headgate override add user=ada "500/hour, burst 50" --class exports --from "monday 8:00" --reason audit
    exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
    """
    given = context.arguments
    if given.limit is None and given.route_class is None:
        raise InvalidInput("name a limit with --limit LIMIT (see `headgate who`), or a class with --class CLASS")
    fields = _fields(context, {})
    fields["who"] = resolve_client(context, given.client).fields
    hint = "Override {0} was created: `headgate override remove {0} --reason ...` removes it."
    return change(context, "POST", "overrides", fields=fields, id_hint=hint)


def list_rows(context: CommandContext) -> int:
    """List overrides, of all clients or of one.

    headgate override list
    headgate override list acme --state active
    headgate override list --search contract --json
    """
    given = context.arguments
    client = {} if given.client is None else resolve_client(context, given.client).fields
    found = fetch_pages(context, "overrides", given.most, search=given.search, state=given.state, **client)

    def row(each: dict[str, Any]) -> list[str]:
        return [context.id(each), context.client(each), *override_cells(each, context)]

    titles = ["id", "client", "of", "bucket", f"from ({context.zone_name})", "until", "state", "reason", "by"]
    return print_list(context, found, titles, map(row, found["items"]), empty="No overrides.")


def change_one(context: CommandContext) -> int:
    """Change some fields of an override.

    headgate override change 17 20000/minute --reason "contract 4712"
    headgate override change 17 --until "in 2 weeks" --reason "they need longer"
    """
    path = build_path("overrides", context.arguments.id)
    response = context.api.request("GET", path)
    # Fields that are not given keep their value, so the override must not have changed meanwhile.
    based_on = response.version if context.arguments.based_on is None else context.arguments.based_on
    return change(context, "PUT", path, fields=_fields(context, response.body), based_on=based_on)


def _fields(context: CommandContext, before: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given, and the others as they were before."""
    given = context.arguments
    return {
        "who": before.get("who"),
        "bucket": given.bucket or before.get("bucket"),
        "limit": given.limit or before.get("limit"),
        "class": given.route_class or before.get("route_class"),
        "valid_from": future(given.since, context) or context.iso(before.get("valid_from_us")),
        "valid_until": future(given.until, context, is_end=True) or context.iso(before.get("valid_until_us")),
    }


def remove(context: CommandContext) -> int:
    """Remove an override.

    headgate override remove 17 --reason "the contract has ended"
    """
    return change(context, "DELETE", build_path("overrides", context.arguments.id))


_ID = option("id", metavar="ID", type=int, help="its ID from `list`")
_BUCKET_HELP = 'like "1000/minute, burst 200"'
_WHERE = (
    option("--limit", metavar="LIMIT", help="override this limit; see `headgate who`"),
    option("--class", metavar="CLASS", dest="route_class", help="override limits on routes of this class"),
    option("--from", metavar="TIME", dest="since", help="start; default: now"),
    UNTIL,
)

ACTIONS = {
    "add": (add, CLIENT, option("bucket", metavar="BUCKET", help=_BUCKET_HELP), *_WHERE, *CHANGE),
    "list": (list_rows, option("client", metavar="CLIENT", nargs="?", help=CLIENT_HELP), STATE, *page_options(50)),
    "change": (change_one, _ID, option("bucket", metavar="BUCKET", nargs="?", help=_BUCKET_HELP), *_WHERE, *CHANGE),
    "remove": (remove, _ID, *CHANGE),
}
