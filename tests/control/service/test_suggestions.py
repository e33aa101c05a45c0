"""Suggested limits from the decision log: their reasons, their bounds, and that nothing is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from headgate.control.config import ConfigStore
from headgate.control.service import Actor, AdminService, ChangeContext, NotAllowed
from headgate.control.service import suggestions as suggestions_module
from headgate.errors import InvalidInput
from headgate.policy import read
from headgate.testing import FakeClock
from support.decision_logs import write_decision_log

if TYPE_CHECKING:
    from pathlib import Path

    from headgate.control.service.suggestions import SuggestionView

NOW_US = 1_790_000_000_000_000
OPERATOR = Actor("ada", "operator")
GOAL = "reject at most 1% of requests"


def admin_service(place: Path, **options: Any) -> AdminService:
    options = {"log": f"sqlite:///{place}/decisions.db", "clock": FakeClock(start_us=NOW_US)} | options
    return AdminService(ConfigStore(f"sqlite:///{place}/config.db"), **options)


@pytest.fixture
def service(tmp_path: Path) -> AdminService:
    write_decision_log(tmp_path / "decisions.db", until_us=NOW_US)
    return admin_service(tmp_path)


def suggested(service: AdminService, *goals: str, **options: Any) -> SuggestionView:
    return service.suggestions.suggest(OPERATOR, goals, **options)


def test_suggestion_has_its_reasons_and_is_not_applied(service: AdminService) -> None:
    found = suggested(service, GOAL)
    [limit] = found.limits
    assert (found.requests, found.warnings, found.troubles) == (limit.requests, (), ())
    assert limit.share <= 0.01
    assert limit.is_stable
    assert limit.curve[0].share > 0.01, "a lower limit does not reach the goal"
    assert [point.quota for point in limit.curve if point.quota == limit.quota], "the suggestion is on its curve"
    assert limit.determined_by[0].client == f"hmac:{10:032x}", "the busiest tenant"
    assert f"a lower limit would first reject tenant hmac:{10:032x}" in limit.reasons[-1]
    assert read(found.policy).rules[0].name == "per-client"
    assert service.version == 0, "nothing was written"


def test_tiers_of_the_decisions_get_numbers_of_their_own(tmp_path: Path) -> None:
    write_decision_log(tmp_path / "decisions.db", until_us=NOW_US, tier="pro")
    service = admin_service(tmp_path)
    policy = "tier: free\nlimits: [{name: all, by: tenant, bucket: 1/minute, tiers: {pro: 2/minute}}]"
    service.policy.put(ChangeContext(OPERATOR, reason="first policy"), policy)
    found = suggested(service, "reject at most 1% of pro requests")
    assert [limit.tier for limit in found.limits] == ["pro"]
    assert service.version == 1
    with pytest.raises(InvalidInput, match="'por' is not a tier of the policy; did you mean 'pro'"):
        suggested(service, "reject at most 1% of por requests")


def test_only_operators_ask_for_suggestions(service: AdminService) -> None:
    with pytest.raises(NotAllowed, match="ask for suggested limits"):
        service.suggestions.suggest(Actor("otto", "support"))


@pytest.mark.parametrize(
    ("goal", "days", "message"), [("reject few", 7, "is not understood"), (GOAL, 31, "give 1 to 30")]
)
def test_mistakes_are_explained(service: AdminService, goal: str, days: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        suggested(service, goal, days=days)


def test_missing_and_empty_logs_are_told_apart(tmp_path: Path) -> None:
    service = admin_service(tmp_path)
    assert "there is no decision log at" in suggested(service).troubles[0]
    without = suggested(admin_service(tmp_path, log=None))
    assert without.troubles == ("no decision log was given to the admin server; start it with --log",)
    write_decision_log(tmp_path / "decisions.db", until_us=NOW_US - 8 * 86_400_000_000)
    assert suggested(admin_service(tmp_path)).troubles == ("the decision log has no requests in this time",)
    assert suggested(admin_service(tmp_path), days=30).limits


def test_only_the_newest_records_are_read(service: AdminService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions_module, "MAX_RECORDS", 1200)
    found = suggested(service, GOAL)
    assert found.requests == 1200
    assert found.last_us is not None
    assert found.last_us > NOW_US - 3_600_000_000
    assert "only the newest 1,200 records of the decision log were read" in found.notes


def test_sampled_records_count_as_several_and_blocked_ones_not_at_all(tmp_path: Path) -> None:
    whole, sampled, blocked = (tmp_path / name for name in ("whole", "sampled", "blocked"))
    for place, changes in ((whole, {}), (sampled, {"weight": 100.0}), (blocked, {"outcome": "blocked"})):
        place.mkdir()
        write_decision_log(place / "decisions.db", until_us=NOW_US, **changes)
    exact, rough = (suggested(admin_service(place), GOAL) for place in (whole, sampled))
    assert rough.requests == 100 * exact.requests
    assert rough.limits[0].quota >= 50 * exact.limits[0].quota
    assert "represent several requests each" in rough.notes[0]
    assert exact.notes == ()
    assert suggested(admin_service(blocked), GOAL).troubles == ("the decision log has no requests in this time",)


def test_suggestion_is_kept_for_five_minutes(tmp_path: Path) -> None:
    write_decision_log(tmp_path / "decisions.db", until_us=NOW_US)
    clock = FakeClock(start_us=NOW_US)
    service = admin_service(tmp_path, clock=clock)
    first = suggested(service, GOAL)
    assert suggested(service, GOAL) is first
    assert suggested(service, GOAL, days=1) is not first
    clock.advance(300)
    assert suggested(service, GOAL) is not first
