"""`headgate override`: other numbers for one client, perhaps for a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import path_of
from headgate.cli.context import ClientArgument, ahead, as_json, change, client_of, opened, paged, titled
from headgate.cli.options import CLIENT, EXIT_CODES, Actions, add_change, add_page, add_server
from headgate.cli.who import override_cells
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.context import CommandContext
    from headgate.cli.terminal import Terminal

__all__ = ["ABOUT", "EXAMPLES", "STATES", "add_arguments", "add_until", "run"]

ABOUT = "give a client numbers of its own, perhaps for a time"
EXAMPLES = f"""
    headgate override add acme 10000/minute --limit search --until friday --reason "contract 4711"
    headgate override list acme
    headgate override change 17 20000/minute --reason "contract 4712"
    headgate override remove 17 --reason "the contract has ended"
{EXIT_CODES}"""

STATES: Final = ("all", "active", "future", "expired")
BUCKET: Final = 'like "1000/minute, burst 200"'


def add_arguments(parser: ArgumentParser) -> None:
    actions = Actions(parser)
    adding = actions.add(
        "add",
        add,
        "give a client other numbers",
        f"""
        headgate override add acme 10000/minute --limit search --until friday --reason "contract 4711"
        headgate override add user=ada "500/hour, burst 50" --class exports --from "monday 8:00" --reason audit
        {EXIT_CODES.strip()}
        """,
    )
    adding.add_argument("client", metavar="CLIENT", help=CLIENT)
    adding.add_argument("bucket", metavar="BUCKET", help=BUCKET)
    _add_where(adding)
    add_change(adding)

    listing = actions.add(
        "list",
        list_all,
        "list overrides, of all clients or of one",
        """
        headgate override list
        headgate override list acme --state active
        headgate override list --search contract --json
        """,
    )
    listing.add_argument("client", metavar="CLIENT", nargs="?", help=CLIENT)
    listing.add_argument("--state", choices=STATES, default="all", help="only those; all, if not given")
    add_page(listing)
    add_server(listing)

    changing = actions.add(
        "change",
        change_one,
        "change an override; what is not said stays",
        """
        headgate override change 17 20000/minute --reason "contract 4712"
        headgate override change 17 --until "in 2 weeks" --reason "they need longer"
        """,
    )
    changing.add_argument("id", metavar="ID", type=int, help="its number, which list shows")
    changing.add_argument("bucket", metavar="BUCKET", nargs="?", help=BUCKET)
    _add_where(changing)
    add_change(changing)

    removing = actions.add(
        "remove", remove, "end an override now", 'headgate override remove 17 --reason "the contract has ended"'
    )
    removing.add_argument("id", metavar="ID", type=int, help="its number, which list shows")
    add_change(removing)


def _add_where(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="LIMIT", help="on this limit, as `headgate who` names it")
    parser.add_argument("--class", metavar="CLASS", dest="route_class", help="on routes of this class")
    parser.add_argument("--from", metavar="TIME", dest="since", help="from when on; at once, if not given")
    add_until(parser)


def add_until(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--until", metavar="TIME", help='"friday" (all of it), "friday 18:00", "in 2 hours"; for ever, if not given'
    )


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    raise InvalidInput("say what to do: add, list, change or remove")


def add(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.limit is None and arguments.route_class is None:
        raise InvalidInput(
            "say of which limit: --limit LIMIT, one of those that `headgate who` shows, or --class CLASS"
        )
    desk = opened(arguments, out, err)
    until = ahead(arguments.until, desk, at_its_end=True)
    since = ahead(arguments.since, desk, at_its_end=False)
    who = client_of(desk, arguments.client)
    fields = {
        "who": who.plain,
        "bucket": arguments.bucket,
        "limit": arguments.limit,
        "class": arguments.route_class,
        "valid_from": since,
        "valid_until": until,
    }
    number = "It is override {0}: `headgate override remove {0} --reason ...` ends it."
    return change(arguments, desk, "POST", "overrides", fields=fields, number=number)


def change_one(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    until = ahead(arguments.until, desk, at_its_end=True)
    since = ahead(arguments.since, desk, at_its_end=False)
    path = path_of("overrides", arguments.id)
    reply = desk.api.ask("GET", path)
    before = reply.body
    fields = {
        "who": ClientArgument(**before["who"]).plain,
        "bucket": arguments.bucket or before["bucket"],
        "limit": arguments.limit or before.get("limit"),
        "class": arguments.route_class or before.get("route_class"),
        "valid_from": since or desk.iso(before.get("valid_from_us")),
        "valid_until": until or desk.iso(before.get("valid_until_us")),
    }
    # What was not said stays as it is, so nobody may have changed it in between.
    based_on = reply.version if arguments.based_on is None else arguments.based_on
    return change(arguments, desk, "PUT", path, fields=fields, based_on=based_on)


def remove(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    return change(arguments, desk, "DELETE", path_of("overrides", arguments.id), fields={})


def list_all(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    desk = opened(arguments, out, err)
    who = None if arguments.client is None else client_of(desk, arguments.client)
    asked = {"search": arguments.search, "state": arguments.state}
    if who is not None:
        asked |= who.plain
    found = paged(desk, "overrides", arguments.most, **asked)
    if arguments.json:
        return as_json(desk, found)
    if not found["items"]:
        err.say("There are none.")
        return 0
    titles = ["id", "client", "of", "bucket", f"from ({desk.zone_name})", "until", "state", "reason", "by"]
    out.say(*titled(titles, [_row(each, desk) for each in found["items"]], out))
    desk.tell_of_more(found)
    return 0


def _row(each: dict[str, Any], desk: CommandContext) -> list[str]:
    return ["-" if each["id"] is None else f"{each['id']}", desk.client(each), *override_cells(each, desk)]
