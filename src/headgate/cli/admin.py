"""`headgate admin`: runs the admin server, and creates tokens for it."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import tempfile
from argparse import SUPPRESS
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headgate.cli.options import ROLES, add_secret_option
from headgate.cli.request import read_file, read_secret
from headgate.cli.terminal import BOLD, YELLOW
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from headgate.cli.terminal import Terminal
    from headgate.control.admin import Token

__all__ = ["ABOUT", "EXAMPLES", "add_arguments", "run"]

ABOUT = "run the admin server: its API and pages, on a separate port"
EXAMPLES = """
    headgate admin --config sqlite:///headgate.db --store redis://127.0.0.1:6379/0
    headgate admin --config postgresql://db/headgate --log sqlite:///decisions.db --port 8001
    headgate admin --host 0.0.0.0 --cert cert.pem --key key.pem --name admin.example.org
    headgate admin token ada --role support --days 30 --config sqlite:///headgate.db

    The first start prints a token, once, if the output is a terminal. If not,
    it writes the token to a private file and prints the path. If all tokens are
    lost, create another with access to the config store, as in the last example.

    exit code: 0 stopped by a signal, 2 invalid call
"""

DEFAULT_CONFIG: Final = "sqlite:///headgate.db"
NEXT_STEP: Final = "Create a token for each person who needs one, with the role they need."


def add_arguments(parser: ArgumentParser) -> None:
    _add_config(parser, DEFAULT_CONFIG)
    parser.add_argument("--store", metavar="URL", help="the store of the gates; without it, usage is unknown")
    parser.add_argument(
        "--log",
        metavar="URL",
        help="decision log: sqlite:///decisions.db, clickhouse://host/database; default: beside an SQLite --config",
    )
    parser.add_argument("--namespace", default="headgate", help="prefix of keys in the store; default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--name", action="append", default=[], help="another host name of the server; may be repeated")
    parser.add_argument("--cert", metavar="FILE", help="TLS certificate; needs --key")
    parser.add_argument("--key", metavar="FILE", help="private key of the certificate")
    parser.add_argument("--behind-tls", action="store_true", help="a proxy in front of this server terminates TLS")
    parser.add_argument(
        "--proxy",
        metavar="NETWORK",
        action="append",
        default=[],
        help="trust X-Forwarded-For from this network; may be repeated",
    )
    parser.add_argument(
        "--webhook", metavar="URL", help="receives anomalies: clients with ten times their usual traffic"
    )
    parser.add_argument("--webhook-secret-file", metavar="FILE", help="file with the secret that signs these messages")
    parser.set_defaults(command_of_admin=None)
    commands = parser.add_subparsers(title="instead of serving", metavar="")
    token = commands.add_parser(
        "token",
        help="create a token in the config store",
        description="Create a token directly in the config store. Needs access to it, but no other token.",
        allow_abbrev=False,
    )
    token.add_argument("token_name", metavar="NAME", help="person or program that the token is for")
    token.add_argument("--role", choices=ROLES, required=True, help="role of the token")
    token.add_argument("--days", type=int, default=90, help="validity; default: %(default)s")
    token.set_defaults(command_of_admin="token")
    _add_config(token, SUPPRESS)  # a default here would override an option before `token`
    add_secret_option(parser)


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    if arguments.command_of_admin == "token":
        return _create_token(arguments, out, err)
    return _serve(arguments, err)


def _add_config(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--config",
        metavar="URL",
        default=default,
        help=f"the config store: sqlite:///headgate.db, postgresql://host/name; default: {DEFAULT_CONFIG}",
    )


# ------------------------------------------------------------------ tokens


def _create_token(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    """Print the token alone to standard output, so that it can be redirected to a file."""
    from headgate.control.admin import Tokens
    from headgate.control.config import ConfigStore
    from headgate.control.service.models import Actor
    from headgate.control.service.service import AdminService

    by = f"{_user()} at the command line"
    tokens, store = Tokens(arguments.config), ConfigStore(arguments.config)
    service = AdminService(store, secret=read_secret(arguments.secret_file))
    tokens.check_name = service.refuse_keys
    try:
        token, text = tokens.make(arguments.token_name, arguments.role, by=by, days=arguments.days)
        service.audit.record(Actor(by, "admin"), "made token", f"{token.name} ({token.role}, {token.id})")
    finally:
        tokens.close()
        store.close()
    err.print(f"Token for {token.name}, role {token.role}, valid until {_day(token)}. It is shown once:")
    out.print(text)
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"


def _day(token: Token) -> str:
    return f"{datetime.fromtimestamp(token.expires_us / 1_000_000, UTC):%Y-%m-%d}"


# ------------------------------------------------------------------ the server


def _serve(arguments: Namespace, err: Terminal) -> int:
    from headgate.control.admin import AdminServer, Tokens
    from headgate.control.anomalies.detector import AnomalyLog
    from headgate.control.config import ConfigStore, default_decision_log_url
    from headgate.control.service.service import AdminService

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    secret = read_secret(arguments.secret_file)
    with ExitStack() as stack:
        store = ConfigStore(arguments.config, secret=secret)
        stack.callback(store.close)
        tokens = Tokens(arguments.config)
        stack.callback(tokens.close)
        fleet = _fleet(arguments, stack)
        log = arguments.log or default_decision_log_url(arguments.config)
        service = AdminService(store, log=log, secret=secret, anomalies=AnomalyLog(store), **fleet)
        server = AdminServer(
            service,
            tokens,
            host=arguments.host,
            port=arguments.port,
            cert=arguments.cert,
            key=arguments.key,
            behind_tls=arguments.behind_tls,
            names=arguments.name,
            proxies=arguments.proxy,
            watchers=_watchers(arguments, fleet, store),
        )
        if arguments.behind_tls and not arguments.proxy:
            err.print(
                f"{err.paint('note:', YELLOW)} without --proxy, all clients behind the proxy share one address and its "
                "limits for failed sign-ins; valid tokens are still accepted"
            )
        _welcome(server, tokens, err, _directory(arguments.config))
        # uvicorn stops on either signal and raises it again; as KeyboardInterrupt, it lets the stack close everything.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.run()
    return 0


def _fleet(arguments: Namespace, stack: ExitStack) -> dict[str, Any]:
    """The counters and node statuses in the store of the gates."""
    if arguments.store is None:
        return {}
    from headgate import Limiter
    from headgate.telemetry.fleet.status_store import open_status_store

    counters = Limiter(arguments.store, namespace=arguments.namespace)
    stack.callback(counters.close)
    status_store = open_status_store(arguments.store, namespace=arguments.namespace)
    stack.callback(status_store.close)
    return {"counters": counters, "status_store": status_store}


def _watchers(arguments: Namespace, fleet: dict[str, Any], store: Any) -> list[Any]:
    """The anomaly detector, if there is a store to read node statuses from."""
    if (arguments.webhook is None) != (arguments.webhook_secret_file is None):
        raise InvalidInput("--webhook and --webhook-secret-file go together: the receiver verifies the signature")
    if "status_store" not in fleet:
        if arguments.webhook is not None:
            raise InvalidInput("--webhook needs --store, which has the traffic of the nodes")
        return []
    from headgate.control.anomalies.detector import AnomalyDetector
    from headgate.control.anomalies.webhook import Webhook

    webhook = None
    if arguments.webhook is not None:
        webhook = Webhook(arguments.webhook, read_file("--webhook-secret-file", arguments.webhook_secret_file))
    return [AnomalyDetector(fleet["status_store"], store, webhook=webhook)]


def _welcome(server: Any, tokens: Any, err: Terminal, directory: Path) -> None:
    """Print the server's URL, and the first token: to a terminal, or to a private file, as more people read logs."""
    made = tokens.first()
    err.print(f"The admin server is at {err.paint(server.url, BOLD)}")
    if made is None:
        err.print("Sign in there with a token. If all are lost: headgate admin token NAME --role admin")
    elif err.is_terminal:
        err.print(
            "",
            f"This is the first start. This admin token is valid until {_day(made.token)} and shown once:",
            "",
            f"    {err.paint(made.text, BOLD)}",
            "",
            "Or sign in with this link, once, within ten minutes:",
            "",
            f"    {server.link(made.token)}",
            "",
            NEXT_STEP,
            "",
        )
    else:
        file = _save(made.text, directory)
        err.print(
            f"This is the first start. An admin token, valid until {_day(made.token)}, is in {file}"
            if file is not None
            else "This is the first start. Create a token with: headgate admin token NAME --role admin",
            f"{NEXT_STEP} Delete the file." if file is not None else NEXT_STEP,
        )


def _save(token: str, directory: Path) -> str | None:
    """Write a token to a new private file and return its path; None if no file can be written."""
    for place in (directory, Path(tempfile.gettempdir())):
        with suppress(OSError):
            number, file = tempfile.mkstemp(prefix="headgate-admin-token-", dir=place.absolute())  # mode 0600
            with os.fdopen(number, "w") as out:
                out.write(f"{token}\n")
            return file
    return None


def _directory(config: str) -> Path:
    """The directory of an SQLite config store, else the current directory."""
    scheme, _, path = config.partition(":///")
    return Path(path).parent if scheme.startswith("sqlite") and path else Path()
