"""Set the limits of tiers, and assign clients to tiers.

headgate tier list
headgate tier set pro search "2000/minute, burst 200" --reason "the new price list"
headgate tier assign acme pro --reason "has paid"
headgate tier unassign acme --reason "has not paid"

exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.admin_client import build_path
from headgate.cli.context import CommandContext, change, print_list, resolve_client
from headgate.cli.options import CHANGE, CLIENT, SERVER, option

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ACTIONS"]


def list_rows(context: CommandContext) -> int:
    """List tiers with their limits.

    headgate tier list
    """
    found = context.api.get("tiers")
    titles = ["tier", "clients", "limit", "allows", "source"]
    return print_list(context, found, titles, _rows(found["items"]), empty="No tiers.")


def _rows(tiers: list[dict[str, Any]]) -> Iterator[list[str]]:
    """One row per limit; only the first of a tier names it."""
    for tier in tiers:
        name = f"{tier['name']} (default)" if tier.get("is_default") else tier["name"]
        clients = f"{tier.get('clients', 0)}"
        for each in tier["limits"] or [{"limit": "-", "bucket": "", "from": ""}]:
            yield [name, clients, each["limit"], each["bucket"], each["from"]]
            name = clients = ""


def set_limit(context: CommandContext) -> int:
    """Set a limit for the clients of a tier.

    headgate tier set pro search "2000/minute, burst 200" --reason "the new price list"
    """
    path = build_path("tiers", context.arguments.tier, context.arguments.limit)
    return change(context, "PUT", path, fields={"bucket": context.arguments.bucket})


def remove(context: CommandContext) -> int:
    """Remove a limit of a tier; the policy applies again.

    headgate tier remove pro search --reason "it was a trial"
    """
    return change(context, "DELETE", build_path("tiers", context.arguments.tier, context.arguments.limit))


def assign(context: CommandContext) -> int:
    """Assign a client to a tier.

    headgate tier assign acme pro --label "Acme Inc." --reason "has paid"
    headgate tier assign acme pro --timezone Europe/Berlin --starts 15 --reason "their month"
    """
    given = context.arguments
    fields = {
        "who": resolve_client(context, given.client).fields,
        "tier": given.tier,
        "label": given.label,
        "timezone": given.timezone,
        "starts": given.starts,
    }
    return change(context, "PUT", "client/tier", fields=fields)


def unassign(context: CommandContext) -> int:
    """Remove a client from its tier; the policy applies again.

    headgate tier unassign acme --reason "has not paid"
    """
    return change(context, "DELETE", "client/tier", fields=resolve_client(context, context.arguments.client).fields)


_TIER = option("tier", metavar="TIER", help="name of the tier")
_LIMIT = option("limit", metavar="LIMIT", help="name of the limit")
_BUCKET = option("bucket", metavar="BUCKET", help='such as "1000/minute, burst 200"')
_LABEL = option("--label", metavar="TEXT", help="display name for logs and lists")
_TIMEZONE = option("--timezone", metavar="NAME", help="time zone of its calendar periods; '' for that of the limits")
_STARTS = option(
    "--starts", metavar="DAY", help="first day of its months (15) or years (04-01); '' for that of the limits"
)

ACTIONS = {
    "list": (list_rows, *SERVER),
    "set": (set_limit, _TIER, _LIMIT, _BUCKET, *CHANGE),
    "remove": (remove, _TIER, _LIMIT, *CHANGE),
    "assign": (assign, CLIENT, _TIER, _LABEL, _TIMEZONE, _STARTS, *CHANGE),
    "unassign": (unassign, CLIENT, *CHANGE),
}
