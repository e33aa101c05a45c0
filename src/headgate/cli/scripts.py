"""Show which nodes run which version of the scripts, and roll out another one.

headgate scripts --store redis://127.0.0.1:6379/0
headgate scripts export ./lua
headgate scripts canary ./lua --percent 5
headgate scripts canary ./lua --nodes web-1,web-2 --max-slowdown 1.5
headgate scripts promote
headgate scripts rollback --reason "ticket 4711"

exit code: 0 done, 1 refused, 2 invalid call or no answer
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.options import JSON, option
from headgate.cli.terminal import BOLD, GREEN, RED, YELLOW, Terminal, printable, titled_table
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from headgate.stores.redis.rollout import NodeScripts, RolloutClient, RolloutView, ScriptRollout

__all__ = ["ACTIONS", "OPTIONS", "run"]

STORE: Final = (
    option("--store", metavar="URL", help="the Redis of the nodes; default: the variable HEADGATE_STORE"),
    option("--namespace", default="headgate", help="prefix of keys in the store; default: %(default)s"),
    JSON,
)
REASON: Final = option("--reason", metavar="TEXT", default="", help="reason for the record")
OPTIONS = STORE


class _Refused(HeadgateError):
    """The change is not possible in the current state."""

    code = 1


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    with _client(arguments) as client:
        return _show(client.read(), arguments, out)


def _export(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Write the scripts of this library to a directory, as the start of a candidate.

    headgate scripts export ./lua
    """
    from headgate.stores.redis.scripts import ScriptSet

    shipped, directory = ScriptSet.shipped(), Path(arguments.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in shipped.decision_sources.items():
            (directory / f"{name}.lua").write_text(text, "utf-8")
    except OSError as error:
        raise InvalidInput(f"{arguments.directory}: cannot be written: {error.strerror}") from None
    out.print(f"wrote version {shipped.digest} to {arguments.directory}")
    return 0


def _canary(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Let some nodes decide with the scripts of a directory, compared with the current ones.

    headgate scripts canary ./lua --percent 5
    headgate scripts canary ./lua --nodes web-1,web-2
    """
    from headgate.stores.redis.rollout import CANARY, CanaryThresholds, new_rollout
    from headgate.stores.redis.scripts import ScriptSet

    stable, candidate = ScriptSet.shipped(), ScriptSet.read(arguments.directory)
    if candidate.digest == stable.digest:
        raise InvalidInput(f"{arguments.directory} contains the current version, {stable.digest}: change a script")
    stable.check_compatible(candidate)
    nodes = tuple([name.strip() for name in (arguments.nodes or "").split(",") if name.strip()])
    limits = CanaryThresholds(arguments.max_differences, arguments.max_errors, arguments.max_slowdown)
    with _client(arguments) as client:
        view = client.read()
        if view.rollout is not None and view.rollout.state == CANARY:
            raise _Refused(f"a canary of version {view.rollout.candidate} is running: promote it or roll it back first")
        rollout = new_rollout(
            candidate,
            limits,
            percent=arguments.percent,
            nodes=nodes,
            view=view,
            author=_author(),
            reason=arguments.reason,
        )
        client.check_syntax(rollout)
        if not client.write(rollout, view.revision):
            raise _Refused("another rollout was started at the same time; nothing was changed")
        err.print(*[f"note: {note}" for note in _notes(rollout, view)])
        return _show(client.read(), arguments, out)


def _notes(rollout: ScriptRollout, view: RolloutView) -> Iterator[str]:
    """The nodes that try the candidate."""
    known = view.live_nodes
    chosen = [node for node in known if rollout.includes(node)]
    if not known:
        yield "no node is reporting, so it is not known which nodes try the candidate"
        return
    yield printable(
        f"candidate on {', '.join(chosen[:10]) or 'no reporting node'}: {len(chosen)} of {len(known)} nodes"
    )
    if missing := [node for node in rollout.nodes if node not in known]:
        yield printable(f"not reporting: {', '.join(missing[:10])}")


def _promote(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Let all nodes use the candidate.

    headgate scripts promote --reason "no difference in 3 hours"
    """
    return _end("promoted", arguments, out)


def _rollback(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Let all nodes use the scripts of their library again.

    headgate scripts rollback --reason "ticket 4711"
    """
    return _end("rolled back", arguments, out)


def _downgrade(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Let this version of headgate use a store with counters in a newer format, whose limits start from zero.

    headgate scripts downgrade
    """
    from headgate.stores.redis.scripts import ScriptSet

    formats = ScriptSet.shipped().formats
    with _client(arguments) as client:
        _, used = client.formats()
        newer = []
        for name in used:
            algorithm, _, version = name.partition(".")
            if algorithm in formats and int(version) not in formats[algorithm].reads:
                newer.append(name)
        if newer:
            client.forget_formats(newer)
    done = f"forgot the formats {', '.join(newer)}" if newer else "nothing to change"
    out.print(json.dumps({"forgotten": newer}) if arguments.json else done)
    return 0


ACTIONS = {
    "export": (_export, option("directory", metavar="DIR", help="directory for the Lua files")),
    "canary": (
        _canary,
        option("directory", metavar="DIR", help="directory with the Lua files that replace current ones"),
        option("--percent", metavar="N", type=int, help="percentage of nodes that use the candidate"),
        option("--nodes", metavar="NAMES", help="names of these nodes, separated by commas"),
        option(
            "--max-differences",
            metavar="N",
            type=int,
            default=0,
            help="differences on a node that are tolerated; default: %(default)s",
        ),
        option(
            "--max-errors",
            metavar="PERCENT",
            type=float,
            default=1.0,
            help="runs that may fail; default: %(default)s",
        ),
        option(
            "--max-slowdown",
            metavar="FACTOR",
            type=float,
            default=2.0,
            help="time in Redis, as a multiple of the current one; default: %(default)s",
        ),
        REASON,
        *STORE,
    ),
    "promote": (_promote, REASON, *STORE),
    "rollback": (_rollback, REASON, *STORE),
    "downgrade": (_downgrade, *STORE),
}


@contextmanager
def _client(arguments: Namespace) -> Iterator[RolloutClient]:
    url = arguments.store or os.environ.get("HEADGATE_STORE") or ""
    if not url or url.startswith("memory:"):
        raise InvalidInput("no store: give --store, or set HEADGATE_STORE; scripts are rolled out on Redis only")
    from headgate.limiter import Limiter

    limiter = Limiter(url, namespace=arguments.namespace)
    from headgate.stores.redis.rollout import RolloutClient

    with limiter, closing(limiter.engine.store.background_client()) as background:
        yield RolloutClient(background)


def _author() -> str:
    try:
        return f"{getpass.getuser()} on {socket.gethostname()}"
    except (OSError, KeyError):
        return socket.gethostname()


def _end(state: str, arguments: Namespace, out: Terminal) -> int:
    with _client(arguments) as client:
        rollout = client.read().rollout
        if rollout is None:
            raise _Refused("there is no rollout of scripts: start one with `headgate scripts canary DIR`")
        ended = client.end(rollout.id, state, by=_author(), reason=arguments.reason)
        if ended is None or ended.state != state:
            raise _Refused(f"the rollout is {'gone' if ended is None else ended.state} already")
        return _show(client.read(), arguments, out)


def _show(view: RolloutView, arguments: Namespace, out: Terminal) -> int:
    if arguments.json:
        rollout = None if view.rollout is None else json.loads(view.rollout.to_json())
        if rollout is not None:
            rollout["changes"] = sorted(rollout["changes"])
        nodes = [{"node": each.node, "age": round(each.age_s, 1), **each.status} for each in view.nodes]
        out.print(json.dumps({"rollout": rollout, "nodes": nodes}, indent=2))
        return 0
    out.print(*_rollout_lines(view.rollout, out))
    titles = ("node", "version", "role", "runs", "differences", "errors", "time in Redis", "last report")
    out.print(*titled_table(titles, [_row(each) for each in view.nodes], out))
    return 0


def _rollout_lines(rollout: ScriptRollout | None, out: Terminal) -> list[str]:
    if rollout is None:
        return ["No rollout of scripts."]
    style = {"canary": YELLOW, "promoted": GREEN}.get(rollout.state, RED)
    head = (
        f"version {out.paint(rollout.candidate, BOLD)} on {printable(rollout.share)}: {out.paint(rollout.state, style)}"
    )
    lines = [head, f"changes {', '.join([f'{name}.lua' for name in sorted(rollout.changes)])}"]
    why = f": {printable(rollout.reason)}" if rollout.reason and rollout.ended_us is None else ""
    lines.append(f"started {_time(rollout.begun_us)} by {printable(rollout.author)}{why}")
    if rollout.ended_us is not None:
        reason = f": {printable(rollout.reason)}" if rollout.reason else ""
        lines.append(f"{rollout.state} {_time(rollout.ended_us)} by {printable(rollout.ended_by)}{reason}")
    return [*lines, ""]


def _row(each: NodeScripts) -> list[str]:
    status: dict[str, Any] = {**each.status}
    runs, stable_us = status.get("runs") or 0, status.get("stable_us") or 0
    slowdown = f"{(status.get('candidate_us') or 0) / stable_us:.2f}x" if runs and stable_us else ""
    counts = [f"{status.get(name) or 0}" for name in ("runs", "differences", "errors")]
    role = f"{status.get('problem') or status.get('role') or '?'}"
    return [
        printable(each.node), printable(f"{status.get('digest') or '?'}"), printable(role), *counts, slowdown,
        f"{each.age_s:.0f} s ago",
    ]  # fmt: skip


def _time(at_us: int) -> str:
    return f"{datetime.fromtimestamp(at_us / 1_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
