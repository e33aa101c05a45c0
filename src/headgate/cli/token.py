"""Create, list and revoke tokens of the admin server.

headgate token list
headgate token make bob --role support --days 30
headgate token revoke 4f9a1c

exit code: 0 done, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

from typing import Any

from headgate.cli.admin_client import EXIT_UNREACHABLE, build_path
from headgate.cli.context import CommandContext, print_list
from headgate.cli.options import ROLES, SERVER, option
from headgate.cli.terminal import BOLD

__all__ = ["ACTIONS"]


def list_rows(context: CommandContext) -> int:
    """List tokens, without their secrets.

    headgate token list
    """

    def row(each: dict[str, Any]) -> list[str]:
        state = each.get("state") or ("revoked" if each.get("revoked_us") else "active")
        times = [context.time(each.get(name), none="never") for name in ("expires_us", "used_us")]
        return [each["id"], each["name"], each["role"], state, *times]

    titles = ["id", "name", "role", "state", f"expires ({context.zone_name})", "last used"]
    found = context.api.get("tokens")
    return print_list(context, found, titles, map(row, found["items"]), empty="No tokens.")


def make(context: CommandContext) -> int:
    """Create a token, which is shown once.

    headgate token make bob --role support --days 30
    """
    name, role, days = context.arguments.name, context.arguments.role, context.arguments.days
    body = {"name": name, "role": role} | ({} if days is None else {"days": days})
    found = context.api.request("POST", "tokens", body=body).body
    if context.arguments.json:
        return context.show(found)
    if found.get("token") is None:  # a retry, whose response does not repeat the secret
        context.err.print(f"Token {found['id']} was created, but the response was lost: revoke it and create another.")
        return EXIT_UNREACHABLE
    context.err.print(f"Token for {name}, role {role}. It is shown once:")
    context.out.print(context.out.paint(found["token"], BOLD))
    return 0


def revoke(context: CommandContext) -> int:
    """Revoke a token immediately.

    headgate token revoke 4f9a1c
    """
    found = context.api.request("DELETE", build_path("tokens", context.arguments.id)).body
    return context.show(found, [f"revoked {context.arguments.id}"])


ACTIONS = {
    "list": (list_rows, *SERVER),
    "make": (
        make,
        option("name", metavar="NAME", help="owner of the token; named in the audit log"),
        option("--role", choices=ROLES, default="viewer", help="default: %(default)s"),
        option("--days", metavar="N", type=int, help="validity; default: 90"),
        *SERVER,
    ),
    "revoke": (revoke, option("id", metavar="ID", help="its ID from `list`"), *SERVER),
}
