"""Conditions of --fail-if: what they compare, and how mistakes are reported."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.errors import InvalidInput
from headgate.replay.conditions import parse_condition

REPORT: dict[str, Any] = {
    "requests": 1000,
    "rejected": 10,
    "blocked": 2,
    "clients": 30,
    "rejected_clients": 3,
    "default_tier": "free",
    "by_tier": {
        "free": {"requests": 900, "rejected": 9, "blocked": 2},
        "pro": {"requests": 90, "rejected": 1, "blocked": 0},
        "gold": {"requests": 10, "rejected": 0, "blocked": 0},
    },
    "by_limit": {"search": {"requests": 50, "rejected": 5}, "pro": {"requests": 5, "rejected": 0}},
    "by_class": {},
    "by_route": {"/t/{id}": {"requests": 7, "rejected": 7, "blocked": 0}},
    "all_clients": {"192.0.2.1": {"requests": 4, "rejected": 4}},
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("rejected > 9", True),
        ("rejected > 10", False),
        ("rejected >= 1%", True),
        ("rejected > 1 %", False),
        ("allowed == 990", True),
        ("blocked != 2", False),
        ("rejected.paying > 0", True),
        ("rejected.paying >= 1%", True),
        ("requests.paying == 100", True),
        ("rejected.tier.pro > 0", True),
        ("rejected.gold > 0", False),
        ("rejected.search > 9.5%", True),
        ("rejected.limit.pro > 0", False),
        ('rejected."/t/{id}" == 100%', True),
        ("rejected.route./t/{id} < 7", False),
        ('rejected.client."192.0.2.1" > 3', True),
        ('rejected.client."192.0.2.9" > 0', False),
        ("rejected > 100 or rejected.free > 0 and rejected.gold == 0", True),
        ("rejected > 100 and rejected.free > 0 or rejected.gold > 0", False),
        ("rejected_clients > 2", True),
    ],
)
def test_condition_compares_counts_and_shares(text: str, holds: bool) -> None:
    assert parse_condition(text).holds(REPORT) is holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a comparison is missing; write it like"),
        ("rejected", "'rejected' is not a comparison; write it like"),
        ("rejected > ", "'rejected >' is not a comparison"),
        ("rejected > many", "'rejected > many' is not a comparison"),
        ("rejectd > 0", "unknown metric 'rejectd'; did you mean 'rejected'?"),
        ("rejected > 0 rejected > 1", "expected 'and' or 'or' instead of 'rejected' at character 14"),
        ("rejected > 0; drop", "cannot read '; drop' at character 13"),
        ("__import__('os') > 0", "cannot read"),
        ("requests > 5%", "a share of all requests is always 100 %"),
        ("clients.pro > 1", "has no parts or shares"),
    ],
)
def test_mistake_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_condition(text)
    assert message in f"{caught.value}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rejected.por > 0", "'por' is not a tier, limit, class, route or client; did you mean 'pro'?"),
        ("rejected.pro > 0", "'pro' is a tier and a limit; write rejected.tier.pro"),
        ("newly_rejected > 0", "newly_rejected compares two policies; give --against"),
        ("rejected == 0 and rejected.por > 0", "'por' is not a tier"),
    ],
)
def test_unknown_part_is_an_error_and_never_false(text: str, message: str) -> None:
    condition = parse_condition(text)
    with pytest.raises(InvalidInput) as caught:
        condition.holds(REPORT)
    assert message in f"{caught.value}"
