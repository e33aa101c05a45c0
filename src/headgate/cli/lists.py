"""Show the reputation lists of a policy, refresh them, and find an address in them.

headgate lists --policy policy.yaml
headgate lists find 203.0.113.9 --policy policy.yaml
headgate lists refresh --policy policy.yaml

Shows the versions that the processes of this machine have stored on disk
(HEADGATE_CACHE), and reads the lists that are files.

exit code: 0 done, 1 a list has failed or the policy is invalid, 2 invalid call
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from headgate.cli.check import EXIT_UNREADABLE, check_file, print_problems
from headgate.cli.options import JSON, POLICY_FILE, option
from headgate.cli.terminal import GREEN, RED, YELLOW, Terminal, duration, printable, titled_table
from headgate.errors import InvalidInput
from headgate.policy.addresses import canonical
from headgate.policy.lists.list_watcher import stored_lists

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.policy.lists.list_watcher import ListStatus, NetworkLists

__all__ = ["ACTIONS", "DEFAULT_ACTION"]

DEFAULT_ACTION: Final = "show"
EXIT_FAILED: Final = 1

_POLICY = option("--policy", metavar="FILE", default="policy.yaml", help=f"{POLICY_FILE}; default: %(default)s")


def show(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Show the lists: networks, version, age, and the error of the last refresh.

    headgate lists show --policy policy.yaml
    headgate lists show --policy policy.yaml --json
    """
    code, lists = _read(arguments, err)
    return code if lists is None else _print_lists(lists, arguments, out)


def find(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Find the lists that contain an address.

    headgate lists find 203.0.113.9 --policy policy.yaml
    """
    address = canonical(arguments.address)
    if address is None:
        raise InvalidInput(f"{printable(arguments.address)[:80]!r} is not an address; write one like 203.0.113.9")
    code, lists = _read(arguments, err)
    if lists is None:
        return code
    names = lists.find(address)
    unread = [status.name for status in lists.status if not status.is_loaded]
    if arguments.json:
        out.print(json.dumps({"address": address, "lists": names, "unread": unread}, indent=2))
        return 0
    out.print(*[f"{address} is listed in {lists.describe(name)}" for name in names])
    if not names:
        out.print(f"{address} is in none of the lists")
    if unread:
        err.print(f"never read: {', '.join(unread)}; run headgate lists refresh")
    return 0


def refresh(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Read all lists from their sources now, and store them for the processes of this machine.

    headgate lists refresh --policy policy.yaml
    """
    code, lists = _read(arguments, err)
    if lists is None:
        return code
    for each in lists.watchers:
        each.refresh(force=True)
    return _print_lists(lists, arguments, out)


def _read(arguments: Namespace, err: Terminal) -> tuple[int, NetworkLists | None]:
    """The stored lists of the policy; without them, the exit code."""
    report = check_file(arguments.policy)
    if report.policy is None:
        print_problems(report, err)
        return report.code(), None
    lists = stored_lists(report.policy)
    if lists is None:
        err.print(f"{arguments.policy} has no lists")
        return EXIT_UNREADABLE, None
    return 0, lists


def _print_lists(lists: NetworkLists, arguments: Namespace, out: Terminal) -> int:
    found = lists.status
    if arguments.json:
        out.print(json.dumps({"lists": [status._asdict() for status in found]}, indent=2))
    else:
        heads = ["list", "networks", "ranges", "skipped", "version", "in force for", "checked", "state"]
        out.print(*titled_table(heads, [[*_cells(status, out)] for status in found], out))
    return EXIT_FAILED if any(status.error is not None for status in found) else 0


def _cells(status: ListStatus, out: Terminal) -> Iterator[str]:
    yield status.name
    yield from (f"{status.networks:,}", f"{status.ranges:,}", f"{status.invalid:,}", status.version or "-")
    yield from (_age(status.changed_us), f"{_age(status.checked_us)} ago" if status.is_loaded else "never")
    if status.error is not None:
        yield out.paint(f"failed: {printable(status.error)}", RED)
    else:
        yield out.paint("current", GREEN) if status.is_loaded else out.paint("never read", YELLOW)


def _age(at_us: int) -> str:
    return duration(max(0.0, time.time() - at_us / 1_000_000)) if at_us else "-"


ACTIONS: Final = {
    "show": (show, _POLICY, JSON),
    "find": (find, option("address", metavar="ADDRESS", help="an IPv4 or IPv6 address"), _POLICY, JSON),
    "refresh": (refresh, _POLICY, JSON),
}
