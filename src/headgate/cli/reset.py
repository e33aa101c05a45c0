"""`headgate reset`: resets the usage of a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.cli.context import change, open_context, resolve_client
from headgate.cli.options import CLIENT, EXIT_CODES, add_change_options

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "reset the usage of a client, so that its limits start over"
EXAMPLES = f"""
    headgate reset acme --reason "ticket 4711: their job ran twice"
    headgate reset ip=203.0.113.9 --limit login-ip --reason "locked out by mistake"
{EXIT_CODES}"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("client", metavar="CLIENT", help=CLIENT)
    parser.add_argument("--limit", metavar="LIMIT", action="append", help="reset only this limit; may be repeated")
    add_change_options(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    context = open_context(arguments, out, err)
    who = resolve_client(context, arguments.client)
    fields = {"who": who.fields, "limits": arguments.limit}
    return change(arguments, context, "POST", "client/reset", fields=fields)
