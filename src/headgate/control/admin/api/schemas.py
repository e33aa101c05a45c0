"""Request schemas, which are strict, bounded and without API keys in the wrong place, and response models.

The response models of views are derived from the service's views, so that the two cannot diverge.
"""

import re
import types
from dataclasses import is_dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Annotated, Any, Final, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, StringConstraints, WithJsonSchema, create_model
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator

from headgate.control.admin.tokens import Token
from headgate.control.anomalies.detector import Anomaly
from headgate.control.canaries.comparison import Comparison
from headgate.control.config import CanarySpec
from headgate.control.config.history import Version
from headgate.control.service.models import OverrideSpec, Role
from headgate.control.service.redaction import looks_secret
from headgate.control.service.suggestions import MAX_DAYS
from headgate.errors import InvalidInput
from headgate.policy import scalars
from headgate.quotas.ledger import AccountSummary
from headgate.quotas.usage_alerts import UsageAlert
from headgate.telemetry.decision_log.record import DecisionRecord, Outcome

__all__ = [
    "MAX_INTEGER", "AccountQuery", "ActionId", "ActionsQuery", "AdjustmentBody", "AttributedBody", "AuditQuery",
    "BlockBody", "BlocksQuery", "CanaryBody", "ChangeBody", "Checked", "ClientFilter", "ClientRemovalQuery",
    "ClientsQuery", "CreatedTokenModel", "DecisionsQuery", "DiffQuery", "DifferenceModel", "EndCanaryBody",
    "FindBody", "Found", "GrantBody", "Name", "Number", "OptionalClientFilter", "OverrideBody", "OverridesQuery",
    "PolicyBody", "PolicyQuery", "PolicyText", "Reason", "RemovalQuery", "ResetBody", "RestoreBody", "RouteBody",
    "RouteRemovalQuery", "SearchBody", "Searched", "StatementQuery", "StepsQuery", "SuggestionsQuery", "TierBody",
    "TierNumbersBody", "TimelineQuery", "TokenBody", "TokenModel", "VersionModel", "VersionsQuery", "WhoBody",
    "WhyModel", "WhyQuery", "WriteAnswer", "list_model", "view_model",
]  # fmt: skip

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that all JSON parsers and databases represent exactly."""

_DIGITS: Final = re.compile("[0-9]{1,20}")
_LINE: Final = r"^[^\x00-\x1f\x7f]*$"
_TYPE_CHECKING_NAMES: Final = {
    each.__name__: each for each in (AccountSummary, Anomaly, Comparison, DecisionRecord, UsageAlert, Version)
} | {"Role": Role}
"""Names that views import for type checkers only."""
_COMPUTED_FIELDS: Final[dict[type, dict[str, Any]]] = {Anomaly: {"text": (str, ...)}}
"""Fields that `as_dict()` adds."""


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


_INSTANT: Final = WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64})
Instant = Annotated[datetime, BeforeValidator(_parse_instant), _INSTANT]
_NotSecret: Final = AfterValidator(_refuse_secret)
Reason = Annotated[str, _line(500, shortest=1), _NotSecret]
Bucket = Annotated[str, _line(200, shortest=1), _NotSecret]
Name = Annotated[str, _line(100, shortest=1), _NotSecret]
Node = Annotated[str, _line(200, shortest=1), _NotSecret]
Template = Annotated[str, _line(1100, shortest=1), _NotSecret]
Search = Annotated[str, _line(200)]
Cursor = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"^[!-~]+$")]
RecordId = Annotated[str, StringConstraints(max_length=100, pattern=r"^[!-~]*$")]
Kind = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,49}$")]
Value = Annotated[str, _line(500, shortest=1)]
Key = Annotated[str, _line(4096, shortest=1)]
File = Annotated[str, StringConstraints(max_length=200, pattern=r"^[\w. -]{1,180}\.(?:yaml|yml|toml|json)$")]
Zone = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+/-]{1,64}$")]
Account = Annotated[str, _line(200, shortest=1), _NotSecret]
EntryId = Annotated[
    str, _line(200, shortest=1), _NotSecret, Field(description="A repetition with the same id changes nothing")
]
Whole = Annotated[int, BeforeValidator(_require_digits, json_schema_input_type=int)]
ActionId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Number = Annotated[Whole, Field(ge=1, le=MAX_INTEGER)]
RiskCode = Literal["ten-times", "tenth", "wildcard-block", "policy", "canary"]
Section = Literal["documents", "tiers", "routes", "clients", "overrides", "blocked"]
Most = Annotated[Whole, Field(ge=1, le=500)]
FirstDay = Annotated[
    int | str | None, Field(description='Of months (15) or years ("04-01"); empty for that of the limits')
]
RouteClass = Annotated[Name | None, Field(alias="class")]


class Body(BaseModel, extra="forbid", strict=True, hide_input_in_errors=True): ...


class Query(BaseModel, extra="forbid", hide_input_in_errors=True): ...


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
    timezone: Annotated[str | None, Field(max_length=50, description="Empty for that of the limits")] = None
    starts: FirstDay = None


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


class PolicyBody(AttributedBody, PolicyText): ...


class CanaryBody(PolicyBody):
    """A candidate, the nodes that apply it, and the thresholds of its rollback."""

    percent: Annotated[int, Field(ge=1, le=100)] | None = None
    nodes: Annotated[list[Node], Field(max_length=200)] = []
    max_rejections: Annotated[float, Field(ge=0, le=100, description="Percentage points more than other nodes")] = 5.0
    max_errors: Annotated[float, Field(ge=0, le=100, description="Percentage points more than other nodes")] = 1.0
    max_latency: Annotated[float, Field(ge=1, le=1000, description="A multiple of other nodes' 99th percentile")] = 2.0
    for_s: Annotated[float, Field(ge=1, le=30 * 86_400, description="The time of observation")] | None = None
    promote: Annotated[bool, Field(description="Promote the candidate after for_s")] = False

    def spec(self) -> CanarySpec:
        run_for = None if self.for_s is None else timedelta(seconds=self.for_s)
        thresholds = self.max_rejections, self.max_errors, self.max_latency
        return CanarySpec(self.percent, tuple(self.nodes), *thresholds, run_for, self.promote)


class EndCanaryBody(AttributedBody): ...


class RestoreBody(AttributedBody):
    sections: Annotated[list[Section], Field(min_length=1)] | None = None


class GrantBody(AttributedBody):
    """Units for an account of the ledger."""

    account: Account
    amount: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    id: EntryId | None = None
    expires_at: Instant | None = None
    priority: Annotated[int, Field(ge=0, le=1_000_000, description="Lower ones are spent first")] = 100
    source: Annotated[str, _line(100, shortest=1), _NotSecret] = "grant"
    reference: Annotated[str, _line(500), _NotSecret] = ""


class AdjustmentBody(AttributedBody):
    """A correction of an account of the ledger, up or down."""

    account: Account
    amount: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
    id: EntryId | None = None
    reference: Annotated[str, _line(500), _NotSecret] = ""


class TokenBody(Body):
    name: Name
    role: Role
    days: Annotated[int, Field(ge=1, le=3650)] = 90


class OptionalClientFilter(Query):
    kind: Kind | None = None
    value: Value | None = None

    @model_validator(mode="after")
    def _check_filter(self) -> Self:
        if (self.kind is None) != (self.value is None):
            raise ValueError("kind and value belong together; give both, or neither")
        value = self.value or "hmac:"
        if (self.kind == "api_key" and not value.startswith("hmac:")) or looks_secret(value):
            raise ValueError("an API key must not appear in a URL; send it to POST /api/v1/find to get its hash")
        return self


class ClientFilter(OptionalClientFilter):
    kind: Kind
    value: Annotated[Value, Field(description="For an API key only its hash, hmac:..., as POST /find returns it")]


class RemovalQuery(Query):
    reason: Annotated[
        Reason | None, Field(description="Required, here or in the header Headgate-Reason, which is not logged")
    ] = None
    confirm: list[RiskCode] = []


class ClientRemovalQuery(ClientFilter, RemovalQuery): ...


class RouteRemovalQuery(RemovalQuery):
    path: Template


class WhyQuery(ClientFilter):
    at: Annotated[str, _line(100)] = "today"
    until: Annotated[str, _line(100)] | None = None
    zone: Zone = "UTC"


class TimelineQuery(ClientFilter):
    since: Instant
    until: Instant
    slots: Most = 60


class AccountQuery(Query):
    account: Account


class StatementQuery(AccountQuery):
    since: Instant
    until: Instant
    zone: Zone = "UTC"
    most: Most = 100


class ClientsQuery(Query):
    search: Search = ""
    after: Cursor | None = None
    most: Most = 50


class BlocksQuery(ClientsQuery):
    state: Literal["all", "active", "future", "expired"] = "all"


class ActionsQuery(ClientsQuery):
    state: Literal["all", "active", "shadow", "undone", "ended"] = "all"


class OverridesQuery(BlocksQuery, OptionalClientFilter): ...


class DecisionsQuery(OptionalClientFilter):
    after: RecordId = ""
    before: RecordId = ""
    outcome: Outcome | None = None
    most: Most = 100


class SuggestionsQuery(Query):
    goal: Annotated[list[Name], Field(max_length=10)] = []
    days: Annotated[Whole, Field(ge=1, le=MAX_DAYS)] = 7


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


class ResponseModel(BaseModel, extra="forbid"): ...


def _model(name: str, summary: str, *, title: str | None = None, **types: Any) -> Any:
    """A response model with these fields, all required."""
    fields: dict[str, Any] = {field: (kind, ...) for field, kind in types.items()}
    return create_model(name, __base__=ResponseModel, __doc__=summary, __cls_kwargs__={"title": title}, **fields)


@cache
def view_model(view: Any, name: str = "", **added: Any) -> type[BaseModel]:
    """The model of what `as_dict()` of a view returns, with the fields that a response adds to it."""
    hints = get_type_hints(view, localns=_TYPE_CHECKING_NAMES)
    fields: dict[str, Any] = dict(_COMPUTED_FIELDS.get(view, {}))
    for field in getattr(view, "_fields", None) or tuple(view.__dataclass_fields__):
        public = field.rstrip("_")
        fields[field] = (_json_type(hints[field]), Field(alias=public, title=None) if public != field else Field())
    summary = (view.__doc__ or "").strip().partition("\n")[0]
    return create_model(name or view.__name__, __base__=ResponseModel, __doc__=summary, **fields, **added)


@cache
def list_model(item: Any, *, cursor: Any = str) -> type[BaseModel]:
    """The model of a page of views."""
    inner: Any = item if issubclass(item, BaseModel) else view_model(item)
    name = f"{inner.__name__.removesuffix('View').removesuffix('Model')}List"
    following: Any = (cursor | None, Field(description="The cursor of the next page; null at the end"))
    return create_model(name, __base__=ResponseModel, items=(list[inner], ...), next=following)


def _json_type(hint: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        return Union[tuple(_json_type(each) for each in inner)]  # noqa: UP007 - the types are only known at run time
    if origin in (tuple, list):
        return list[_json_type(inner[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[str, _json_type(inner[1])]  # type: ignore[misc]
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return view_model(hint)
    return hint


Texts = list[str]
Found: Final = _model("Found", "The client that a text identifies.", kind=str, value=str, label=str | None)
Searched: Final = _model("Searched", "The text to search for.", text=str)
Checked: Final = _model("Checked", "The problems of a policy; empty if it is valid.", problems=Texts)
DifferenceModel: Final = _model(
    "DifferenceModel", "A row before and after.", title="Difference", section=str, id=int, what=str, lines=Texts
)
VersionModel: Final = _model(
    "VersionModel", "A version of the configuration.", title="Version",
    version=int, at_us=int, author=str, reason=str, what=str, restores=int | None,
)  # fmt: skip
WhyModel: Final = _model(
    "WhyModel", "The report on a client's rejected requests, with paragraphs for the customer and for operators.",
    answer=dict[str, Any], mail=Texts, details=Texts,
)  # fmt: skip
WriteAnswer: Final = _model(
    "WriteAnswer", "The result of a change: the version that it created, if any, and the ids of the rows it wrote.",
    version=int | None, notes=Texts, what=str, ids=list[int],
)  # fmt: skip
TokenModel: Final = view_model(Token, "TokenModel", state=(Literal["active", "expired", "revoked"], ...))
CreatedTokenModel: Final = create_model(
    "CreatedTokenModel",
    __base__=TokenModel,
    __doc__="A new token.",
    token=(str | None, Field(description="The token itself, which is returned only once; null in a replayed response")),
)
