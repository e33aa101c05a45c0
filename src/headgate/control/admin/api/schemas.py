"""What requests may say: every field strictly, bounded, and without what could be an API key in a wrong place."""

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
    "LARGEST",
    "AuditQuery",
    "BlockBody",
    "BlocksQuery",
    "ChangeBody",
    "ClientFilter",
    "ClientsQuery",
    "DecisionsQuery",
    "DiffQuery",
    "FindBody",
    "Number",
    "OverrideBody",
    "OverridesQuery",
    "PolicyBody",
    "PolicyQuery",
    "PolicyText",
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
    "WhyQuery",
    "looks_secret",
]

LARGEST: Final = 2**53 - 1

_DIGITS: Final = re.compile("[0-9]{1,20}")
_LINE: Final = r"^[^\x00-\x1f\x7f]*$"


def _harmless(text: str) -> str:
    if looks_secret(text):
        raise ValueError("this looks like an API key or a token, which would be kept; leave it out")
    return text


def _instant(value: Any) -> Any:
    try:
        return scalars.instant(value)
    except scalars.OutOfRange as error:
        raise ValueError(f"{error}") from None
    except InvalidInput:
        raise ValueError("write a time with its zone, like 2026-11-20T18:00:00Z") from None


def _digits(value: Any) -> Any:
    """Refuse numbers in URLs that are spelled in Python's way: 1_0, +10, 10.0."""
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        raise ValueError("write a whole number in digits, like 10")
    return value


Instant = Annotated[
    datetime, BeforeValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64})
]
_Harmless: Final = AfterValidator(_harmless)
Reason = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=_LINE), _Harmless]
Bucket = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_LINE), _Harmless]
Label = Bucket
Name = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=_LINE), _Harmless]
Template = Annotated[str, StringConstraints(min_length=1, max_length=1100, pattern=_LINE), _Harmless]
Search = Annotated[str, StringConstraints(max_length=200, pattern=_LINE)]
Cursor = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"^[!-~]+$")]
Kind = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,49}$")]
Value = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=_LINE)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=_LINE)]
File = Annotated[str, StringConstraints(max_length=200, pattern=r"^[\w. -]{1,180}\.(?:yaml|yml|toml|json)$")]
Whole = Annotated[int, BeforeValidator(_digits, json_schema_input_type=int)]
Number = Annotated[Whole, Field(ge=1, le=LARGEST)]
Danger = Literal["ten-times", "tenth", "wildcard-block", "policy"]
Section = Literal["documents", "tiers", "routes", "clients", "overrides", "blocked"]
Most = Annotated[Whole, Field(ge=1, le=500)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


# ------------------------------------------------------------------ bodies


class WhoBody(Body):
    """A client, by one of its identities. An API key may be given as it is: it is hashed at once."""

    kind: Kind
    value: Key

    @model_validator(mode="after")
    def _is_what_it_says(self) -> Self:
        if self.kind != "api_key":
            if len(self.value) > 500:
                raise ValueError("the value has more than 500 characters")
            if looks_secret(self.value):
                raise ValueError("the value looks like an API key; say so: kind api_key")
        return self

    def ref(self) -> ClientRef:
        return ClientRef(self.kind, self.value)


class AttributedBody(Body):
    """What every write says."""

    reason: Reason
    confirm: Annotated[list[Danger], Field(max_length=10, description="The dangers that are meant")] = []


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
    label: Label | None = None


class ChangeBody(AttributedBody):
    """Another override in the place of one, of the same client."""

    who: WhoBody | None = None
    bucket: Bucket
    limit: Name | None = None
    route_class: Annotated[Name | None, Field(alias="class")] = None
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
    cost: Annotated[int, Field(ge=0, le=LARGEST)]
    route_class: Annotated[Name | None, Field(alias="class")] = None


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
    value: Annotated[Value, Field(description="Of an API key only its hash, hmac:..., as POST /find tells it")]

    @model_validator(mode="after")
    def _holds_no_key(self) -> Self:
        if (self.kind == "api_key" and not self.value.startswith("hmac:")) or looks_secret(self.value):
            raise ValueError("an API key must not stand in a URL; send it to POST /api/v1/find, which tells its hash")
        return self

    def ref(self) -> ClientRef:
        return ClientRef(self.kind, self.value)


class RemovalBody(Query):
    reason: Annotated[
        Reason | None, Field(description="Needed, here or in the header field Headgate-Reason, which no log keeps")
    ] = None
    confirm: list[Danger] = []


class RemovalQuery(RemovalBody):
    pass


class TierRemovalQuery(ClientFilter, RemovalBody):
    pass


class RouteRemovalQuery(RemovalBody):
    path: Template


class WhyQuery(ClientFilter):
    at: Annotated[str, StringConstraints(max_length=100, pattern=_LINE)] = "today"
    until: Annotated[str, StringConstraints(max_length=100, pattern=_LINE)] | None = None
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


class OfClient(Query):
    """Of one client, or of all."""

    kind: Kind | None = None
    value: Value | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.kind is not None and self.value is not None:
            ClientFilter(kind=self.kind, value=self.value)
        elif self.kind is not None or self.value is not None:
            raise ValueError("kind and value belong together; give both, or neither")
        return self

    def client_filter(self) -> ClientFilter | None:
        return None if self.kind is None or self.value is None else ClientFilter(kind=self.kind, value=self.value)


class OverridesQuery(BlocksQuery, OfClient):
    pass


RecordId = Annotated[str, StringConstraints(max_length=100, pattern=r"^[!-~]*$")]


class DecisionsQuery(OfClient):
    after: RecordId = ""
    before: RecordId = ""
    outcome: Outcome | None = None
    most: Most = 100


class PolicyQuery(Query):
    version: Annotated[Whole, Field(ge=0, le=LARGEST)] | None = None


class VersionsQuery(Query):
    before: Number | None = None
    most: Most = 50


class DiffQuery(Query):
    against: Annotated[int, Field(ge=0, le=LARGEST, description="The version before it, if not given")] | None = None


class AuditQuery(Query):
    before: Cursor | None = None
    most: Most = 50
    author: Search | None = None
    search: Search = ""


class StepsQuery(Query):
    most: Annotated[int, Field(ge=1, le=200)] = 20
