"""`headgate tier`: the limits of tiers, and the tiers of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.admin_client import build_path
from headgate.cli.context import change, print_json, resolve_client
from headgate.cli.options import CLIENT, EXIT_CODES, Actions, add_change_options, add_server_options
from headgate.cli.table import titled_table

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from headgate.cli.context import CommandContext

__all__ = ["ABOUT", "EXAMPLES", "add_arguments"]

ABOUT = "set the limits of tiers, and assign clients to tiers"
EXAMPLES = f"""
    headgate tier list
    headgate tier set pro search "2000/minute, burst 200" --reason "the new price list"
    headgate tier assign acme pro --reason "has paid"
    headgate tier unassign acme --reason "has not paid"
{EXIT_CODES}"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser)
    listing = actions.add("list", list_rows, "list tiers with their limits", "headgate tier list")
    add_server_options(listing)

    setting = actions.add(
        "set",
        set_limit,
        "set a limit for the clients of a tier",
        'headgate tier set pro search "2000/minute, burst 200" --reason "the new price list"',
    )
    setting.add_argument("tier", metavar="TIER", help="name of the tier")
    setting.add_argument("limit", metavar="LIMIT", help="name of the limit")
    setting.add_argument("bucket", metavar="BUCKET", help='such as "1000/minute, burst 200"')
    add_change_options(setting)

    removing = actions.add(
        "remove",
        remove,
        "remove a limit of a tier; the policy applies again",
        'headgate tier remove pro search --reason "it was a trial"',
    )
    removing.add_argument("tier", metavar="TIER", help="name of the tier")
    removing.add_argument("limit", metavar="LIMIT", help="name of the limit")
    add_change_options(removing)

    assigning = actions.add(
        "assign",
        assign,
        "assign a client to a tier",
        'headgate tier assign acme pro --label "Acme Inc." --reason "has paid"',
    )
    assigning.add_argument("client", metavar="CLIENT", help=CLIENT)
    assigning.add_argument("tier", metavar="TIER", help="name of the tier")
    assigning.add_argument("--label", metavar="TEXT", help="display name for logs and lists")
    add_change_options(assigning)

    unassigning = actions.add(
        "unassign",
        unassign,
        "remove a client from its tier; the policy applies again",
        'headgate tier unassign acme --reason "has not paid"',
    )
    unassigning.add_argument("client", metavar="CLIENT", help=CLIENT)
    add_change_options(unassigning)


def list_rows(arguments: Namespace, context: CommandContext) -> int:
    found = context.api.get("tiers")
    if arguments.json:
        return print_json(context, found)
    if not found["items"]:
        context.err.print("No tiers.")
        return 0
    titles = ["tier", "clients", "limit", "allows", "source"]
    context.out.print(*titled_table(titles, [*_rows(found["items"])], context.out))
    return 0


def _rows(tiers: list[dict[str, Any]]) -> Iterator[list[str]]:
    """One row per limit; only the first of a tier names it."""
    for tier in tiers:
        name = f"{tier['name']} (default)" if tier.get("is_default") else tier["name"]
        clients = f"{tier.get('clients', 0)}"
        for each in tier["limits"] or [{"limit": "-", "bucket": "", "from": ""}]:
            yield [name, clients, each["limit"], each["bucket"], each["from"]]
            name = clients = ""


def set_limit(arguments: Namespace, context: CommandContext) -> int:
    path = build_path("tiers", arguments.tier, arguments.limit)
    return change(arguments, context, "PUT", path, fields={"bucket": arguments.bucket})


def remove(arguments: Namespace, context: CommandContext) -> int:
    return change(arguments, context, "DELETE", build_path("tiers", arguments.tier, arguments.limit))


def assign(arguments: Namespace, context: CommandContext) -> int:
    who = resolve_client(context, arguments.client)
    fields = {"who": who.fields, "tier": arguments.tier, "label": arguments.label}
    return change(arguments, context, "PUT", "client/tier", fields=fields)


def unassign(arguments: Namespace, context: CommandContext) -> int:
    return change(arguments, context, "DELETE", "client/tier", fields=resolve_client(context, arguments.client).fields)
