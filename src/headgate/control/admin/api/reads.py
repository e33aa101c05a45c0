"""Endpoints that read, for every role; only admins see the tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Final, TypeVar
from zoneinfo import ZoneInfo

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import Caller, CallerDependency, InQuery
from headgate.control.admin.api.schemas import list_model, view_model
from headgate.control.admin.problems import problem_responses
from headgate.control.anomalies.detector import Anomaly
from headgate.control.config.rows import microseconds
from headgate.control.service import models
from headgate.control.service.actions import ActionView
from headgate.control.service.client_lookup import Candidate
from headgate.control.service.ledger import AccountRow, AccountView
from headgate.control.service.redaction import redact_errors
from headgate.control.service.suggestions import SuggestionView
from headgate.errors import InvalidInput
from headgate.quotas.statement import Statement
from headgate.telemetry.decision_log.record import DecisionRecord
from headgate.telemetry.region_overview import RegionOverview
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

Read = TypeVar("Read", bound=Callable[..., Any])


def _endpoint(method: str, path: str, model: type, *problems: str, has_etag: bool = False) -> Callable[[Read], Read]:
    """Register a function that returns a view, a list of views or a dict as an endpoint that responds with it as JSON.
    The model describes the response in OpenAPI. The ETag is the version of the configuration before the read."""
    success: dict[int | str, Any] = {200: {"model": model, **(ETAG if has_etag else {})}}

    def register(read: Read) -> Read:
        @wraps(read)
        def respond(caller: Caller, **given: Any) -> JSONResponse:
            headers = {"ETag": f'"{caller.service.version}"'} if has_etag else None
            found = models.plain(read(caller, **given))
            return JSONResponse({"items": found, "next": None} if isinstance(found, list) else found, headers=headers)

        responses = success | problem_responses(*problems)
        router.add_api_route(path, respond, methods=[method], response_model=None, responses=responses)
        return read

    return register


_get, _post = partial(_endpoint, "GET"), partial(_endpoint, "POST")


@_get("/overview", view_model(models.Overview))
def overview(caller: CallerDependency) -> Any:
    """The state of the fleet: nodes, the last five minutes, denied clients, clients near a limit."""
    return caller.service.fleet.overview(caller.actor)


@_get("/steps", list_model(Anomaly))
def steps(caller: CallerDependency, query: InQuery[schemas.StepsQuery]) -> Any:
    """Traffic anomalies: clients with ten times their usual traffic."""
    return caller.service.fleet.anomalies(most=query.most)


@_get("/decisions", list_model(DecisionRecord), "not-found", "config-away", "log-away")
def decisions(caller: CallerDependency, query: InQuery[schemas.DecisionsQuery]) -> Any:
    """Records of the decision log, newest last. Give the id of the last one as `after` to continue, or of the first one
    as `before` to go back. A record may be written after newer ones: to get all of them, give an older id, and drop
    duplicates."""
    found = caller.service.clients.decisions(
        client=caller.filter(query), after=query.after, before=query.before, outcome=query.outcome, most=query.most
    )
    return {"items": found, "next": found[-1].id if found else query.after or None}


@_post("/find", schemas.Found, "not-found")
def find(caller: CallerDependency, body: schemas.FindBody) -> Any:
    """The client that a text identifies: a label, "tenant=acme", an address, or an API key."""
    who = caller.service.clients.find(body.client)
    return {"kind": who.kind, "value": who.value, "label": caller.service.clients.get(who).label}


@_post("/candidates", list_model(Candidate))
def candidates(caller: CallerDependency, body: schemas.FindBody) -> Any:
    """All clients that a text can mean, known or not, and the requests that a block of each would match. API keys are
    returned masked, with their hash."""
    return caller.service.clients.candidates(body.client)


@_post("/matches", list_model(Candidate))
def matches(caller: CallerDependency, body: schemas.FindBody) -> Any:
    """The known clients that a text identifies, or up to 20 whose label or identity contains it."""
    return caller.service.clients.matches(body.client)


@_post("/search", schemas.Searched)
def search(caller: CallerDependency, body: schemas.SearchBody) -> Any:
    """The value to give as `search` or `author` for a text: the same, or its hash if it may be an API key, which must
    not appear in a URL."""
    return {"text": caller.service.searchable(body.text)}


@_get("/client", view_model(models.ClientView), "not-found", has_etag=True)
def client(caller: CallerDependency, query: InQuery[schemas.ClientFilter]) -> Any:
    """A client: its tier, limits with their sources and usage, overrides and block."""
    return caller.service.clients.get(caller.client(query))


@_get("/client/why", schemas.WhyModel, "not-found", "config-away", "log-away", "ledger-away")
def why(caller: CallerDependency, query: InQuery[schemas.WhyQuery]) -> Any:
    """A report on a client's rejected and charged requests at a time: "yesterday 15:00", "3pm", "10 minutes ago"."""
    zone = _parse_zone(query.zone)
    who = caller.client(query)
    with redact_errors(query.at, query.until):
        found = caller.service.clients.why(who, at=query.at, until=query.until, zone=zone)
    charges = caller.service.ledger.charges(who, found.span.since_us, found.span.until_us)
    about = [*render.details(found, zone=zone), *[text for report in charges for text in report.paragraphs(zone)]]
    answer = render.plain(found) | {"charges": [report.as_dict() for report in charges]}
    return {"answer": answer, "mail": render.mail(found, zone=zone), "details": about}


@_get("/client/timeline", view_model(models.Timeline), "not-found", "config-away", "log-away")
def timeline(caller: CallerDependency, query: InQuery[schemas.TimelineQuery]) -> Any:
    """The outcomes of a client's requests in equal time slots."""
    since_us, until_us = microseconds(query.since), microseconds(query.until)
    if until_us <= since_us:
        raise InvalidInput("until: it must be after since")
    who = caller.client(query)
    return caller.service.clients.timeline(who, since_us=since_us, until_us=until_us, slots=query.slots)


@_get("/clients", list_model(models.ClientRow), has_etag=True)
def clients(caller: CallerDependency, query: InQuery[schemas.ClientsQuery]) -> Any:
    """The clients that have an entry in the configuration."""
    caller.service.refuse_keys(query.search)
    return caller.service.clients.list(**dict(query))


@_get("/overrides", list_model(models.OverrideView), "not-found", has_etag=True)
def overrides(caller: CallerDependency, query: InQuery[schemas.OverridesQuery]) -> Any:
    """Custom limits of single clients."""
    caller.service.refuse_keys(query.search)
    return caller.service.overrides.list(
        search=query.search, state=query.state, client=caller.filter(query), after=query.after, most=query.most
    )


@_get("/overrides/{id}", view_model(models.OverrideView), "not-found", has_etag=True)
def override(caller: CallerDependency, id: schemas.Number) -> Any:
    """One override."""
    return caller.service.overrides.get(id)


@_get("/blocks", list_model(models.BlockView), has_etag=True)
def blocks(caller: CallerDependency, query: InQuery[schemas.BlocksQuery]) -> Any:
    """Blocked clients."""
    caller.service.refuse_keys(query.search)
    return caller.service.blocks.list(**dict(query))


@_get("/actions", list_model(ActionView))
def actions(caller: CallerDependency, query: InQuery[schemas.ActionsQuery]) -> Any:
    """Actions that scenarios have taken on clients, newest first."""
    caller.service.refuse_keys(query.search)
    return caller.service.actions.list(**dict(query))


@_get("/tiers", list_model(models.TierView), has_etag=True)
def tiers(caller: CallerDependency) -> Any:
    """The tiers with their limits."""
    return caller.service.policy.tiers()


@_get("/routes", list_model(models.RouteView), has_etag=True)
def routes(caller: CallerDependency) -> Any:
    """The costs and classes of routes."""
    return caller.service.policy.routes()


@_get("/policy", view_model(models.PolicyView), "not-found", has_etag=True)
def policy(caller: CallerDependency, query: InQuery[schemas.PolicyQuery]) -> Any:
    """The policy document and the resulting limits, now or at a version."""
    return caller.service.policy.get(query.version)


@_post("/policy/check", schemas.Checked)
def check_policy(caller: CallerDependency, body: schemas.PolicyText) -> Any:
    """Check a policy without saving it."""
    return {"problems": caller.service.policy.check(body.text, file=body.file)}


@_get("/policy/canary", view_model(models.CanaryStatus), has_etag=True)
def canary(caller: CallerDependency) -> Any:
    """The last canary of the policy, and the comparison of its nodes while it runs."""
    return caller.service.canaries.status(caller.actor)


@_get("/policy/suggestions", view_model(SuggestionView), "role-too-low", "config-away", "log-away")
def suggestions(caller: CallerDependency, query: InQuery[schemas.SuggestionsQuery]) -> Any:
    """Limits that reach a goal, derived from the requests of the last days in the decision log, with their reasons.
    Nothing is applied."""
    return caller.service.suggestions.suggest(caller.actor, query.goal, days=query.days)


@_get("/scripts", view_model(models.ScriptStatus))
def scripts(caller: CallerDependency) -> Any:
    """The last rollout of scripts, and the nodes with their versions."""
    return caller.service.scripts.status()


@_get("/regions", view_model(RegionOverview), "config-away")
def regions(caller: CallerDependency) -> Any:
    """The state of all regions, read from their stores, and the limits that they share."""
    return caller.service.regions.overview(caller.actor)


@_get("/ledger/accounts", list_model(AccountRow), "not-found", "ledger-away")
def accounts(caller: CallerDependency, query: InQuery[schemas.ClientsQuery]) -> Any:
    """The accounts of the ledger whose names begin with `search`, in alphabetical order."""
    return caller.service.ledger.list(search=query.search, after=query.after, most=query.most)


@_get("/ledger/account", view_model(AccountView), "not-found", "ledger-away")
def account(caller: CallerDependency, query: InQuery[schemas.AccountQuery]) -> Any:
    """An account: its totals, its open grants in the order in which they are spent, when it is used up, and the
    thresholds of its allowance that it has reached."""
    return caller.service.ledger.account(query.account)


@_get("/ledger/statement", view_model(Statement), "not-found", "ledger-away")
def statement(caller: CallerDependency, query: InQuery[schemas.StatementQuery]) -> Any:
    """The statement of an account for a period: the sums, each day, and the first lines."""
    since_us, until_us = microseconds(query.since), microseconds(query.until)
    zone = _parse_zone(query.zone)
    return caller.service.ledger.statement(query.account, since_us, until_us, zone=zone, most=query.most)


@_get("/versions", list_model(schemas.VersionModel, cursor=int), has_etag=True)
def versions(caller: CallerDependency, query: InQuery[schemas.VersionsQuery]) -> Any:
    """The versions of the configuration, newest first; give the last one as `before` to continue."""
    found = caller.service.policy.versions(**dict(query))
    items = [each._replace(what=caller.service.clients.insert_names(each.what))._asdict() for each in found]
    for item in items:
        item["version"] = item.pop("number")
        del item["ids"]
    return {"items": items, "next": found[-1].number if len(found) == query.most and found[-1].number > 1 else None}


@_get("/versions/{number}/diff", list_model(schemas.DifferenceModel), "not-found", has_etag=True)
def diff(caller: CallerDependency, number: schemas.Number, query: InQuery[schemas.DiffQuery]) -> Any:
    """The differences from the previous version, or from another one."""
    items: list[dict[str, Any]] = []
    for each in caller.service.policy.diff(number - 1 if query.against is None else query.against, number):
        what, lines = each.what, each.lines
        if len(items) < MAX_NAMED and each.section not in ("documents", "canaries"):
            insert_names = caller.service.clients.insert_names
            what, lines = insert_names(what), [insert_names(line) for line in lines]
        items.append({"section": each.section, "id": each.id, "what": what, "lines": lines})
    return items


@_get("/audit", list_model(models.AuditEntry))
def audit(caller: CallerDependency, query: InQuery[schemas.AuditQuery]) -> Any:
    """The audit log, newest first: changes, resets, tokens and sign-ins."""
    caller.service.refuse_keys(query.search, query.author or "")
    page = caller.service.audit.list(**dict(query))
    insert_names = caller.service.clients.insert_names
    items = [replace(each, what=insert_names(each.what), about=insert_names(each.about)) for each in page.items]
    return replace(page, items=tuple(items))


@_get("/tokens", list_model(schemas.TokenModel), "role-too-low")
def tokens(caller: CallerDependency) -> Any:
    """All tokens, newest first, without their secrets."""
    caller.actor.require("admin", "see the tokens")
    now_us = caller.parts.tokens.clock.now_us()
    return [{**each._asdict(), "state": each.state(now_us)} for each in caller.parts.tokens.list()]


def _parse_zone(text: str) -> ZoneInfo:
    try:
        return ZoneInfo(text)
    except (ValueError, OSError, KeyError):
        raise InvalidInput("zone: unknown time zone; write it like Europe/Berlin") from None
