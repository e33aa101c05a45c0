"""`headgate tier`: the numbers of tiers, and who is in which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.admin_client import path_of
from headgate.cli.context import as_json, change, client_of, opened, titled
from headgate.cli.options import CLIENT, EXIT_CODES, Actions, add_change, add_server
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "set the numbers of tiers, and put clients into them"
EXAMPLES = f"""
    headgate tier list
    headgate tier set pro search "2000/minute, burst 200" --reason "the new price list"
    headgate tier assign acme pro --reason "has paid"
    headgate tier unassign acme --reason "has not paid"
{EXIT_CODES}"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser)
    listing = actions.add("list", list_all, "list tiers with their numbers", "headgate tier list")
    add_server(listing)

    setting = actions.add(
        "set",
        set_numbers,
        "give the clients of a tier these numbers on a limit",
        'headgate tier set pro search "2000/minute, burst 200" --reason "the new price list"',
    )
    setting.add_argument("tier", metavar="TIER", help="its name")
    setting.add_argument("limit", metavar="LIMIT", help="a limit's name")
    setting.add_argument("bucket", metavar="BUCKET", help='like "1000/minute, burst 200"')
    add_change(setting)

    removing = actions.add(
        "remove",
        remove,
        "let the policy say again what a tier has on a limit",
        'headgate tier remove pro search --reason "it was a trial"',
    )
    removing.add_argument("tier", metavar="TIER", help="its name")
    removing.add_argument("limit", metavar="LIMIT", help="a limit's name")
    add_change(removing)

    assigning = actions.add(
        "assign",
        assign,
        "put a client into a tier",
        'headgate tier assign acme pro --label "Acme Inc." --reason "has paid"',
    )
    assigning.add_argument("client", metavar="CLIENT", help=CLIENT)
    assigning.add_argument("tier", metavar="TIER", help="its name")
    assigning.add_argument("--label", metavar="TEXT", help="what to call it in logs and lists")
    add_change(assigning)

    unassigning = actions.add(
        "unassign",
        unassign,
        "let the policy say again in which tier a client is",
        'headgate tier unassign acme --reason "has not paid"',
    )
    unassigning.add_argument("client", metavar="CLIENT", help=CLIENT)
    add_change(unassigning)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    raise InvalidInput("say what to do: list, set, remove, assign or unassign")


def list_all(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    found = desk.api.get("tiers")
    if arguments.json:
        return as_json(desk, found)
    if not found["items"]:
        err.say("There are no tiers.")
        return 0
    out.say(*titled(["tier", "clients", "limit", "allows", "said in"], [*_rows(found["items"])], out))
    return 0


def _rows(tiers: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each limit, with the tier's name on the first of its own."""
    for tier in tiers:
        name = f"{tier['name']} (of everybody else)" if tier.get("is_default") else tier["name"]
        clients = f"{tier.get('clients', 0)}"
        for each in tier["limits"] or [{"limit": "-", "bucket": "", "from": ""}]:
            yield [name, clients, each["limit"], each["bucket"], each["from"]]
            name = clients = ""


def set_numbers(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    path = path_of("tiers", arguments.tier, arguments.limit)
    return change(arguments, desk, "PUT", path, fields={"bucket": arguments.bucket})


def remove(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    return change(arguments, desk, "DELETE", path_of("tiers", arguments.tier, arguments.limit), fields={})


def assign(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    who = client_of(desk, arguments.client)
    fields = {"who": who.plain, "tier": arguments.tier, "label": arguments.label}
    return change(arguments, desk, "PUT", "client/tier", fields=fields)


def unassign(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    return change(arguments, desk, "DELETE", "client/tier", fields=client_of(desk, arguments.client).plain)
