"""A fleet with everything on, and API keys wherever people and programs put them: afterwards none of them is found in
anything that was stored, sent, logged, shown or answered."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
import logging
import secrets
import threading
import time
import zlib
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import quote, quote_plus, urlencode, urlsplit
from urllib.request import Request as Call
from urllib.request import urlopen

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from headgate import HeadgateError, Limit, Limiter, cli
from headgate.adapters.wsgi import HeadgateMiddleware
from headgate.control.admin import AdminServer, Tokens
from headgate.control.admin.pages import READS
from headgate.control.anomalies.detector import ANOMALY_QUEUE, AnomalyDetector, AnomalyLog
from headgate.control.config import ConfigStore
from headgate.control.config.watcher import ConfigSource
from headgate.control.service import Actor, ChangeContext, ClientRef, OverrideSpec
from headgate.control.service.service import AdminService
from headgate.control.webhooks import Webhook
from headgate.policy import read
from headgate.policy.api_keys import ApiKeyHasher
from headgate.quotas import Ledger
from headgate.telemetry import DecisionLog, otel, prometheus
from headgate.telemetry.fleet.redis_status_store import RedisStatusStore
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.testing import FakeClock
from support.anomaly_fleet import AnomalyFleet
from support.clickhouse import PASSWORD, USER
from support.kafka import consume
from support.servers import RedisServer, wait_until
from support.traffic import SECRET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from support.postgres import PostgresServer

pytestmark = pytest.mark.timeout(300)  # other tests may keep this machine busy

# Each begins with twelve letters that stand nowhere else.
HEADER = "Hq7mZx2vLw9K-header-0b1c2d3e4f"
BEARER = "Bt4nRy8uJs5E+bearer/5f6a7b8c=="
LISTED = "Lk3pWc6xNd1G.listed~9d8e7f6a5b"
NUMBERED = "Np8sQv1zTg4M_override_1a2b3c4d5e"
SHUT_OUT = "Sr5tUb9yHj2C-blocked-6e7f8a9b0c"
STRANGER = "Xw6vOf3kPe7A-never-seen-2c3d4e5f"
SHAPED = "sk_live_Zd9gIa5hVm8B7c6d5e4f3a2b"
ASKED_FOR = "Qe2jMl7rFs4D-in-an-address-8a9b"
KEYS = (HEADER, BEARER, LISTED, NUMBERED, SHUT_OUT, STRANGER, SHAPED, ASKED_FOR)
SENT = (HEADER, BEARER, LISTED, NUMBERED, SHUT_OUT)
"""Those that clients send: the log has their hashes."""

HASHED = ApiKeyHasher(SECRET.encode()).fingerprint
HASH = HASHED(HEADER)
LABEL = "Control Works Ltd"
LIMIT = "control-limit"
REASON = "control reason 4711"
ADA = Actor("ada", "admin")
MINUTE_US = 60_000_000
ECHOES = "answers to who typed it"
ROOM = "control-room"

POLICY = f"""\
name: shop
routes:
  - {{path: "/items/{{id}}", class: items}}
limits:
  - {{name: {LIMIT}, by: client, bucket: 90/minute, tiers: {{pro: 900/minute}}}}
  - {{name: keys, path: /keys, by: api_key, missing: skip, bucket: 3/minute}}
  - {{name: watched, by: api_key, missing: skip, bucket: 2/minute, shadow: true}}
clients:
  - {{api_key: "{HASHED(LISTED)}", label: {LABEL}}}
  - {{tenant: {ROOM}}}
"""


class Places:
    """All that was written, sent, shown or said, by where that was."""

    def __init__(self) -> None:
        self.found: dict[str, list[bytes]] = {}

    def put(self, place: str, what: Any) -> None:
        self.found.setdefault(place, []).append(what if isinstance(what, bytes) else f"{what}".encode())

    def without(self, place: str) -> Places:
        """The same but for one of them."""
        others = Places()
        others.found = {name: pieces for name, pieces in self.found.items() if name != place}
        return others

    def sightings(self, texts: Iterable[bytes]) -> list[str]:
        return [
            f"{place}: ...{piece[max(0, at - 90) : at + 60]!r}..."
            for text in texts
            for place, pieces in self.found.items()
            for piece in pieces
            if (at := piece.find(text)) >= 0
        ]


def forms(key: str) -> set[bytes]:
    """Everything by which a key would be known again: as it is, in the usual encodings, or only its begin."""
    raw = key.encode()
    found = {raw, raw[:12], quote(key, safe="").encode(), quote_plus(key).encode(), html.escape(key).encode()}
    found |= {json.dumps(key)[1:-1].encode(), raw.hex().encode(), key.encode("utf-16-le")}
    for before in range(3):  # the letters depend on where in a longer text it stands
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(encode(b"x" * before + raw)[4 if before else 0 : (before + len(raw)) // 3 * 4])
    return found


# ------------------------------------------------------------------ the fleet


class Town:
    """Two gates, all that listens to them, and the admin server."""

    def __init__(self, stack: ExitStack, folder: Path, *, config: str, redis: RedisServer, logs: list[str]) -> None:
        self.places, self.folder, self.redis = Places(), folder, redis
        self.config_url = config
        put = self.places.put
        self.clock = FakeClock(time.time_ns() // 1000 - 1500 * MINUTE_US)
        self.config = stack.enter_context(closing(ConfigStore(config, secret=SECRET)))
        raw = POLICY.replace(HASHED(LISTED), LISTED)
        self.mistake(lambda: self.config.put_policy(raw, author="ada", reason=REASON))
        self.config.put_policy(raw, author="ada", reason=REASON, hash_keys=True)
        self.board = stack.enter_context(closing(RedisStatusStore(redis.url, namespace="town")))
        self.steps = AnomalyFleet.__new__(AnomalyFleet)
        self.steps.clock, self.steps.store = self.clock, self.config
        self.steps.learn({1: 1500}, minutes=1500, client=("api_key", HASH))
        self.logs = [
            stack.enter_context(
                closing(DecisionLog(url, secret=SECRET, node="web-1", sample=1.0, every=0.05, writer="thread"))
            )
            for url in logs
        ]
        self.log = logs[0]
        self.is_clumsy = False
        self.echoes = ""
        """Where answers go to those who have typed a key into a wrong field: forms show what was typed."""
        options: dict[str, Any] = {
            "clock": self.clock,
            "secret": SECRET,
            "namespace": "town",
            "budget": 1.0,
            "identities": {"tenant": lambda request: next(iter(request.header("x-tenant")), None)},
            "on_decision": self._decided,
            "on_event": lambda event: put("events", f"{event} {event!r}"),
            "refusal_body": self._body,
            "health_path": "/health",
        }
        feed = ConfigSource(config, cache=folder / "policy.copy")
        self.app = HeadgateMiddleware(_welcome, feed, redis.url, **options)
        self.lonely = HeadgateMiddleware(_welcome, self.config.policy(), "redis://127.0.0.1:1/0", **options)
        self.registry, self.meters, self.spans = CollectorRegistry(), InMemoryMetricReader(), InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        meters = MeterProvider([self.meters])
        stack.callback(meters.shutdown)
        stack.callback(tracers.shutdown)
        for name, app in (("shared", self.app), ("lonely", self.lonely)):
            stack.enter_context(closing(app.gate))
            prometheus.register(app.gate, self.registry, name=name)
            otel.instrument(app.gate, meters, name=name)
            otel.trace(app.gate, tracers)
        self.reporter = stack.enter_context(
            closing(StatusReporter(self.app.gate, self.board, node="web-1", every=None))
        )
        counters = stack.enter_context(closing(Limiter(redis.url, namespace="town", budget=1.0)))
        self.hook = stack.enter_context(receiver(lambda body: put("webhook", body)))
        self.watcher = AnomalyDetector(
            self.board, self.config, webhook=Webhook(self.hook, "a secret of sixteen bytes"), clock=self.clock
        )
        steps = AnomalyLog(self.config, clock=self.clock)
        self.ledger = stack.enter_context(closing(Ledger(config, clock=self.clock)))
        self.ledger.grant("acme", 100)
        self.service = AdminService(
            self.config,
            ledger=self.ledger,
            counters=counters,
            log=self.log,
            status_store=self.board,
            secret=SECRET,
            anomalies=steps,
            clock=self.clock,
        )
        self.tokens = stack.enter_context(closing(Tokens(config)))
        self.server = stack.enter_context(AdminServer(self.service, self.tokens, port=0))

    # ------------------------------------------------------------------ at the API

    def ask(self, path: str = "/", *, app: Any = None, **fields: str) -> int:
        """A request to the API, with header fields; its status."""
        path, _, query = path.partition("?")
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": query, "REMOTE_ADDR": "203.0.113.9"}
        environ |= {f"HTTP_{name.upper()}": value for name, value in fields.items()}
        told: list[Any] = []
        answer = (app or self.app)(environ, lambda status, headers, error=None: told.extend((status, headers)))
        body = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        self.places.put("answers of the API", f"{told} {body!r}")
        return int(told[0].split()[0])

    def _decided(self, request: Any, admission: Any) -> None:
        for log in self.logs:
            log(request, admission)
        said = [admission, admission.decision, admission.resolution, admission.refusal]
        said += [*admission.resolution.keys] if admission.resolution else []
        self.places.put("decisions", " ".join(f"{each} {each!r}" for each in said))
        if self.is_clumsy:
            raise RuntimeError("a mistake of the app's")

    def _body(self, facts: Any) -> Any:
        if self.is_clumsy:
            raise RuntimeError("a mistake of the app's")
        return f"{facts.message} {facts.violated_policies} {facts.decision!r}", None

    # ------------------------------------------------------------------ at the admin server

    def call(self, method: str, target: str, body: Any = None, *, place: str, **headers: str) -> tuple[int, Any, bytes]:
        """An answer of the admin server, which is kept whole."""
        parts = urlsplit(self.server.url)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        with closing(connection):
            connection.request(method, target, body, headers={"Host": parts.netloc, **headers})
            answer = connection.getresponse()
            content = answer.read()
        self.places.put(self.echoes or place, f"{answer.status} {answer.getheaders()}".encode() + content)
        return answer.status, answer.headers, content

    def api(self, method: str, path: str, body: Any = None, **query: str) -> int:
        target = f"/api/v1/{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self._fresh_token()}", "If-Match": f'"{self.config.version}"'}
        headers |= {} if method == "GET" else {"Idempotency-Key": secrets.token_hex(8)}
        content = None if body is None else json.dumps(body)
        headers |= {} if body is None else {"Content-Type": "application/json"}
        return self.call(method, target, content, place="admin API", **headers)[0]

    def _fresh_token(self) -> str:
        """One for some requests: the server counts them."""
        if not hasattr(self, "_token") or self._uses == 200:
            self._token, self._uses = self.tokens.make("ada", "admin", by="tests").text, 0
        self._uses += 1
        return self._token

    def sign_in(self) -> None:
        form = urlencode({"token": self._fresh_token(), "next": "/"})
        status, headers, _ = self.call("POST", "/login", form, place="pages", **self._of_form())
        assert status == 303
        self.cookie = headers["Set-Cookie"].partition(";")[0]
        page = self.call("GET", "/blocks", place="pages", Cookie=self.cookie)[2].decode()
        self.csrf = page.partition('name="csrf" value="')[2].partition('"')[0]

    def page(self, path: str, **form: str) -> int:
        """A page, or with fields what a form of it is answered, and the page that it leads to."""
        if not form:
            return self.call("GET", path, place="pages", Cookie=self.cookie)[0]
        sent = urlencode({"csrf": self.csrf, **form})
        status, headers, _ = self.call("POST", path, sent, place="pages", Cookie=self.cookie, **self._of_form())
        if status == 303:
            flash = (headers["Set-Cookie"] or "").partition(";")[0]
            self.call("GET", headers["Location"], place="pages", Cookie=f"{self.cookie}; {flash}")
        return status

    def _of_form(self) -> dict[str, str]:
        return {"Content-Type": "application/x-www-form-urlencoded", "Origin": self.server.url}

    def command(self, *words: str, given: str = "") -> int:
        """A command, with what it says."""
        out = io.StringIO()
        fed = io.TextIOWrapper(io.BytesIO(given.encode()))
        with redirect_stdout(out), redirect_stderr(out), patch("sys.stdin", fed):
            code = cli.main(words)
        self.places.put("command line", out.getvalue())
        return code

    def mistake(self, do: Callable[[], Any]) -> None:
        """Something that cannot be done; what is said of it."""
        with pytest.raises(HeadgateError) as refusal:
            do()
        error: BaseException | None = refusal.value
        while error is not None:
            self.places.put("errors", f"{error} {error!r} {error.args} {vars(error)}")
            error = error.__cause__ or error.__context__


def _welcome(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"welcome"]


@contextlib.contextmanager
def receiver(take: Callable[[bytes], None]) -> Iterator[str]:
    """Where a webhook leads to."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            take(f"{self.path} {self.headers}".encode() + self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
        server.shutdown()


# ------------------------------------------------------------------ what is done


def send_requests(town: Town) -> None:
    for app in (town.app, town.lonely):
        for key in (HEADER, LISTED, NUMBERED, SHUT_OUT):
            for _ in range(5):
                town.ask("/keys", app=app, x_api_key=key)
        for _ in range(5):
            town.ask("/keys", app=app, authorization=f"Bearer {BEARER}")
            town.ask("/", app=app, x_tenant=ROOM)
        town.ask(f"/items/{ASKED_FOR}?api_key={ASKED_FOR}", app=app)
        town.ask(f"/{ASKED_FOR}/no/such/path?token={BEARER}", app=app, x_api_key=HEADER, user_agent=STRANGER)
        town.ask("/keys", app=app, x_api_key=f"{HEADER}, {BEARER}", authorization=f"Basic {STRANGER}")
        town.ask("/keys", app=app, x_api_key=HEADER, cookie=f"key={STRANGER}", referer=f"https://x.example/{STRANGER}")
        town.ask("/health", app=app, x_api_key=HEADER)
    assert town.ask("/keys", x_api_key=HEADER) == 429
    town.is_clumsy = True
    assert town.ask("/keys", x_api_key=HEADER) == 429
    town.is_clumsy = False


def change_things(town: Town) -> None:
    """What people mean to do, of whom they have the keys."""
    signed = {"reason": REASON}
    town.service.overrides.add(
        ChangeContext(ADA, REASON), ClientRef("tenant", ROOM), OverrideSpec("70/minute", limit=LIMIT)
    )
    numbers = {"bucket": "5/minute", "limit": "keys", **signed}
    assert town.api("POST", "overrides", {"who": {"kind": "api_key", "value": NUMBERED}, **numbers}) == 200
    assert town.api("POST", "blocks", {"who": {"kind": "api_key", "value": SHUT_OUT}, **signed}) == 200
    wait_until(lambda: town.ask("/", x_api_key=SHUT_OUT) == 403, "the block")
    who = {"kind": "api_key", "value": HEADER}
    assert town.api("PUT", "client/tier", {"who": who, "tier": "pro", "label": "Header Inc", **signed}) == 200
    assert town.api("POST", "client/reset", {"who": {"kind": "tenant", "value": ROOM}, **signed}) == 200
    for key in SENT:
        assert town.api("POST", "find", {"client": key}) == 200
        assert town.api("POST", "find", {"client": f"api_key={key}"}) == 200
        assert town.page("/find", client=key) == 303
        assert town.api("GET", "client", kind="api_key", value=HASHED(key)) == 200
        assert town.api("GET", "client/why", kind="api_key", value=HASHED(key), at="today") == 200
    assert town.page("/blocks", client=BEARER, reason=REASON) == 200, "the preview"
    target = f"api_key={HASHED(BEARER)}"
    assert town.page("/blocks", client=target, target=target, reason=REASON) == 303
    assert town.page("/client/unblock", kind="api_key", value=HASHED(BEARER), reason=REASON) == 303
    for _ in range(2):  # two minutes of ten times the usual
        for _ in range(80):
            town.ask("/items/1", x_api_key=HEADER)
        town.clock.set_us((town.clock.now_us() // MINUTE_US + 1) * MINUTE_US + 20_000_000)
        town.reporter.report()
        town.watcher.check()
    assert town.watcher._webhook.deliver(ANOMALY_QUEUE, town.config.engine, town.clock) == 1


def be_clumsy(town: Town, *, briefly: bool) -> None:
    """Keys where they do not belong. It is not for this test to say how each is refused, but that nothing is kept."""
    tenant, api_key = {"kind": "tenant", "value": ROOM}, {"kind": "api_key", "value": HEADER}
    since = {"since": "2026-11-15T00:00:00Z", "until": "2026-11-16T00:00:00Z"}
    for key, texts in (
        (HEADER, ("{}", "her key is {}.", "key:{}", "(api_key={})", "https://x.example/?key={}&a=b")),
        (SHAPED, ("{}",)),
    )[: 1 if briefly else 2]:
        for text in [text.format(key) for text in texts[: 2 if briefly else None]]:
            override = {"who": tenant, "bucket": "80/minute", "limit": LIMIT}
            town.api("POST", "overrides", {**override, "reason": text})
            town.api("PUT", "client/tier", {"who": tenant, "tier": "pro", "label": text, "reason": REASON})
            town.api("POST", "tokens", {"name": text, "role": "viewer"})
            town.page("/client/override", kind="tenant", value=ROOM, limit=LIMIT, bucket="80/minute", reason=text)
            town.page("/client/tier", kind="tenant", value=ROOM, tier="pro", label=text, reason=REASON)
            town.page("/tokens", name=text, role="viewer", days="9")
            town.page("/blocks", client="203.0.113.77", reason=text)
            town.page("/client/reset", kind="tenant", value=ROOM, reason=text)
        for who in (tenant, api_key):
            town.api("POST", "blocks", {"who": who, "reason": f"leaked: {key}"})
            town.api("POST", "client/reset", {"who": who, "limits": [key], "reason": REASON})
        town.api("POST", "blocks", {"who": {"kind": "ip", "value": key}, "reason": REASON, key: key})
        for field in ("bucket", "limit", "class", "valid_until", "valid_from"):
            given = {"who": tenant, "bucket": "80/minute", "limit": LIMIT, "reason": REASON, field: key}
            town.api("POST", "overrides", given)
            town.api("PUT", "overrides/1", given)
        town.api("PUT", f"tiers/{quote(key, safe='')}/{LIMIT}", {"bucket": "80/minute", "reason": REASON})
        town.api("PUT", f"tiers/pro/{quote(key, safe='')}", {"bucket": "80/minute", "reason": REASON})
        town.api("PUT", "routes", {"path": f"/{key}", "cost": 3, "reason": REASON})
        town.api("PUT", "routes", {"path": "/x", "cost": 3, "class": key, "reason": REASON})
        town.api("PUT", "client/tier", {"who": tenant, "tier": key, "reason": REASON})
        for text in (
            f"{POLICY}# {key}\n",
            f"{POLICY}overrides: [{{api_key: {key}, limit: {LIMIT}, bucket: 9/minute}}]\n",
            f"{POLICY}blocked: [{{tenant: nobody, reason: 'has {key}'}}]\n",
            f"{POLICY}  - {{tenant: nobody, label: {key}}}\n",
            f"{POLICY}nonsense: {key}\n",
            f"{POLICY}  - {{api_key: '{key} {key}'}}\n",
            f"limits: [{{name: {key}, by: tenant, bucket: 9/minute}}]",
            f"limits: [{{name: x, by: {key}, bucket: '{key}'}}]",
        ):
            town.api("PUT", "policy", {"text": text, "file": "policy.yaml", "reason": REASON})
            town.page("/policy/edit", text=text, file="policy.yaml", reason=REASON)
        town.api("POST", "policy/check", {"text": f"{POLICY}nonsense: {key}\\n", "file": "policy.yaml"})
        town.page("/policy/edit", text=f"{POLICY}nonsense: {key}\\n", file="policy.yaml", reason=REASON, check="")
        town.api("PUT", "policy", {"text": POLICY, "file": f"{key}.yaml", "reason": REASON})
        town.page("/client/override", kind="tenant", value=ROOM, limit=key, bucket=key, until=key, reason=REASON)
        town.page("/client/block", kind="api_key", value=key, reason=REASON)
        town.page("/overrides/1", limit=LIMIT, bucket="80/minute", until=key, reason=f"for {key}")
        town.page("/overrides/1/remove", reason=f"for {key}")
    for key in (STRANGER,) if briefly else (HEADER, STRANGER):  # what is looked for is not kept
        for text in (key, f"api_key={key}"):
            town.api("POST", "find", {"client": text})
            town.page("/find", client=text)
        town.page("/blocks", client=f"{key}?", reason=REASON)
        for path in ("clients", "overrides", "blocks", "audit"):
            town.api("GET", path, search=key)
            town.page(f"/{path}?{urlencode({'search': key})}")
        town.api("GET", "clients", after=key)
        town.api("GET", "audit", author=key, before=key)
        town.api("GET", "decisions", kind="api_key", value=key)
        town.api("GET", "decisions", after=key)
        for kind in ("api_key", key):
            who = {"kind": kind, "value": key}
            town.api("GET", "client", **who)
            town.api("GET", "client/why", **who, at="today")
            town.api("GET", "client/timeline", **who, **since)
            town.api("DELETE", "client/tier", **who, reason=REASON)
            town.api("DELETE", "blocks", **who, reason=REASON)
            town.page(f"/client?{urlencode(who)}")
        town.api("GET", "client/why", kind="tenant", value=ROOM, at=key, until=key, zone=key)
        town.page(f"/client?{urlencode({'kind': 'tenant', 'value': ROOM, 'at': key})}")
        town.api("GET", quote(key, safe=""))
        town.api("GET", f"overrides/{quote(key, safe='')}")
        town.api("DELETE", f"tokens/{quote(key, safe='')}")
        town.page(f"/{quote(key, safe='')}")
        town.call("GET", "/api/v1/overview", place="admin API", Authorization=f"Bearer {key}")
        target = f"/client?{urlencode({'kind': 'api_key', 'value': key})}"
        town.call("GET", target, place="pages")  # of somebody who has not signed in
        town.call("POST", "/find", urlencode({"client": key}), place="pages", **town._of_form())
    town.call("POST", "/login", urlencode({"token": HEADER, "next": f"/{HEADER}"}), place="pages", **town._of_form())
    town.call("GET", f"/enter?code={HEADER}", place="pages")


def look_at_everything(town: Town) -> None:
    town.reporter.report()
    numbers = {"{id:int}": f"{town.service.overrides.list().items[0].id}", "{version:int}": "2"}
    for path in READS:
        for name, value in numbers.items():
            path = path.replace(name, value)
        client = f"?kind=api_key&value={HASH}"
        queries = {"/client": f"{client}&at=today", "/blocks/new": client, "/policy/diff": "?one=1&other=2"}
        queries["/ledger/account"] = "?account=acme"
        assert town.page(path + queries.get(path, "")) == 200, path
    for path in ("overview", "steps", "decisions", "clients", "overrides", "blocks", "tiers", "routes", "policy",
                 "versions", "versions/2/diff", "audit", "tokens", "regions", "ledger/accounts"):  # fmt: skip
        assert town.api("GET", path) == 200, path


def use_the_command_line(town: Town) -> None:
    for key in (HEADER, STRANGER):
        why = f"for {key}" if key == HEADER else REASON  # of a key that nobody knows, nobody knows that it is one
        for words in (("who",), ("why",), ("why", "--log", town.log, "--at", "today"), ("tail", "--no-follow")):
            town.command(*words, key)
            town.command(*words, "-", given=f"{key}\n")
        town.command("override", "add", f"api_key={key}", "7/minute", "--limit", "keys", "--reason", why)
        town.command("override", "add", key, "7/minute", "--limit", "keys", "--reason", REASON)
        town.command("block", "add", key, "--reason", why)
        town.command("override", "list", "--search", key)
        town.command("hash-key", given=f"{key}\n")
        file = town.folder / "given.yaml"
        file.write_text(f"{POLICY}  - {{api_key: {key}, tier: pro}}\nblocked: [{{api_key: '{key} {key}'}}]\n")
        town.command("check", f"{file}")
        file.unlink()
    for words in (
        ("audit",),
        ("top", "--once"),
        ("tail", "--no-follow"),
        ("block", "list"),
        ("tier", "list"),
        ("policy", "show"),
    ):
        town.command(*words)


def make_mistakes(town: Town) -> None:
    bad = f"{HEADER} {LISTED}"
    gate = town.app.gate
    town.mistake(lambda: gate.block("api_key", bad))
    town.mistake(lambda: town.config.block(("api_key", bad), author="ada", reason=REASON))
    town.mistake(
        lambda: town.service.overrides.add(
            ChangeContext(ADA, REASON), ClientRef("api_key", HEADER), OverrideSpec(HEADER, limit=LIMIT)
        )
    )
    town.mistake(lambda: town.service.clients.find(ASKED_FOR))
    town.mistake(lambda: town.service.blocks.add(ChangeContext(ADA, REASON), ClientRef("api_key", bad)))
    town.mistake(lambda: town.service.blocks.add(ChangeContext(ADA, HEADER), ClientRef("tenant", ROOM)))
    town.mistake(lambda: read(f"clients: [{{api_key: '{bad}'}}]"))
    town.mistake(lambda: read(f"limits: [{{name: control-limit, by: ip, bucket: 1/minute}}]\napi_key: {HEADER}"))
    alone = Limiter("redis://127.0.0.1:1/0", on_failure="raise")
    with closing(alone):
        town.mistake(lambda: alone.check(Limit.parse("1/minute", name=LIMIT).by(HASH)))


# ------------------------------------------------------------------ what is there afterwards


def gather(town: Town) -> None:
    put = town.places.put
    put("Prometheus", generate_latest(town.registry))
    data = town.meters.get_metrics_data()
    put("OpenTelemetry metrics", data.to_json() if data is not None else "")
    for span in town.spans.get_finished_spans():
        put("OpenTelemetry spans", span.to_json())
    for each in (town.app.gate, town.lonely.gate, town.config, town.service, town.tokens, town.board, *town.logs):
        put("decisions", f"{each!r} {each}")
    with town.redis.client(decode_responses=False) as client:
        for key in client.scan_iter(count=1000):
            put("Redis", key)
            for value in values_in_redis(client, key):
                put("Redis", value)
                with suppress(zlib.error):
                    put("Redis", zlib.decompress(value))
            put("Redis", client.dump(key) or b"")


def values_in_redis(client: Any, key: bytes) -> Iterator[bytes]:
    match client.type(key):
        case b"string":
            yield client.get(key) or b""
        case b"hash":
            for pair in client.hgetall(key).items():
                yield from (part.partition(b" ")[2] or part for part in pair)
                yield from pair
        case b"list":
            yield from client.lrange(key, 0, -1)
        case b"set":
            yield from client.smembers(key)
        case b"zset":
            yield from (member for member, _ in client.zrange(key, 0, -1, withscores=True))
        case b"stream":
            yield f"{client.xrange(key)}".encode()


@contextlib.contextmanager
def all_that_is_logged(file: Path) -> Iterator[None]:
    """Whatever anybody logs, down to each statement of the database with its parameters, goes into a file."""
    handler = logging.FileHandler(file)
    handler.setFormatter(
        logging.Formatter("%(name)s %(levelname)s %(message)s %(decision)s", defaults={"decision": ""})
    )
    root, loud = logging.getLogger(), [logging.getLogger(name) for name in ("uvicorn", "uvicorn.access", "sqlalchemy")]
    others = [*root.handlers]  # of pytest: it would keep all of it, too
    before = [(each, each.level) for each in (root, *loud, *others)]
    for each, _ in before:
        each.setLevel(logging.CRITICAL if each in others else logging.DEBUG)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        for each, level in before:
            each.setLevel(level)


@contextlib.contextmanager
def all_that_redis_hears(redis: RedisServer, places: Places) -> Iterator[None]:
    """What is published, and every command, as the server itself tells them."""
    is_over = threading.Event()
    with redis.client(decode_responses=False, socket_timeout=None) as client, ExitStack() as stack:
        published = stack.enter_context(client.pubsub())
        published.psubscribe("*")
        monitor = stack.enter_context(client.monitor())

        def hear() -> None:
            while not is_over.is_set():
                message = published.get_message(timeout=0.05)
                if message is not None:
                    places.put("published", f"{message}")

        def overhear() -> None:
            with suppress(Exception):  # the server ends
                while not is_over.is_set():
                    places.put("commands of Redis", monitor.connection.read_response(disable_decoding=True))

        threads = [threading.Thread(target=each, daemon=True) for each in (hear, overhear)]
        for thread in threads:
            thread.start()
        try:
            yield
            client.publish("over", "over")
            wait_until(lambda: any(b"over" in each for each in places.found.get("published", ())), "all to be heard")
        finally:
            is_over.set()
            client.ping()
            for thread in threads:
                thread.join(5)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def town(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    brokers: str,
    clickhouse: str,
) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    table = f"raw_keys_{request.param}"
    login = f"{USER}:{PASSWORD}@{clickhouse}"
    logs = [
        f"sqlite:///{folder}/decisions.db",
        f"jsonl:///{folder}/decisions.jsonl",
        "logging://decisions?level=debug",
        f"kafka://{brokers}/{table}?linger.ms=1",
        f"clickhouse://{login}/default?table={table}",
    ]
    if request.param == "sqlite":
        config, database = f"sqlite:///{folder}/config.db", None
    else:
        database = request.getfixturevalue("postgres")
        config = database.fresh_url()
    with ExitStack() as stack:
        stack.enter_context(all_that_is_logged(folder / "everything.log"))
        redis = stack.enter_context(RedisServer())
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        town = Town(stack, folder, config=config, redis=redis, logs=logs)
        for name, value in {
            "HEADGATE_ADMIN": town.server.url,
            "HEADGATE_TOKEN": town._fresh_token(),
            "HEADGATE_SECRET": SECRET,
        }.items():
            patched.setenv(name, value)
        with all_that_redis_hears(redis, town.places):
            send_requests(town)
            for log in town.logs:
                assert log.flush(20)
            town.sign_in()
            change_things(town)
            town.echoes = ECHOES
            be_clumsy(town, briefly=database is not None)  # what stands above the databases is the same
            town.echoes = ""
            send_requests(town)
            look_at_everything(town)
            use_the_command_line(town)
            make_mistakes(town)
            for log in town.logs:
                assert log.flush(20)
            gather(town)
        put = town.places.put
        count = town.logs[0].stats.written
        for message in consume(brokers, table, count):
            put("Kafka", message.key() + message.value())
        put("ClickHouse", of_clickhouse(login, f"SELECT * FROM {table} FORMAT JSONEachRow"))
        if database is not None:
            for name, text in of_postgres(database, config):
                put("PostgreSQL", f"{name} {text}")
            for file in (database.directory / "data").rglob("*"):
                with suppress(OSError):
                    if file.is_file():
                        put("files of PostgreSQL", file.read_bytes())
        for file in folder.rglob("*"):
            put(f"file {file.name}", file.read_bytes())
        yield town


def of_clickhouse(login: str, query: str) -> bytes:
    user, _, host = login.rpartition("@")
    basic = base64.b64encode(user.encode()).decode()
    with urlopen(Call(f"http://{host}/", query.encode(), {"Authorization": f"Basic {basic}"}), timeout=20) as answer:
        content: bytes = answer.read()
        return content


def of_postgres(database: PostgresServer, url: str) -> Iterator[tuple[str, str]]:
    """Every row of every table, as text."""
    schema = url.rpartition("%3D")[2]
    with psycopg.connect(database.url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
        for (table,) in tables:
            for (row,) in connection.execute(f'SELECT t::text FROM {schema}."{table}" t'.encode()):
                yield table, row


def test_no_key_is_found_anywhere(town: Town) -> None:
    kept = town.places.without(ECHOES)
    assert [each for key in KEYS for each in kept.sightings(forms(key))] == []


def test_other_keys_are_not_in_the_responses(town: Town) -> None:
    typed = (HEADER, SHAPED, STRANGER)
    assert [each for key in KEYS if key not in typed for each in town.places.sightings(forms(key))] == []


CONTROLS = {
    "answers of the API": LIMIT,
    "decisions": HASH,
    "events": "127.0.0.1",
    "admin API": HASH,
    "pages": LABEL,
    "command line": LABEL,
    "errors": "127.0.0.1",
    "webhook": HASH,
    "Prometheus": LIMIT,
    "OpenTelemetry metrics": LIMIT,
    "OpenTelemetry spans": LIMIT,
    "Redis": HASH,
    "published": HASHED(SHUT_OUT),
    "commands of Redis": HASH,
    "Kafka": HASH,
    "ClickHouse": HASH,
    "PostgreSQL": REASON,
    "files of PostgreSQL": REASON,
    "file decisions.db": HASH,
    "file decisions.jsonl": HASH,
    "file everything.log": HASH,
    "file policy.copy": LABEL,
    "file config.db": REASON,
}


def test_what_is_known_to_be_there_is_found_by_the_same_search(town: Town) -> None:
    is_sqlite = "file config.db" in town.places.found
    expected = {
        place: control
        for place, control in CONTROLS.items()
        if place not in (("PostgreSQL", "files of PostgreSQL") if is_sqlite else ("file config.db",))
    }
    missed = {
        place for place in town.places.without(ECHOES).found if not any(place.startswith(known) for known in expected)
    }
    assert missed == set()
    blind = [
        place
        for place, control in expected.items()
        if not any(each.startswith(place) for each in town.places.sightings([control.encode()]))
    ]
    assert blind == []


@pytest.mark.parametrize("key", KEYS)
def test_key_would_be_found_however_it_is_written(key: str) -> None:
    for written in (
        key.encode(),
        f"begins with {key[:12]}...".encode(),
        f"/find?client={quote(key, safe='')}".encode(),
        urlencode({"client": f"a {key}"}).encode(),
        base64.b64encode(f"user:{key}".encode()),
        base64.b64encode(f"users:{key}:x".encode()),
        base64.urlsafe_b64encode(f"u:{key}".encode()),
        f"{key}".encode("utf-16"),
        zlib.decompress(zlib.compress(key.encode())),
    ):
        places = Places()
        places.put("here", b"something before, " + written + b" and after")
        assert places.sightings(forms(key)), written
