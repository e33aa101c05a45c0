"""Reset the usage of a client, so that its limits start over.

headgate reset acme --reason "ticket 4711: their job ran twice"
headgate reset ip=203.0.113.9 --limit login-ip --reason "locked out by mistake"

exit code: 0 done, 1 refused, 2 invalid call or no answer, 3 needs --confirm
"""

from __future__ import annotations

from headgate.cli.context import CommandContext, change, resolve_client
from headgate.cli.options import CHANGE, CLIENT, option

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    CLIENT,
    option("--limit", metavar="LIMIT", action="append", help="reset only this limit; may be repeated"),
    *CHANGE,
)


def run(context: CommandContext) -> int:
    who = resolve_client(context, context.arguments.client)
    return change(context, "POST", "client/reset", fields={"who": who.fields, "limits": context.arguments.limit})
