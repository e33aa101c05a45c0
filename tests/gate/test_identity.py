"""Client identity: addresses behind proxies, API keys, and the app's own identity functions."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest

from headgate.adapters.asgi import HeadgateMiddleware
from headgate.errors import InvalidConfiguration
from headgate.policy.loader import read
from headgate.testing import FakeClock
from support.asgi_client import PEER, scope, talk
from support.sites import END_OF_BODY, item_request, policy_json, starlette_site

if TYPE_CHECKING:
    from support.servers import RedisServer
    from support.sites import Answer, MakeSite


MEGABYTE = 2**20
PER_IP = policy_json({"by": "ip", "bucket": "1/hour"})
BY_KEY = policy_json({"by": "api_key", "bucket": "1/hour"})
BEHIND = policy_json({"by": "ip", "bucket": "1/hour"}, identity={"proxies": ["10.0.0.0/8"]})
FORWARDED = BEHIND.replace('["10.0.0.0/8"]', '["10.0.0.0/8"], "forwarded_by": "forwarded"')
HOPS = "10.0.0.2, " * 100_000 + "10.0.0.3"


def by_header(name: str, *values: str) -> list[list[tuple[str, str]]]:
    """A request for each value of a header."""
    return [[(name, value)] for value in values]


@pytest.mark.parametrize(
    ("text", "peer", "attempts"),
    [
        (PER_IP, PEER, by_header("x-forwarded-for", "1.1.1.1", "1.1.1.2", "unknown")),
        (BEHIND, PEER, by_header("x-forwarded-for", "1.1.1.1", "1.1.1.2", "10.0.0.9")),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", *[f"1.1.1.{n}, 6.6.6.6" for n in range(3)])),
        (BEHIND, "10.0.0.1", [[("x-forwarded-for", f"1.1.1.{n}"), ("x-forwarded-for", PEER)] for n in range(3)]),
        (BEHIND, "10.0.0.1", [[("forwarded", f"for=1.1.1.{n}"), ("x-forwarded-for", PEER)] for n in range(3)]),
        (FORWARDED, "10.0.0.1", [[("x-forwarded-for", f"1.1.1.{n}"), ("forwarded", "for=6.6.6.6")] for n in range(3)]),
        (FORWARDED, "10.0.0.1", by_header("forwarded", *[f'for=1.1.1.{n};host=", for=6.6.6.6' for n in range(3)])),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", *[f"1.1.1.{n}, {HOPS}" for n in range(3)])),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", *[f"1.1.1.{n}, " + "x" * 10 * MEGABYTE for n in range(3)])),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", *[f"1.1.1.{n}," + "," * 100_000 for n in range(3)])),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", "1.1.1.1, ", "1.1.1.2, 1.1.1.300", "1.1.1.3, \0")),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", "6.6.6.6", "::ffff:6.6.6.6", "[::FFFF:606:606]:443")),
        (BEHIND, "10.0.0.1", by_header("x-forwarded-for", *[f"2001:db8::{n}%eth{n}" for n in range(3)])),
        (BEHIND, "::ffff:10.0.0.1", by_header("x-forwarded-for", "6.6.6.6", "6.6.6.6:1", "6.6.6.6:65535")),
        (BEHIND, None, by_header("x-forwarded-for", "1.1.1.1", "1.1.1.2", "1.1.1.3")),
        (PER_IP, "not an address", by_header("x-real-ip", "1.1.1.1", "1.1.1.2", "1.1.1.3")),
        (BY_KEY, PEER, by_header("x-api-key", *[f"{n}" + "k" * MEGABYTE for n in range(3)])),
        (BY_KEY, PEER, by_header("x-api-key", "a\r\nx: y", "b\0", "c d")),
        (BY_KEY, PEER, by_header("x-api-key", "schlüssel", "鍵", "\ud800")),
        (BY_KEY, PEER, [[("x-api-key", f"a{n}"), ("x-api-key", "b")] for n in range(3)]),
        (BY_KEY, PEER, [[("authorization", f"Bearer a{n}"), ("authorization", "Bearer b")] for n in range(3)]),
        (BY_KEY, PEER, by_header("authorization", "Bearer", "Basic YTpi", "Bearer  ")),
        (PER_IP, PEER, [[("x-ratelimit-cost", "0")], [("cost", "-5")], [("x-ratelimit-remaining", "99")]]),
    ],
    ids=[
        "no proxies", "not from a proxy", "left of the client", "two lines", "the other header", "the other way round",
        "a quoted comma", "100,000 hops", "10 MB", "100,000 commas", "no address", "mapped", "zones", "mapped proxy",
        "no peer", "odd peer", "megabyte keys", "control characters", "unicode", "two keys", "two tokens", "no keys",
        "costs",
    ],
)  # fmt: skip
def test_request_headers_do_not_reset_the_counter(
    make_site: MakeSite, text: str, peer: str | None, attempts: list[list[tuple[str, str]]]
) -> None:
    site = make_site(text)
    assert site.statuses(*[{"headers": headers, "peer": peer} for headers in attempts]) == [200, 429, 429]


KEY_AND_ADDRESS_LIMITS = policy_json(
    {"by": "api_key", "bucket": "1/hour"}, {"by": "ip", "bucket": "100/hour"}, blocked=[{"api_key": "stolen"}]
)


@pytest.mark.parametrize("spoiling", ["", " ", "a b", ",", "\0", "k" * 5000], ids=repr)
def test_invalid_key_header_does_not_hide_the_bearer_token(make_site: MakeSite, spoiling: str) -> None:
    """Else the limit by key would be left out for a client whose token the app takes, and a block would not hold."""
    site = make_site(KEY_AND_ADDRESS_LIMITS)
    for token, expected in (("valid", [200, 429, 429]), ("stolen", [403, 403, 403])):
        headers = [("x-api-key", spoiling), ("authorization", f"Bearer {token}")]
        assert site.statuses(*[{"headers": headers}] * 3) == expected


def test_several_keys_in_one_request_share_one_counter(make_site: MakeSite) -> None:
    """The app may believe one of them: from however many addresses they come, there is one quota for all of them."""
    site = make_site(KEY_AND_ADDRESS_LIMITS)
    sent = [("x-api-key", "valid"), ("x-api-key", "b")]
    got = site.statuses(*[{"headers": sent, "peer": f"198.51.100.{number}"} for number in range(3)])
    # WSGI servers join the lines, and an app there gets no valid key at all.
    assert got == ([200, 429, 429] if site.kind == "asgi" else [200, 200, 200])


@pytest.mark.parametrize("name", ["x-api-key", "authorization"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_blocked_key_among_several_is_blocked(make_site: MakeSite, name: str, place: int) -> None:
    """Where lines reach the app one by one, it may believe any of them; where they are joined, it gets no key."""
    keys = ["first", "second"]
    keys.insert(place, "leaked")
    sent = [(name, f"Bearer {key}" if name == "authorization" else key) for key in keys]
    site = make_site(policy_json({"by": "ip", "bucket": "9/hour"}, blocked=[{"api_key": "leaked"}]))
    assert site.ask(headers=sent).status == (403 if site.kind == "asgi" else 200)
    assert site.ask(headers=[each for each in sent if "leaked" not in each[1]]).status == 200


NAMES = [
    "a", "b", "a|b", "a%7Cb", "|", "||", "%", "%all", "%25all", "%hash-00", "{a}", "{", "a:b", "a/b", "a b", "A",
    "a\r\nset-cookie: x=1", "\0", "ä", "a\u0308", "鍵", "\ud800", "ip", "|ip|203.0.113.9", "unknown", "ambiguous",
    "hmac:00112233445566778899aabbccddeeff", "x" * MEGABYTE, "x" * MEGABYTE + "y", "0", "-1", "None",
]  # fmt: skip


@pytest.mark.parametrize("place", ["memory", "redis"])
def test_identities_never_collide_and_are_not_echoed(
    make_site: MakeSite, place: str, redis7: RedisServer, unique: str
) -> None:
    store = redis7.url if place == "redis" else "memory://"
    site = make_site(
        policy_json({"by": "tenant", "bucket": "1/hour"}, {"by": "tenant+user", "bucket": "1/hour"}),
        store,
        namespace=unique,
        budget=5.0,
        identities={
            "tenant": lambda request: NAMES[int(request.header("x-number")[0])],
            "user": lambda request: NAMES[-int(request.header("x-number")[0])],
        },
    )  # fmt: skip
    for expected in (200, 429):
        for number, name in enumerate(NAMES):
            answer = site.ask(headers=[("x-number", str(number))])
            assert (answer.status, name) == (expected, name)
            assert_not_echoed(answer, name)
    if place == "redis":
        with redis7.client() as redis:
            keys = list(redis.scan_iter(match=f"{unique}:[^%]*", count=1000))
            assert len(keys) == 2 * len(NAMES)
            assert all(redis.pttl(key) > 0 and len(key) < 300 for key in keys)


def assert_not_echoed(answer: Answer, secret: str) -> None:
    told = " ".join(itertools.chain(*answer.lines)) + answer.body.decode()
    assert len(secret) < 6 or secret not in told
    assert not [value for _, value in answer.lines if not value.isprintable() or not value.isascii()]


class TextSubclass(str):
    """As Django's safe strings and enums of text: what `str` makes of it is not its text."""

    def __str__(self) -> str:
        return self


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("sk_live_secret")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "sk_live_secret"


def failing(request: Any) -> str:
    raise LookupError("no such session")


@pytest.mark.parametrize(
    "value",
    [b"sk_live_secret", Incomparable(), 10**5000, 1.5, True, ["sk_live_secret"], {"sk_live_secret"}, failing, ""],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_invalid_identity_counts_by_address_and_is_not_logged(
    make_site: MakeSite, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    function = value if callable(value) else lambda request: value
    site = make_site(policy_json({"by": "tenant", "bucket": "1/hour"}), identities={"tenant": function})
    assert site.statuses(*[{}] * 3, {"peer": "198.51.100.1"}) == [200, 429, 429, 200]
    assert "sk_live_secret" not in caplog.text
    assert ("identities['tenant']" in caplog.text) == (not isinstance(value, str))


def test_str_subclasses_and_integers_count_as_their_text(make_site: MakeSite) -> None:
    names = iter([TextSubclass("a"), "a", TextSubclass("b"), 7, "7"])
    site = make_site(
        policy_json({"by": "tenant", "bucket": "1/hour"}), identities={"tenant": lambda request: next(names)}
    )
    assert site.statuses(*[{}] * 5) == [200, 429, 200, 200, 429]


def test_failing_identity_function_logs_once_per_second(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(policy_json({"by": "tenant", "bucket": "1/hour"}), identities={"tenant": failing})
    start = time.monotonic()
    site.statuses(*[{}] * 200)
    assert 1 <= len(caplog.records) <= 2 + time.monotonic() - start


@pytest.mark.parametrize("kind", ["ip", "subnet", "address", "endpoint", "client", "global"])
def test_built_in_identity_kinds_cannot_be_replaced(make_site: MakeSite, kind: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"identities\['{kind}'\]: this kind is built in"):
        make_site(PER_IP, identities={kind: failing})


def test_hanging_identity_function_delays_its_own_request_only() -> None:
    async def tenant(request: Any) -> str:
        if request.path == "/slow":
            await asyncio.get_running_loop().create_future()
        return "acme"

    async def run() -> list[Any]:
        app = HeadgateMiddleware(starlette_site([]), read(policy_json({"by": "tenant", "bucket": "1/hour"})),
                                 clock=FakeClock(), identities={"tenant": tenant})  # fmt: skip
        stuck = asyncio.create_task(talk(app, scope("/slow"), END_OF_BODY))
        got = [(await talk(app, scope("/login"), END_OF_BODY))[0]["status"] for _ in range(2)]
        stuck.cancel()
        return [*got, *await asyncio.gather(stuck, return_exceptions=True)]

    first, second, stuck = asyncio.run(run())
    assert (first, second, type(stuck)) == (200, 429, asyncio.CancelledError)


def test_each_client_has_its_own_quota(make_item_site: MakeSite) -> None:
    """P1: a limiter that ignored the client, so that the third request from another address got a 429."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "2/minute"}))
    got = site.statuses(
        item_request(),
        item_request(),
        item_request(peer="198.51.100.7"),
        item_request(),
        item_request(peer="198.51.100.7"),
    )
    assert got == [200, 200, 200, 429, 200]


def test_address_is_the_rightmost_untrusted_hop(make_item_site: MakeSite) -> None:
    """P14: X-Forwarded-For was believed from anybody, and its first hop taken."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "1/minute"}, identity={"proxies": ["10.0.0.0/8"]}))

    def by(peer: str, *hops: str) -> dict[str, Any]:
        return item_request(peer=peer, headers=[("x-forwarded-for", ", ".join(hops))])

    assert site.statuses(by("6.6.6.6", "1.1.1.1"), by("6.6.6.6", "1.1.1.2")) == [200, 429]
    assert site.statuses(by("10.0.0.1", "1.1.1.3", "7.7.7.7"), by("10.0.0.2", "7.7.7.7", "10.0.0.9")) == [200, 429]
    assert site.statuses(by("10.0.0.1", "1.1.1.4")) == [200]  # an honest client behind the proxy


def test_ipv4_mapped_ipv6_address_is_the_ipv4_address(make_item_site: MakeSite) -> None:
    """Row 42: ::ffff:1.2.3.4/64 is ::/64, which is everybody."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "1/minute"}))
    peers = ["::ffff:1.2.3.4", "::ffff:5.6.7.8", "1.2.3.4", "::ffff:102:304"]
    assert site.statuses(*[item_request(peer=peer) for peer in peers]) == [200, 200, 429, 429]


def test_addresses_of_one_ipv6_network_are_one_client(make_item_site: MakeSite) -> None:
    """Row 40: ten million random IPv6 addresses would be 1.7 GB of counters."""
    site = make_item_site(policy_json({"by": "ip", "bucket": "5/minute"}))
    got = site.statuses(*[item_request(peer=f"2001:db8:1:2::{number:x}") for number in range(200)])
    assert (got.count(200), got.count(429), site.gate._limiter.stats.keys) == (5, 195, 1)
    assert site.ask("/items/1", peer="2001:db8:1:3::1").status == 200
