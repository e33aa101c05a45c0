"""Show the audit log: who changed what, when and why.

headgate audit
headgate audit --author bob --most 200
headgate audit --search acme --json

exit code: 0 done, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

from typing import Any

from headgate.cli.context import CommandContext, fetch_pages, print_list
from headgate.cli.options import option, page_options

__all__ = ["OPTIONS", "run"]

OPTIONS = (option("--author", metavar="NAME", help="show only changes by NAME"), *page_options(30))


def run(context: CommandContext) -> int:
    author, search, most = context.arguments.author, context.arguments.search, context.arguments.most
    found = fetch_pages(context, "audit", most, cursor="before", author=author, search=search)

    def row(each: dict[str, Any]) -> list[str]:
        version = "" if each.get("version") is None else f"{each['version']}"
        what = context.local_times(each.get("what") or f"{each['action']} {each['about']}".strip())
        return [context.time(each["at_us"]), each["author"], version, what, each.get("reason") or ""]

    titles = [f"when ({context.zone_name})", "who", "version", "what", "why"]
    return print_list(context, found, titles, map(row, found["items"]), empty="No entries.")
