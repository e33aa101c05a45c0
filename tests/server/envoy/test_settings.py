"""Environment variables of envoyproxy/ratelimit."""

from __future__ import annotations

import pytest

from headgate.errors import InvalidConfiguration
from headgate.server.envoy.settings import ServiceSettings


def test_variables_replace_the_defaults() -> None:
    settings = ServiceSettings.from_env(
        {"SHADOW_MODE": "T", "NEAR_LIMIT_RATIO": "0.5", "LIMIT_RESET_HEADER": "x-reset"}
    )
    assert settings == ServiceSettings(shadow_mode=True, near_limit_ratio=0.5, limit_reset_header="x-reset")
    assert ServiceSettings.from_env({"PATH": "/bin"}) == ServiceSettings()


@pytest.mark.parametrize(("variable", "value"), [("QUOTA_MODE", "yes"), ("NEAR_LIMIT_RATIO", "most")])
def test_an_invalid_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"^{variable}={value}: use "):
        ServiceSettings.from_env({variable: value})
