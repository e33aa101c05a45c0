"""Shared parts of the commands that use an admin server: connecting, naming clients, making changes, listing."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime, tzinfo
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headgate.cli.admin_client import EXIT_REFUSED, AdminClient, AdminError, ConfirmationRequired, is_loopback
from headgate.cli.options import read_api_key
from headgate.cli.terminal import BOLD, RED, YELLOW, Terminal, printable, titled_table
from headgate.errors import InvalidInput
from headgate.telemetry.human_time import coming, end_in_words, shown

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

__all__ = [
    "ClientArgument", "CommandContext", "ask_yes", "change", "choose_client", "fetch_pages", "future", "is_interactive",
    "print_list", "read_client", "resolve_client", "warn_about_raw_key",
]  # fmt: skip

_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?\+00:00")
MAX_TOKEN_BYTES: Final = 1024
PAGE_SIZE: Final = 100
MIN_KEY_LENGTH: Final = 8
"""Shorter texts are never API keys for the server."""


class ClientArgument(NamedTuple):
    """A client as the server identifies it; the value of an API key is its hash."""

    kind: str
    value: str
    label: str = ""

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label and self.label != self.value else ""
        return f"{self.kind} {self.value}{label}"

    @property
    def fields(self) -> dict[str, str]:
        return {"kind": self.kind, "value": self.value}


class CommandContext:
    """The arguments of a command, the output streams, the time zone (None for the local one) and the admin server."""

    def __init__(self, arguments: Namespace, out: Terminal, err: Terminal) -> None:
        self.arguments = arguments
        self.out = out
        self.err = err
        self.zone: tzinfo | None = UTC if arguments.utc else None

    @cached_property
    def api(self) -> AdminClient:
        """The server of the arguments or the environment, with the token from a file or a variable."""
        url = self.arguments.admin or os.environ.get("HEADGATE_ADMIN") or "http://127.0.0.1:8001"
        api = AdminClient(url, _token(self.arguments.token_file))
        if url.startswith("http:") and not is_loopback(url):
            self.warn(f"the token is sent unencrypted to {url}; use https")
        return api

    def warn(self, text: str) -> None:
        self.err.print(f"{self.err.paint('warning:', YELLOW)} {text}")

    def show(self, found: Any, lines: Iterable[str] = ()) -> int:
        """Print the lines or, with --json, the data that they show; return the exit code for success."""
        self.out.print(*([json.dumps(found, indent=2)] if self.arguments.json else lines))
        return 0

    def time(self, at_us: int | None, *, none: str = "") -> str:
        """A timestamp. Column titles name the zone's current offset; a different one is added here."""
        if at_us is None:
            return none
        at = _to_datetime(at_us)
        offset = _offset(at, self.zone)
        return shown(at, self.zone, with_zone=False) + ("" if offset == self.zone_name else f" {offset}")

    def local_times(self, text: str) -> str:
        """A text of the server with its timestamps converted to the local zone."""
        return _INSTANT.sub(lambda found: end_in_words(datetime.fromisoformat(found[0]), self.zone), text)

    def iso(self, at_us: int | None) -> str | None:
        return None if at_us is None else _to_datetime(at_us).isoformat().replace("+00:00", "Z")

    def id(self, row: dict[str, Any]) -> str:
        return "-" if row.get("id") is None else f"{row['id']}"

    def client(self, row: dict[str, Any]) -> str:
        return f"{ClientArgument(**row['who'], label=row.get('label') or '')}"

    def validity(self, row: dict[str, Any]) -> tuple[str, str]:
        return self.time(row.get("valid_from_us"), none="-"), self.time(row.get("valid_until_us"), none="no end")

    @property
    def zone_name(self) -> str:
        """The current offset of the zone, such as UTC+01:00."""
        return _offset(datetime.now(UTC), self.zone)


def _to_datetime(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC)


def _offset(moment: datetime, zone: tzinfo | None) -> str:
    offset = f"{moment.astimezone(zone):%z}"
    return "UTC" if int(offset) == 0 else f"UTC{offset[:3]}:{offset[3:5]}"


def _token(file: str | None) -> str:
    if file is None:
        token, source = os.environ.get("HEADGATE_TOKEN", "").strip(), "HEADGATE_TOKEN"
    else:
        source = f"--token-file {file}"
        try:
            with Path(file).open("rb") as stream:
                token = stream.read(MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
        except OSError as error:
            raise InvalidInput(f"{source}: cannot be read: {error.strerror}") from None
    if not token:
        raise AdminError(
            "no token: set HEADGATE_TOKEN, or give --token-file. `headgate admin` prints the first token when it "
            "starts, and `headgate admin token NAME --role support` creates another"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidInput(f"{source} contains no token: tokens start with hg_ and have no spaces")
    return token


def resolve_client(context: CommandContext, text: str) -> ClientArgument:
    """The client that the text names; `-` reads an API key from standard input."""
    client = read_client(text)
    try:
        found = context.api.request("POST", "find", body={"client": client}).body
        who = ClientArgument(found["kind"], found["value"], found.get("label") or "")
    except AdminError as error:
        if error.status != 404:
            raise
        matches = context.api.request("POST", "matches", body={"client": client}).body["items"]
        if not matches:
            raise
        match = choose_client(context, matches)
        who = ClientArgument(**match["who"], label=match["label"] or "")
    warn_about_raw_key(context, text, who)
    return who


def read_client(text: str) -> str:
    """The client argument as sent to the server; `-` reads an API key from standard input."""
    client = f"api_key={read_api_key()}" if text == "-" else text
    if not client.strip():
        raise InvalidInput("name a client")
    return client


def choose_client(context: CommandContext, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Let the user choose one of several candidates; AdminError without a terminal."""
    lines = [f"{number}. {_candidate(each)}" for number, each in enumerate(found, 1)]
    is_ambiguous = len(found) > 1
    if not is_interactive(context):
        head = "several clients match; give one of them as KIND=VALUE:" if is_ambiguous else "did you mean this client?"
        raise AdminError("\n".join([head, *lines]), code=EXIT_REFUSED)
    head = "Several clients match:" if is_ambiguous else "No client has this name, but one contains it:"
    context.err.print(head, *[printable(line) for line in lines])
    print(f"Which one? 1 to {len(found)}: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not (answer.isascii() and answer.isdigit() and 1 <= int(answer[:6]) <= len(found)):
        raise InvalidInput("no client was chosen; nothing was changed")
    return found[int(answer) - 1]


def _candidate(each: dict[str, Any]) -> str:
    label = f" ({each['label']})" if each.get("label") else ""
    seen = "" if each["is_known"] else ", never seen before"
    return f"{each['title']}{label}{seen}: {each['who']['kind']}={each['who']['value']}"


def warn_about_raw_key(context: CommandContext, text: str, who: ClientArgument) -> None:
    """Warn about an API key on the command line, which the shell's history keeps."""
    value = text.removeprefix("api_key=")
    is_name = " " in value or value.casefold() == who.label.casefold()
    if who.kind == "api_key" and text != "-" and not value.startswith("hmac:") and not is_name:
        context.warn(
            "an API key on the command line stays in the shell's history and is visible to other users of this "
            "machine; write - and give the key on standard input"
        )


def change(
    context: CommandContext,
    method: str,
    path: str,
    *,
    fields: dict[str, Any] | None = None,
    based_on: int | None = None,
    id_hint: str = "",
) -> int:
    """Send a change, confirmed by --confirm or at the terminal, and print its result. `id_hint` explains a new ID."""
    reason = (context.arguments.reason or "").strip()
    if not reason:
        raise InvalidInput('a change needs a reason for the audit log: add --reason "ticket 4711: ..."')
    if based_on is None:
        based_on = context.arguments.based_on
    codes = [*(context.arguments.confirm or ())]
    while True:
        sent = {name: value for name, value in (fields or {}).items() if value is not None}
        sent |= {"confirm": codes} if codes else {}
        try:
            if method == "DELETE":
                response = context.api.request(method, path, query=sent, based_on=based_on, reason=reason)
            else:
                response = context.api.request(method, path, body={**sent, "reason": reason}, based_on=based_on)
            return _print_result(context, response.body or {}, id_hint)
        except ConfirmationRequired as required:
            missing = [code for code, _ in required.dangers if code not in codes]
            if not missing or not _confirm(context, required):
                raise
            codes += missing


def _confirm(context: CommandContext, required: ConfirmationRequired) -> bool:
    """Ask for confirmation at a terminal; False elsewhere."""
    if not is_interactive(context):
        return False
    for _, text in required.dangers:
        context.err.print(f"{context.err.paint('Careful:', RED)} {printable(text)}")
    return ask_yes("Continue? Type yes: ")


def is_interactive(context: CommandContext) -> bool:
    return sys.stdin.isatty() and context.err.is_terminal


def ask_yes(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() == "yes"


def _print_result(context: CommandContext, body: dict[str, Any], id_hint: str) -> int:
    if context.arguments.json:
        return context.show(body)
    version = body.get("version")
    if version is None and not body.get("what"):
        done = "nothing to change"
    else:
        done = printable(context.local_times(f"{body.get('what') or 'done'}"))
    context.out.print(done if version is None else f"{done} {context.out.paint(f'(version {version})', BOLD)}")
    if id_hint and version is not None:
        context.err.print(*[id_hint.format(id) for id in body.get("ids") or ()])
    context.err.print(*[f"note: {printable(f'{note}')}" for note in body.get("notes") or ()])
    return 0


def print_list(
    context: CommandContext,
    found: dict[str, Any],
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    empty: str,
) -> int:
    """Print a list as JSON or as a table, and say on standard error if it is empty or has more entries."""
    if not context.arguments.json and not found["items"]:
        context.err.print(empty)
        return 0
    context.show(found, titled_table(titles, rows, context.out))
    if not context.arguments.json and found.get("next") is not None:
        context.err.print(f"More than these {len(found['items'])} exist: use --most N or --search TEXT.")
    return 0


def fetch_pages(
    context: CommandContext, path: str, most: int, *, cursor: str = "after", **query: Any
) -> dict[str, Any]:
    """The first `most` entries of a list, from as many pages as needed; `next` is where it continues."""
    if most < 1:
        raise InvalidInput(f"--most {most} would show nothing; give 1 or more")
    items: list[Any] = []
    position: Any = None
    query |= {name: _searchable(context, query[name]) for name in ("search", "author") if query.get(name)}
    while True:
        found = context.api.get(path, most=min(most - len(items), PAGE_SIZE), **query, **{cursor: position})
        items += found["items"]
        position = found.get("next")
        if position is None or len(items) >= most or not found["items"]:
            return {"items": items, "next": position}


def _searchable(context: CommandContext, text: str) -> str:
    """The text, with possible API keys hashed: proxies log URLs."""
    if len(text) < MIN_KEY_LENGTH or text.startswith("hmac:"):
        return text
    found: str = context.api.request("POST", "search", body={"text": text}).body["text"]
    return found


def future(text: str | None, context: CommandContext, *, is_end: bool = False) -> str | None:
    """A future time as the server reads it; None stays None. With `is_end`, a day stands for its end."""
    if text is None:
        return None
    moment = coming(text, now=datetime.now(UTC), zone=context.zone, at_its_end=is_end)
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
