"""Runs the server: one event loop with gRPC and HTTP in each worker, and a parent that keeps the workers alive."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headgate import __version__
from headgate.control.admin.tokens import Tokens
from headgate.control.service.models import CHECK_ROLE
from headgate.errors import InvalidConfiguration
from headgate.gate.gate import AsyncGate
from headgate.limiter import AsyncLimiter
from headgate.server.access import CERTIFICATE, AccessControl, TokenVerifier
from headgate.server.check_api import BodySizeLimit, add_auth_route, add_check_routes, add_error_handlers
from headgate.server.check_service import DEADLINE_S, MAX_CONCURRENT, CheckService
from headgate.server.envoy.config_directory import ConfigDirectory
from headgate.server.envoy.http_api import envoy_routes
from headgate.server.envoy.quota_service import QuotaService
from headgate.server.envoy.service import AsyncRateLimitService
from headgate.server.forwarded import identity_functions
from headgate.server.grpc_api import api_handler
from headgate.server.grpc_server import GrpcServer, TlsFiles
from headgate.server.health import StoreProbe
from headgate.server.metrics import ServerMetrics, is_maximum
from headgate.server.worker_stats import WorkerStats
from headgate.telemetry.decision_log.log import DecisionLog
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.status_store import open_status_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headgate.failure import FailureMode
    from headgate.gate.event_stream import DecisionSource

__all__ = ["ServerOptions", "announce_worker", "bind", "is_local", "run_worker", "run_workers", "worker_command"]

logger = logging.getLogger("headgate")

DIRECTORY_VARIABLE: Final = "HEADGATE_SERVE_DIRECTORY"
"""Names the directory that the workers of one server share."""

POLL_INTERVAL_S: Final = 0.1
RESTART_DELAY_S: Final = 1.0
_FIRST_ROUTES: Final = {"/v1/check": 0, "/auth": 1}
"""Those that gateways and apps ask about every request."""
DRAIN_TIMEOUT_S: Final = 10.0
MAX_DEADLINE_S: Final = 60.0

GC_THRESHOLD: Final = 20_000
"""New objects after which the collector looks for cycles. Python's 700 are those of a few concurrent calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The options of a server; each is the option of `headgate serve` of the same name."""

    store: str = "memory://"
    envoy: str | None = None
    grpc: str | None = None
    http: str | None = None
    workers: int = 1
    on_failure: FailureMode = "raise"
    budget: float = 0.005
    namespace: str = "headgate"
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    policy: str | None = None
    control: str | None = None
    identity: Sequence[str] = ()
    max_concurrent: int = MAX_CONCURRENT
    deadline: float = DEADLINE_S
    log: str | None = None
    show: Sequence[str] = ()

    def check(self) -> None:
        """Raise InvalidConfiguration for options that contradict each other."""
        if self.grpc is None and self.http is None:
            raise InvalidConfiguration("nothing to serve; give --grpc ADDRESS, --http ADDRESS, or both")
        if (self.cert is None) != (self.key is None) or (self.client_ca is not None and self.cert is None):
            raise InvalidConfiguration("--cert and --key belong together, and --client-ca needs both")
        for name, address, is_needed in (
            ("http", self.http, self.has_policy),
            ("grpc", self.grpc, self.envoy is None),
        ):
            if is_needed and address is not None and not self.offers_checks(address):
                raise InvalidConfiguration(
                    f"--{name} {address} would let anyone on the network charge the limits of others; listen on "
                    "loopback or a unix socket, or give --control URL, whose tokens with the role check give access, "
                    "or --cert, --key and --client-ca for client certificates"
                )
        if self.max_concurrent < 1 or not 0 < self.deadline <= MAX_DEADLINE_S:
            raise InvalidConfiguration(
                f"--max-concurrent {self.max_concurrent} --deadline {self.deadline:g}: give at least 1 request, and "
                f"more than 0 and at most {MAX_DEADLINE_S:g} seconds"
            )
        if self.workers < 1:
            raise InvalidConfiguration(f"--workers {self.workers}: give at least 1")
        for address in (self.grpc, self.http):
            if self.workers > 1 and address is not None and address.startswith("unix:"):
                raise InvalidConfiguration(
                    f"{address} cannot be shared by {self.workers} workers; use HOST:PORT, or --workers 1"
                )
        if self.workers > 1 and self.store.startswith("memory:"):
            raise InvalidConfiguration(
                f"--workers {self.workers} with --store memory:// would count in each worker on its own, which allows "
                f"{self.workers} times every limit; use a store that they share, such as redis://127.0.0.1:6379/0"
            )

    def offers_checks(self, address: str) -> bool:
        """True if callers at this address may charge limits: they are on this machine, or prove who they are."""
        return is_local(address) or self.control is not None or self.client_ca is not None

    def needs_access_control(self, address: str) -> bool:
        """True if callers at this address need a token or a client certificate."""
        return self.client_ca is not None or not is_local(address)

    @property
    def has_policy(self) -> bool:
        return self.policy is not None or self.control is not None


async def run_worker(options: ServerOptions, announce: Callable[[dict[str, int]], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in progress. `announce` gets the ports once all are open."""
    options.check()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        limiter = AsyncLimiter(
            options.store, on_failure=options.on_failure, budget=options.budget, namespace=options.namespace
        )
        await stack.enter_async_context(limiter)
        log = None if options.log is None else DecisionLog(options.log, show=("tenant", *options.show))
        if log is not None:
            stack.push_async_callback(asyncio.to_thread, log.close)
        service = AsyncRateLimitService(limiter)
        stack.push_async_callback(asyncio.to_thread, service.decisions.close)
        directory = None
        if options.envoy is not None:
            directory = ConfigDirectory(options.envoy)
            service.reload(directory.read())
        probe = StoreProbe(limiter)
        shared = os.environ.get(DIRECTORY_VARIABLE)
        stats = WorkerStats(service.server_stats, shared)
        ports: dict[str, int] = {}
        tasks: list[asyncio.Task[None]] = []
        grpc_server = None
        tls = None
        if options.cert is not None and options.key is not None:
            tls = TlsFiles(options.cert, options.key, options.client_ca)
        gate = _open_gate(options, log)
        if gate is not None:
            stack.push_async_callback(gate.close)
            log = log or (gate.control and gate.control.log)
        if log is not None:
            service.decisions.add_observer(log)
        checks = CheckService(limiter, gate, max_concurrent=options.max_concurrent, deadline=options.deadline)
        verifier = _open_verifier(options, stack)
        if options.grpc is not None:
            api = None
            if options.offers_checks(options.grpc):
                # With --client-ca, every client of this port has shown a certificate.
                needs_token = options.needs_access_control(options.grpc) and options.client_ca is None
                api = api_handler(checks, verifier if needs_token else None)
            grpc_server = GrpcServer(service, QuotaService(limiter, service), options.grpc, tls=tls, api=api)
            ports["grpc"] = grpc_server.port
        http_server = None
        if options.http is not None:
            app = _create_app(options, checks, verifier)
            sources: dict[str, DecisionSource] = {"envoy": service.decisions}
            if gate is not None:
                sources["policy"] = gate
            metrics = WorkerStats(ServerMetrics(sources).series, shared, name="metrics", is_maximum=is_maximum)
            app.routes.extend(envoy_routes(service, stats, lambda: not stopped.is_set() and probe.is_ready, metrics))
            tasks.append(asyncio.create_task(metrics.write_regularly()))
            listener = bind(options.http)
            stack.callback(listener.close)
            ports["http"] = listener.getsockname()[1] if listener.family != socket.AF_UNIX else 0
            http_server = _HttpServer(app, listener, tls)
        if grpc_server is not None:
            await grpc_server.start()
        if http_server is not None:
            await http_server.start()
        tasks += [asyncio.create_task(stats.write_regularly()), asyncio.create_task(probe.run())]
        if directory is not None:
            tasks.append(asyncio.create_task(directory.watch(service.reload_in_background)))
        if options.control is not None and options.envoy is not None:
            stack.callback(_report_status(options, service).close)
        _spare_startup_objects()
        announce(ports)
        await stopped.wait()
        logger.info("stopping: finishing requests in progress")
        drains = [] if grpc_server is None else [grpc_server.drain(DRAIN_TIMEOUT_S)]
        if http_server is not None:
            drains.append(http_server.stop())
        await asyncio.gather(*drains)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _spare_startup_objects() -> None:
    """Exclude modules, configuration and servers from garbage collection, which would stop the loop for 100 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _open_gate(options: ServerOptions, log: DecisionLog | None) -> AsyncGate | None:
    """The gate that applies the policy of the server; None without one. A config store may have a log of its own."""
    if not options.has_policy:
        return None
    gate = AsyncGate(
        options.policy,
        options.store,
        control=options.control,
        namespace=options.namespace,
        budget=options.budget,
        identities=identity_functions(("user", "tenant", *options.identity)),
        on_decision=log,
    )
    gate.serves_requests = False
    return gate


def _report_status(options: ServerOptions, service: AsyncRateLimitService) -> StatusReporter:
    """Report Envoy's traffic and quotas to the admin server; the gate reports that of the policy."""
    store = open_status_store(options.store, namespace=options.namespace)
    return StatusReporter(
        service.decisions, store, node=f"{socket.gethostname()}/envoy", show=("tenant", *options.show)
    )


def _open_verifier(options: ServerOptions, stack: AsyncExitStack) -> TokenVerifier | None:
    """The verifier of tokens, if there are some and an address needs them."""
    addresses = [each for each in (options.grpc, options.http) if each is not None]
    if options.control is None or not any(map(options.needs_access_control, addresses)):
        return None
    tokens = Tokens(options.control)
    stack.callback(tokens.close)
    if not any(each.role == CHECK_ROLE and each.revoked_us is None for each in tokens.list()):
        logger.warning("no token with the role check yet; create one with headgate token make NAME --role check")
    if options.cert is None:
        logger.warning("tokens are sent unencrypted; give --cert and --key, unless a proxy in front encrypts them")
    return TokenVerifier(tokens)


def _create_app(options: ServerOptions, checks: CheckService, verifier: TokenVerifier | None) -> FastAPI:
    address = options.http or ""
    app = FastAPI(title="Headgate", description="Rate limits for any language.", version=__version__, redoc_url=None)
    app.add_middleware(BodySizeLimit)
    add_error_handlers(app)
    if options.needs_access_control(address) and options.offers_checks(address):
        app.add_middleware(AccessControl, verifier=verifier)
    if options.offers_checks(address):
        add_check_routes(app.router, checks)
        if checks.has_policy:
            add_auth_route(app.router, checks)
    # Routes are tried in their order: those of every request first, and the documentation, which FastAPI adds, last.
    app.router.routes.sort(key=_route_rank)
    return app


def _route_rank(route: Any) -> tuple[int, bool]:
    return _FIRST_ROUTES.get(route.path, len(_FIRST_ROUTES)), not isinstance(route, APIRoute)


def is_local(address: str) -> bool:
    """True for addresses that only programs on this machine can reach."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: the worker has its own, which also stop the gRPC server."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class _CertificateProtocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """The HTTP protocol of uvicorn, which passes client certificates to the app."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.getpeercert():
            app: Any = self.app  # type: ignore[has-type]
            self.app = lambda scope, receive, send: app({**scope, CERTIFICATE: True}, receive, send)


class _HttpServer:
    """The HTTP server inside the event loop of the worker."""

    def __init__(self, app: Any, listener: socket.socket, tls: TlsFiles | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=_CertificateProtocol,
            ssl_context_factory=None if tls is None else lambda *_: tls.context(),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(DRAIN_TIMEOUT_S),
            lifespan="off",
            ws="none",
        )
        self._server = _Uvicorn(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise InvalidConfiguration("the HTTP server did not start; see the log")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def bind(address: str) -> socket.socket:
    """A socket for "host:port", "[::1]:port" or "unix:PATH"; other workers can listen on the same port."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with suppress(FileNotFoundError):
                os.unlink(path)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            return listener
        host, _, port = address.rpartition(":")
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only on sockets that name their protocol; without it, a body waits 40 ms for an ACK.
        listener = socket.socket(family, proto=socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(place)
    except ValueError:
        raise InvalidConfiguration(f"address {address!r}: use HOST:PORT, such as 127.0.0.1:8081") from None
    except OSError as error:
        raise InvalidConfiguration(f"cannot listen on {address}: {error.strerror or error}") from None
    return listener


def announce_worker(_: dict[str, int]) -> None:
    """Report to the parent process that this worker accepts requests."""
    Path(os.environ[DIRECTORY_VARIABLE], f"ready-{os.getpid()}").touch()


def run_workers(options: ServerOptions, command: Sequence[str], announce: Callable[[dict[str, int]], None]) -> int:
    """Start the workers as processes and keep them running until a signal; returns the exit code.

    `command` starts a worker. `announce` gets the ports once all workers accept requests. The parent holds the ports,
    so that port 0 is the same free port for all workers, but does not accept anything.
    """
    options.check()
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        arguments = [*command]
        for name, address in (("grpc", options.grpc), ("http", options.http)):
            if address is not None and not address.startswith("unix:"):
                listener = stack.enter_context(bind(address))
                ports[name] = listener.getsockname()[1]
                arguments += [f"--{name}", f"{address.rpartition(':')[0]}:{ports[name]}"]
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-"))
        pool = _WorkerPool(arguments, Path(directory), options.workers)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pool.stop)
        return pool.run(lambda: announce(ports))


class _WorkerPool:
    """The worker processes of a server."""

    def __init__(self, command: Sequence[str], directory: Path, size: int) -> None:
        self._command = command
        self._directory = directory
        self._environment = {**os.environ, DIRECTORY_VARIABLE: str(directory)}
        self._workers = [self._start() for _ in range(size)]
        self._is_stopping = False

    def run(self, announce: Callable[[], None]) -> int:
        """Restart workers that end, until `stop`. Returns 2 if one cannot start at all."""
        is_announced = False
        while True:
            time.sleep(POLL_INTERVAL_S)
            if self._is_stopping:
                codes = [worker.wait() for worker in self._workers]
                return 0 if not any(codes) else 1
            if not is_announced and all(self._ready(worker).exists() for worker in self._workers):
                is_announced = True
                announce()
            for index, worker in enumerate(self._workers):
                if worker.poll() is None:
                    continue
                if not self._ready(worker).exists():
                    self.stop()
                    return 2
                logger.error("worker %d ended with exit code %s; starting another", worker.pid, worker.returncode)
                time.sleep(RESTART_DELAY_S)
                if not self._is_stopping:
                    self._workers[index] = self._start()

    def stop(self, *_: object) -> None:
        """End all workers, after they have finished what is in progress."""
        self._is_stopping = True
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.send_signal(signal.SIGTERM)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=self._environment)

    def _ready(self, worker: subprocess.Popen[bytes]) -> Path:
        return self._directory / f"ready-{worker.pid}"


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command of a worker: this interpreter, and the arguments of `headgate serve`."""
    return [sys.executable, "-m", "headgate", "serve", *arguments, "--worker"]
