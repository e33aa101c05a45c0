"""Serve gateways and other languages: Envoy over gRPC, everything else over HTTP.

headgate serve --envoy ./ratelimit --grpc 127.0.0.1:8081 --http 127.0.0.1:8080
headgate serve --envoy ./ratelimit --grpc 0.0.0.0:8081 --store redis://127.0.0.1:6379/0 --workers 4
headgate serve --demo
headgate serve --policy limits.yaml --http 127.0.0.1:8080 --store redis://127.0.0.1:6379/0
headgate serve --envoy ./ratelimit --grpc 127.0.0.1:8081 --log sqlite:///decisions.db
headgate serve --envoy ./ratelimit --grpc 0.0.0.0:8081 --cert cert.pem --key key.pem --client-ca ca.pem

The files in the directory of --envoy are those of envoyproxy/ratelimit.
They are read again when they change; invalid ones are reported, and the
previous configuration stays in force.

exit code: 0 stopped by a signal, 2 invalid call
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, get_args

from headgate.cli.options import option
from headgate.failure import FailureMode

if TYPE_CHECKING:
    from argparse import Namespace

    from headgate.cli.terminal import Terminal

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    option("--envoy", metavar="DIR", help="configuration files of envoyproxy/ratelimit; default: from RUNTIME_ROOT"),
    option("--grpc", metavar="ADDRESS", help="address for gRPC: 127.0.0.1:8081 or unix:/run/headgate.sock"),
    option("--http", metavar="ADDRESS", help="address for HTTP: 127.0.0.1:8080 or unix:/run/headgate-http.sock"),
    option("--policy", metavar="FILE", help="policy for /auth and checks: .yaml, .yml, .toml or .json"),
    option(
        "--control",
        metavar="URL",
        help="config store with policy and tokens: sqlite:///headgate.db, postgresql://...; default: the variable "
        "HEADGATE_CONTROL",
    ),
    option(
        "--identity",
        metavar="KIND",
        action="append",
        default=[],
        help="another identity that callers of /v1/check supply, besides user and tenant; may be repeated",
    ),
    option("--store", metavar="URL", help="store of the counters; default: the variable HEADGATE_STORE, or memory://"),
    option(
        "--log",
        metavar="URL",
        help="decision log for headgate why: sqlite:///decisions.db, clickhouse://host/database, ...; default: the "
        "variable HEADGATE_LOG, or that of --control",
    ),
    option(
        "--show",
        metavar="KIND",
        action="append",
        default=[],
        help="another identity or descriptor key that --log has in plain text, besides tenant; may be repeated",
    ),
    option("--workers", metavar="N", type=int, default=1, help="processes on the same ports; default: %(default)s"),
    option(
        "--on-failure",
        choices=get_args(FailureMode),
        default="raise",
        help="answer when the store fails; raise: an error, on which Envoy decides; default: %(default)s",
    ),
    option("--budget", metavar="S", type=float, default=0.005, help="seconds the store may take; default: %(default)s"),
    option(
        "--deadline", metavar="S", type=float, default=1.0, help="seconds that a check may take; default: %(default)s"
    ),
    option(
        "--max-concurrent",
        metavar="N",
        type=int,
        default=1000,
        help="checks in progress in a worker; further ones are answered by --on-failure; default: %(default)s",
    ),
    option("--namespace", default="headgate", help="prefix of keys in the store; default: %(default)s"),
    option("--cert", metavar="FILE", help="TLS certificate for gRPC and HTTP; needs --key; read again when it changes"),
    option("--key", metavar="FILE", help="private key of the certificate"),
    option("--client-ca", metavar="FILE", help="require client certificates of this authority"),
    option("--demo", action="store_true", help="show the server with a built-in caller, and end"),
    option("--worker", action="store_true", help="run as one of several workers; used by the parent process"),
)

VARIABLES = {"store": "HEADGATE_STORE", "control": "HEADGATE_CONTROL", "log": "HEADGATE_LOG"}
"""Environment variables of options whose URLs may contain passwords."""


def run(arguments: Namespace, out: Terminal, err: Terminal) -> int:
    from headgate.server.envoy.config_directory import runtime_directory
    from headgate.server.run import ServerOptions, announce_worker, run_worker, run_workers, worker_command

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if arguments.demo:
        from headgate.server.demo import play

        asyncio.run(play(out.print))
        return 0
    values = {each.name: getattr(arguments, each.name) for each in fields(ServerOptions)}
    for name, variable in VARIABLES.items():
        values[name] = values[name] or os.environ.get(variable) or None
    values["store"] = values["store"] or "memory://"
    if values["envoy"] is None:
        directory = runtime_directory(os.environ)
        values["envoy"] = None if directory is None else str(directory)
    options = ServerOptions(**values)

    def announce(ports: dict[str, int]) -> None:
        for name, port in ports.items():
            address = getattr(arguments, name)
            shown = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
            out.print(f"{name} on {shown}")
        sys.stdout.flush()

    if arguments.worker or options.workers == 1:
        asyncio.run(run_worker(options, announce_worker if arguments.worker else announce))
        return 0
    given = {name: value for name, value in values.items() if value is not None}
    # Their passwords must not be visible in the list of processes.
    os.environ.update({variable: given.pop(name) for name, variable in VARIABLES.items() if name in given})
    words = [word for name, value in given.items() for word in _words(name, value)]
    return run_workers(options, worker_command(words), announce)


def _words(name: str, value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [word for each in values for word in (f"--{name.replace('_', '-')}", str(each))]
