"""Anomaly detection: raised once per client at ten times its baseline, and delivered to a webhook until accepted."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import warnings
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, update

from headgate import InvalidConfiguration, StoreError
from headgate.control import webhooks
from headgate.control.admin import Tokens
from headgate.control.admin.app import create_app
from headgate.control.anomalies import baseline
from headgate.control.anomalies.baseline import (
    DAY,
    Baseline,
    TrafficHistory,
    bucket_maximum,
    bucket_of,
    percentile,
    read_histories,
)
from headgate.control.anomalies.detector import ANOMALY_QUEUE, Anomaly, AnomalyDetector, AnomalyLog, MinuteTotal, detect
from headgate.control.anomalies.tables import ANOMALIES, CLIENT_DAYS, METADATA, WATCHED_DAYS
from headgate.control.config import ConfigStore
from headgate.control.config.engine import read_transaction, write_transaction
from headgate.control.service import AdminService
from headgate.control.webhooks import Webhook, sign, verify
from headgate.gate.gate import Gate
from headgate.policy import read
from headgate.telemetry.fleet.reporter import StatusReporter
from headgate.telemetry.fleet.rollups import TrafficSketch, most_of, read_minute
from headgate.telemetry.pseudonyms import Pseudonymizer
from headgate.testing import FakeRequest
from support.anomaly_fleet import CLIENT, MINUTE_US, START, AnomalyFleet
from support.servers import wait_until
from support.webhook_receiver import WebhookReceiver

with warnings.catch_warnings(action="ignore"):  # it works as well with httpx as with the newer httpx2
    from starlette.testclient import TestClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "a secret that both sides have"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config store without anything in it, made once."""
    file = tmp_path_factory.mktemp("steps") / "empty.db"
    ConfigStore(f"sqlite:///{file}").close()
    return file


@pytest.fixture
def fleet(tmp_path: Path, empty: Path) -> Iterator[AnomalyFleet]:
    made = AnomalyFleet(f"sqlite:///{shutil.copy(empty, tmp_path)}")
    yield made
    made.store.close()


@pytest.fixture
def any_fleet(config_url: str) -> Iterator[AnomalyFleet]:
    """On SQLite, and on PostgreSQL."""
    made = AnomalyFleet(config_url)
    yield made
    made.store.close()


# ------------------------------------------------------------------ detection


def test_ten_times_the_usual_for_two_minutes_is_an_anomaly(any_fleet: AnomalyFleet) -> None:
    any_fleet.learn({20: 200, 7: 2000}, minutes=7 * DAY)
    assert any_fleet.next_minute(210) == []  # one minute may be a slip
    (anomaly,) = any_fleet.next_minute(230)
    assert (anomaly.kind, anomaly.key, anomaly.label) == ("tenant", "hmac:acme", "acme")
    assert (anomaly.before, anomaly.count, anomaly.usual, anomaly.times) == (210, 230, 7, 32.9)
    assert anomaly.at_us == any_fleet.minute * MINUTE_US
    assert any_fleet.log.recent() == [anomaly]
    assert anomaly.text == (
        "acme sent 230 requests in a minute and 210 in the minute before, 33 times its usual 7. It looks like one bot: "
        "1 user agent, 1 address and 1 path in 16 sampled requests."
    )
    assert anomaly.as_dict()["text"] == anomaly.text


@pytest.mark.parametrize(
    ("counts", "first", "second", "is_one"),
    [
        ({7: 2000}, 70, 70, True),
        ({7: 2000}, 69, 70, False),
        ({7: 2000}, 70, 69, False),
        ({100: 500}, 59, 59, False),  # 500 of 10,080 are less than a twentieth: it is mostly silent
        ({100: 500}, 60, 60, True),
        ({100: 510}, 999, 999, False),  # now they are more, and are in a bucket of up to 103
        ({100: 510}, 1030, 1030, True),
        ({1: 10_000}, 59, 59, False),
        ({1: 10_000}, 60, 60, True),  # six a minute are usual for everybody
    ],
)
def test_both_minutes_must_have_ten_times_the_95th_percentile(
    counts: dict[int, int], first: int, second: int, is_one: bool
) -> None:
    history = TrafficHistory({bucket_of(number): times for number, times in counts.items()}, 7 * DAY)
    assert (
        detect(CLIENT, history, MinuteTotal("acme", second), MinuteTotal("acme", first), START) is not None
    ) is is_one


def test_pause_between_two_minutes_is_none(fleet: AnomalyFleet) -> None:
    fleet.learn({1: 100}, minutes=2 * DAY)
    assert [fleet.next_minute(count) for count in (500, None, 500, None)] == [[]] * 4


def test_new_clients_have_no_anomalies_for_a_day(fleet: AnomalyFleet) -> None:
    fleet.learn({1: 50}, minutes=DAY - 1)
    fleet.next_minute(500)
    assert fleet.next_minute(500) == []
    fleet.learn({1: 1}, minutes=1)
    fleet.next_minute(500)
    assert len(fleet.next_minute(500)) == 1


def test_client_is_known_since_it_was_first_seen_and_not_since_others_were(fleet: AnomalyFleet) -> None:
    fleet.learn({1: 50}, minutes=3 * DAY + 400, client=("tenant", "hmac:other"))
    fleet.learn({1: 50}, minutes=DAY)
    with read_transaction(fleet.store.engine) as connection:
        known = read_histories(connection, [CLIENT, ("tenant", "hmac:other"), ("ip", "new")], fleet.minute // DAY)
    assert {client: history.minutes for client, history in known.items()} == {
        CLIENT: DAY,
        ("tenant", "hmac:other"): 4 * DAY + 400,
    }


def test_anomaly_is_reported_again_after_ten_minutes_below(fleet: AnomalyFleet) -> None:
    fleet.learn({5: 2500}, minutes=2 * DAY)
    counts = (500, 500, 500, *[5] * 9, 500, 500, *[None] * 9, 5, 500, 500)
    raised = [len(fleet.next_minute(count)) for count in counts]
    assert raised == [0, 1, *[0] * 23, 1]
    assert len(fleet.rows()) == 2
    assert [anomaly.over for anomaly in fleet.log.recent()] == [False, True]
    assert fleet.log.recent(1)[0].at_us > fleet.log.recent()[1].at_us


def test_reports_of_several_nodes_are_summed(fleet: AnomalyFleet) -> None:
    fleet.learn({1: 50}, minutes=2 * DAY)
    for _ in range(2):
        fleet.tell({CLIENT: 35}, node="web:1:a", look=(10, 5, 6, 7))
        fleet.tell({CLIENT: 35, ("ip", "hmac:other"): 9}, node="web:2:b", look=(10, 3, 8, 2))
        fleet.clock.set_us((fleet.minute + 1) * MINUTE_US + 20_000_000)
        found = fleet.watcher.check()
    assert [(anomaly.count, anomaly.before, anomaly.looked_at) for anomaly in found] == [(70, 70, 40)]
    assert (found[0].agents, found[0].addresses, found[0].paths) == (5, 8, 7)


@pytest.mark.parametrize(
    ("kind", "agents", "addresses", "paths", "verdict"),
    [
        ("tenant", 9, 20, 30, "people"),
        ("tenant", 4, 4, 4, "people"),
        ("tenant", 3, 20, 30, "one bot"),
        ("tenant", 9, 3, 30, "one bot"),
        ("tenant", 9, 20, 3, "one bot"),
        ("ip", 9, 1, 30, "people"),  # an office behind one address
        ("ip", 1, 1, 30, "one bot"),
        ("api_key", 1, 1, 1, "one bot"),
    ],
)
def test_people_and_bots_are_distinguished(kind: str, agents: int, addresses: int, paths: int, verdict: str) -> None:
    now, history = MinuteTotal("x", 100), TrafficHistory({bucket_of(1): 50}, 2 * DAY)
    now.traits = TrafficSketch(50, *[(1 << number) - 1 for number in (agents, addresses, paths)])
    anomaly = detect((kind, "hmac:x"), history, now, MinuteTotal("x", 100), START)
    assert anomaly is not None
    assert anomaly.verdict == verdict


@pytest.mark.parametrize(
    ("kind", "bot", "verdict", "dominant"),
    [
        ("tenant", [], "people", 10),
        ("tenant", [("curl", "198.51.100.9")] * 150, "people", 75),  # a batch job, and at least as many people
        ("tenant", [("curl", "198.51.100.9")] * 400, "one bot", 88),
        ("tenant", [("curl", f"198.51.100.{number % 200}") for number in range(400)], "one bot", 88),  # many addresses
        ("tenant", [(f"agent {number % 30}", "198.51.100.9") for number in range(400)], "one bot", 88),  # many agents
        ("ip", [(f"agent {number % 30}", "198.51.100.9") for number in range(400)], "people", 4),
    ],
)
def test_a_bot_among_the_usual_clients_is_found(
    kind: str, bot: list[tuple[str, str]], verdict: str, dominant: int
) -> None:
    people = [(f"browser {number % 10}", f"203.0.113.{number}", f"/{number % 40}") for number in range(50)]
    now, before = MinuteTotal("x", 100), MinuteTotal("x", 100)
    requests = [*people, *[(agent, address, "/search") for agent, address in bot]]
    # As two nodes report them.
    for minute, part in ((before, requests[::2]), (now, requests[1::2])):
        sketch = TrafficSketch.of(part)
        fields = [sketch.looked_at, *[f"{bitmap:x}" for bitmap in sketch.bitmaps]]
        row = [kind, "hmac:x", "x", 100, *fields, *[[*most_of(counts)] for counts in sketch.requests]]
        document = json.dumps({"v": 1, "minute": 1, "at_us": 1, "clients": [row]}).encode()
        (client,) = read_minute(document)[1]
        assert client.traits is not None
        minute.traits.add(client.traits)
    anomaly = detect((kind, "hmac:x"), TrafficHistory({bucket_of(1): 50}, 2 * DAY), now, before, START)
    assert anomaly is not None
    assert (anomaly.verdict, anomaly.dominant) == (verdict, pytest.approx(dominant, abs=3))
    assert ("from a single user agent or address" in anomaly.text) is (verdict == "one bot")


def test_node_with_a_wrong_clock_is_counted_in_the_right_minute(fleet: AnomalyFleet) -> None:
    fleet.learn({1: 50}, minutes=2 * DAY)
    for _ in range(2):
        at_us = (fleet.minute + 1) * MINUTE_US
        fleet.tell({CLIENT: 40}, node="web:1:a")
        said = json.dumps(
            {
                "v": 1,
                "minute": fleet.minute + 90,
                "at_us": at_us + 90 * MINUTE_US,
                "clients": [[*CLIENT, "acme", 40]],
            }
        )
        fleet.clock.set_us(at_us)
        fleet.board.put(f"minutes/late:2:b:{fleet.minute + 90}", said.encode(), keep=300)
        fleet.clock.advance(20)
        found = fleet.watcher.check()
    assert [anomaly.count for anomaly in found] == [80]


# ------------------------------------------------------------------ several, and troubles


def test_one_of_several_detectors_reports(any_fleet: AnomalyFleet) -> None:
    any_fleet.learn({1: 50}, minutes=2 * DAY)
    others = [AnomalyDetector(any_fleet.board, any_fleet.store, clock=any_fleet.clock) for _ in range(3)]
    found: list[Anomaly] = []
    for _ in range(3):
        any_fleet.tell({CLIENT: 300})
        any_fleet.clock.set_us((any_fleet.minute + 1) * MINUTE_US + 20_000_000)
        threads = [
            threading.Thread(target=lambda watcher=watcher: found.extend(watcher.check()))
            for watcher in (*others, any_fleet.watcher)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == len(any_fleet.rows()) == 1
    for watcher in (*others, any_fleet.watcher):
        watcher.stop()
    with read_transaction(
        any_fleet.store.engine
    ) as connection:  # each minute is in the history once, whoever looked at it
        history = read_histories(connection, [CLIENT], any_fleet.minute // DAY)[CLIENT]
    assert history.histogram == {bucket_of(1): 50, bucket_of(300): 3}
    assert history.minutes == 2 * DAY + 3


def test_what_was_learnt_is_written_and_found_after_a_restart(fleet: AnomalyFleet) -> None:
    for _ in range(12):
        fleet.next_minute(3)
    with read_transaction(fleet.store.engine) as connection:
        assert [row.counts for row in connection.execute(select(CLIENT_DAYS))] == ["3:10"]
    fleet.watcher.stop()
    fleet.watcher = AnomalyDetector(fleet.board, fleet.store, clock=fleet.clock)
    assert fleet.watcher.check() == []  # nothing is counted twice
    fleet.next_minute(40)
    fleet.watcher.stop()
    with read_transaction(fleet.store.engine) as connection:
        history = read_histories(connection, [CLIENT], fleet.minute // DAY)[CLIENT]
    assert history.histogram == {3: 12, bucket_of(40): 1}
    assert history.minutes == 13


def test_unreported_minutes_are_not_zero(fleet: AnomalyFleet) -> None:
    fleet.next_minute(3)
    fleet.clock.advance(3600)
    assert fleet.watcher.check() == []
    fleet.next_minute(3)
    fleet.watcher.stop()
    with read_transaction(fleet.store.engine) as connection:
        assert connection.execute(select(WATCHED_DAYS.c.minutes)).scalar() == 2


def test_problems_are_logged_once_with_their_end(fleet: AnomalyFleet, caplog: pytest.LogCaptureFixture) -> None:
    there = fleet.board.read
    with caplog.at_level(logging.WARNING, "headgate"):
        fleet.board.read = _away  # type: ignore[method-assign]
        for _ in range(3):
            assert fleet.next_minute(3) == []
        fleet.board.read = there  # type: ignore[method-assign]
        fleet.board.put("minutes/junk:1", b"junk", keep=300)
        fleet.next_minute(3)
    assert [record.message for record in caplog.records] == [
        "anomaly detection is unavailable: away",
        "ignoring an invalid document in the status store: 'minutes/junk:1'",
        "anomaly detection is available again",
    ]
    fleet.watcher.stop()
    with read_transaction(fleet.store.engine) as connection:
        assert connection.execute(select(WATCHED_DAYS.c.minutes)).scalar() == 4  # what was missed is still on the board


def _away(*_: Any) -> Any:
    raise StoreError("away")


def test_history_is_bounded_in_days_and_clients(fleet: AnomalyFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "MAX_CLIENTS_PER_DAY", 5)
    for _ in range(12):
        fleet.learn({1: 3}, minutes=DAY)
    with write_transaction(fleet.store.engine) as connection:
        learnt = Baseline()
        learnt.add(fleet.minute - 1, {("ip", f"hmac:{number}"): 1 for number in range(9)})
        learnt.write(connection)
        days = connection.execute(select(CLIENT_DAYS.c.day).order_by(CLIENT_DAYS.c.day)).scalars().all()
        assert len(connection.execute(select(WATCHED_DAYS)).all()) == 8
    assert sorted(set(days)) == [START // DAY + number for number in range(4, 12)]
    assert days.count(START // DAY + 11) == 5


def test_watcher_runs_by_itself_and_leaves_no_thread(fleet: AnomalyFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.control.anomalies.detector.CHECK_INTERVAL_S", 0.01)
    fleet.learn({1: 50}, minutes=2 * DAY)
    fleet.watcher.start().start()
    for _ in range(2):
        fleet.tell({CLIENT: 300})
        fleet.clock.set_us((fleet.minute + 1) * MINUTE_US + 20_000_000)
        wait_until(lambda: fleet.watcher._last_minute == fleet.minute - 1, "a look")
    wait_until(fleet.log.recent, "the anomaly")
    fleet.watcher.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "headgate-anomalies"]


def test_anomaly_log_is_opened_by_a_url_too(tmp_path: Path) -> None:
    assert AnomalyLog(f"sqlite:///{tmp_path}/new.db").recent() == []


# ------------------------------------------------------------------ what is usual


def test_buckets_are_an_eighth_wide_at_most() -> None:
    before = -1
    for requests in [*range(3000), 10**6, 10**9]:
        bucket, most = bucket_of(requests), bucket_maximum(bucket_of(requests))
        assert requests <= most <= requests * 9 / 8
        assert bucket - before in (0, 1) or requests >= 10**6
        before = bucket


def test_percentile_is_that_of_all_minutes() -> None:
    assert percentile({}, 1000) == 0
    assert percentile({bucket_of(n): 1 for n in range(1, 11)}, 10) == 10
    for silent in range(0, 3000, 100):
        numbers = [0] * silent + [n % 15 for n in range(600)]
        steps: dict[int, int] = {}
        for number in filter(None, numbers):
            steps[bucket_of(number)] = steps.get(bucket_of(number), 0) + 1
        assert percentile(steps, len(numbers)) == sorted(numbers)[-(-len(numbers) * 95 // 100) - 1]


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index")
def test_migrations_make_the_tables_that_are_used(any_fleet: AnomalyFleet) -> None:
    def ours(thing: Any, name: str | None, kind: str, *_: Any) -> bool:
        return kind != "table" or name in METADATA.tables

    with read_transaction(any_fleet.store.engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_object": ours})
        assert compare_metadata(context, METADATA) == []


# ------------------------------------------------------------------ webhooks


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as made:
        yield made


def raised(fleet: AnomalyFleet) -> Anomaly:
    """An anomaly that waits for its webhook."""
    fleet.learn({1: 50}, minutes=2 * DAY)
    fleet.next_minute(300)
    (anomaly,) = fleet.next_minute(400)
    return anomaly


def test_anomaly_is_sent_once_signed_and_with_its_id(any_fleet: AnomalyFleet, receiver: WebhookReceiver) -> None:
    anomaly, webhook = raised(any_fleet), Webhook(receiver.url, SECRET)
    assert webhook.deliver(ANOMALY_QUEUE, any_fleet.store.engine, any_fleet.clock) == 1
    assert webhook.deliver(ANOMALY_QUEUE, any_fleet.store.engine, any_fleet.clock) == 0
    (call,) = receiver.calls
    said = json.loads(call.body)
    assert (call.path, said["type"], said["id"]) == ("/hook", "step-change", anomaly.id)
    assert said["step"] == anomaly.as_dict()
    assert call.headers["headgate-event-id"] == anomaly.id
    assert call.headers["content-type"] == "application/json"
    now = any_fleet.clock.now_us() / 1_000_000
    assert verify(call.body, call.headers["headgate-signature"], SECRET, now=now)
    (row,) = any_fleet.rows()
    assert (row.attempts, row.next_us, row.error, row.delivered_us) == (1, None, None, any_fleet.clock.now_us())


def request_number(number: int, *, alike: bool) -> FakeRequest:
    if alike:
        return FakeRequest("/prices", headers={"user-agent": "python-requests/2.31"})
    agent = f"Mozilla/5.0 (browser {number % 9})"
    return FakeRequest(f"/items/{number % 7}", peer=f"198.51.100.{number % 40}", headers={"user-agent": agent})


@pytest.mark.parametrize(("alike", "verdict"), [(True, "one bot"), (False, "people")])
def test_from_a_request_to_the_webhook_and_the_overview(
    fleet: AnomalyFleet, receiver: WebhookReceiver, alike: bool, verdict: str
) -> None:
    """Two busy minutes of a tenant that has had a request in each minute so far, of one kind or the other."""
    policy = read("limits: [{name: requests, by: tenant, bucket: 50/minute}]")
    who: dict[str, Any] = {"tenant": lambda _: "acme"}
    gate = Gate(policy, identities=who, clock=fleet.clock, secret=SECRET)
    reporter = StatusReporter(gate, fleet.board, node="web-1", every=None)
    webhook = Webhook(receiver.url, SECRET)
    found: list[Anomaly] = []

    def minute(requests: int) -> None:
        for number in range(requests):
            gate.admit(request_number(number, alike=alike))
            if number % 100 == 99:
                fleet.clock.advance(1)
                reporter.report()
        fleet.clock.set_us((fleet.minute + 1) * MINUTE_US)
        reporter.report()
        fleet.clock.advance(20)
        found.extend(fleet.watcher.check())

    with closing(gate), closing(reporter):
        fleet.learn({1: 2 * DAY}, minutes=2 * DAY, client=("tenant", Pseudonymizer(SECRET).hash_of("tenant", "acme")))
        minute(1)
        assert not found
        minute(900)
        minute(1000)
        (anomaly,) = found
        assert (anomaly.kind, anomaly.label, anomaly.count, anomaly.usual) == ("tenant", "tenant acme", 1000, 1)
        assert anomaly.verdict == verdict
        assert webhook.deliver(ANOMALY_QUEUE, fleet.store.engine, fleet.clock) == 1
        said = json.loads(receiver.calls[0].body)
        assert said["step"] == anomaly.as_dict()
        assert said["step"]["verdict"] == verdict
        service = AdminService(
            fleet.store, status_store=fleet.board, anomalies=fleet.log, secret=SECRET, clock=fleet.clock
        )
        tokens = Tokens(str(fleet.store.engine.url), clock=fleet.clock)
        made, app = tokens.make("ada", "viewer", by="the test"), create_app(service, tokens, clock=fleet.clock)
        with closing(tokens), TestClient(app, base_url="http://127.0.0.1") as web:
            assert web.get("/enter", params={"code": tokens.create_code(made.token)}).status_code == 200
            page = " ".join(re.sub("<[^>]*>", " ", web.get("/").text).split())
            program = web.get("/api/v1/overview", headers={"Authorization": f"Bearer {made.text}"}).json()
        kinds = "1 agent, 1 address, 1 path" if alike else r"\d+ agents, \d+ addresses, \d+ paths"
        assert re.search(rf"\bacme .*1,000 in a minute, usually up to 1; looks like {verdict} \({kinds}\)", page)
        assert [each["verdict"] for each in program["steps"]] == [verdict]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {}), "HTTP status 500"),
        ((404, {}), "HTTP status 404"),
        ((302, {"Location": "/other"}), "HTTP status 302"),
        ((307, {"Location": "/other"}), "HTTP status 307"),
        ((0, {}), "Remote end closed connection without response"),
    ],
)
def test_what_is_not_taken_is_sent_again_later(
    fleet: AnomalyFleet,
    receiver: WebhookReceiver,
    answer: tuple[int, dict[str, str]],
    error: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raised(fleet)
    webhook, engine = Webhook(receiver.url, SECRET), fleet.store.engine
    receiver.answers = [answer] * 4
    before = fleet.clock.now_us()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "headgate"):
        for _ in range(4):
            assert webhook.deliver(ANOMALY_QUEUE, engine, fleet.clock) == 0
            assert webhook.deliver(ANOMALY_QUEUE, engine, fleet.clock) == 0  # it is not due
            (row,) = fleet.rows()
            assert row.error == error
            fleet.clock.set_us(row.next_us)
        assert webhook.deliver(ANOMALY_QUEUE, engine, fleet.clock) == 1
    assert len(receiver.calls) == 5
    assert {call.path for call in receiver.calls} == {"/hook"}
    assert len({call.headers["headgate-event-id"] for call in receiver.calls}) == 1
    assert (1 + 2 + 4 + 8) * 1_000_000 <= fleet.clock.now_us() - before <= (2 + 4 + 8 + 16) * 1_000_000
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the webhook did not accept an event",
        "the webhook accepts requests again",
    ]


def test_pauses_grow_up_to_an_hour_and_are_spread() -> None:
    pauses = [[webhooks.backoff_s(attempts) for _ in range(50)] for attempts in range(40)]
    for attempts, each in enumerate(pauses):
        longest = min(2.0 * 2**attempts, 3600.0)
        assert longest / 2 <= min(each) < max(each) <= longest


def test_after_a_day_or_when_the_receiver_is_gone_it_is_given_up(
    fleet: AnomalyFleet, receiver: WebhookReceiver
) -> None:
    raised(fleet)
    receiver.answers = [(410, {})]
    webhook, engine = Webhook(receiver.url, SECRET), fleet.store.engine
    webhook.deliver(ANOMALY_QUEUE, engine, fleet.clock)
    assert [(row.next_us, row.error) for row in fleet.rows()] == [(None, "HTTP status 410")]
    with write_transaction(engine) as connection:
        connection.execute(update(ANOMALIES).values(next_us=0))
    fleet.clock.advance(86_400)
    assert webhook.deliver(ANOMALY_QUEUE, engine, fleet.clock) == 0
    assert [(row.next_us, row.attempts) for row in fleet.rows()] == [(None, 1)]
    assert len(receiver.calls) == 1


def test_of_too_many_that_wait_the_oldest_are_given_up(
    fleet: AnomalyFleet, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MAX_PENDING", 3)
    anomaly = raised(fleet)
    (row,) = fleet.rows()
    with write_transaction(fleet.store.engine) as connection:
        for number in range(1, 6):
            values = {
                **row._mapping,
                "id": f"{anomaly.id[:-1]}{number}x",
                "minute": row.minute - number,
                "key": f"{number}",
            }
            connection.execute(ANOMALIES.insert().values(values))
    assert Webhook(receiver.url, SECRET).deliver(ANOMALY_QUEUE, fleet.store.engine, fleet.clock) == 3
    assert len(receiver.calls) == 3


def test_two_senders_never_send_the_same_at_the_same_time(any_fleet: AnomalyFleet, receiver: WebhookReceiver) -> None:
    raised(any_fleet)
    senders = [Webhook(receiver.url, SECRET) for _ in range(4)]
    threads = [
        threading.Thread(target=sender.deliver, args=(ANOMALY_QUEUE, any_fleet.store.engine, any_fleet.clock))
        for sender in senders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receiver.calls) == 1


def test_what_waits_is_sent_after_a_restart_by_a_watcher(
    fleet: AnomalyFleet, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "CHECK_INTERVAL_S", 0.01)
    raised(fleet)
    watcher = AnomalyDetector(fleet.board, fleet.store, webhook=Webhook(receiver.url, SECRET), clock=fleet.clock)
    watcher.start()
    wait_until(lambda: receiver.calls, "a call")
    wait_until(lambda: fleet.rows()[0].delivered_us is not None, "the delivery to be noted")
    watcher.stop()


def test_unreachable_webhook_is_recorded_as_a_failure(fleet: AnomalyFleet) -> None:
    raised(fleet)
    assert Webhook("http://127.0.0.1:1/", SECRET).deliver(ANOMALY_QUEUE, fleet.store.engine, fleet.clock) == 0
    assert "refused" in fleet.rows()[0].error


@pytest.mark.parametrize(
    "url",
    ["ftp://x/", "file:///etc/passwd", "x", "", "http://", "http://a b/", "http://x:99999/", "https://ada:secret@x/"],
)
def test_invalid_webhook_url_is_rejected(url: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        Webhook(url, SECRET)
    assert "secret@" not in str(refused.value)


def test_short_secret_is_refused_and_none_is_shown() -> None:
    with pytest.raises(InvalidConfiguration, match="too short"):
        Webhook("https://example.com/", "short")
    shown = repr(Webhook("https://example.com/token-in-path", SECRET))
    assert shown == "Webhook('example.com')"


def test_signatures_are_verified_in_all_their_parts() -> None:
    body, header = b'{"a":1}', sign(b'{"a":1}', SECRET, at=1000)
    assert verify(body, header, SECRET, now=1000)
    assert verify(body, header, SECRET.encode(), now=1300)
    assert verify(body, header + ",v1=" + "0" * 64, SECRET, now=1000)
    refused = [
        (b'{"a":2}', header, SECRET, 1000),
        (body, header, "another secret, long enough", 1000),
        (body, header, SECRET, 1301),
        (body, header, SECRET, 699),
        (body, header.replace("t=1000", "t=1001"), SECRET, 1000),
        (body, header.partition(",")[2], SECRET, 1000),
        (body, "t=1000", SECRET, 1000),
        (body, "t=1000,v1=\u00e9", SECRET, 1000),
        (body, "t=-1000,v1=0", SECRET, 1000),
        (body, "", SECRET, 1000),
    ]
    for said, sent, secret, now in refused:
        assert not verify(said, sent, secret, now=now), sent
    assert verify(body, header, SECRET, now=1400, tolerance=400)


def test_no_proxy_leads_to_this_machine(
    fleet: AnomalyFleet, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    raised(fleet)
    assert Webhook(receiver.url, SECRET).deliver(ANOMALY_QUEUE, fleet.store.engine, fleet.clock) == 1
