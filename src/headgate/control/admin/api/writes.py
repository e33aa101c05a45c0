"""Endpoints that change something. The services check roles and risks."""

import json
from collections.abc import Callable
from functools import partial, wraps
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Path
from fastapi.responses import Response
from pydantic import StringConstraints

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import ChangeRequest, HeaderReason, InQuery, Write
from headgate.control.admin.api.reads import COMMON_PROBLEMS
from headgate.control.admin.api.schemas import CreatedTokenModel, WriteAnswer
from headgate.control.admin.idempotency import RecordedResponse
from headgate.control.admin.problems import problem_responses
from headgate.control.service import Change
from headgate.errors import InvalidInput

__all__ = ["router", "token_router"]

REPEATABLE: Final = {
    "Idempotency-Replayed": {
        "description": "The request was carried out before; this is the recorded response",
        "schema": {"type": "string", "enum": ["true"]},
    }
}
ETAG: Final = {"ETag": {"description": "The version that the change created", "schema": {"type": "string"}}}

router: Final = APIRouter(
    responses={
        **problem_responses(
            *COMMON_PROBLEMS, "role-too-low", "not-found", "confirmation-needed", "in-progress", "outcome-unknown",
            "changed-meanwhile", "key-reused", "store-away",
        ),
        200: {"model": WriteAnswer, "headers": {**REPEATABLE, **ETAG}},
    }
)  # fmt: skip
token_router: Final = APIRouter(
    responses=problem_responses(*COMMON_PROBLEMS, "role-too-low", "key-reused", "in-progress", "outcome-unknown")
)

Handler = TypeVar("Handler", bound=Callable[..., Change])
Id = schemas.Number
Removal = InQuery[schemas.RemovalQuery]
ClientRemoval = InQuery[schemas.ClientRemovalQuery]


def _endpoint(method: str, path: str, *problems: str) -> Callable[[Handler], Handler]:
    """Register a function that makes a change as an endpoint that responds with its result."""

    def register(change: Handler) -> Handler:
        @wraps(change)
        def respond(write: ChangeRequest, **given: Any) -> Response:
            return write.run(partial(change, write, **given))

        responses = problem_responses(*problems)
        router.add_api_route(path, respond, methods=[method], response_model=None, responses=responses)
        return change

    return register


_delete, _post, _put = (partial(_endpoint, method) for method in ("DELETE", "POST", "PUT"))


@_post("/client/reset")
def reset(write: Write, body: schemas.ResetBody) -> Change:
    """Reset the client's own counters, of all limits or of those named."""
    return write.service.clients.reset(write.context(body), write.client(body.who), limits=body.limits)


@_put("/client/tier")
def assign(write: Write, body: schemas.TierBody) -> Change:
    """Assign a client to a tier, and optionally give it a label, a time zone and a first day of its periods."""
    return write.service.clients.assign_tier(
        write.context(body),
        write.client(body.who),
        body.tier,
        label=body.label,
        timezone=body.timezone,
        starts=body.starts,
    )


@_delete("/client/tier")
def unassign(write: Write, query: ClientRemoval, reason: HeaderReason) -> Change:
    """Remove a client's tier assignment: the policy decides its tier again."""
    return write.service.clients.unassign_tier(write.context(query, reason), write.client(query))


@_post("/overrides")
def add_override(write: Write, body: schemas.OverrideBody) -> Change:
    """Give a client a custom limit, optionally for a limited time."""
    return write.service.overrides.add(write.context(body), write.client(body.who), body.spec())


@_put("/overrides/{id}")
def change_override(write: Write, id: Id, body: schemas.ChangeBody) -> Change:
    """Replace an override with another one of the same client."""
    if body.who is not None:
        write.actor.require("support", "change overrides")
        if write.client(body.who) != write.service.overrides.get(id).who:
            raise InvalidInput(f"who: override {id} is of another client; add one for this client, and remove that")
    return write.service.overrides.change(write.context(body), id, body.spec())


@_delete("/overrides/{id}")
def remove_override(write: Write, id: Id, query: Removal, reason: HeaderReason) -> Change:
    """Remove an override: the usual limits of the client apply again."""
    return write.service.overrides.remove(write.context(query, reason), id)


@_post("/blocks")
def block(write: Write, body: schemas.BlockBody) -> Change:
    """Block a client, at once on all nodes and in the configuration."""
    return write.service.blocks.add(write.context(body), write.client(body.who), valid_until=body.valid_until)


@_delete("/blocks/{id}")
def unblock(write: Write, id: Id, query: Removal, reason: HeaderReason) -> Change:
    """Remove a block."""
    return write.service.blocks.remove(write.context(query, reason), id)


@_delete("/blocks")
def unblock_client(write: Write, query: ClientRemoval, reason: HeaderReason) -> Change:
    """Remove all blocks of a client, in the configuration and live on the nodes."""
    return write.service.blocks.remove(write.context(query, reason), write.client(query))


@_delete("/actions/{id}")
def undo_action(write: Write, id: schemas.ActionId, query: Removal, reason: HeaderReason) -> Change:
    """End an action of a scenario on all nodes. The scenario does not act on the client again in the grace time."""
    return write.service.actions.undo(write.context(query, reason), id)


@_put("/tiers/{tier}/{limit:path}")
def set_tier(write: Write, tier: schemas.Name, limit: schemas.Name, body: schemas.TierNumbersBody) -> Change:
    """Set the rate of a limit for the clients of a tier."""
    return write.service.policy.set_tier(write.context(body), tier, limit, body.bucket)


@_delete("/tiers/{tier}/{limit:path}")
def remove_tier(write: Write, tier: schemas.Name, limit: schemas.Name, query: Removal, reason: HeaderReason) -> Change:
    """Remove a tier's rate from the table: the policy document applies again."""
    return write.service.policy.remove_tier(write.context(query, reason), tier, limit)


@_put("/routes")
def set_route(write: Write, body: schemas.RouteBody) -> Change:
    """Set the cost and the class of a route."""
    return write.service.policy.set_route(write.context(body), body.path, body.cost, route_class=body.route_class)


@_delete("/routes")
def remove_route(write: Write, query: InQuery[schemas.RouteRemovalQuery], reason: HeaderReason) -> Change:
    """Remove a route from the table: the policy document applies again."""
    return write.service.policy.remove_route(write.context(query, reason), query.path)


@_put("/policy", "if-match-needed")
def put_policy(write: Write, body: schemas.PolicyBody) -> Change:
    """Replace the policy document. If-Match is the version that it was edited from."""
    write.require_if_match()
    return write.service.policy.put(write.context(body), body.text, file=body.file)


@_post("/policy/canary", "if-match-needed")
def start_canary(write: Write, body: schemas.CanaryBody) -> Change:
    """Apply a policy document on a share of the nodes, or on named ones, until it is promoted or rolled back. If-Match
    is the version that it was edited from."""
    write.require_if_match()
    return write.service.canaries.start(write.context(body), body.text, body.spec(), file=body.file)


@_post("/policy/canary/promote")
def promote_canary(write: Write, body: schemas.EndCanaryBody) -> Change:
    """Make the candidate of the running canary the policy document of all nodes."""
    return write.service.canaries.promote(write.context(body))


@_post("/policy/canary/rollback")
def rollback_canary(write: Write, body: schemas.EndCanaryBody) -> Change:
    """End the running canary: its nodes apply the policy document again."""
    return write.service.canaries.rollback(write.context(body))


@_post("/scripts/promote")
def promote_scripts(write: Write, body: schemas.EndCanaryBody) -> Change:
    """Let all nodes use the candidate of the rollout of scripts."""
    return write.service.scripts.promote(write.context(body))


@_post("/scripts/rollback")
def rollback_scripts(write: Write, body: schemas.EndCanaryBody) -> Change:
    """End the rollout of scripts: all nodes use the scripts of their library."""
    return write.service.scripts.rollback(write.context(body))


@_post("/versions/{number}/restore")
def restore(write: Write, number: schemas.Number, body: schemas.RestoreBody) -> Change:
    """Roll back to a version: the whole configuration, or some sections of it."""
    return write.service.policy.rollback(write.context(body), number, sections=body.sections)


@_post("/ledger/grants", "ledger-away")
def grant(write: Write, body: schemas.GrantBody) -> Change:
    """Add units to the balance of an account. The first grant creates the account."""
    return write.service.ledger.grant(
        write.context(body), body.account, body.amount, id=body.id, expires_at=body.expires_at,
        priority=body.priority, source=body.source, reference=body.reference,
    )  # fmt: skip


@_post("/ledger/adjustments", "ledger-away")
def adjust(write: Write, body: schemas.AdjustmentBody) -> Change:
    """Correct the balance of an account, up or down, but not below 0."""
    return write.service.ledger.adjust(
        write.context(body), body.account, body.amount, id=body.id, reference=body.reference
    )


@token_router.post("/tokens", responses={200: {"model": CreatedTokenModel, "headers": REPEATABLE}})
def make_token(write: Write, body: schemas.TokenBody) -> Response:
    """Create a token for a person or a program. It is returned in this response only."""
    write.actor.require("admin", "make tokens")

    def create() -> RecordedResponse:
        write.service.refuse_keys(body.name)
        token, text = write.tokens.make(body.name, body.role, by=write.actor.name, days=body.days)
        write.service.audit.record(write.actor, "made token", f"{token.name} ({token.role}, {token.id})")
        state = token.state(token.made_us)
        return RecordedResponse(200, json.dumps({**token._asdict(), "state": state, "token": text}))

    def without_token(response: RecordedResponse) -> RecordedResponse:
        return response._replace(body=json.dumps({**json.loads(response.body), "token": None}))

    return write.respond(create, redact=without_token)


@token_router.delete(
    "/tokens/{id}", responses={**problem_responses("not-found"), 200: {"model": WriteAnswer, "headers": REPEATABLE}}
)
def revoke_token(write: Write, id: Annotated[str, Path(), StringConstraints(pattern=r"^[0-9a-z]{1,20}$")]) -> Response:
    """Revoke a token, and end all sessions that were started with it."""
    write.actor.require("admin", "revoke tokens")

    def revoke() -> Change:
        token = write.tokens.revoke(id, by=write.actor.name)
        write.service.audit.record(write.actor, "revoked token", f"{token.name} ({token.role}, {token.id})")
        return Change(None, what=f"revoked token {token.name}")

    return write.run(revoke)
