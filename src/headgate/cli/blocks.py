"""`headgate block`: blocks, which reject all requests of a client at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.admin_client import build_path
from headgate.cli.context import (
    ClientArgument,
    change,
    choose_client,
    fetch_pages,
    future,
    print_list,
    read_client,
    resolve_client,
    warn_about_raw_key,
)
from headgate.cli.options import CLIENT, EXIT_CODES, Actions, add_change_options, add_page_options, add_server_options
from headgate.cli.overrides import STATES, add_until
from headgate.cli.terminal import printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.context import CommandContext

__all__ = ["ABOUT", "EXAMPLES", "add_arguments"]

ABOUT = "block a client immediately"
EXAMPLES = f"""
    headgate block 203.0.113.9 --reason "scraping" --until "in 2 hours"
    headgate block add ip=203.0.113.0/26 --reason "scraping"
    headgate block - --reason "the key was stolen" < key.txt
    headgate block list
    headgate block remove 203.0.113.9 --reason "it was a mistake"

    `add` may be omitted
{EXIT_CODES}"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser, default="add")
    adding = actions.add(
        "add",
        add,
        "block a client: any address, network, API key or name, known or not",
        """
        headgate block add 203.0.113.9 --reason "scraping" --until "in 2 hours"
        headgate block add tenant=acme --reason "has not paid"
        """,
    )
    adding.add_argument("client", metavar="CLIENT", help=f"{CLIENT}; or a network. May be unknown")
    add_until(adding)
    add_change_options(adding)

    listing = actions.add(
        "list",
        list_rows,
        "list blocks",
        "headgate block list --state active\nheadgate block list --search scraping",
    )
    listing.add_argument("--state", choices=STATES, default="all", help="default: %(default)s")
    add_page_options(listing)
    add_server_options(listing)

    removing = actions.add(
        "remove",
        remove,
        "lift a block",
        """
        headgate block remove 203.0.113.9 --reason "it was a mistake"
        headgate block remove 12 --reason "it was a mistake"
        """,
    )
    removing.add_argument("client", metavar="CLIENT", help="the client, or the block's ID from `list`")
    add_change_options(removing)


def add(arguments: Namespace, context: CommandContext) -> int:
    until = future(arguments.until, context, is_end=True)
    who = _target(context, arguments.client)
    return change(arguments, context, "POST", "blocks", fields={"who": who.fields, "valid_until": until})


def _target(context: CommandContext, text: str) -> ClientArgument:
    """The client to block, known or not; prints what the block will match."""
    found = context.api.request("POST", "candidates", body={"client": read_client(text)}).body["items"]
    chosen = found[0]
    if len(found) > 1 and (chosen["who"]["kind"] != "ip" or "/" in text):
        chosen = choose_client(context, found)
    elif len(found) > 1:  # an IPv6 address, and the network around it
        context.err.print(f"note: to block {printable(found[1]['matches'])}, give {found[1]['who']['value']}")
    who = ClientArgument(**chosen["who"], label=chosen["label"] or "")
    warn_about_raw_key(context, text, who)
    context.err.print(printable(f"{chosen['title']}: blocks {chosen['matches']}"))
    if not chosen["is_known"] and who.kind not in ("ip", "subnet"):
        context.err.print(f"note: this {who.kind.replace('_', ' ')} has never been seen")
    return who


def remove(arguments: Namespace, context: CommandContext) -> int:
    if arguments.client.isascii() and arguments.client.isdigit():
        return change(arguments, context, "DELETE", build_path("blocks", arguments.client))
    return change(arguments, context, "DELETE", "blocks", fields=resolve_client(context, arguments.client).fields)


def list_rows(arguments: Namespace, context: CommandContext) -> int:
    found = fetch_pages(context, "blocks", arguments.most, search=arguments.search, state=arguments.state)

    def row(each: dict[str, Any]) -> list[str]:
        return [
            "-" if each.get("id") is None else f"{each['id']}",
            context.client(each),
            context.time(each.get("valid_from_us"), none="-"),
            context.time(each.get("valid_until_us"), none="no end"),
            each["state"],
            each.get("source") or "",
            each.get("reason") or "",
            each.get("author") or "",
        ]

    titles = ["id", "client", f"from ({context.zone_name})", "until", "state", "source", "reason", "by"]
    return print_list(arguments, context, found, titles, row, empty="No blocks.")
