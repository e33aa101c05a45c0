"""The environment variables of envoyproxy/ratelimit that change decisions and answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ServiceSettings"]

_BOOLS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings, read again with each configuration. Each is the variable of its name in upper case."""

    shadow_mode: bool = False
    quota_mode: bool = False
    merge_domain_config: bool = False
    response_dynamic_metadata: bool = False
    use_calendar_month_rate_limit: bool = False
    stop_cache_key_increment_when_overlimit: bool = False
    near_limit_ratio: float = 0.8
    sanitize_descriptor_metric_dots: bool = False
    limit_response_headers_enabled: bool = False
    limit_limit_header: str = "RateLimit-Limit"
    limit_remaining_header: str = "RateLimit-Remaining"
    limit_reset_header: str = "RateLimit-Reset"
    limit_request_headers_enabled: bool = False
    limit_request_limit_header: str = "RateLimit-Limit"
    limit_request_remaining_header: str = "RateLimit-Remaining"
    limit_request_reset_header: str = "RateLimit-Reset"

    @property
    def adds_headers(self) -> bool:
        return self.limit_response_headers_enabled or self.limit_request_headers_enabled

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> ServiceSettings:
        """Read the variables. Raises InvalidConfiguration if one has no valid value."""
        values: dict[str, Any] = {}
        for each in fields(cls):
            variable = each.name.upper()
            if variable in env:
                values[each.name] = _PARSERS[str(each.type)](variable, env[variable])
        return cls(**values)


def _parse_bool(variable: str, text: str) -> bool:
    if text not in _BOOLS:
        raise InvalidConfiguration(f"{variable}={text}: use true or false")
    return _BOOLS[text]


def _parse_float(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidConfiguration(f"{variable}={text}: use a number such as 0.8") from None


def _parse_text(_: str, text: str) -> str:
    return text


_PARSERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "bool": _parse_bool,
    "float": _parse_float,
    "str": _parse_text,
}
