"""`headgate token`: tokens of the admin server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.cli.admin_client import EXIT_UNREACHABLE, build_path
from headgate.cli.context import print_json, print_list
from headgate.cli.options import ROLES, Actions, add_server_options
from headgate.cli.terminal import BOLD

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.context import CommandContext

__all__ = ["ABOUT", "EXAMPLES", "add_arguments"]

ABOUT = "create, list and revoke tokens of the admin server"
EXAMPLES = """
    headgate token list
    headgate token make bob --role support --days 30
    headgate token revoke 4f9a1c

    exit code: 0 done, 1 refused, 2 invalid call or no answer
"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser)
    add_server_options(actions.add("list", list_rows, "list tokens, without their secrets", "headgate token list"))

    making = actions.add(
        "make", make, "create a token, which is shown once", "headgate token make bob --role support --days 30"
    )
    making.add_argument("name", metavar="NAME", help="owner of the token; named in the audit log")
    making.add_argument("--role", choices=ROLES, default="viewer", help="default: %(default)s")
    making.add_argument("--days", metavar="N", type=int, help="validity; default: 90")
    add_server_options(making)

    revoking = actions.add("revoke", revoke, "revoke a token immediately", "headgate token revoke 4f9a1c")
    revoking.add_argument("id", metavar="ID", help="its ID from `list`")
    add_server_options(revoking)


def list_rows(arguments: Namespace, context: CommandContext) -> int:
    def row(each: dict[str, Any]) -> list[str]:
        return [
            each["id"],
            each["name"],
            each["role"],
            each.get("state") or ("revoked" if each.get("revoked_us") else "active"),
            context.time(each.get("expires_us"), none="never"),
            context.time(each.get("used_us"), none="never"),
        ]

    titles = ["id", "name", "role", "state", f"expires ({context.zone_name})", "last used"]
    return print_list(arguments, context, context.api.get("tokens"), titles, row, empty="No tokens.")


def make(arguments: Namespace, context: CommandContext) -> int:
    fields = {"name": arguments.name, "role": arguments.role, "days": arguments.days}
    body = {name: value for name, value in fields.items() if value is not None}
    found = context.api.request("POST", "tokens", body=body).body
    if arguments.json:
        return print_json(context, found)
    if found.get("token") is None:  # a retry, whose response does not repeat the secret
        context.err.print(f"Token {found['id']} was created, but the response was lost: revoke it and create another.")
        return EXIT_UNREACHABLE
    context.err.print(f"Token for {arguments.name}, role {arguments.role}. It is shown once:")
    context.out.print(context.out.paint(found["token"], BOLD))
    return 0


def revoke(arguments: Namespace, context: CommandContext) -> int:
    found = context.api.request("DELETE", build_path("tokens", arguments.id)).body
    if arguments.json:
        return print_json(context, found)
    context.out.print(f"revoked {arguments.id}")
    return 0
