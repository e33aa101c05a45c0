"""What can be looked at, by everybody with a token."""

from dataclasses import replace
from typing import Annotated, Any, Final
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import Asking, answer
from headgate.control.admin.api.response_models import listed, shape
from headgate.control.admin.problems import answers
from headgate.control.anomalies.detector import Anomaly
from headgate.control.config.history import Difference, Version
from headgate.control.config.rows import microseconds
from headgate.control.service import AdminService
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
from headgate.control.service.redaction import discreetly
from headgate.errors import InvalidInput
from headgate.telemetry.decision_log.record import DecisionRecord
from headgate.telemetry.why import render

__all__ = ["ALWAYS", "CONFIG", "router"]

ALWAYS: Final = (
    "bad-request", "token-needed", "too-slow", "too-large", "invalid", "too many requests",
    "too-many-failures", "config-away",
)  # fmt: skip
"""Types of problems that any request may meet."""
CONFIG: Final = {"headers": {"ETag": {"description": "The version", "schema": {"type": "string"}}}}

MAX_NAMED: Final = 200
"""Rows of a difference that are told with the names of their clients."""

router: Final = APIRouter(responses=answers(*ALWAYS))


class Found(BaseModel):
    """A client that was found."""

    model_config = ConfigDict(extra="forbid")

    kind: str
    value: str
    label: str | None


class Searched(BaseModel):
    """What to search for."""

    model_config = ConfigDict(extra="forbid")

    text: str


class WhyModel(BaseModel):
    """Why a client was rejected."""

    model_config = ConfigDict(extra="forbid")

    answer: dict[str, Any]
    mail: list[str]
    """Paragraphs of a mail to the customer, which can be sent as it is."""
    details: list[str]
    """Paragraphs for colleagues."""


class DifferenceModel(BaseModel):
    """A row before and after."""

    model_config = ConfigDict(extra="forbid", title="Difference")

    section: str
    id: int
    what: str
    lines: list[str]


class VersionModel(BaseModel):
    """A change that was made as a whole."""

    model_config = ConfigDict(extra="forbid", title="Version")

    version: int
    at_us: int
    author: str
    reason: str
    what: str
    restores: int | None


class Checked(BaseModel):
    """What is wrong with a policy; nothing, if it is good."""

    model_config = ConfigDict(extra="forbid")

    problems: list[str]


def _gives(model: type, *problems: str, config: bool = False) -> dict[str, Any]:
    """The response model, for OpenAPI; what is sent is made by the views themselves."""
    told: dict[int | str, Any] = {200: {"model": model, **(CONFIG if config else {})}}
    return {"response_model": None, "responses": told | answers(*problems)}


# ------------------------------------------------------------------ now


@router.get("/overview", **_gives(shape(Overview)))
def overview(caller: Asking) -> JSONResponse:
    """What the fleet is doing: nodes, the last five minutes, who is denied, who is near a limit."""
    return answer(caller.service.fleet.overview(caller.actor).as_dict())


@router.get("/steps", **_gives(listed(Anomaly)))
def steps(caller: Asking, query: Annotated[schemas.StepsQuery, Query()]) -> JSONResponse:
    """Clients that do ten times what they usually do."""
    return answer({"items": [each.as_dict() for each in caller.service.fleet.anomalies(most=query.most)], "next": None})


@router.get("/decisions", **_gives(listed(DecisionRecord), "not-found", "config-away", "log-away"))
def decisions(caller: Asking, query: Annotated[schemas.DecisionsQuery, Query()]) -> JSONResponse:
    """The decision log, the newest last; `after` the last that was seen, to go on; `before` the first, to go back. A
    record may be written later than others that are newer: who wants all of them gives an older id, and drops what was
    seen."""
    filter = query.client_filter()
    client = None if filter is None else caller.client(filter)
    found = caller.service.clients.decisions(
        client=client, after=query.after, before=query.before, outcome=query.outcome, most=query.most
    )
    return answer({"items": plain(found), "next": found[-1].id if found else query.after or None})


# ------------------------------------------------------------------ one client


@router.post("/find", **_gives(Found, "not-found"))
def find(caller: Asking, body: schemas.FindBody) -> JSONResponse:
    """Which client a text means: a label, "tenant=acme", an address, an API key. Of a key only its hash comes back."""
    who = caller.service.clients.find(body.client)
    return answer({"kind": who.kind, "value": who.value, "label": caller.service.clients.get(who).label})


@router.post("/candidates", **_gives(listed(Candidate)))
def candidates(caller: Asking, body: schemas.FindBody) -> JSONResponse:
    """All clients that a text can mean, known or not, and the requests that a block of each would match. API keys come
    back masked, with their hash."""
    return answer({"items": plain(caller.service.clients.candidates(body.client)), "next": None})


@router.post("/matches", **_gives(listed(Candidate)))
def matches(caller: Asking, body: schemas.FindBody) -> JSONResponse:
    """The known clients that a text means, or up to 20 that contain it in their label, name, tenant or address."""
    return answer({"items": plain(caller.service.clients.matches(body.client)), "next": None})


@router.post("/search", **_gives(Searched))
def search(caller: Asking, body: schemas.SearchBody) -> JSONResponse:
    """What to give as `search` or `author` in place of a text: itself; where it may be an API key, which must not stand
    in a URL, its hash."""
    return answer({"text": caller.service.searchable(body.text)})


@router.get("/client", **_gives(shape(ClientView), "not-found", config=True))
def client(caller: Asking, query: Annotated[schemas.ClientFilter, Query()]) -> JSONResponse:
    """A client: its tier, the limits that it meets with where each comes from and what is used, overrides, block."""
    version = caller.service.version
    return answer(caller.service.clients.get(caller.client(query)).as_dict(), version)


@router.get("/client/why", **_gives(WhyModel, "not-found", "config-away", "log-away"))
def why(caller: Asking, query: Annotated[schemas.WhyQuery, Query()]) -> JSONResponse:
    """Why a client was rejected at a time: "yesterday 15:00", "3pm", "10 minutes ago"."""
    try:
        zone = ZoneInfo(query.zone)
    except (ValueError, OSError, KeyError):
        raise InvalidInput("zone: there is no such time zone; write it like Europe/Berlin") from None
    who = caller.client(query)
    with discreetly(query.at, query.until):
        found = caller.service.clients.why(who, at=query.at, until=query.until, zone=zone)
    texts = {"mail": render.mail(found, zone=zone), "details": render.details(found, zone=zone)}
    return answer({"answer": plain(render.plain(found)), **texts})


@router.get("/client/timeline", **_gives(shape(Timeline), "not-found", "config-away", "log-away"))
def timeline(caller: Asking, query: Annotated[schemas.TimelineQuery, Query()]) -> JSONResponse:
    """What became of a client's requests, in equal parts of a time."""
    since_us, until_us = microseconds(query.since), microseconds(query.until)
    if until_us <= since_us:
        raise InvalidInput("until: it is not after since")
    who = caller.client(query)
    found = caller.service.clients.timeline(who, since_us=since_us, until_us=until_us, slots=query.slots)
    return answer(found.as_dict())


@router.get("/clients", **_gives(listed(ClientRow), config=True))
def clients(caller: Asking, query: Annotated[schemas.ClientsQuery, Query()]) -> JSONResponse:
    """Clients of whom the configuration says something."""
    version = caller.service.version
    caller.service.refuse_keys(query.search)
    return answer(
        caller.service.clients.list(search=query.search, after=query.after, most=query.most).as_dict(), version
    )


# ------------------------------------------------------------------ the configuration


@router.get("/overrides", **_gives(listed(OverrideView), "not-found", config=True))
def overrides(caller: Asking, query: Annotated[schemas.OverridesQuery, Query()]) -> JSONResponse:
    """Other numbers for single clients."""
    version = caller.service.version
    caller.service.refuse_keys(query.search)
    filter = query.client_filter()
    client = None if filter is None else caller.client(filter)
    page = caller.service.overrides.list(
        search=query.search, state=query.state, client=client, after=query.after, most=query.most
    )
    return answer(page.as_dict(), version)


@router.get("/overrides/{id}", **_gives(shape(OverrideView), "not-found", config=True))
def override(caller: Asking, id: Annotated[schemas.Number, Path()]) -> JSONResponse:
    """One override."""
    version = caller.service.version
    return answer(caller.service.overrides.get(id).as_dict(), version)


@router.get("/blocks", **_gives(listed(BlockView), config=True))
def blocks(caller: Asking, query: Annotated[schemas.BlocksQuery, Query()]) -> JSONResponse:
    """Who does not get in."""
    version = caller.service.version
    caller.service.refuse_keys(query.search)
    page = caller.service.blocks.list(search=query.search, state=query.state, after=query.after, most=query.most)
    return answer(page.as_dict(), version)


@router.get("/tiers", **_gives(listed(TierView), config=True))
def tiers(caller: Asking) -> JSONResponse:
    """The tiers with their numbers."""
    version = caller.service.version
    return answer({"items": plain(caller.service.policy.tiers()), "next": None}, version)


@router.get("/routes", **_gives(listed(RouteView), config=True))
def routes(caller: Asking) -> JSONResponse:
    """What routes cost, and of which class they are."""
    version = caller.service.version
    return answer({"items": plain(caller.service.policy.routes()), "next": None}, version)


@router.get("/policy", **_gives(shape(PolicyView), "not-found", config=True))
def policy(caller: Asking, query: Annotated[schemas.PolicyQuery, Query()]) -> JSONResponse:
    """The policy document, and the limits that it comes to; now, or at a version."""
    version = caller.service.version
    return answer(caller.service.policy.get(query.version).as_dict(), version)


@router.post("/policy/check", **_gives(Checked))
def check_policy(caller: Asking, body: schemas.PolicyText) -> JSONResponse:
    """What is wrong with a policy, before it holds."""
    return answer({"problems": list(caller.service.policy.check(body.text, file=body.file))})


# ------------------------------------------------------------------ what was


@router.get("/versions", **_gives(listed(VersionModel, cursor=int), config=True))
def versions(caller: Asking, query: Annotated[schemas.VersionsQuery, Query()]) -> JSONResponse:
    """Who changed what, the newest first; `before` one of them, to go on."""
    version = caller.service.version
    found = caller.service.policy.versions(before=query.before, most=query.most)
    following = found[-1].number if len(found) == query.most and found[-1].number > 1 else None
    return answer({"items": [_version(each, caller.service) for each in found], "next": following}, version)


@router.get("/versions/{number}/diff", **_gives(listed(DifferenceModel), "not-found", config=True))
def diff(
    caller: Asking, number: Annotated[schemas.Number, Path()], query: Annotated[schemas.DiffQuery, Query()]
) -> JSONResponse:
    """What is different at a version from the one before it, or from another."""
    version = caller.service.version
    against = number - 1 if query.against is None else query.against
    found = caller.service.policy.diff(against, number)
    told = [_difference(each, caller.service if place < MAX_NAMED else None) for place, each in enumerate(found)]
    return answer({"items": told, "next": None}, version)


@router.get("/audit", **_gives(listed(AuditEntry)))
def audit(caller: Asking, query: Annotated[schemas.AuditQuery, Query()]) -> JSONResponse:
    """What people did, the newest first: changes, resets, tokens, and who has signed in."""
    caller.service.refuse_keys(query.search, query.author or "")
    page = caller.service.audit.list(before=query.before, most=query.most, author=query.author, search=query.search)
    items = [
        replace(
            each,
            what=caller.service.clients.insert_names(each.what),
            about=caller.service.clients.insert_names(each.about),
        )
        for each in page.items
    ]
    return answer(replace(page, items=tuple(items)).as_dict())


def _version(made: Version, service: AdminService) -> dict[str, Any]:
    return {
        "version": made.number,
        "at_us": made.at_us,
        "author": made.author,
        "reason": made.reason,
        "what": service.clients.insert_names(made.what),
        "restores": made.restores,
    }


def _difference(found: Difference, service: AdminService | None) -> dict[str, Any]:
    """A difference; with the names of clients, if there is a service to ask. A document stays as it is written."""
    what, lines = found.what, found.lines
    if service is not None and found.section != "documents":
        what, lines = service.clients.insert_names(what), [service.clients.insert_names(line) for line in lines]
    return {"section": found.section, "id": found.id, "what": what, "lines": lines}
