"""The section `abuse:` of policies: shipped scenarios by one line, changes to them, and scenarios of one's own."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from headgate.abuse.model import AbuseScenario, AbuseSettings, ActionStep, Threshold
from headgate.policy import read
from headgate.policy.model import Identity
from headgate.policy.routes import Template
from headgate.policy.shipped_scenarios import SHIPPED

MINUTE = timedelta(minutes=1)


def abuse(text: str) -> AbuseSettings:
    found = read(f"limits: [{{by: ip, bucket: 10/minute}}]\nabuse: {text}").abuse
    assert found is not None
    return found


def test_policy_without_the_section_detects_nothing() -> None:
    assert read("limits: [{by: ip, bucket: 10/minute}]").abuse is None


@pytest.mark.parametrize("text", ["on", "true", "{}", "{scenarios: on}", "'on'"])
def test_one_word_enables_all_shipped_scenarios(text: str) -> None:
    assert abuse(text).scenarios == tuple(SHIPPED.values())


@pytest.mark.parametrize("text", ["off", "false", "{scenarios: off}", "{scenarios: {botnet: off}}", "{scenarios: []}"])
def test_off_enables_none(text: str) -> None:
    assert abuse(text) == AbuseSettings()


def test_shadow_only_reports() -> None:
    assert {(each.name, each.shadow) for each in abuse("shadow").scenarios} == {(name, True) for name in SHIPPED}
    (botnet,) = abuse("{scenarios: {botnet: shadow}}").scenarios
    assert botnet == replace(SHIPPED["botnet"], shadow=True)


def test_list_enables_scenarios_by_name() -> None:
    assert abuse("{scenarios: [botnet, scraping]}").scenarios == (SHIPPED["botnet"], SHIPPED["scraping"])


def test_thresholds_of_a_shipped_scenario_change_one_by_one() -> None:
    (changed,) = abuse("{scenarios: {credential-stuffing: {when: {refused: 95%}}}}").scenarios
    shipped = {each.signal: each.value for each in SHIPPED["credential-stuffing"].when}
    assert {each.signal: each.value for each in changed.when} == shipped | {"refused": 0.95}
    assert replace(changed, when=SHIPPED["credential-stuffing"].when) == SHIPPED["credential-stuffing"]


def test_routes_of_a_shipped_scenario_are_replaced() -> None:
    (changed,) = abuse("{scenarios: {botnet: {class: sign-in}}}").scenarios
    assert (changed.templates, changed.classes) == ((), ("sign-in",))


def test_own_scenario_has_all_its_fields() -> None:
    text = """
  allow: [{ip: 192.0.2.0/24}, {tenant: acme}]
  scenarios:
    vouchers:
      path: [POST /vouchers, "POST /gifts/{id}"]
      by: user
      when: {paths: 20, missing: 50%}
      window: 2 minutes
      steps: [tighten 8 for 10 minutes, delay 500 ms for 1 hour, {action: challenge, for: 1 day, mode: app}]
      decay: 2 hours
      longest: 2 days
      grace: 5 minutes
"""
    steps = (
        ActionStep("tighten", 10 * MINUTE, factor=8),
        ActionStep("delay", 60 * MINUTE, delay=timedelta(milliseconds=500)),
        ActionStep("challenge", timedelta(days=1), mode="app"),
    )
    scenario = AbuseScenario(
        "vouchers", "user", (Threshold("paths", 20), Threshold("missing", 0.5)), 2 * MINUTE, steps,
        templates=(Template.parse("/vouchers"), Template.parse("/gifts/{id}")), methods=frozenset(["POST"]),
        decay=120 * MINUTE, longest=timedelta(days=2), grace=5 * MINUTE,
    )  # fmt: skip
    allowed = (Identity("ip", "192.0.2.0/24"), Identity("tenant", "acme"))
    assert abuse(text) == AbuseSettings((scenario,), allowed)


@pytest.mark.parametrize("scenario", SHIPPED.values(), ids=lambda scenario: scenario.name)
def test_shipped_scenarios_are_valid_policies(scenario: AbuseScenario) -> None:
    steps = [f"{step.action} for {step.duration // MINUTE} minutes" for step in scenario.steps]
    when = ", ".join(each.text for each in scenario.when)
    each = f", each: {{{', '.join(each.text for each in scenario.each)}}}" if scenario.each else ""
    (own,) = abuse(f"{{scenarios: {{own: {{by: {scenario.by}, when: {{{when}}}{each}, steps: {steps}}}}}}}").scenarios
    assert (own.when, own.each, own.steps) == (scenario.when, scenario.each, scenario.steps)
