"""Request schemas: strict, bounded, and without anything that could be an API key in the wrong place."""

import re
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from headgate.control.service.models import ClientRef, OverrideSpec, Role
from headgate.control.service.redaction import looks_secret
from headgate.errors import InvalidInput
from headgate.policy import scalars
from headgate.telemetry.decision_log.record import Outcome

__all__ = [
    "MAX_INTEGER",
    "AttributedBody",
    "AuditQuery",
    "BlockBody",
    "BlocksQuery",
    "ChangeBody",
    "ClientFilter",
    "ClientsQuery",
    "DecisionsQuery",
    "DiffQuery",
    "FindBody",
    "Name",
    "Number",
    "OverrideBody",
    "OverridesQuery",
    "PolicyBody",
    "PolicyQuery",
    "PolicyText",
    "Reason",
    "RemovalQuery",
    "ResetBody",
    "RestoreBody",
    "RouteBody",
    "RouteRemovalQuery",
    "SearchBody",
    "StepsQuery",
    "TierBody",
    "TierNumbersBody",
    "TierRemovalQuery",
    "TimelineQuery",
    "TokenBody",
    "VersionsQuery",
    "WhoBody",
    "WhyQuery",
]

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that all JSON parsers and databases represent exactly."""

_DIGITS: Final = re.compile("[0-9]{1,20}")
_LINE: Final = r"^[^\x00-\x1f\x7f]*$"


def _refuse_secret(text: str) -> str:
    if looks_secret(text):
        raise ValueError("this looks like an API key or a token, which must not be stored; leave it out")
    return text


def _parse_instant(value: Any) -> Any:
    try:
        return scalars.instant(value)
    except scalars.OutOfRange as error:
        raise ValueError(f"{error}") from None
    except InvalidInput:
        raise ValueError("write a time with its zone, like 2026-11-20T18:00:00Z") from None


def _require_digits(value: Any) -> Any:
    """Reject numbers in URLs that only Python accepts: 1_0, +10, 10.0."""
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        raise ValueError("write a whole number in digits, like 10")
    return value


def _line(longest: int, *, shortest: int = 0) -> Any:
    return StringConstraints(min_length=shortest or None, max_length=longest, pattern=_LINE)


Instant = Annotated[
    datetime,
    BeforeValidator(_parse_instant),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64}),
]
_NotSecret: Final = AfterValidator(_refuse_secret)
Reason = Annotated[str, _line(500, shortest=1), _NotSecret]
Bucket = Annotated[str, _line(200, shortest=1), _NotSecret]
Name = Annotated[str, _line(100, shortest=1), _NotSecret]
Template = Annotated[str, _line(1100, shortest=1), _NotSecret]
Search = Annotated[str, _line(200)]
Cursor = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"^[!-~]+$")]
RecordId = Annotated[str, StringConstraints(max_length=100, pattern=r"^[!-~]*$")]
Kind = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,49}$")]
Value = Annotated[str, _line(500, shortest=1)]
Key = Annotated[str, _line(4096, shortest=1)]
File = Annotated[str, StringConstraints(max_length=200, pattern=r"^[\w. -]{1,180}\.(?:yaml|yml|toml|json)$")]
Whole = Annotated[int, BeforeValidator(_require_digits, json_schema_input_type=int)]
Number = Annotated[Whole, Field(ge=1, le=MAX_INTEGER)]
RiskCode = Literal["ten-times", "tenth", "wildcard-block", "policy"]
Section = Literal["documents", "tiers", "routes", "clients", "overrides", "blocked"]
Most = Annotated[Whole, Field(ge=1, le=500)]
RouteClass = Annotated[Name | None, Field(alias="class")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


# ------------------------------------------------------------------ bodies


class WhoBody(Body):
    """A client by one of its identities. An API key may be given as it is: only its hash is stored."""

    kind: Kind
    value: Key

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if self.kind != "api_key":
            if len(self.value) > 500:
                raise ValueError("the value has more than 500 characters")
            if looks_secret(self.value):
                raise ValueError("the value looks like an API key; give it with the kind api_key")
        return self

    def ref(self) -> ClientRef:
        return ClientRef(self.kind, self.value)


class AttributedBody(Body):
    """The fields of every change."""

    reason: Reason
    confirm: Annotated[list[RiskCode], Field(max_length=10, description="The codes of the confirmed risks")] = []


class FindBody(Body):
    client: Key


class SearchBody(Body):
    text: Key


class ResetBody(AttributedBody):
    who: WhoBody
    limits: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = None


class TierBody(AttributedBody):
    who: WhoBody
    tier: Name | None
    label: Bucket | None = None


class ChangeBody(AttributedBody):
    """An override that replaces another one of the same client."""

    who: WhoBody | None = None
    bucket: Bucket
    limit: Name | None = None
    route_class: RouteClass = None
    valid_from: Instant | None = None
    valid_until: Instant | None = None

    def spec(self) -> OverrideSpec:
        return OverrideSpec(self.bucket, self.limit, self.route_class, self.valid_from, self.valid_until)


class OverrideBody(ChangeBody):
    who: WhoBody


class BlockBody(AttributedBody):
    who: WhoBody
    valid_until: Instant | None = None


class TierNumbersBody(AttributedBody):
    bucket: Bucket


class RouteBody(AttributedBody):
    path: Template
    cost: Annotated[int, Field(ge=0, le=MAX_INTEGER)]
    route_class: RouteClass = None


class PolicyText(Body):
    text: Annotated[str, StringConstraints(max_length=1024 * 1024, pattern=r"^[^\x00]*$")]
    file: File = "policy.yaml"


class PolicyBody(AttributedBody, PolicyText):
    pass


class RestoreBody(AttributedBody):
    sections: Annotated[list[Section], Field(min_length=1)] | None = None


class TokenBody(Body):
    name: Name
    role: Role
    days: Annotated[int, Field(ge=1, le=3650)] = 90


# ------------------------------------------------------------------ queries


class ClientFilter(Query):
    kind: Kind
    value: Annotated[Value, Field(description="For an API key only its hash, hmac:..., as POST /find returns it")]

    @model_validator(mode="after")
    def _refuse_keys(self) -> Self:
        if (self.kind == "api_key" and not self.value.startswith("hmac:")) or looks_secret(self.value):
            raise ValueError("an API key must not appear in a URL; send it to POST /api/v1/find to get its hash")
        return self

    def ref(self) -> ClientRef:
        return ClientRef(self.kind, self.value)


class OptionalClientFilter(Query):
    kind: Kind | None = None
    value: Value | None = None

    @model_validator(mode="after")
    def _check_filter(self) -> Self:
        if (self.kind is None) != (self.value is None):
            raise ValueError("kind and value belong together; give both, or neither")
        self.client_filter()
        return self

    def client_filter(self) -> ClientFilter | None:
        return None if self.kind is None or self.value is None else ClientFilter(kind=self.kind, value=self.value)


class RemovalQuery(Query):
    reason: Annotated[
        Reason | None, Field(description="Required, here or in the header Headgate-Reason, which is not logged")
    ] = None
    confirm: list[RiskCode] = []


class TierRemovalQuery(ClientFilter, RemovalQuery):
    pass


class RouteRemovalQuery(RemovalQuery):
    path: Template


class WhyQuery(ClientFilter):
    at: Annotated[str, _line(100)] = "today"
    until: Annotated[str, _line(100)] | None = None
    zone: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+/-]{1,64}$")] = "UTC"


class TimelineQuery(ClientFilter):
    since: Instant
    until: Instant
    slots: Annotated[Whole, Field(ge=1, le=500)] = 60


class ClientsQuery(Query):
    search: Search = ""
    after: Cursor | None = None
    most: Most = 50


class BlocksQuery(ClientsQuery):
    state: Literal["all", "active", "future", "expired"] = "all"


class OverridesQuery(BlocksQuery, OptionalClientFilter):
    pass


class DecisionsQuery(OptionalClientFilter):
    after: RecordId = ""
    before: RecordId = ""
    outcome: Outcome | None = None
    most: Most = 100


class PolicyQuery(Query):
    version: Annotated[Whole, Field(ge=0, le=MAX_INTEGER)] | None = None


class VersionsQuery(Query):
    before: Number | None = None
    most: Most = 50


class DiffQuery(Query):
    against: Annotated[int, Field(ge=0, le=MAX_INTEGER, description="Default: the previous version")] | None = None


class AuditQuery(Query):
    before: Cursor | None = None
    most: Most = 50
    author: Search | None = None
    search: Search = ""


class StepsQuery(Query):
    most: Annotated[int, Field(ge=1, le=200)] = 20
