"""`headgate token`: who may ask the admin server, and for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import UNANSWERED, path_of
from headgate.cli.context import as_json, opened, titled
from headgate.cli.options import Actions, add_server
from headgate.cli.terminal import BOLD
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "make, list and revoke the tokens of the admin server"
EXAMPLES = """
    headgate token list
    headgate token make bob --role support --days 30
    headgate token revoke 4f9a1c

    exit code: 0 done, 1 refused, 2 it cannot be asked
"""

ROLES: Final = ("viewer", "support", "operator", "admin")


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser)
    add_server(actions.add("list", list_all, "list tokens, but not their secrets", "headgate token list"))

    making = actions.add(
        "make", make, "make a token, which is shown this once", "headgate token make bob --role support --days 30"
    )
    making.add_argument("name", metavar="NAME", help="whose it is: what is done with it is signed so")
    making.add_argument("--role", choices=ROLES, default="viewer", help="what it may; viewer, if not given")
    making.add_argument("--days", metavar="N", type=int, help="for how long; 90, if not given")
    add_server(making)

    revoking = actions.add("revoke", revoke, "end a token now", "headgate token revoke 4f9a1c")
    revoking.add_argument("id", metavar="ID", help="which list shows")
    add_server(revoking)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    raise InvalidInput("say what to do: list, make or revoke")


def list_all(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    found = desk.api.get("tokens")
    if arguments.json:
        return as_json(desk, found)
    zone = desk.zone_name
    titles = ["id", "name", "role", "state", f"ends ({zone})", "last used"]
    out.say(*titled(titles, [_row(each, desk) for each in found["items"]], out))
    return 0


def _row(each: dict[str, Any], desk: CommandContext) -> list[str]:
    return [
        each["id"],
        each["name"],
        each["role"],
        each.get("state") or ("revoked" if each.get("revoked_us") else "active"),
        desk.time(each.get("expires_us"), none="never"),
        desk.time(each.get("used_us"), none="never"),
    ]


def make(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    fields = {"name": arguments.name, "role": arguments.role, "days": arguments.days}
    given = {name: value for name, value in fields.items() if value is not None}
    found = desk.api.ask("POST", "tokens", body=given).body
    if arguments.json:
        return as_json(desk, found)
    if found.get("token") is None:  # the connection broke, and what was asked again is not told again
        err.say(f"The token {found['id']} was made, but its answer was lost: revoke it, and make another.")
        return UNANSWERED
    err.say(f"A token for {arguments.name}, {arguments.role}; it is shown this once:")
    out.say(out.paint(found["token"], BOLD))
    return 0


def revoke(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    found = desk.api.ask("DELETE", path_of("tokens", arguments.id)).body
    if arguments.json:
        return as_json(desk, found)
    out.say(f"revoked {arguments.id}")
    return 0
