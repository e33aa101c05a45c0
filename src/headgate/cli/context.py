"""What the commands share that ask an admin server: which one, about whom, and how changes are made."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.cli.admin_client import REFUSED, AdminClient, AdminError, Unconfirmed, is_loopback
from headgate.cli.table import table
from headgate.cli.terminal import BAD, BOLD, ODD, printable
from headgate.errors import InvalidInput
from headgate.telemetry.human_time import coming, end_in_words, shown

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence
    from datetime import tzinfo

    from headgate.cli.admin_client import Reply
    from headgate.cli.terminal import Terminal

__all__ = [
    "ClientArgument",
    "CommandContext",
    "ahead",
    "as_json",
    "asked",
    "asked_client",
    "at_us_of",
    "change",
    "chosen_from",
    "client_of",
    "confirmed",
    "opened",
    "paged",
    "read_key",
    "titled",
    "told",
    "warn_of_key",
    "zone_of",
]

_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?\+00:00")
LONGEST_TOKEN: Final = 1024
PAGE: Final = 100
"""Rows that are asked for at once."""
NOT_FOUND: Final = 404
SHORTEST_KEY: Final = 8
"""Characters of what the server would know as an API key."""
LONGEST_KEY: Final = 8192
"""An API key of this many characters is none; see policy/api_keys.py, which says so to whoever gives it."""


class ClientArgument(NamedTuple):
    """A client, as the server knows it: API keys by their hashes."""

    kind: str
    value: str
    label: str = ""

    def __str__(self) -> str:
        named = f" ({self.label})" if self.label and self.label != self.value else ""
        return f"{self.kind} {self.value}{named}"

    @property
    def plain(self) -> dict[str, str]:
        return {"kind": self.kind, "value": self.value}


class CommandContext(NamedTuple):
    """All that a command needs: the server, and where to say what it answers."""

    api: AdminClient
    out: Terminal
    err: Terminal
    zone: tzinfo | None

    def time(self, at_us: int | None, *, none: str = "") -> str:
        """A moment for people; the zone is said once, in the title of a column, and again where clocks are others."""
        if at_us is None:
            return none
        at = at_us_of(at_us)
        other = _offset(at, self.zone)
        return shown(at, self.zone, with_zone=False) + ("" if other == self.zone_name else f" {other}")

    def local_times(self, text: str) -> str:
        """A text of the server with its times in the local zone, and with weekdays."""
        return _INSTANT.sub(lambda found: end_in_words(datetime.fromisoformat(found[0]), self.zone), text)

    def iso(self, at_us: int | None) -> str | None:
        """A moment as the server reads it."""
        return None if at_us is None else at_us_of(at_us).isoformat().replace("+00:00", "Z")

    def client(self, each: dict[str, Any]) -> str:
        """Whom a row is about."""
        return f"{ClientArgument(**each['who'], label=each.get('label') or '')}"

    def tell_of_more(self, found: dict[str, Any]) -> None:
        if found.get("next") is not None:
            shown = len(found["items"])
            self.err.say(f"There are more than these {shown}: --most N shows more, --search TEXT finds some of them.")

    @property
    def zone_name(self) -> str:
        """As short as can be: UTC+01:00."""
        return _offset(datetime.now(UTC), self.zone)


def _offset(moment: datetime, zone: tzinfo | None) -> str:
    told = f"{moment.astimezone(zone):%z}"
    return "UTC" if int(told) == 0 else f"UTC{told[:3]}:{told[3:5]}"


def opened(arguments: Namespace, out: Terminal, err: Terminal) -> CommandContext:
    """The server that the arguments, or the environment, name; with the token out of a file or a variable."""
    url = getattr(arguments, "admin", None) or os.environ.get("HEADGATE_ADMIN") or "http://127.0.0.1:8001"
    api = AdminClient(url, _token(arguments.token_file))
    if url.startswith("http:") and not is_loopback(url):
        err.say(f"{err.paint('warning:', ODD)} the token travels in clear to {url}; use https")
    return CommandContext(api, out, err, zone_of(arguments))


def _token(file: str | None) -> str:
    if file is None:
        token = os.environ.get("HEADGATE_TOKEN", "").strip()
        source = "HEADGATE_TOKEN"
    else:
        source = f"--token-file {file}"
        try:
            with Path(file).open("rb") as opened:
                token = opened.read(LONGEST_TOKEN).decode("ascii", "replace").strip()
        except OSError as error:
            raise InvalidInput(f"{source}: cannot be read: {error.strerror}") from None
    if not token:
        raise AdminError(
            "there is no token: set HEADGATE_TOKEN, or give --token-file. `headgate admin` prints the first one when "
            "it starts, and `headgate admin token NAME --role support` makes another"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidInput(f"{source} holds no token: those begin with hg_, and have no blanks")
    return token


def zone_of(arguments: Namespace) -> tzinfo | None:
    """That in which times are read and shown; None for this machine's."""
    return UTC if getattr(arguments, "utc", False) else None


# ------------------------------------------------------------------ clients


def client_of(desk: CommandContext, written: str) -> ClientArgument:
    """The client that is meant; `-` reads an API key from the input. What a shell remembers is warned about."""
    text = asked_client(written)
    try:
        found = desk.api.ask("POST", "find", body={"client": text}).body
        who = ClientArgument(found["kind"], found["value"], found.get("label") or "")
    except AdminError as error:
        if error.status != NOT_FOUND:
            raise
        who = _matching(desk, text, error)
    warn_of_key(desk, written, who)
    return who


def _matching(desk: CommandContext, text: str, error: AdminError) -> ClientArgument:
    """The client of whose name a text is a part; several are asked about at a terminal, and listed elsewhere."""
    found = desk.api.ask("POST", "matches", body={"client": text}).body["items"]
    if not found:
        raise error
    each = chosen_from(desk, found)
    return ClientArgument(**each["who"], label=each["label"] or "")


def asked_client(written: str) -> str:
    """The client as it is sent to the server; `-` reads an API key from the standard input."""
    asked = f"api_key={read_key()}" if written == "-" else written
    if not asked.strip():
        raise InvalidInput("name a client")
    return asked


def chosen_from(desk: CommandContext, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of several candidates, chosen at the terminal by its number; AdminError where nobody can be asked."""
    lines = [f"{number}. {_candidate(each)}" for number, each in enumerate(found, 1)]
    many = len(found) > 1
    if not (sys.stdin.isatty() and desk.err.is_terminal):
        head = "this can mean several clients; give one of them as KIND=VALUE:" if many else "did you mean this client?"
        raise AdminError("\n".join([head, *lines]), code=REFUSED)
    head = "This can mean several clients:" if many else "No client has this name, but one contains it:"
    desk.err.say(head, *[printable(line) for line in lines])
    print(f"Which one? 1 to {len(found)}: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not (answer.isascii() and answer.isdigit() and 1 <= int(answer[:6]) <= len(found)):
        raise InvalidInput("no client was chosen; nothing was changed")
    return found[int(answer) - 1]


def _candidate(each: dict[str, Any]) -> str:
    """A candidate on one line, with the argument that names it alone."""
    who = ClientArgument(**each["who"])
    label = f" ({each['label']})" if each.get("label") else ""
    seen = "" if each["is_known"] else ", never seen before"
    return f"{each['title']}{label}{seen}: {who.kind}={who.value}"


def warn_of_key(desk: CommandContext, written: str, who: ClientArgument) -> None:
    """Warn of an API key on the command line, which the shell's history keeps."""
    said = written.removeprefix("api_key=")
    # A name has blanks, or is the one that is known; it may be known to the log alone, which does not tell it here.
    is_name = " " in said or said.casefold() == who.label.casefold()
    if who.kind == "api_key" and written != "-" and not said.startswith("hmac:") and not is_name:
        desk.err.say(
            f"{desk.err.paint('warning:', ODD)} an API key on the command line stays in the shell's history, and "
            "others on this machine may see it; write - instead, and give the key on the standard input"
        )


def read_key() -> str:
    """The API key that stands on the first line of the input; at a terminal it is not echoed."""
    if sys.stdin.isatty():
        try:
            return getpass("API key: ")
        except EOFError:
            return ""
    return sys.stdin.buffer.readline(LONGEST_KEY).decode("ascii", "replace").rstrip("\r\n")


# ------------------------------------------------------------------ changes


def change(
    arguments: Namespace,
    desk: CommandContext,
    method: str,
    path: str,
    *,
    fields: dict[str, Any],
    based_on: int | None = None,
    number: str | None = None,
) -> int:
    """Make a change, which is confirmed by --confirm or at the terminal, and say what was done. `number` is what to say
    of the new row's."""
    reply = confirmed(arguments, desk, method, path, fields=fields, based_on=based_on)
    return told(arguments, desk, reply, number=number)


def confirmed(
    arguments: Namespace,
    desk: CommandContext,
    method: str,
    path: str,
    *,
    fields: dict[str, Any],
    based_on: int | None = None,
) -> Reply:
    """The server's answer to a change."""
    given = {name: value for name, value in fields.items() if value is not None}
    reason = _reason(arguments)
    based_on = getattr(arguments, "based_on", None) if based_on is None else based_on
    codes = [*(getattr(arguments, "confirm", None) or ())]
    while True:
        asked = given | ({"confirm": codes} if codes else {})
        try:
            if method == "DELETE":
                return desk.api.ask(method, path, query=asked, based_on=based_on, reason=reason)
            return desk.api.ask(method, path, body={**asked, "reason": reason}, based_on=based_on)
        except Unconfirmed as unconfirmed:
            missing = [code for code, _ in unconfirmed.dangers if code not in codes]
            if not missing or not _agrees(desk, unconfirmed):
                raise
            codes += missing


def _reason(arguments: Namespace) -> str:
    reason: str = (arguments.reason or "").strip()
    if not reason:
        raise InvalidInput('a change needs a reason, which others will read: add --reason "ticket 4711: ..."')
    return reason


def _agrees(desk: CommandContext, unconfirmed: Unconfirmed) -> bool:
    """Whether somebody at a terminal says that a danger is meant; nobody else is asked."""
    if not (sys.stdin.isatty() and desk.err.is_terminal):
        return False
    for _, text in unconfirmed.dangers:
        desk.err.say(f"{desk.err.paint('Careful:', BAD)} {printable(text)}")
    return asked(desk, "Is that meant? Type yes: ")


def asked(desk: CommandContext, question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() == "yes"


def told(arguments: Namespace, desk: CommandContext, reply: Reply, *, number: str | None = None) -> int:
    """Say what was changed; and what the new row's number is good for, if that is given."""
    body = reply.body or {}
    if arguments.json:
        return as_json(desk, body)
    done = printable(desk.local_times(f"{body.get('what') or 'done'}"))
    version = body.get("version")
    if version is None and not body.get("what"):
        done = "nothing had to be changed"
    desk.out.say(done if version is None else f"{done} {desk.out.paint(f'(version {version})', BOLD)}")
    if number is not None and version is not None:
        desk.err.say(*[number.format(id) for id in body.get("ids") or ()])
    for note in body.get("notes") or ():
        desk.err.say(f"note: {printable(f'{note}')}")
    return 0


# ------------------------------------------------------------------ what is shown


def as_json(desk: CommandContext, body: Any) -> int:
    desk.out.say(json.dumps(body, indent=2))
    return 0


def titled(titles: Sequence[str], rows: Sequence[Sequence[str]], out: Terminal) -> Iterator[str]:
    """Rows under titles that stand out."""
    first, *lines = table([titles, *rows], width=out.width)
    yield out.paint(first, BOLD)
    yield from lines


def paged(desk: CommandContext, path: str, most: int, *, cursor: str = "after", **asked: Any) -> dict[str, Any]:
    """The first `most` of a list, over as many pages as that takes; `next` is where it goes on."""
    if most < 1:
        raise InvalidInput(f"--most {most}: nothing would be shown; give 1 or more")
    items: list[Any] = []
    place: Any = None
    asked |= {name: _searchable(desk, asked[name]) for name in ("search", "author") if asked.get(name)}
    while True:
        found = desk.api.get(path, most=min(most - len(items), PAGE), **asked, **{cursor: place})
        items += found["items"]
        place = found.get("next")
        if place is None or len(items) >= most or not found["items"]:
            return {"items": items, "next": place}


def _searchable(desk: CommandContext, text: str) -> str:
    """A text that may stand in a URL, which proxies keep: for what may be an API key, its hash."""
    if len(text) < SHORTEST_KEY or text.startswith("hmac:"):
        return text
    found: str = desk.api.ask("POST", "search", body={"text": text}).body["text"]
    return found


def at_us_of(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC)


def ahead(written: str | None, desk: CommandContext, *, at_its_end: bool) -> str | None:
    """A moment to come, as the server reads it; None stays None."""
    if written is None:
        return None
    moment = coming(written, now=datetime.now(UTC), zone=desk.zone, at_its_end=at_its_end)
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
