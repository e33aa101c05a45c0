"""Endpoints that read, for every role."""

from dataclasses import replace
from typing import Annotated, Any, Final
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import CallerDependency, answer
from headgate.control.admin.api.response_models import list_model, view_model
from headgate.control.admin.problems import problem_responses
from headgate.control.anomalies.detector import Anomaly
from headgate.control.config.rows import microseconds
from headgate.control.service.candidates import Candidate
from headgate.control.service.models import (
    AuditEntry,
    BlockView,
    ClientRow,
    ClientView,
    OverrideView,
    Overview,
    PolicyView,
    RouteView,
    TierView,
    Timeline,
    plain,
)
from headgate.control.service.redaction import redact_errors
from headgate.errors import InvalidInput
from headgate.telemetry.decision_log.record import DecisionRecord
from headgate.telemetry.why import render

__all__ = ["COMMON_PROBLEMS", "router"]

COMMON_PROBLEMS: Final = (
    "bad-request", "token-needed", "too-slow", "too-large", "invalid", "too many requests",
    "too-many-failures", "config-away",
)  # fmt: skip
"""Problem types of all endpoints."""
ETAG: Final = {"headers": {"ETag": {"description": "The version", "schema": {"type": "string"}}}}

MAX_NAMED: Final = 200
"""Differences in which hashes are replaced by client names."""

router: Final = APIRouter(responses=problem_responses(*COMMON_PROBLEMS))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Found(_Model):
    """The client that a text identifies."""

    kind: str
    value: str
    label: str | None


class Searched(_Model):
    """The text to search for."""

    text: str


class WhyModel(_Model):
    """The report on a client's rejected requests."""

    answer: dict[str, Any]
    mail: list[str]
    """Paragraphs of a mail to the customer."""
    details: list[str]
    """Paragraphs for operators."""


class DifferenceModel(_Model):
    """A row before and after."""

    model_config = ConfigDict(title="Difference")

    section: str
    id: int
    what: str
    lines: list[str]


class VersionModel(_Model):
    """A version of the configuration."""

    model_config = ConfigDict(title="Version")

    version: int
    at_us: int
    author: str
    reason: str
    what: str
    restores: int | None


class Checked(_Model):
    """The problems of a policy; empty if it is valid."""

    problems: list[str]


def _returns(model: type, *problems: str, config: bool = False) -> dict[str, Any]:
    """The response model and problems for OpenAPI; the endpoints serialize the views themselves."""
    success: dict[int | str, Any] = {200: {"model": model, **(ETAG if config else {})}}
    return {"response_model": None, "responses": success | problem_responses(*problems)}


# ------------------------------------------------------------------ fleet


@router.get("/overview", **_returns(view_model(Overview)))
def overview(caller: CallerDependency) -> JSONResponse:
    """The state of the fleet: nodes, the last five minutes, denied clients, clients near a limit."""
    return answer(caller.service.fleet.overview(caller.actor).as_dict())


@router.get("/steps", **_returns(list_model(Anomaly)))
def steps(caller: CallerDependency, query: Annotated[schemas.StepsQuery, Query()]) -> JSONResponse:
    """Traffic anomalies: clients with ten times their usual traffic."""
    return answer({"items": [each.as_dict() for each in caller.service.fleet.anomalies(most=query.most)], "next": None})


@router.get("/decisions", **_returns(list_model(DecisionRecord), "not-found", "config-away", "log-away"))
def decisions(caller: CallerDependency, query: Annotated[schemas.DecisionsQuery, Query()]) -> JSONResponse:
    """Records of the decision log, newest last. Give the id of the last one as `after` to continue, or of the first one
    as `before` to go back. A record may be written after newer ones: to get all of them, give an older id, and drop
    duplicates."""
    filter = query.client_filter()
    client = None if filter is None else caller.client(filter)
    found = caller.service.clients.decisions(
        client=client, after=query.after, before=query.before, outcome=query.outcome, most=query.most
    )
    return answer({"items": plain(found), "next": found[-1].id if found else query.after or None})


# ------------------------------------------------------------------ clients


@router.post("/find", **_returns(Found, "not-found"))
def find(caller: CallerDependency, body: schemas.FindBody) -> JSONResponse:
    """The client that a text identifies: a label, "tenant=acme", an address, or an API key."""
    who = caller.service.clients.find(body.client)
    return answer({"kind": who.kind, "value": who.value, "label": caller.service.clients.get(who).label})


@router.post("/candidates", **_returns(list_model(Candidate)))
def candidates(caller: CallerDependency, body: schemas.FindBody) -> JSONResponse:
    """All clients that a text can mean, known or not, and the requests that a block of each would match. API keys are
    returned masked, with their hash."""
    return answer({"items": plain(caller.service.clients.candidates(body.client)), "next": None})


@router.post("/matches", **_returns(list_model(Candidate)))
def matches(caller: CallerDependency, body: schemas.FindBody) -> JSONResponse:
    """The known clients that a text identifies, or up to 20 whose label or identity contains it."""
    return answer({"items": plain(caller.service.clients.matches(body.client)), "next": None})


@router.post("/search", **_returns(Searched))
def search(caller: CallerDependency, body: schemas.SearchBody) -> JSONResponse:
    """The value to give as `search` or `author` for a text: the same, or its hash if it may be an API key, which must
    not appear in a URL."""
    return answer({"text": caller.service.searchable(body.text)})


@router.get("/client", **_returns(view_model(ClientView), "not-found", config=True))
def client(caller: CallerDependency, query: Annotated[schemas.ClientFilter, Query()]) -> JSONResponse:
    """A client: its tier, limits with their sources and usage, overrides and block."""
    version = caller.service.version
    return answer(caller.service.clients.get(caller.client(query)).as_dict(), version)


@router.get("/client/why", **_returns(WhyModel, "not-found", "config-away", "log-away"))
def why(caller: CallerDependency, query: Annotated[schemas.WhyQuery, Query()]) -> JSONResponse:
    """A report on a client's rejected requests at a time: "yesterday 15:00", "3pm", "10 minutes ago"."""
    try:
        zone = ZoneInfo(query.zone)
    except (ValueError, OSError, KeyError):
        raise InvalidInput("zone: unknown time zone; write it like Europe/Berlin") from None
    who = caller.client(query)
    with redact_errors(query.at, query.until):
        found = caller.service.clients.why(who, at=query.at, until=query.until, zone=zone)
    texts = {"mail": render.mail(found, zone=zone), "details": render.details(found, zone=zone)}
    return answer({"answer": plain(render.plain(found)), **texts})


@router.get("/client/timeline", **_returns(view_model(Timeline), "not-found", "config-away", "log-away"))
def timeline(caller: CallerDependency, query: Annotated[schemas.TimelineQuery, Query()]) -> JSONResponse:
    """The outcomes of a client's requests in equal time slots."""
    since_us, until_us = microseconds(query.since), microseconds(query.until)
    if until_us <= since_us:
        raise InvalidInput("until: it must be after since")
    who = caller.client(query)
    found = caller.service.clients.timeline(who, since_us=since_us, until_us=until_us, slots=query.slots)
    return answer(found.as_dict())


@router.get("/clients", **_returns(list_model(ClientRow), config=True))
def clients(caller: CallerDependency, query: Annotated[schemas.ClientsQuery, Query()]) -> JSONResponse:
    """The clients that have an entry in the configuration."""
    version = caller.service.version
    caller.service.refuse_keys(query.search)
    return answer(
        caller.service.clients.list(search=query.search, after=query.after, most=query.most).as_dict(), version
    )


# ------------------------------------------------------------------ configuration


@router.get("/overrides", **_returns(list_model(OverrideView), "not-found", config=True))
def overrides(caller: CallerDependency, query: Annotated[schemas.OverridesQuery, Query()]) -> JSONResponse:
    """Custom limits of single clients."""
    version = caller.service.version
    caller.service.refuse_keys(query.search)
    filter = query.client_filter()
    client = None if filter is None else caller.client(filter)
    page = caller.service.overrides.list(
        search=query.search, state=query.state, client=client, after=query.after, most=query.most
    )
    return answer(page.as_dict(), version)


@router.get("/overrides/{id}", **_returns(view_model(OverrideView), "not-found", config=True))
def override(caller: CallerDependency, id: Annotated[schemas.Number, Path()]) -> JSONResponse:
    """One override."""
    version = caller.service.version
    return answer(caller.service.overrides.get(id).as_dict(), version)


@router.get("/blocks", **_returns(list_model(BlockView), config=True))
def blocks(caller: CallerDependency, query: Annotated[schemas.BlocksQuery, Query()]) -> JSONResponse:
    """Blocked clients."""
    version = caller.service.version
    caller.service.refuse_keys(query.search)
    page = caller.service.blocks.list(search=query.search, state=query.state, after=query.after, most=query.most)
    return answer(page.as_dict(), version)


@router.get("/tiers", **_returns(list_model(TierView), config=True))
def tiers(caller: CallerDependency) -> JSONResponse:
    """The tiers with their limits."""
    version = caller.service.version
    return answer({"items": plain(caller.service.policy.tiers()), "next": None}, version)


@router.get("/routes", **_returns(list_model(RouteView), config=True))
def routes(caller: CallerDependency) -> JSONResponse:
    """The costs and classes of routes."""
    version = caller.service.version
    return answer({"items": plain(caller.service.policy.routes()), "next": None}, version)


@router.get("/policy", **_returns(view_model(PolicyView), "not-found", config=True))
def policy(caller: CallerDependency, query: Annotated[schemas.PolicyQuery, Query()]) -> JSONResponse:
    """The policy document and the resulting limits, now or at a version."""
    version = caller.service.version
    return answer(caller.service.policy.get(query.version).as_dict(), version)


@router.post("/policy/check", **_returns(Checked))
def check_policy(caller: CallerDependency, body: schemas.PolicyText) -> JSONResponse:
    """Check a policy without saving it."""
    return answer({"problems": list(caller.service.policy.check(body.text, file=body.file))})


# ------------------------------------------------------------------ history


@router.get("/versions", **_returns(list_model(VersionModel, cursor=int), config=True))
def versions(caller: CallerDependency, query: Annotated[schemas.VersionsQuery, Query()]) -> JSONResponse:
    """The versions of the configuration, newest first; give the last one as `before` to continue."""
    version = caller.service.version
    found = caller.service.policy.versions(before=query.before, most=query.most)
    following = found[-1].number if len(found) == query.most and found[-1].number > 1 else None
    items = [
        {
            "version": each.number,
            "at_us": each.at_us,
            "author": each.author,
            "reason": each.reason,
            "what": caller.service.clients.insert_names(each.what),
            "restores": each.restores,
        }
        for each in found
    ]
    return answer({"items": items, "next": following}, version)


@router.get("/versions/{number}/diff", **_returns(list_model(DifferenceModel), "not-found", config=True))
def diff(
    caller: CallerDependency, number: Annotated[schemas.Number, Path()], query: Annotated[schemas.DiffQuery, Query()]
) -> JSONResponse:
    """The differences from the previous version, or from another one."""
    version = caller.service.version
    items: list[dict[str, Any]] = []
    for each in caller.service.policy.diff(number - 1 if query.against is None else query.against, number):
        what, lines = each.what, each.lines
        if len(items) < MAX_NAMED and each.section != "documents":
            insert_names = caller.service.clients.insert_names
            what, lines = insert_names(what), [insert_names(line) for line in lines]
        items.append({"section": each.section, "id": each.id, "what": what, "lines": lines})
    return answer({"items": items, "next": None}, version)


@router.get("/audit", **_returns(list_model(AuditEntry)))
def audit(caller: CallerDependency, query: Annotated[schemas.AuditQuery, Query()]) -> JSONResponse:
    """The audit log, newest first: changes, resets, tokens and sign-ins."""
    caller.service.refuse_keys(query.search, query.author or "")
    page = caller.service.audit.list(before=query.before, most=query.most, author=query.author, search=query.search)
    insert_names = caller.service.clients.insert_names
    items = [replace(each, what=insert_names(each.what), about=insert_names(each.about)) for each in page.items]
    return answer(replace(page, items=tuple(items)).as_dict())
