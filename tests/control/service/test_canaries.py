"""The canary service: roles, risks, notes, comparison, promotion and rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headgate.control.config import CanarySpec, Conflict
from headgate.control.service import Actor, AdminService, ChangeContext, NeedsConfirmation, NotAllowed, NotFound
from headgate.errors import InvalidInput, InvalidPolicy
from support.canary_fleet import SECRET, CanaryFleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STABLE = "limits: [{name: all, by: ip, bucket: 1000/minute}]\n"
CANDIDATE = "limits: [{name: all, by: ip, bucket: 900/minute}]\n"
OTTO = ChangeContext(Actor("otto", "operator"), "stricter")
SURE = ChangeContext(Actor("otto", "operator"), "certain", confirmed=["canary"])
ON_WEB_1 = CanarySpec(nodes=("web-1",))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[CanaryFleet]:
    fleet = CanaryFleet(f"sqlite:///{tmp_path}/config.db", STABLE, "web-1", "web-2", "web-3")
    yield fleet
    fleet.close()


@pytest.fixture
def service(fleet: CanaryFleet) -> AdminService:
    return AdminService(fleet.store, status_store=fleet.status_store, secret=SECRET, clock=fleet.clock)


def test_share_selects_one_of_the_reporting_nodes(fleet: CanaryFleet, service: AdminService) -> None:
    fleet.run(1)
    done = service.canaries.start(OTTO, CANDIDATE, CanarySpec(percent=10))
    assert done.what == "started canary of policy.yaml on 10 % of nodes"
    (note,) = done.notes
    assert note.endswith(": 1 of 3 nodes.")
    fleet.run(5)
    found = service.canaries.status()
    assert [each.role for each in found.nodes].count("candidate") == 1
    assert all(each.role == each.wanted for each in found.nodes)


def test_missing_nodes_are_noted(fleet: CanaryFleet, service: AdminService) -> None:
    assert service.canaries.start(OTTO, CANDIDATE, ON_WEB_1).notes == (
        "No node is reporting, so it is not known which nodes apply the candidate.",
    )
    service.canaries.rollback(OTTO)
    fleet.run(1)
    done = service.canaries.start(OTTO, CANDIDATE, CanarySpec(nodes=("web-1", "web-9")))
    assert done.notes == ("Candidate on web-1: 1 of 3 nodes.", "Not reporting: web-9.")
    service.canaries.rollback(OTTO)
    done = service.canaries.start(OTTO, CANDIDATE, CanarySpec(percent=100))
    assert done.notes[1].startswith("No other node is left to compare with")


def test_status_compares_the_nodes(fleet: CanaryFleet, service: AdminService) -> None:
    assert service.canaries.status().canary is None
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    fleet.run(6)
    found = service.canaries.status()
    assert found.canary is not None
    assert found.comparison is not None
    assert (found.canary.author, found.canary.reason, found.canary.nodes) == ("otto", "stricter", ("web-1",))
    assert found.comparison.verdict == "within thresholds"
    assert [(each.name.partition(":")[0], each.role) for each in found.nodes] == [
        ("web-1", "candidate"), ("web-2", "stable"), ("web-3", "stable"),
    ]  # fmt: skip


def test_promotion_within_thresholds_needs_no_confirmation(fleet: CanaryFleet, service: AdminService) -> None:
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    fleet.run(6)
    done = service.canaries.promote(OTTO)
    assert done.what == "promoted canary of policy.yaml on nodes web-1; changed policy document policy.yaml"
    assert service.policy.get().text == CANDIDATE
    found = service.canaries.status()
    assert found.canary is not None
    assert (found.canary.state, found.canary.ended_by, found.comparison) == ("promoted", "otto", None)


def test_promotion_of_a_candidate_that_was_not_compared_needs_confirmation(
    fleet: CanaryFleet, service: AdminService
) -> None:
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    with pytest.raises(NeedsConfirmation, match="the candidate was not compared: no candidate nodes"):
        service.canaries.promote(OTTO)
    assert fleet.state == "running"
    service.canaries.promote(SURE)
    assert fleet.state == "promoted"


def test_without_a_status_store_nothing_is_compared(fleet: CanaryFleet) -> None:
    service = AdminService(fleet.store, secret=SECRET)
    assert service.watchers() == []
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    assert service.canaries.status().troubles
    with pytest.raises(NeedsConfirmation, match="cannot compare the nodes"):
        service.canaries.promote(OTTO)


def test_end_without_a_canary_is_not_found(fleet: CanaryFleet, service: AdminService) -> None:
    for end in (service.canaries.promote, service.canaries.rollback):
        with pytest.raises(NotFound, match="no canary is running"):
            end(OTTO)
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    service.canaries.rollback(OTTO)
    with pytest.raises(NotFound, match=r"the last one, of policy\.yaml, was rolled back by otto"):
        service.canaries.rollback(OTTO)


def test_candidate_is_checked_as_any_document(fleet: CanaryFleet, service: AdminService) -> None:
    with pytest.raises(InvalidPolicy):
        service.canaries.start(OTTO, "limits: [{}]", ON_WEB_1)
    with pytest.raises(NeedsConfirmation):  # a tenth of the limit
        service.canaries.start(OTTO, "limits: [{name: all, by: ip, bucket: 9/minute}]", ON_WEB_1)
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    with pytest.raises(InvalidInput, match="a canary of"):
        service.policy.put(OTTO, STABLE + "# changed\n")


def test_candidate_of_an_older_document_conflicts(fleet: CanaryFleet, service: AdminService) -> None:
    service.policy.put(OTTO, STABLE + "# changed\n")
    with pytest.raises(Conflict):
        service.canaries.start(ChangeContext(OTTO.actor, "late", based_on=1), CANDIDATE, ON_WEB_1)


def test_only_operators_change_canaries_and_see_addresses(
    fleet: CanaryFleet, service: AdminService, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = ChangeContext(Actor("sue", "support"), "try")
    with pytest.raises(NotAllowed):
        service.canaries.start(support, CANDIDATE, ON_WEB_1)
    with pytest.raises(NotAllowed):
        service.canaries.promote(support)
    with pytest.raises(NotAllowed):
        service.canaries.rollback(support)

    def fail(_: object) -> None:
        raise InvalidInput("redis://10.0.0.7:6379 is unknown")

    fleet.run(1)
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    watcher = fleet.gates["web-1"].policy_watcher
    activate, calls = watcher._make, iter([fail])
    monkeypatch.setattr(watcher, "_make", lambda policy: next(calls, activate)(policy))
    fleet.run(1)
    assert "10.0.0.7" in repr(service.canaries.status(OTTO.actor))
    shown = service.canaries.status(support.actor)
    assert "10.0.0.7" not in repr(shown)
    assert shown.comparison is not None
    assert shown.comparison.verdict == "invalid candidate"


def test_audit_log_names_the_steps_of_a_canary(fleet: CanaryFleet, service: AdminService) -> None:
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    service.canaries.rollback(OTTO)
    service.canaries.start(OTTO, CANDIDATE, ON_WEB_1)
    service.canaries.promote(SURE)
    entries = [(each.action, each.about) for each in service.audit.list().items][:4]
    canary = "canary of policy.yaml on nodes web-1"
    assert entries == [("promoted", canary), ("started", canary), ("rolled back", canary), ("started", canary)]
