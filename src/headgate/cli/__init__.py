"""`headgate`: check and explain policies before they meet a request, and operate what runs."""

from __future__ import annotations

import io
import json
import os
import sys
from getpass import getpass
from importlib import import_module
from typing import TYPE_CHECKING, Final

import headgate
from headgate import speedups
from headgate.cli import check, explain
from headgate.cli.options import Parser, add_json, add_secret, described
from headgate.cli.request import given_secret
from headgate.cli.terminal import BAD, Terminal
from headgate.errors import HeadgateError, InvalidInput
from headgate.gate.base import SECRET_VARIABLE
from headgate.policy.api_keys import LONGEST_KEY, ApiKeyHasher
from headgate.policy.schema import json_schema

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Sequence

__all__ = ["main"]

INTERRUPTED: Final = 130
UNHEARD: Final = 141
"""Exit codes, as shells give them for what a signal ends: SIGINT, SIGPIPE."""

IN_MODULES: Final = {
    "why": "why",
    "who": "who",
    "override": "overrides",
    "block": "blocks",
    "tier": "tiers",
    "reset": "reset",
    "tail": "tail",
    "top": "top",
    "audit": "audit",
    "policy": "policies",
    "token": "tokens",
    "admin": "admin",
    "completion": "completion",
}
"""The commands that have a module of their own in this package, with ABOUT, EXAMPLES, add_arguments and run. It is
imported when the command is given, so that each costs only itself."""

HASHING: Final = frozenset({"admin", "why"})
"""Those of them that take --secret-file, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command; its exit code: 0 for good, 1 for mistakes in a policy, 2 for a call that cannot be."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name must not fail where its letters are unknown
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        return _hushed(UNHEARD)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _hushed(_complain(f"cannot write: {error.strerror}"))
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        given = [*(sys.argv[1:] if argv is None else argv)]
        only = given[0] if given and given[0] in (*IN_HERE, *IN_MODULES) else None
        arguments = _parser(only=only).parse_args(given)
    except SystemExit as ended:  # argparse has said all there is to say
        return int(ended.code or 0)
    try:
        code: int = arguments.run(arguments, Terminal(sys.stdout), Terminal(sys.stderr))
    except HeadgateError as error:
        return _complain(f"{error}", code=getattr(error, "code", check.UNREADABLE))
    return code


def _complain(what: str, *, code: int = check.UNREADABLE) -> int:
    screen = Terminal(sys.stderr)
    screen.say(f"{screen.paint('headgate:', BAD)} {what}")
    return code


def _hushed(code: int) -> int:
    """The same code, once the interpreter's own last flush has nowhere to fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


# ------------------------------------------------------------------ commands


def _check(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    return check.check(arguments.files, out, err, strict=arguments.strict, as_json=arguments.json)


def _schema(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    out.say(json.dumps(json_schema(), indent=2))
    return 0


def _hash_key(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    secret = given_secret(arguments.secret_file)
    if secret is None:
        raise InvalidInput(
            f"there is no secret to hash keys with: give --secret-file, or set {SECRET_VARIABLE}, to the app's own"
        )
    api_keys = ApiKeyHasher(secret)
    out.say(api_keys.fingerprint(_read_key()))
    return 0


def _read_key() -> str:
    """The key that stands on the first line of the input; at a terminal it is not echoed."""
    if sys.stdin.isatty():
        try:
            return getpass("API key: ")
        except EOFError:
            return ""
    return sys.stdin.buffer.readline(2 * LONGEST_KEY).decode("ascii", "replace").rstrip("\r\n")


def _demo(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate import demo

    demo.main()
    return 0


# ------------------------------------------------------------------ arguments


def _parser(*, only: str | None = None) -> ArgumentParser:
    """All commands, or only one, which is quicker."""
    parser = Parser(
        "headgate",
        allow_abbrev=False,
        description="Check and explain rate limiting policies before they meet a request, and operate what runs.",
        epilog="`headgate COMMAND --help` shows each command with examples.",
    )
    parser.add_argument(
        "--version", action="version", version=f"headgate {headgate.__version__} ({speedups.describe()})"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str,
        run: Callable[[Namespace, Terminal, Terminal], int],
        about: str,
        examples: str,
        *adding: Callable[[ArgumentParser], None],
    ) -> None:
        if only in (None, name):
            made = commands.add_parser(name, **described(about, examples))
            made.set_defaults(run=run)
            for add in adding:
                add(made)

    command("check", _check, *_CHECK, _add_check)
    command("explain", explain.run, *_EXPLAIN, _add_explain)
    for name, file in IN_MODULES.items():
        if only in (None, name):
            module = import_module(f"headgate.cli.{file}")
            secret = [add_secret] if name in HASHING else []
            command(name, module.run, module.ABOUT, module.EXAMPLES, module.add_arguments, *secret)
    command("schema", _schema, "print the JSON Schema of policies, for editors", "headgate schema > policy.schema.json")
    command("hash-key", _hash_key, *_HASH_KEY, add_secret)
    command("demo", _demo, "let the seven algorithms answer the same requests, side by side", "headgate demo")
    return parser


IN_HERE: Final = frozenset({"check", "explain", "schema", "hash-key", "demo"})

_CHECK: Final = (
    "tell whether policy files are good, and where they are not",
    """
    headgate check policy.yaml
    headgate check --strict policies/*.yaml
    headgate check --json policy.yaml

    exit code: 0 all are good, 1 mistakes in a policy, 2 a file cannot be read
    """,
)
_EXPLAIN: Final = (
    "show which limits a request would meet, and why",
    """
    headgate explain policy.yaml GET /api/v1/search --ip 203.0.113.9 --tenant acme
    headgate explain policy.yaml POST /login --user ada --at 2026-05-28T02:00:00Z
    headgate explain policy.yaml GET / --identity device=4711 --json

    exit code: 0 here is the answer, 1 mistakes in the policy,
    2 a question that cannot be asked
    """,
)
_HASH_KEY: Final = (
    "print the hash of an API key, to name it by in policies",
    """
    headgate hash-key --secret-file secret.txt < key.txt
    HEADGATE_SECRET=... headgate hash-key
    """,
)


def _add_check(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a policy: .yaml, .yml, .toml or .json")
    parser.add_argument("--strict", action="store_true", help="warnings are mistakes, too")
    parser.add_argument("--json", action="store_true", help="a list for programs")


def _add_explain(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a policy: .yaml, .yml, .toml or .json")
    parser.add_argument("method", metavar="METHOD", help="GET, POST, ...")
    parser.add_argument("path", metavar="PATH", help="the target of the request; what follows ? is ignored")
    parser.add_argument("--ip", metavar="ADDRESS", help="the client's address; unknown, if not given")
    parser.add_argument("--user", metavar="USER", help="who the app says it is")
    parser.add_argument("--tenant", metavar="TENANT", help="whom the app says it belongs to")
    parser.add_argument("--api-key", metavar="KEY", help="its API key, or better hmac: and the key's hash")
    parser.add_argument(
        "--identity", metavar="KIND=VALUE", action="append", default=[], help="any other identity; may be repeated"
    )
    parser.add_argument("--tier", metavar="TIER", help="the tier that the app says it is in")
    parser.add_argument("--at", metavar="TIME", help="when: 2026-05-28T02:01:00Z; now, if not given")
    add_json(parser)
    add_secret(parser)
