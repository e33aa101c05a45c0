"""Block a client immediately.

headgate block 203.0.113.9 --reason "scraping" --until "in 2 hours"
headgate block add ip=203.0.113.0/26 --reason "scraping"
headgate block - --reason "the key was stolen" < key.txt
headgate block list
headgate block remove 203.0.113.9 --reason "it was a mistake"

`add` may be omitted

exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
"""

from __future__ import annotations

from typing import Any, Final

from headgate.cli.admin_client import build_path
from headgate.cli.context import (
    ClientArgument,
    CommandContext,
    change,
    choose_client,
    fetch_pages,
    future,
    print_list,
    read_client,
    resolve_client,
    warn_about_raw_key,
)
from headgate.cli.options import CHANGE, CLIENT_HELP, option, page_options
from headgate.cli.override import STATE, UNTIL
from headgate.cli.terminal import printable

__all__ = ["ACTIONS", "DEFAULT_ACTION"]

DEFAULT_ACTION: Final = "add"


def add(context: CommandContext) -> int:
    """Block a client: any address, network, API key or name, known or not.

    headgate block add 203.0.113.9 --reason "scraping" --until "in 2 hours"
    headgate block add tenant=acme --reason "has not paid"
    """
    until = future(context.arguments.until, context, is_end=True)
    who = _target(context, context.arguments.client)
    return change(context, "POST", "blocks", fields={"who": who.fields, "valid_until": until})


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


def list_rows(context: CommandContext) -> int:
    """List blocks.

    headgate block list --state active
    headgate block list --search scraping
    """
    given = context.arguments
    found = fetch_pages(context, "blocks", given.most, search=given.search, state=given.state)

    def row(each: dict[str, Any]) -> list[str]:
        texts = [each.get(name) or "" for name in ("source", "reason", "author")]
        return [context.id(each), context.client(each), *context.validity(each), each["state"], *texts]

    titles = ["id", "client", f"from ({context.zone_name})", "until", "state", "source", "reason", "by"]
    return print_list(context, found, titles, map(row, found["items"]), empty="No blocks.")


def remove(context: CommandContext) -> int:
    """Lift a block.

    headgate block remove 203.0.113.9 --reason "it was a mistake"
    headgate block remove 12 --reason "it was a mistake"
    """
    client = context.arguments.client
    if client.isascii() and client.isdigit():
        return change(context, "DELETE", build_path("blocks", client))
    return change(context, "DELETE", "blocks", fields=resolve_client(context, client).fields)


_CLIENT = option("client", metavar="CLIENT", help=f"{CLIENT_HELP}; or a network. May be unknown")
_BLOCK = option("client", metavar="CLIENT", help="the client, or the block's ID from `list`")

ACTIONS = {
    "add": (add, _CLIENT, UNTIL, *CHANGE),
    "list": (list_rows, STATE, *page_options(50)),
    "remove": (remove, _BLOCK, *CHANGE),
}
