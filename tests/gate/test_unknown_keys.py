"""API keys that the policy does not know share a limit by address."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from headgate.policy.api_keys import ApiKeyHasher
from support.asgi_client import PEER
from support.sites import empty_asgi, empty_wsgi, policy_json

if TYPE_CHECKING:
    from pathlib import Path

    from support.sites import MakeSite, Served


def test_unknown_keys_have_no_counters_with_known_only(make_site: MakeSite) -> None:
    """Nor does anybody learn from the answer which keys there are: they count like none at all."""
    site = make_site(
        policy_json(
            {"name": "keys", "by": "api_key", "bucket": "3/hour", "missing": "ip"},
            identity={"api_key": {"known_only": True}},
            clients=[{"api_key": "sk_real"}, {"api_key": ApiKeyHasher(b"x" * 16).fingerprint("sk_other")}],
            blocked=[{"api_key": "sk_stolen"}],
        ),
        secret=b"x" * 16,
    )
    real, other = {"headers": [("x-api-key", "sk_real")]}, {"headers": [("authorization", "Bearer sk_other")]}
    made_up = [{"headers": [("x-api-key", f"sk_{number}")]} for number in range(1000)]
    assert site.statuses(*made_up)[:4] == [200, 200, 200, 429]
    assert site.statuses({}, {"headers": [("x-api-key", "sk_1")]}) == [429, 429]
    assert site.statuses(*[real] * 4, *[other] * 4) == [200, 200, 200, 429] * 2
    assert site.statuses({"headers": [("x-api-key", "sk_stolen")]}) == [403]
    assert site.statuses({"headers": [("x-api-key", "sk_1"), ("authorization", "Bearer sk_other")]}) == [429]
    assert site.gate._limiter.stats.keys == 3
    assert len(site.gate.active_policy.cached_clients) <= 3, "nor are they remembered as clients"


SECRET = b"sixteen bytes or more"


def requests_with_new_keys(number: int) -> list[dict[str, Any]]:
    """Requests from one address, each with a key of its own, in either header."""
    keys = [f"sk_{random.getrandbits(64):x}" for _ in range(number)]
    named = [("x-api-key", key) if index % 2 else ("authorization", f"Bearer {key}") for index, key in enumerate(keys)]
    return [{"headers": [each]} for each in named]


@pytest.mark.parametrize(
    "limits",
    [
        {"default": "5/day"},
        [{"name": "default", "bucket": "5/day"}],
        [{"name": "default", "by": "client", "bucket": "5/day", "algorithm": "sliding_window"}],
        [{"name": "default", "by": "api_key", "bucket": "5/day", "algorithm": "fixed_window"}],
        [{"name": "default", "by": ["api_key", "endpoint"], "bucket": "5/day", "algorithm": "gcra"}],
        [{"name": "default", "by": ["ip", "api_key"], "bucket": "5/day"}],
    ],
)
def test_new_key_per_request_passes_at_most_ten_times_the_limit(
    make_site: MakeSite, limits: Any, store_url: str, unique: str
) -> None:
    site = make_site(json.dumps({"limits": limits}), store_url, namespace=unique, secret=SECRET, budget=10)
    elsewhere = [{**each, "peer": "198.51.100.7"} for each in requests_with_new_keys(60)]
    assert site.statuses(*requests_with_new_keys(200)) == [200] * 50 + [429] * 150
    assert site.statuses(*elsewhere) == [200] * 50 + [429] * 10, "another address has a counter of its own"


def test_known_keys_are_unaffected_by_unknown_keys_of_the_same_address(make_site: MakeSite) -> None:
    known = {"clients": [{"api_key": "sk_acme"}], "limits": {"default": "5/day"}}
    known["overrides"] = [
        {"api_key": ApiKeyHasher(SECRET).fingerprint("sk_big"), "limit": "default", "bucket": "99/day"}
    ]
    site = make_site(json.dumps(known), secret=SECRET)
    assert site.statuses(*requests_with_new_keys(60)) == [200] * 50 + [429] * 10
    acme, big = {"headers": [("x-api-key", "sk_acme")]}, {"headers": [("authorization", "bearer sk_big")]}
    assert site.statuses(*[acme] * 6) == [200] * 5 + [429]
    assert site.statuses(*[big] * 100) == [200] * 99 + [429]


def test_unknown_key_beside_a_known_one_is_the_known_client(make_site: MakeSite) -> None:
    site = make_site(json.dumps({"clients": [{"api_key": "sk_acme"}], "limits": {"default": "5/day"}}), secret=SECRET)
    known = ("authorization", "Bearer sk_acme")
    both = [{"headers": [*each["headers"], known]} for each in requests_with_new_keys(40)[1::2]]
    assert site.statuses({"headers": [known]}, *both) == [200] * 5 + [429] * 16
    assert site.statuses({"headers": [known]}) == [429]


@pytest.mark.parametrize("first", [("x-api-key", "sk_new"), ("x-api-key", "sk_acme")])
def test_blocked_key_stays_blocked_beside_another(make_site: MakeSite, first: tuple[str, str]) -> None:
    named = {"clients": [{"api_key": "sk_acme"}], "blocked": [{"api_key": "sk_stolen"}]}
    site = make_site(json.dumps({**named, "limits": {"default": "5/day"}}), secret=SECRET)
    both = [first, ("authorization", "Bearer sk_stolen")]
    assert site.statuses({"headers": [first]}, {"headers": both}) == [200, 403]


def test_unknown_keys_limit_is_named_in_headers_and_decisions(make_site: MakeSite) -> None:
    admissions: list[Any] = []
    site = make_site('{"limits": {"default": "5/day"}}', on_decision=lambda _, admission: admissions.append(admission))
    *_, last, refused = [site.ask(**each) for each in requests_with_new_keys(51)]
    told = '"default";q=5;w=86400, "default (unknown keys)";q=50;w=86400'
    assert (last.fields["ratelimit-policy"], last.fields["x-ratelimit-remaining"]) == (told, "0")
    assert json.loads(refused.body)["violated-policies"] == ["default (unknown keys)"]
    assert admissions[-1].decision.denied_by == ("default (unknown keys)",)
    assert [(each.rule.net_of, each.key.identity) for each in admissions[-1].resolution.applied_limits][1] == (
        "default",
        PEER,
    )


@pytest.mark.parametrize(
    ("more", "functions"),
    [
        ({"identity": {"api_key": {"unknown_factor": "off"}}}, {}),
        ({}, {"api_key": lambda request: request.header("x-api-key")[0]}),
        ({}, {"tenant": lambda _: str(random.random())}),
    ],
    ids=["turned off", "keys of the app", "tenants of the app"],
)
def test_keys_trusted_by_the_app_have_no_unknown_keys_limit(
    make_site: MakeSite, more: dict[str, Any], functions: dict[str, Any]
) -> None:
    site = make_site(json.dumps({"limits": {"default": "5/day"}, **more}), identities=functions, secret=SECRET)
    assert site.statuses(*[{"headers": [("x-api-key", f"k{number}")]} for number in range(60)]) == [200] * 60


def test_limit_by_address_replaces_the_unknown_keys_limit(make_site: MakeSite) -> None:
    site = make_site(
        policy_json({"name": "keys", "by": "api_key", "bucket": "5/day"}, {"by": "subnet", "bucket": "70/day"})
    )
    assert site.statuses(*requests_with_new_keys(80)) == [200] * 70 + [429] * 10


@pytest.mark.parametrize(
    "guard",
    [
        {"by": "ip", "bucket": "70/day", "count_when": "status == 401"},
        {"by": "ip", "bucket": "70/day", "shadow": True},
        {"by": "ip", "bucket": "70/day", "cost": 0},
        {"by": ["ip", "api_key"], "bucket": "70/day"},
        {"by": "ip", "bucket": "70/hour, concurrency"},
        {"by": "ip", "tiers": {"pro": "70/day"}},
        {"by": "ip", "path": "/elsewhere", "bucket": "70/day"},
    ],
)
def test_partial_limit_by_address_keeps_the_unknown_keys_limit(make_site: MakeSite, guard: dict[str, Any]) -> None:
    site = make_site(policy_json({"name": "keys", "by": "api_key", "bucket": "5/day"}, guard))
    assert site.statuses(*requests_with_new_keys(80)) == [200] * 50 + [429] * 30


def test_unknown_keys_leave_bounded_state(make_site: MakeSite) -> None:
    site = make_site('{"limits": {"default": "5/day"}}')
    app, site.app.app = site.app.app, empty_asgi if site.kind == "asgi" else empty_wsgi
    assert site.statuses(*requests_with_new_keys(6_000)).count(200) == 50
    site.app.app = app
    assert site.gate._limiter.stats.keys == 51
    assert len(site.gate.active_policy.cached_clients) <= 4096
    assert len(site.gate.active_policy._header_templates) == 1


def test_reservations_of_unknown_keys_settle_on_both_limits(make_site: MakeSite, served: Served) -> None:
    """Ten requests that reserve 10 of 20, and cost 1 in the end: the net, of 200, has 190 left."""
    limit = {"name": "tokens", "by": "api_key", "bucket": "20/day", "reserve": 10}
    seen: list[Any] = []

    def commit(_: Any, admission: Any) -> None:
        seen.append(admission)
        admission.commit(1)

    site = make_site(policy_json(limit), on_decision=commit)
    assert site.statuses(*requests_with_new_keys(30)) == [200] * 30
    net = seen[-1].resolution.keys[1]
    assert site.gate.limiter_view().peek(net).remaining == 170


def test_gate_logs_the_warnings_of_each_policy_version(
    make_site: MakeSite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"limits": {"default": "5/day"}}')
    site = make_site(file, reload_every=None)
    warned = [record for record in caplog.records if "unknown API keys also count by address" in record.getMessage()]
    assert [(record.levelname, record.name) for record in warned] == [("WARNING", "headgate")]
    site.statuses({}, {})
    file.write_text('{"limits": {"default": "6/day"}}')
    assert site.gate.policy_watcher.look()
    assert sum("unknown API keys also count by address" in record.getMessage() for record in caplog.records) == 2
