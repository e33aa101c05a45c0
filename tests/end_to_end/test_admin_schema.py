"""The admin API holds to its own description, whatever it is sent, and by whom."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import sampled_from
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance  # no schema can say what an address, a limit or a policy is

from headgate import Limiter
from headgate.control.admin import Tokens, create_app
from headgate.control.config import ConfigStore
from headgate.control.service.models import ROLES
from headgate.control.service.service import AdminService

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "the same sixteen bytes or more"
POLICY = """
tier: free
routes: [{path: /api/search, class: search, cost: 2}]
limits:
  - {name: search, class: search, by: client, bucket: 100/minute, tiers: {pro: 1000/minute}}
  - {name: pay, path: /api/pay, by: ip, bucket: 10/minute, on_failure: closed}
"""
EXAMPLES = 4
"""For each endpoint and kind of data: few, as there are many of those, and another few in each run."""


class Hurrying:
    """A clock by which a second passes whenever somebody looks at it, so that no limit of the server's is reached."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1_794_800_000)

    def now_us(self) -> int:
        return next(self._ticks) * 1_000_000


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("admin")
    url = f"sqlite:///{directory}/config.db"
    store = ConfigStore(url, secret=SECRET)
    signed: dict[str, Any] = {"author": "ada", "reason": "a start"}
    store.put_policy(POLICY, **signed)
    store.override(("tenant", "acme"), "150/minute", limit="search", **signed)
    store.assign(("tenant", "acme"), "pro", **signed)
    store.block(("ip", "203.0.113.9"), **signed)
    tokens = Tokens(url)
    with Limiter() as counters:
        service = AdminService(store, counters=counters, log=f"sqlite:///{directory}/decisions.db", secret=SECRET)
        yield create_app(service, tokens, pages=False, clock=Hurrying())
    tokens.close()
    store.close()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
def test_every_response_matches_the_schema_for_every_role(mode: GenerationMode, app: Any) -> None:
    tokens: Tokens = app.state.parts.tokens
    texts = {role: tokens.make(f"{role} {mode.value}", role, by="the test").text for role in ROLES}
    described = schemathesis.openapi.from_asgi("/openapi.json", app)
    seen: set[int] = set()
    for found in described.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not _takes_anything(operation):
            continue

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode), role=sampled_from(ROLES))
        def holds(case: Any, role: str) -> None:
            token = {"Authorization": f"Bearer {texts[role]}"}
            answer = case.call_and_validate(headers=token, excluded_checks=[positive_data_acceptance])
            seen.add(answer.status_code)

        holds()
    assert 429 not in seen
    assert seen >= ({200, 403} if mode is GenerationMode.POSITIVE else {422})


def _takes_anything(operation: Any) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)
