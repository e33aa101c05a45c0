"""`headgate block`: refuse all requests of a client, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.admin_client import path_of
from headgate.cli.context import (
    ClientArgument,
    ahead,
    as_json,
    asked_client,
    change,
    chosen_from,
    client_of,
    opened,
    paged,
    titled,
    warn_of_key,
)
from headgate.cli.options import CLIENT, EXIT_CODES, Actions, add_change, add_page, add_server
from headgate.cli.overrides import STATES, add_until
from headgate.cli.terminal import printable
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "block a client, at once"
EXAMPLES = f"""
    headgate block 203.0.113.9 --reason "scraping" --until "in 2 hours"
    headgate block add ip=203.0.113.0/26 --reason "scraping"
    headgate block - --reason "the key was stolen" < key.txt
    headgate block list
    headgate block remove 203.0.113.9 --reason "it was a mistake"

    add may be left out
{EXIT_CODES}"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser, implied="add")
    adding = actions.add(
        "add",
        add,
        "block a client: any address, network, API key or name, whether it was seen before or not",
        """
        headgate block add 203.0.113.9 --reason "scraping" --until "in 2 hours"
        headgate block add tenant=acme --reason "has not paid"
        """,
    )
    adding.add_argument("client", metavar="CLIENT", help=f"{CLIENT}; or a network. It need not be known yet")
    add_until(adding)
    add_change(adding)

    listing = actions.add(
        "list",
        list_all,
        "list blocks",
        "headgate block list --state active\nheadgate block list --search scraping",
    )
    listing.add_argument("--state", choices=STATES, default="all", help="only those; all, if not given")
    add_page(listing)
    add_server(listing)

    removing = actions.add(
        "remove",
        remove,
        "lift a block",
        """
        headgate block remove 203.0.113.9 --reason "it was a mistake"
        headgate block remove 12 --reason "it was a mistake"
        """,
    )
    removing.add_argument("client", metavar="CLIENT", help="whom, or the number that list shows")
    add_change(removing)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    raise InvalidInput("say what to do: add, list or remove")


def add(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    until = ahead(arguments.until, desk, at_its_end=True)
    who = _target(desk, arguments.client)
    return change(arguments, desk, "POST", "blocks", fields={"who": who.plain, "valid_until": until})


def _target(desk: CommandContext, written: str) -> ClientArgument:
    """The client to block, which need not be known yet. Says what the block will match; a text that can mean several
    clients is asked about at a terminal, and refused elsewhere."""
    found = desk.api.ask("POST", "candidates", body={"client": asked_client(written)}).body["items"]
    chosen = found[0]
    if len(found) > 1 and (chosen["who"]["kind"] != "ip" or "/" in written):
        chosen = chosen_from(desk, found)
    elif len(found) > 1:  # an IPv6 address, and the network around it
        desk.err.say(f"note: to block {printable(found[1]['matches'])}, give {found[1]['who']['value']}")
    who = ClientArgument(**chosen["who"], label=chosen["label"] or "")
    warn_of_key(desk, written, who)
    desk.err.say(printable(f"{chosen['title']}: blocks {chosen['matches']}"))
    if not chosen["is_known"] and who.kind not in ("ip", "subnet"):
        desk.err.say(f"note: no {who.kind.replace('_', ' ')} of this name was ever seen")
    return who


def remove(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    if arguments.client.isascii() and arguments.client.isdigit():
        return change(arguments, desk, "DELETE", path_of("blocks", arguments.client), fields={})
    who = client_of(desk, arguments.client)
    return change(arguments, desk, "DELETE", "blocks", fields=who.plain)


def list_all(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    found = paged(desk, "blocks", arguments.most, search=arguments.search, state=arguments.state)
    if arguments.json:
        return as_json(desk, found)
    if not found["items"]:
        err.say("Nobody is blocked.")
        return 0
    titles = ["id", "client", f"from ({desk.zone_name})", "until", "state", "said in", "reason", "by"]
    out.say(*titled(titles, [_row(each, desk) for each in found["items"]], out))
    desk.tell_of_more(found)
    return 0


def _row(each: dict[str, Any], desk: CommandContext) -> list[str]:
    return [
        "-" if each.get("id") is None else f"{each['id']}",
        desk.client(each),
        desk.time(each.get("valid_from_us"), none="-"),
        desk.time(each.get("valid_until_us"), none="for ever"),
        each["state"],
        each.get("source") or "",
        each.get("reason") or "",
        each.get("author") or "",
    ]
