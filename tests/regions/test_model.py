"""Regions: validation, shares and the numbers of each mode."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from headgate import Calendar, InvalidConfiguration, InvalidLimit, Limit, Limiter
from headgate.regions.cost import region_cost
from headgate.regions.model import read_regions, share_of
from headgate.regions.routing import counted_limit

MINUTE = timedelta(minutes=1)
URLS = {"us": "redis://us", "eu": "redis://eu"}


def test_divided_calendar_keeps_its_periods() -> None:
    limit = Limit(90, Calendar("month", starts=15, timezone="Asia/Tokyo"), region="divided", name="exports")
    regions = read_regions(None, "us", URLS, "us")
    assert regions is not None
    part = counted_limit(limit, regions)
    assert (part.quota, part.period, part.algorithm) == (45, limit.period, "fixed_window")


def test_region_mode_is_part_of_a_limit() -> None:
    limit = Limit(10, MINUTE, region="central", name="worldwide")
    assert repr(limit).endswith("name='worldwide', region='central')")
    assert eval(repr(limit), {"Limit": Limit, "datetime": __import__("datetime")}) == limit
    assert limit != Limit(10, MINUTE, name="worldwide")
    assert pickle.loads(pickle.dumps(limit)).region == "central"
    assert "region" not in repr(Limit(10, MINUTE))


def test_regional_limit_keeps_its_counters() -> None:
    assert Limit(10, MINUTE, region="regional").space == Limit(10, MINUTE).space


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"region": "centrl"}, "unknown region mode 'centrl'; did you mean 'central'?"),
        ({"region": 3}, "unknown region mode 3"),
        ({"region": "central", "split": 2}, "split 2 and region 'central' cannot be combined; leave one out"),
    ],
)
def test_invalid_region_mode_is_rejected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidLimit, match=f"^{problem.replace('?', '.')}"):
        Limit(10, MINUTE, **options)


@pytest.mark.parametrize(
    ("url", "region", "regions", "home", "problem"),
    [
        ("redis://eu", "eu", None, None, "region= needs regions="),
        ("redis://eu", None, None, "eu", "home= needs regions="),
        ("redis://eu", "asia", URLS, "eu", "region 'asia' is not one of the regions: eu, us"),
        ("redis://eu", None, URLS, "eu", "region None is not one of the regions: eu, us"),
        ("redis://eu", "eu", URLS, None, "home None is not one of the regions: eu, us"),
        ("redis://eu", "eu", URLS, "asia", "home 'asia' is not one of the regions: eu, us"),
        ("redis://us", "eu", URLS, "eu", "the limiter's URL differs from that of its region 'eu'"),
        ("memory://", "eu", {"eu": "memory://"}, "eu", "the store of region 'eu' is in memory"),
        ("redis://eu", "eu", {}, "eu", "regions {}: give the stores by name"),
        ("redis://eu", "eu", ["eu"], "eu", "regions ['eu']: give the stores by name"),
        ("redis://eu", "", {"": "redis://eu"}, "", "region name '': use 1 to 50 printable characters"),
    ],
)
def test_invalid_regions_are_rejected(url: Any, region: Any, regions: Any, home: Any, problem: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        Limiter(url, region=region, regions=regions, home=home)
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize("share", [0, -0.1, 0.51, True, "2%", None])
def test_invalid_safe_share_is_rejected(share: Any) -> None:
    with pytest.raises(InvalidConfiguration, match=r"safe_share .*: give the part of reserved limits"):
        Limiter("redis://eu", region="eu", regions=URLS, home="eu", safe_share=share)


def test_a_larger_safe_share_leaves_less_to_a_single_region() -> None:
    limit = Limit(1000, MINUTE, algorithm="fixed_window", region="reserved")
    assert region_cost(limit, 3, 0.1).usable == 0.901


def test_regions_are_numbered_by_name() -> None:
    regions = read_regions("redis://us", "us", URLS, "eu")
    assert regions is not None
    assert (regions.names, regions.index, regions.is_home, regions.home_url) == (("eu", "us"), 1, False, "redis://eu")


@pytest.mark.parametrize("quota", [3, 10, 1000])
@pytest.mark.parametrize("burst", [3, 7])
def test_shares_add_up_to_the_limit(quota: int, burst: int) -> None:
    shares = [share_of(Limit(quota, MINUTE, burst=burst), 3, index) for index in range(3)]
    assert tuple(map(sum, zip(*shares, strict=True))) == (quota, burst)
    assert max(shares)[0] - min(shares)[0] <= 1


@pytest.mark.parametrize(
    ("limit", "cost"),
    [
        (Limit(100, MINUTE, algorithm="fixed_window"), (200, 0, 1.0, 200)),
        (Limit(100, MINUTE, burst=20), (240, 0, 1.0, 240)),
        (Limit(100, MINUTE, region="divided"), (0, 0, 0.33, 0)),
        (Limit(100, MINUTE, region="central"), (0, 1, 1.0, 0)),
        (Limit(1000, MINUTE, algorithm="fixed_window", region="reserved"), (0, 0, 0.982, 0)),
        (Limit(100, MINUTE, algorithm="fixed_window", region="reconciled"), (200, 0, 1.0, 200)),
        (Limit(600, MINUTE, burst=20, region="reconciled"), (1240, 0, 1.0, 120)),
    ],
)
def test_cost_of_each_mode_over_three_regions(limit: Limit, cost: tuple[int, int, float, int]) -> None:
    assert region_cost(limit, 3) == cost


def test_bound_without_regions() -> None:
    limiter = Limiter()
    assert limiter.bound(Limit(10, MINUTE)) == 0
    with pytest.raises(InvalidLimit, match="is central, and the limiter has no regions"):
        limiter.bound(Limit(10, MINUTE, region="central"))
