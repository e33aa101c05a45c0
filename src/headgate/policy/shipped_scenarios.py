"""The scenarios that come with Headgate, which a policy enables by name and may change field by field."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from headgate.abuse.model import AbuseScenario, ActionStep, Threshold
from headgate.policy.routes import Template
from headgate.policy.scalars import status_test

__all__ = ["SHIPPED"]

_LOGIN_PATHS: Final = (
    "/login", "/log-in", "/signin", "/sign-in", "/sessions", "/auth/login", "/api/login", "/api/signin",
    "/api/session", "/api/sessions", "/api/auth/login", "/api/{version}/login", "/api/{version}/auth/login",
    "/user/login", "/users/login", "/users/sign_in", "/account/login", "/accounts/login", "/admin/login",
    "/oauth/token", "/oauth2/token", "/token", "/wp-login.php", "/xmlrpc.php",
)  # fmt: skip
_LOGIN: Final = tuple(Template.parse(path) for path in _LOGIN_PATHS)
_MINUTE: Final = timedelta(minutes=1)


def _steps(*steps: tuple[str, int]) -> tuple[ActionStep, ...]:
    return tuple(ActionStep(action, minutes * _MINUTE) for action, minutes in steps)  # type: ignore[arg-type]


def _when(**thresholds: float) -> tuple[Threshold, ...]:
    return tuple(Threshold(signal, value) for signal, value in thresholds.items())


_SCENARIOS: Final = (
    AbuseScenario(
        "credential-stuffing",
        "ip",
        _when(requests=10, refused=0.7),
        5 * _MINUTE,
        _steps(("challenge", 15), ("block", 60)),
        templates=_LOGIN,
        methods=frozenset(["POST"]),
        classes=("login",),
    ),
    AbuseScenario(
        "botnet",
        "agent",
        _when(addresses=50),
        10 * _MINUTE,
        _steps(("block", 30)),
        templates=_LOGIN,
        methods=frozenset(["POST"]),
        classes=("login",),
        each=_when(requests=10, regular=0.8),
    ),
    AbuseScenario(
        "scraping",
        "ip",
        _when(paths=250),
        10 * _MINUTE,
        _steps(("tighten", 15), ("challenge", 30), ("block", 60)),
    ),
    AbuseScenario(
        "enumeration",
        "ip",
        _when(paths=60),
        5 * _MINUTE,
        _steps(("delay", 10), ("block", 60)),
        status=status_test("status in [401, 403, 404, 410]"),
    ),
    AbuseScenario("key-leak", "api_key", _when(addresses=25, requests=100), 10 * _MINUTE, _steps(("tighten", 60))),
    AbuseScenario(
        "retry-storm",
        "ip",
        _when(requests=100),
        _MINUTE,
        _steps(("delay", 5), ("block", 10)),
        status=status_test("status in [429, 503]"),
    ),
)

SHIPPED: Final = {scenario.name: scenario for scenario in _SCENARIOS}
