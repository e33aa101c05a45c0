"""Statistics under the names of envoyproxy/ratelimit."""

from __future__ import annotations

import pytest

from headgate.server.envoy.stats import TOTAL_REQUESTS, ServiceStats, near_limit_threshold, sanitize


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("domain.foo|bar", "domain.foo_bar"),
        ("domain.foo:bar", "domain.foo_bar"),
        ("domain.address_10.0.0.255/32", "domain.address_10_0_0_255/32"),
        ("domain.a_1.2.3.4.b_5.6.7.8", "domain.a_1_2_3_4.b_5_6_7_8"),
        ("domain.version_1.2.3", "domain.version_1.2.3"),
    ],
)
def test_names_have_no_separators_of_statsd(key: str, name: str) -> None:
    assert sanitize(key) == name


LIMITS = "ratelimit.service.rate_limit."


def test_a_declared_rule_has_all_counters() -> None:
    stats = ServiceStats()
    stats.declare("d.k")
    assert stats.snapshot()["ratelimit.service.rate_limit.d.k.over_limit"] == 0
    stats.record_call(100)
    assert stats.snapshot()[TOTAL_REQUESTS] == 1
    assert stats.snapshot()["ratelimit.service.call.should_rate_limit.redis_error"] == 0
    assert len(stats.snapshot()) == 13


def test_values_of_clients_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.server.envoy.stats.MAX_NAMES", 2)
    stats = ServiceStats()
    for number in range(5):
        stats.count_limit(f"d.user_{number}", {"total_hits": 1})
        stats.count_unknown_domain(f"x:{number}")
    counted = stats.snapshot()
    assert [counted[f"{LIMITS}d.{key}.total_hits"] for key in ("user_0", "user_1", "other")] == [1, 1, 3]
    assert [counted[f"{LIMITS}{key}.domain_not_found"] for key in ("x_0", "x_1", "other")] == [1, 1, 3]


@pytest.mark.parametrize(("limit", "threshold"), [(10, 8), (1, 0), (15, 12), (0, 0), (4_294_967_295, 3_435_973_888)])
def test_the_near_limit_is_computed_in_single_precision(limit: int, threshold: int) -> None:
    assert near_limit_threshold(limit, 0.8) == threshold
