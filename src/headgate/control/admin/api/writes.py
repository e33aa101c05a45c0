"""Endpoints that change something. The services check roles and risks."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import HeaderReason, Write, WriteAnswer
from headgate.control.admin.api.reads import COMMON_PROBLEMS
from headgate.control.admin.problems import problem_responses
from headgate.control.service import Change
from headgate.errors import InvalidInput

__all__ = ["REPEATABLE", "router"]

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


# ------------------------------------------------------------------ clients


@router.post("/client/reset", response_model=None)
def reset(write: Write, body: schemas.ResetBody) -> Response:
    """Reset the client's own counters, of all limits or of those named."""
    return write.run(
        lambda: write.service.clients.reset(write.context(body), write.client(body.who), limits=body.limits)
    )


@router.put("/client/tier", response_model=None)
def assign(write: Write, body: schemas.TierBody) -> Response:
    """Assign a client to a tier, and optionally label it."""
    return write.run(
        lambda: write.service.clients.assign_tier(
            write.context(body), write.client(body.who), body.tier, label=body.label
        )
    )


@router.delete("/client/tier", response_model=None)
def unassign(write: Write, query: Annotated[schemas.TierRemovalQuery, Query()], reason: HeaderReason) -> Response:
    """Remove a client's tier assignment: the policy decides its tier again."""
    return write.run(lambda: write.service.clients.unassign_tier(write.context(query, reason), write.client(query)))


@router.post("/overrides", response_model=None)
def add_override(write: Write, body: schemas.OverrideBody) -> Response:
    """Give a client a custom limit, optionally for a limited time."""
    return write.run(lambda: write.service.overrides.add(write.context(body), write.client(body.who), body.spec()))


@router.put("/overrides/{id}", response_model=None)
def change_override(write: Write, id: Annotated[schemas.Number, Path()], body: schemas.ChangeBody) -> Response:
    """Replace an override with another one of the same client."""

    def change() -> Change:
        if body.who is not None:
            write.actor.require("support", "change overrides")
            if write.client(body.who) != write.service.overrides.get(id).who:
                raise InvalidInput(f"who: override {id} is of another client; add one for this client, and remove that")
        return write.service.overrides.change(write.context(body), id, body.spec())

    return write.run(change)


@router.delete("/overrides/{id}", response_model=None)
def remove_override(
    write: Write,
    id: Annotated[schemas.Number, Path()],
    query: Annotated[schemas.RemovalQuery, Query()],
    reason: HeaderReason,
) -> Response:
    """Remove an override: the usual limits of the client apply again."""
    return write.run(lambda: write.service.overrides.remove(write.context(query, reason), id))


@router.post("/blocks", response_model=None)
def block(write: Write, body: schemas.BlockBody) -> Response:
    """Block a client, at once on all nodes and in the configuration."""
    return write.run(
        lambda: write.service.blocks.add(write.context(body), write.client(body.who), valid_until=body.valid_until)
    )


@router.delete("/blocks/{id}", response_model=None)
def unblock(
    write: Write,
    id: Annotated[schemas.Number, Path()],
    query: Annotated[schemas.RemovalQuery, Query()],
    reason: HeaderReason,
) -> Response:
    """Remove a block."""
    return write.run(lambda: write.service.blocks.remove(write.context(query, reason), id))


@router.delete("/blocks", response_model=None)
def unblock_client(write: Write, query: Annotated[schemas.TierRemovalQuery, Query()], reason: HeaderReason) -> Response:
    """Remove all blocks of a client, in the configuration and live on the nodes."""
    return write.run(lambda: write.service.blocks.remove(write.context(query, reason), write.client(query)))


# ------------------------------------------------------------------ policy


@router.put("/tiers/{tier}/{limit:path}", response_model=None)
def set_tier(
    write: Write,
    tier: Annotated[schemas.Name, Path()],
    limit: Annotated[schemas.Name, Path()],
    body: schemas.TierNumbersBody,
) -> Response:
    """Set the rate of a limit for the clients of a tier."""
    return write.run(lambda: write.service.policy.set_tier(write.context(body), tier, limit, body.bucket))


@router.delete("/tiers/{tier}/{limit:path}", response_model=None)
def remove_tier(
    write: Write,
    tier: Annotated[schemas.Name, Path()],
    limit: Annotated[schemas.Name, Path()],
    query: Annotated[schemas.RemovalQuery, Query()],
    reason: HeaderReason,
) -> Response:
    """Remove a tier's rate from the table: the policy document applies again."""
    return write.run(lambda: write.service.policy.remove_tier(write.context(query, reason), tier, limit))


@router.put("/routes", response_model=None)
def set_route(write: Write, body: schemas.RouteBody) -> Response:
    """Set the cost and the class of a route."""
    return write.run(
        lambda: write.service.policy.set_route(write.context(body), body.path, body.cost, route_class=body.route_class)
    )


@router.delete("/routes", response_model=None)
def remove_route(write: Write, query: Annotated[schemas.RouteRemovalQuery, Query()], reason: HeaderReason) -> Response:
    """Remove a route from the table: the policy document applies again."""
    return write.run(lambda: write.service.policy.remove_route(write.context(query, reason), query.path))


@router.put("/policy", response_model=None, responses=problem_responses("if-match-needed"))
def put_policy(write: Write, body: schemas.PolicyBody) -> Response:
    """Replace the policy document. If-Match is the version that it was edited from."""
    write.require_if_match()
    return write.run(lambda: write.service.policy.put(write.context(body), body.text, file=body.file))


@router.post("/versions/{number}/restore", response_model=None)
def restore(write: Write, number: Annotated[schemas.Number, Path()], body: schemas.RestoreBody) -> Response:
    """Roll back to a version: the whole configuration, or some sections of it."""
    return write.run(lambda: write.service.policy.rollback(write.context(body), number, sections=body.sections))
