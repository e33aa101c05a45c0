"""The `headgate` command: checks and explains policies, and operates a running fleet."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

import headgate
from headgate import speedups
from headgate.cli.check import EXIT_UNREADABLE
from headgate.cli.options import Parser, add_secret_option, describe
from headgate.cli.terminal import RED, Terminal
from headgate.errors import HeadgateError, InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

__all__ = ["build_parser", "main"]

EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
"""The exit codes that shells use for SIGINT and SIGPIPE."""

MODULES: Final = {
    "check": "check",
    "explain": "explain",
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
"""The modules of commands, with ABOUT, EXAMPLES, add_arguments() and run() unless all its actions have their own. Only
the module of the command that runs is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 refused or invalid policy, 2 invalid call."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may contain characters that the encoding lacks
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        return _close_stdout(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _close_stdout(_print_error(f"cannot write: {error.strerror}"))
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        words = [*(sys.argv[1:] if argv is None else argv)]
        only = words[0] if words and words[0] in (*MODULES, *_SIMPLE) else None
        arguments = build_parser(only=only).parse_args(words)
    except SystemExit as ended:  # argparse has printed the reason
        return int(ended.code or 0)
    try:
        code: int = arguments.run(arguments, Terminal(sys.stdout), Terminal(sys.stderr))
    except HeadgateError as error:
        return _print_error(f"{error}", code=getattr(error, "code", EXIT_UNREADABLE))
    return code


def _print_error(message: str, *, code: int = EXIT_UNREADABLE) -> int:
    err = Terminal(sys.stderr)
    err.print(f"{err.paint('headgate:', RED)} {message}")
    return code


def _close_stdout(code: int) -> int:
    """Redirect standard output to /dev/null, so that the interpreter's final flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def build_parser(*, only: str | None = None) -> ArgumentParser:
    """The argument parser of all commands, or of a single one, which is faster."""
    parser = Parser(
        "headgate",
        allow_abbrev=False,
        description="Check and explain rate limiting policies, and operate a running fleet.",
        epilog="`headgate COMMAND --help` shows the options and examples of a command.",
    )
    version = f"headgate {headgate.__version__} ({speedups.describe()})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, file in MODULES.items():
        if only in (None, name):
            module = import_module(f"headgate.cli.{file}")
            command = commands.add_parser(name, **describe(module.ABOUT, module.EXAMPLES))
            command.set_defaults(run=getattr(module, "run", None))
            module.add_arguments(command)
    for name, (run, about, examples) in _SIMPLE.items():
        if only in (None, name):
            command = commands.add_parser(name, **describe(about, examples))
            command.set_defaults(run=run)
            if name == "hash-key":
                add_secret_option(command)
    return parser


# ------------------------------------------------------------------ commands without a module


def _print_schema(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate.policy.schema import json_schema

    out.print(json.dumps(json_schema(), indent=2))
    return 0


def _hash_key(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate.cli.request import SECRET_VARIABLE, read_api_key, read_secret
    from headgate.policy.api_keys import ApiKeyHasher

    secret = read_secret(arguments.secret_file)
    if secret is None:
        raise InvalidInput(f"no secret to hash keys with: give --secret-file, or set {SECRET_VARIABLE}, as in the app")
    hasher = ApiKeyHasher(secret)
    out.print(hasher.fingerprint(read_api_key()))
    return 0


def _run_demo(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate import demo

    demo.main()
    return 0


_SIMPLE: Final = {
    "schema": (_print_schema, "print the JSON Schema of policies, for editors", "headgate schema > policy.schema.json"),
    "hash-key": (
        _hash_key,
        "print the hash of an API key, to use in policies",
        "headgate hash-key --secret-file secret.txt < key.txt\nHEADGATE_SECRET=... headgate hash-key",
    ),
    "demo": (_run_demo, "compare the seven algorithms on the same requests", "headgate demo"),
}
