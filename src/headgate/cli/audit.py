"""`headgate audit`: who did what, when and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.cli.context import as_json, opened, paged, titled
from headgate.cli.options import add_page, add_server

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "show who did what, when and why"
EXAMPLES = """
    headgate audit
    headgate audit --author bob --most 200
    headgate audit --search acme --json

    exit code: 0 here is the answer, 1 refused, 2 it cannot be asked
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--author", metavar="NAME", help="only what this one did")
    add_page(parser, most=30)
    add_server(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    asked = {"author": arguments.author, "search": arguments.search}
    found = paged(desk, "audit", arguments.most, cursor="before", **asked)
    if arguments.json:
        return as_json(desk, found)
    if not found["items"]:
        err.say("Nothing was done.")
        return 0
    rows = [
        [
            desk.time(each["at_us"]),
            each["author"],
            "" if each.get("version") is None else f"{each['version']}",
            desk.local_times(each.get("what") or f"{each['action']} {each['about']}".strip()),
            each.get("reason") or "",
        ]
        for each in found["items"]
    ]
    out.say(*titled([f"when ({desk.zone_name})", "who", "version", "what", "why"], rows, out))
    desk.tell_of_more(found)
    return 0
