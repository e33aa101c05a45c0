"""`headgate reset`: forget what a client has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.cli.context import change, client_of, opened
from headgate.cli.options import CLIENT, EXIT_CODES, add_change

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "forget what a client has used, so that its limits begin anew"
EXAMPLES = f"""
    headgate reset acme --reason "ticket 4711: their job ran twice"
    headgate reset ip=203.0.113.9 --limit login-ip --reason "locked out by mistake"
{EXIT_CODES}"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", help=CLIENT)
    parser.add_argument("--limit", metavar="LIMIT", action="append", help="only this one; may be repeated")
    add_change(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    who = client_of(desk, arguments.client)
    fields = {"who": who.plain, "limits": arguments.limit}
    return change(arguments, desk, "POST", "client/reset", fields=fields)
