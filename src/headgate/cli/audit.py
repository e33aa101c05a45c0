"""`headgate audit`: the audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.context import fetch_pages, open_context, print_list
from headgate.cli.options import add_page_options, add_server_options

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "show the audit log: who changed what, when and why"
EXAMPLES = """
    headgate audit
    headgate audit --author bob --most 200
    headgate audit --search acme --json

    exit code: 0 done, 1 refused, 2 invalid call or no answer
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--author", metavar="NAME", help="show only changes by NAME")
    add_page_options(parser, most=30)
    add_server_options(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    context = open_context(arguments, out, err)
    query = {"author": arguments.author, "search": arguments.search}
    found = fetch_pages(context, "audit", arguments.most, cursor="before", **query)

    def row(each: dict[str, Any]) -> list[str]:
        return [
            context.time(each["at_us"]),
            each["author"],
            "" if each.get("version") is None else f"{each['version']}",
            context.local_times(each.get("what") or f"{each['action']} {each['about']}".strip()),
            each.get("reason") or "",
        ]

    titles = [f"when ({context.zone_name})", "who", "version", "what", "why"]
    return print_list(arguments, context, found, titles, row, empty="No entries.")
