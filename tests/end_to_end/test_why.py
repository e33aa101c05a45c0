"""Why was Acme blocked at 3pm yesterday? The command line, the admin server and its pages say the same of it, and it is
what happened: the test counts along, by what the client was answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode
from urllib.request import Request as Call
from urllib.request import urlopen
from zoneinfo import ZoneInfo

import pytest
import yaml
from playwright.sync_api import expect

from headgate import Limiter
from headgate.adapters.wsgi import HeadgateMiddleware
from headgate.control.admin import AdminServer, Tokens
from headgate.control.config import ConfigStore
from headgate.control.config.watcher import ConfigSource
from headgate.control.service import Actor, ChangeContext, ClientRef, OverrideSpec
from headgate.control.service.service import AdminService
from headgate.telemetry import DecisionLog
from headgate.telemetry.human_time import microseconds
from headgate.telemetry.why.render import DETAILS_TITLE
from headgate.testing import FakeClock
from support.clickhouse import PASSWORD, USER
from support.servers import RedisServer
from support.traffic import SECRET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from playwright.sync_api import Browser

KEY = "sk_live_of_acme_4f9a1c77"
ADA = Actor("ada", "admin")
ACME = ClientRef("tenant", "acme")
AT = "yesterday 15:00"
NODE = "api-1"

POLICY = """\
name: shop
on_failure: local
routes:
  - {path: /search, class: search, cost: 5}
limits:
  - {name: per-tenant, by: tenant, bucket: 10000/minute}
  - {name: search, class: search, by: tenant, bucket: "100/minute, burst 50"}
  - {name: exports, path: /exports, by: api_key, missing: skip, bucket: 3/hour, algorithm: fixed_window}
  - {name: pay, path: /pay, by: tenant, bucket: 60/minute, on_failure: closed}
clients:
  - {tenant: acme, label: Acme Corp}
"""
COSTS = {"/search": 5}


class Step(NamedTuple):
    """What a client asks for at a moment, so many seconds from 3pm; and what is done before that."""

    second: int
    path: str
    times: int
    tenant: str = "acme"
    does: str = ""


DAY = (
    Step(-900, "/exports", 5),  # a quarter to three: nobody has asked about it
    Step(0, "/search", 8),
    Step(0, "/search", 20, "globex"),
    Step(10, "/search", 10),
    Step(10, "/pay", 2),
    Step(65, "/search", 13),
    Step(120, "/exports", 7),
    Step(120, "/exports", 4, "globex"),
    Step(240, "/search", 3, does="block"),
    Step(241, "/pay", 1, does="unblock"),
)
OUTAGE = (
    Step(300, "/search", 6, does="stop"),  # of a node that has a fifth of the burst: two pass
    Step(301, "/pay", 2),
)
EXPECTED = {"search": (5 + 3, 5), "exports": (4, 1)}
"""What the limits come to on paper: how many each denies while the store is there, and how far over the worst is."""


class Answered(NamedTuple):
    """What the API answered to one request."""

    at_us: int
    path: str
    status: int
    limits: tuple[str, ...]
    """Those that denied, by the answer's own word."""
    remaining: tuple[tuple[str, int], ...]
    during_outage: bool


class Api:
    """An API behind a gate, on a clock that stands at 3pm yesterday."""

    def __init__(self, config: str, store: str, *, noon_us: int, log: DecisionLog | None, namespace: str) -> None:
        self.start_us = noon_us
        self.clock = FakeClock(noon_us - 3600 * 1_000_000)
        self.app = HeadgateMiddleware(
            _welcome,
            ConfigSource(config),
            store,
            clock=self.clock,
            secret=SECRET,
            identities={"tenant": lambda request: next(iter(request.header("x-tenant")), None)},
            on_decision=log,
            namespace=namespace,
            budget=1.0,  # other tests may keep this machine busy
            reload_every=None,
        )

    def run(self, steps: Iterable[Step], acts: dict[str, Callable[[], Any]] | None = None) -> list[Answered]:
        """What acme is answered."""
        told: list[Answered] = []
        during_outage = False
        for step in steps:
            self.clock.set_us(self.start_us + step.second * 1_000_000)
            if step.does and acts is not None:
                acts[step.does]()
                during_outage = during_outage or step.does == "stop"
            for _ in range(step.times):
                answered = self._ask(step, during_outage)
                if step.tenant == "acme":
                    told.append(answered)
        return told

    def _ask(self, step: Step, during_outage: bool) -> Answered:
        said: list[Any] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": step.path, "QUERY_STRING": "", "REMOTE_ADDR": "203.0.113.9"}
        environ |= {"HTTP_X_TENANT": step.tenant, "HTTP_X_API_KEY": KEY if step.tenant == "acme" else "sk_other_key"}
        answer = self.app(environ, lambda status, headers, error=None: said.extend((status, dict(headers))))
        body = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        status, headers = int(said[0].split()[0]), {name.lower(): value for name, value in said[1].items()}
        denied = json.loads(body).get("violated-policies", ()) if status == 429 else ()
        left = re.findall(r'"([\w-]+)";r=(\d+)', headers.get("ratelimit", ""))
        remaining = tuple((name, int(number)) for name, number in left)
        return Answered(self.clock.now_us(), step.path, status, tuple(denied), remaining, during_outage)


def _welcome(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"welcome"]


class Yesterday:
    """What happened, and where it can be asked about."""

    def __init__(self, stack: ExitStack, place: Path, *, redis: RedisServer | None, log: str) -> None:
        self.zone = _zone()
        three = datetime.now(self.zone).replace(hour=15, minute=0, second=0, microsecond=0) - timedelta(days=1)
        self.three_us = microseconds(three.astimezone(UTC))
        self.log = log
        self.redis = redis
        self.config = f"sqlite:///{place}/config.db"
        store = stack.enter_context(closing(ConfigStore(self.config, secret=SECRET)))
        store.put_policy(POLICY, author="ada", reason="begin")
        self.counts_at = "memory://" if redis is None else redis.url
        kept = stack.enter_context(
            closing(DecisionLog(log, secret=SECRET, node=NODE, sample=1.0, every=0.05, writer="thread"))
        )
        self.api = self.opened(stack, kept, "yesterday")
        gate = self.api.app.gate
        acts: dict[str, Callable[[], Any]] = {
            "block": lambda: gate.block(*ACME, reason="ticket 4711"),
            "unblock": lambda: gate.unblock(*ACME),
            "stop": redis.kill if redis is not None else (lambda: None),
        }
        self.answered = self.api.run((*DAY, *(OUTAGE if redis else ())), acts)
        if redis is not None:
            redis.start()
        assert kept.flush(20)
        counters = gate.limiter_view() if redis is None else Limiter(redis.url, namespace="yesterday", budget=1.0)
        stack.enter_context(closing(counters))
        self.service = AdminService(store, counters=counters, log=log, secret=SECRET)
        tokens = stack.enter_context(closing(Tokens(self.config)))
        self.token = tokens.make("eve", "viewer", by="tests").text
        self.server = stack.enter_context(AdminServer(self.service, tokens, port=0))

    def opened(self, stack: ExitStack, log: DecisionLog | None, namespace: str) -> Api:
        api = Api(self.config, self.counts_at, noon_us=self.three_us, log=log, namespace=namespace)
        stack.enter_context(closing(api.app.gate))
        return api

    # ------------------------------------------------------------------ four ways to ask

    def command(self, *words: str, **variables: str) -> str:
        """What `headgate why` prints, in a process of its own."""
        variables |= {"TZ": self.zone.key, "PATH": os.environ["PATH"], "PYTHONWARNINGS": "error"}
        variables |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        command = [sys.executable, "-m", "headgate", "why", "tenant=acme", "--at", AT, *words]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def by_log(self, *words: str) -> str:
        return self.command("--log", self.log, *words, HEADGATE_SECRET=SECRET)

    def by_server(self, *words: str) -> str:
        return self.command(*words, HEADGATE_ADMIN=self.server.url, HEADGATE_TOKEN=self.token)

    def by_api(self) -> dict[str, Any]:
        asked = urlencode({"kind": "tenant", "value": "acme", "at": AT, "zone": self.zone.key})
        call = Call(f"{self.server.url}/api/v1/client/why?{asked}", headers={"Authorization": f"Bearer {self.token}"})
        with urlopen(call, timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def by_page(self, browser: Browser) -> str:
        """What a person reads who signs in, finds the client and asks."""
        with closing(browser.new_context(timezone_id=self.zone.key)) as context:
            page = context.new_page()
            page.goto(f"{self.server.url}/login")
            page.get_by_label("Access token").fill(self.token)
            page.keyboard.press("Enter")
            page.get_by_label("Find a client").fill("Acme Corp")
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", level=1)).to_have_text("Acme Corp")
            page.get_by_label("Time", exact=True).fill(AT)
            page.get_by_role("button", name="Explain").click()
            page.get_by_text("Internal details, not part of the email").click()
            texts = [page.locator(f"#{part}").inner_text() for part in ("mail", "details")]
            return f"\n\n---- {DETAILS_TITLE} ----\n\n".join(texts)

    # ------------------------------------------------------------------ what is true

    @property
    def around(self) -> list[Answered]:
        """What was answered in the time that is asked about: ten minutes before 3pm, until ten after its minute."""
        since_us, until_us = self.three_us - 600 * 1_000_000, self.three_us + 660 * 1_000_000
        return [each for each in self.answered if since_us <= each.at_us < until_us]


def _zone() -> ZoneInfo:
    """One in which yesterday stays yesterday for as long as the test runs, and which is not that of this machine."""
    for name in ("Europe/Berlin", "America/New_York"):
        zone = ZoneInfo(name)
        if 1 <= datetime.now(zone).hour < 23:
            return zone
    raise AssertionError("it is midnight everywhere")


@pytest.fixture(scope="module", params=["memory", "redis"])
def yesterday(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yesterday]:
    place = tmp_path_factory.mktemp("yesterday")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer()) if request.param == "redis" else None
        yield Yesterday(stack, place, redis=redis, log=f"sqlite:///{place}/decisions.db")


# ------------------------------------------------------------------ what happened, and what is said of it


def test_what_happened_is_what_was_to_happen(yesterday: Yesterday) -> None:
    """The limits on paper: else all four could agree on something that never was."""
    away = yesterday.redis is not None
    assert Counter(each.status for each in yesterday.around) == {
        200: 8 + 5 + 2 + 10 + 3 + 1 + (2 if away else 0),
        429: 5 + 3 + 4 + (4 if away else 0),
        403: 3,
        **({503: 2} if away else {}),
    }
    counted = tally([each for each in yesterday.around if not each.during_outage])
    assert {name: (each["denied"], each["over"]) for name, each in counted.items()} == EXPECTED


def test_four_ways_to_ask_have_one_answer(yesterday: Yesterday, browser: Browser) -> None:
    found = yesterday.by_api()
    ways = (yesterday.by_log, yesterday.by_server)
    with ThreadPoolExecutor() as pool:  # most of the time that a command takes is to start
        values = [pool.submit(ask, "--json") for ask in ways]
        texts = [pool.submit(ask) for ask in ways]
        on_the_page = yesterday.by_page(browser)
    assert [json.loads(each.result()) for each in values] == [found["answer"]] * 2
    assert [paragraphs(each) for each in (*[each.result() for each in texts], on_the_page)] == [both_parts(found)] * 3


def test_answer_is_what_happened(yesterday: Yesterday) -> None:
    around = yesterday.around
    answer = yesterday.by_api()["answer"]
    statuses = Counter(each.status for each in around)
    rejected = [each for each in around if each.status != 200]
    assert (answer["since"], answer["until"]) == (iso(yesterday.three_us - 600e6), iso(yesterday.three_us + 660e6))
    assert answer["labels"] == ["Acme Corp"]
    assert (answer["rejected"], answer["passed"]) == (len(rejected), statuses[200])
    assert (answer["denied"], answer["blocked"], answer["unavailable"]) == (statuses[429], statuses[403], statuses[503])
    assert answer["block_notes"] == ["ticket 4711"]
    assert answer["degraded"] == sum(each.during_outage for each in rejected)
    assert {each.partition(":")[0] for each in answer["degraded_by"]} == (
        {"local", "closed"} if yesterday.redis else set()
    )
    assert (answer["nodes"], answer["lost"], answer["is_cut"]) == ([NODE], 0, False)
    told = {
        each["name"]: {
            **{name: each[name] for name in ("denied", "cost", "degraded", "first", "last", "routes")},
            "over": each["worst"]["over"],
        }
        for each in answer["limits"]
    }
    assert told == tally(around)
    assert [each["name"] for each in answer["limits"]] == ["search", "exports"]  # the one that denied most, first


def test_mail_and_the_details_say_it_in_words(yesterday: Yesterday) -> None:
    found = yesterday.by_api()
    to_customer, for_colleagues = "\n".join(found["mail"]), "\n".join(found["details"])
    statuses = Counter(each.status for each in yesterday.around)
    rejected = sum(statuses.values()) - statuses[200]
    day = datetime.fromtimestamp(yesterday.three_us / 1e6, yesterday.zone)
    when = f"on {day:%A} {day.day} {day:%B %Y} between 14:50 and 15:11 {day.tzname()} (UTC{day:%z}"[:-2]
    assert to_customer.startswith(f"This is about requests from Acme Corp {when}")
    assert f"We rejected {rejected} of them, and accepted about {statuses[200]}." in to_customer
    assert "3 of them were rejected with status 403, because access was blocked at that time." in to_customer
    assert "Reason of the block: ticket 4711." in for_colleagues
    limits = {
        "search": "100 tokens per minute (at most 50 at once) for each account",
        "exports": "3 requests per hour for each API key",
    }
    for name, each in tally(yesterday.around).items():
        assert f"{each['denied']} of them (GET /{name}) exceeded the limit of {limits[name]}" in to_customer
        assert f'Limit "{name}" (' in for_colleagues
    for word in ("hmac:", "token_bucket", "fixed_window", "ticket 4711", "store"):
        assert word not in to_customer
    assert "To avoid this, keep to these limits. After a response with status 429, wait as long as" in to_customer
    if yesterday.redis is None:
        assert "These figures are exact: the store made all of the decisions." in for_colleagues
    else:
        assert "2 of them were rejected with status 503, because of a temporary problem on our side." in to_customer
        assert "4 of them were rejected during a temporary problem on our side, by a stricter limit" in to_customer
        assert "6 of the rejections were decided without the store: local: " in for_colleagues


def test_with_the_overrides_that_it_names_the_same_traffic_passes(yesterday: Yesterday) -> None:
    traffic = (*DAY, *(OUTAGE if yesterday.redis else ()))
    limits = yesterday.by_api()["answer"]["limits"]
    with ExitStack() as stack:
        before = yesterday.opened(stack, None, "before").run(traffic)
        # The store is here now, and holds what the share of one node did not.
        assert [each.status for each in before if each.status != 200] == [429] * (2 + 5 + 3 + 4)
        for limit in limits:
            override = yaml.safe_load(limit["override"])
            (kind,) = {*override} - {"limit", "bucket"}
            who = ClientRef(kind, override[kind])
            spec = OverrideSpec(override["bucket"], limit=override["limit"])
            yesterday.service.overrides.add(ChangeContext(ADA, "as the log says"), who, spec)
        after = yesterday.opened(stack, None, "after").run(traffic)
        assert {each.status for each in after} == {200}
        assert len(after) == len(before)
        (added,) = yesterday.service.overrides.list(client=ACME).items
        assert (added.limit, added.state) == ("search", "active")
        if yesterday.redis is not None:  # without the store it would not have been enough, and that is said
            away = yesterday.opened(stack, None, "away").run(OUTAGE, {"stop": yesterday.redis.kill})
            yesterday.redis.start()
            assert 429 in {each.status for each in away}
            assert "while the store is available" in limits[0]["override_note"]
        assert limits[1]["override_note"] is None


def test_log_in_clickhouse_gives_the_same_answer(tmp_path: Path, clickhouse: str) -> None:
    login = f"{USER}:{quote(PASSWORD)}"
    with ExitStack() as stack:
        log = f"clickhouse://{login}@{clickhouse}/default?table=three_pm"
        there = Yesterday(stack, tmp_path, redis=None, log=log)
        found = there.by_api()
        assert json.loads(there.by_log("--json")) == found["answer"]
        assert paragraphs(there.by_log()) == both_parts(found)
        told = {each["name"]: (each["denied"], each["worst"]["over"]) for each in found["answer"]["limits"]}
        assert told == EXPECTED
        assert (found["answer"]["rejected"], found["answer"]["blocked"]) == (5 + 3 + 4 + 3, 3)


def tally(answered: Sequence[Answered]) -> dict[str, dict[str, Any]]:
    """What each limit denied, counted from what the client was answered."""
    counted: dict[str, dict[str, Any]] = {}
    for each in answered:
        for limit in each.limits:
            cost = COSTS.get(each.path, 1)
            left = dict(each.remaining)[limit]
            of = counted.setdefault(
                limit, {"denied": 0, "cost": 0, "degraded": 0, "first": iso(each.at_us), "over": 0, "routes": {}}
            )
            of["denied"] += 1
            of["cost"] += cost
            of["degraded"] += each.during_outage
            of["last"] = iso(each.at_us)
            of["over"] = max(of["over"], cost - left)
            of["routes"][f"GET {each.path}"] = of["routes"].get(f"GET {each.path}", 0) + 1
    return counted


def both_parts(found: dict[str, Any]) -> list[str]:
    """The paragraphs of the mail and of the details, as the command line prints them."""
    return [" ".join(each.split()) for each in (*found["mail"], f"---- {DETAILS_TITLE} ----", *found["details"])]


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, whatever its lines are broken by."""
    return [" ".join(each.split()) for each in re.split(r"\n\s*\n", text.strip())]


def iso(at_us: float) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat().replace("+00:00", "Z")
