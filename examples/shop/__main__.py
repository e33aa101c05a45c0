"""`python -m examples.shop`, or `make run`: starts the shop and its admin pages, and demonstrates its policy."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from examples.shop.data_directory import DataDirectory
from examples.shop.guide import REDIS, Guide
from headgate import Limiter
from headgate.errors import HeadgateError
from headgate.policy import load

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
POLICY = Path(__file__).with_name("policy.yaml")


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C, or with --demo until the tour is over; returns the exit status."""
    options = _options(argv)
    try:
        load(options.policy)
        with ExitStack() as closing:
            return _serve(options, closing)
    except HeadgateError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        print(
            f"the shop needs {missing.name!r}: pip install 'headgate[admin,config,fastapi,redis,yaml]' uvicorn",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:  # a second one, during shutdown
        return 130


def _serve(options: argparse.Namespace, closing: ExitStack) -> int:
    import uvicorn

    from examples.shop.admin_server import ShopAdmin
    from examples.shop.policy_file import PolicyFile

    data = DataDirectory(options.data)
    closing.callback(data.close)
    # Through the environment, as workers are separate processes.
    databases = {"SHOP_CONFIG": data.config, "SHOP_LOG": data.log, "SHOP_LEDGER": data.ledger}
    os.environ |= {"SHOP_STORE": options.store, **databases}
    os.environ.setdefault("HEADGATE_SECRET", data.secret())  # in production, the same on all machines
    admin = ShopAdmin(data)
    closing.callback(admin.close)
    file = PolicyFile(options.policy, admin.config)
    file.begin()
    port = _free_port(options.port)
    if options.traffic:
        admin.add_simulated_clients()
        closing.callback(_end, _start_simulated_clients(port))
    pages = admin.open(_counters(options), store=options.store, host=HOST, port=_free_port(port + 1))
    os.environ["SHOP_ADMIN"] = pages
    closing.callback(file.stop)
    file.start()
    guide = Guide(HOST, port, admin.link, options)
    guide.start()
    # As Ctrl-C: uvicorn raises the signal again after its own shutdown, and the rest is still to be closed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    uvicorn.run(
        "examples.shop.app:app",
        host=HOST,
        port=port,
        workers=options.workers,
        log_level="warning",
        access_log=False,
        timeout_worker_healthcheck=30,  # a worker may need some seconds to start on a busy machine
    )
    return guide.status


def _counters(options: argparse.Namespace) -> Limiter:
    """The limiter that the admin pages read and reset counters with."""
    if not options.store.startswith("memory:"):
        return Limiter(options.store)
    from examples.shop.gate import gate

    return gate.limiter_view()  # the counters are in the memory of this process


def _start_simulated_clients(port: int) -> subprocess.Popen[bytes]:
    """Start them as a process, so that they do not slow down the shop; it ends with this one."""
    command = [sys.executable, "-m", "examples.shop.simulated_clients", "--host", HOST, "--port", f"{port}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.shop", description="A shop's API behind a policy, to try out.")
    parser.add_argument("--store", default="memory://", help=f"where to count, like {REDIS}")
    parser.add_argument("--workers", type=int, default=1, help="processes to serve with; several need a Redis store")
    parser.add_argument("--port", type=int, default=8000, help="the port, or the next free one after it")
    parser.add_argument("--policy", type=Path, default=POLICY, help="another policy file")
    parser.add_argument("--data", type=Path, help="the folder of its databases; .build/shop, if not given")
    parser.add_argument("--no-traffic", dest="traffic", action="store_false", help="send no visitors")
    parser.add_argument("--demo", action="store_true", help="only show the tour, and end")
    options = parser.parse_args(argv)
    options.policy = options.policy.resolve()
    options.data = (options.data or _data_of(options.policy)).resolve()
    if options.workers > 1 and options.store.startswith("memory:"):
        parser.error(
            f"{options.workers} workers would count apart from each other in memory; "
            f"give them a store to share: --store {REDIS}"
        )
    return options


def _data_of(policy: Path) -> Path:
    """A directory for each policy, as stored data of one may not fit another."""
    build = ROOT / ".build"
    return build / "shop" if policy == POLICY else build / f"shop-{blake2b(bytes(policy), digest_size=4).hexdigest()}"


def _free_port(first: int) -> int:
    for port in range(first, 65536):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                free: int = probe.getsockname()[1]
                return free
    raise SystemExit(f"no port from {first} on is free")


if __name__ == "__main__":
    sys.exit(main())
