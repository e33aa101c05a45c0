"""`headgate override`: limits of one client that replace those of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate.cli.admin_client import build_path
from headgate.cli.context import change, fetch_pages, future, print_list, resolve_client
from headgate.cli.options import CLIENT, EXIT_CODES, Actions, add_change_options, add_page_options, add_server_options
from headgate.cli.who import override_cells
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.context import CommandContext

__all__ = ["ABOUT", "EXAMPLES", "STATES", "add_arguments", "add_until"]

ABOUT = "override the limits of a client, optionally for a period"
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
        "override a limit for a client",
        f"""
        headgate override add acme 10000/minute --limit search --until friday --reason "contract 4711"
        headgate override add user=ada "500/hour, burst 50" --class exports --from "monday 8:00" --reason audit
        {EXIT_CODES.strip()}
        """,
    )
    adding.add_argument("client", metavar="CLIENT", help=CLIENT)
    adding.add_argument("bucket", metavar="BUCKET", help=BUCKET)
    _add_where(adding)
    add_change_options(adding)

    listing = actions.add(
        "list",
        list_rows,
        "list overrides, of all clients or of one",
        """
        headgate override list
        headgate override list acme --state active
        headgate override list --search contract --json
        """,
    )
    listing.add_argument("client", metavar="CLIENT", nargs="?", help=CLIENT)
    listing.add_argument("--state", choices=STATES, default="all", help="default: %(default)s")
    add_page_options(listing)
    add_server_options(listing)

    changing = actions.add(
        "change",
        change_one,
        "change some fields of an override",
        """
        headgate override change 17 20000/minute --reason "contract 4712"
        headgate override change 17 --until "in 2 weeks" --reason "they need longer"
        """,
    )
    changing.add_argument("id", metavar="ID", type=int, help="its ID from `list`")
    changing.add_argument("bucket", metavar="BUCKET", nargs="?", help=BUCKET)
    _add_where(changing)
    add_change_options(changing)

    removing = actions.add(
        "remove", remove, "remove an override", 'headgate override remove 17 --reason "the contract has ended"'
    )
    removing.add_argument("id", metavar="ID", type=int, help="its ID from `list`")
    add_change_options(removing)


def _add_where(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="LIMIT", help="override this limit; see `headgate who`")
    parser.add_argument("--class", metavar="CLASS", dest="route_class", help="override limits on routes of this class")
    parser.add_argument("--from", metavar="TIME", dest="since", help="start; default: now")
    add_until(parser)


def add_until(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--until", metavar="TIME", help='end: "friday" (inclusive), "friday 18:00", "in 2 hours"; default: no end'
    )


def add(arguments: Namespace, context: CommandContext) -> int:
    if arguments.limit is None and arguments.route_class is None:
        raise InvalidInput("name a limit with --limit LIMIT (see `headgate who`), or a class with --class CLASS")
    until, since = future(arguments.until, context, is_end=True), future(arguments.since, context)
    who = resolve_client(context, arguments.client)
    fields = {
        "who": who.fields,
        "bucket": arguments.bucket,
        "limit": arguments.limit,
        "class": arguments.route_class,
        "valid_from": since,
        "valid_until": until,
    }
    hint = "Override {0} was created: `headgate override remove {0} --reason ...` removes it."
    return change(arguments, context, "POST", "overrides", fields=fields, id_hint=hint)


def change_one(arguments: Namespace, context: CommandContext) -> int:
    until, since = future(arguments.until, context, is_end=True), future(arguments.since, context)
    path = build_path("overrides", arguments.id)
    response = context.api.request("GET", path)
    before = response.body
    fields = {
        "who": before["who"],
        "bucket": arguments.bucket or before["bucket"],
        "limit": arguments.limit or before.get("limit"),
        "class": arguments.route_class or before.get("route_class"),
        "valid_from": since or context.iso(before.get("valid_from_us")),
        "valid_until": until or context.iso(before.get("valid_until_us")),
    }
    # Fields that are not given keep their value, so the override must not have changed meanwhile.
    based_on = response.version if arguments.based_on is None else arguments.based_on
    return change(arguments, context, "PUT", path, fields=fields, based_on=based_on)


def remove(arguments: Namespace, context: CommandContext) -> int:
    return change(arguments, context, "DELETE", build_path("overrides", arguments.id))


def list_rows(arguments: Namespace, context: CommandContext) -> int:
    who = None if arguments.client is None else resolve_client(context, arguments.client)
    query = {"search": arguments.search, "state": arguments.state, **({} if who is None else who.fields)}
    found = fetch_pages(context, "overrides", arguments.most, **query)

    def row(each: dict[str, Any]) -> list[str]:
        return ["-" if each["id"] is None else f"{each['id']}", context.client(each), *override_cells(each, context)]

    titles = ["id", "client", "of", "bucket", f"from ({context.zone_name})", "until", "state", "reason", "by"]
    return print_list(arguments, context, found, titles, row, empty="No overrides.")
