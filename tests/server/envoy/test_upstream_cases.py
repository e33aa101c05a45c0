"""Requests and the answers that users of envoyproxy/ratelimit expect: the cases of upstream_cases.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headgate import Limiter
from headgate.server.envoy import RateLimitService
from headgate.testing import FakeClock
from support.envoy import rate_limit_request

START_US = 1_700_000_000_500_000
CASES = {each["case"]: each for each in yaml.safe_load(Path(__file__).with_name("upstream_cases.yaml").read_text())}

_DESCRIPTOR = re.compile(
    r"(?P<entries>[^*^]*?)(?:\*(?P<hits>\d+))?(?:-(?P<returned>\d+))?(?:\^(?P<limit>\d+)/(?P<unit>\d))?"
)


def build(text: str) -> Any:
    hits, _, text = text.rpartition(" ")
    request = rate_limit_request("d", hits=int(hits or 0))
    for part in text.split(";"):
        found = _DESCRIPTOR.fullmatch(part)
        assert found is not None
        descriptor = request.descriptors.add()
        for entry in filter(None, found["entries"].split(",")):
            key, _, value = entry.partition("=")
            descriptor.entries.add(key=key, value=value)
        for group in ("hits", "returned"):
            if found[group] is not None:
                descriptor.hits_addend.value = int(found[group])
        if found["returned"] is not None:
            descriptor.MergeFromString(b"\x20\x01")  # is_negative_hits
        if found["limit"] is not None:
            descriptor.limit.requests_per_unit, descriptor.limit.unit = int(found["limit"]), int(found["unit"])
    return request


def show(response: Any) -> str:
    shown = []
    for status in response.statuses:
        if status.code == 2:
            assert not status.limit_remaining
            shown.append("!")
        elif status.HasField("current_limit"):
            shown.append(str(status.limit_remaining))
        else:
            shown.append("~" if status.limit_remaining == 2**32 - 1 else "-")
    return f"{'OVER' if response.overall_code == 2 else 'OK'} {','.join(shown)}"


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_original(name: str) -> None:
    case = CASES[name]
    clock = FakeClock(START_US)
    files = [("config.yaml", case["config"])]
    service = RateLimitService.from_texts(files, Limiter(clock=clock), env=case.get("env", {}))
    got = []
    for step in case["steps"]:
        if step.startswith("@"):
            clock.advance(int(step[1:]))
            got.append(step)
        else:
            request = step.partition(" ->")[0]
            got.append(f"{request} -> {show(service.should_rate_limit(build(request)))}")
    assert got == case["steps"]
