"""What can be changed. The desk says who may, and what is dangerous."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import REASON_FIELD, Said, Write, WriteAnswer, meant
from headgate.control.admin.api.reads import ALWAYS
from headgate.control.admin.problems import ProblemDetails, RequestRejected, answers
from headgate.errors import InvalidInput

__all__ = ["REPEATABLE", "router"]

REPEATABLE: Final = {
    "Idempotency-Replayed": {
        "description": "The request was done before; this is the answer from then",
        "schema": {"type": "string", "enum": ["true"]},
    }
}
ETAG: Final = {"ETag": {"description": "The version that it made", "schema": {"type": "string"}}}

router: Final = APIRouter(
    responses={
        **answers(
            *ALWAYS, "role-too-low", "not-found", "confirmation-needed", "in-progress", "outcome-unknown",
            "changed-meanwhile", "key-reused", "store-away",
        ),
        200: {"model": WriteAnswer, "headers": {**REPEATABLE, **ETAG}},
    }
)  # fmt: skip


def _signed(
    said: schemas.AttributedBody | schemas.RemovalBody, write: Write, apart: str | None = None
) -> dict[str, Any]:
    reason = said.reason if apart is None else apart
    if reason is None:
        told = f"reason: say it in the header field {REASON_FIELD}, or in the query"
        raise RequestRejected(ProblemDetails("invalid", told, {"problems": [told]}))
    return {"reason": reason, "confirm": tuple(said.confirm), "based_on": write.based_on}


# ------------------------------------------------------------------ one client


@router.post("/client/reset", response_model=None)
def reset(write: Write, body: schemas.ResetBody) -> Response:
    """Forget what a client has used: of all limits that count it by itself, or of those that are named."""
    return write.done(
        lambda: write.desk.reset(write.actor, meant(write.desk, body.who.who()), limits=body.limits, reason=body.reason)
    )


@router.put("/client/tier", response_model=None)
def assign(write: Write, body: schemas.TierBody) -> Response:
    """Put a client into a tier, and perhaps give it a label."""
    return write.done(
        lambda: write.desk.assign(
            write.actor, meant(write.desk, body.who.who()), body.tier, label=body.label, **_signed(body, write)
        )
    )


@router.delete("/client/tier", response_model=None)
def unassign(write: Write, query: Annotated[schemas.TierRemovalQuery, Query()], said: Said) -> Response:
    """Let the policy say again in which tier a client is."""
    return write.done(
        lambda: write.desk.unassign(write.actor, meant(write.desk, query.who()), **_signed(query, write, said))
    )


@router.post("/overrides", response_model=None)
def add_override(write: Write, body: schemas.OverrideBody) -> Response:
    """Give a client other numbers, perhaps for a time."""
    return write.done(
        lambda: write.desk.add_override(
            write.actor, meant(write.desk, body.who.who()), body.bucket, **_numbers(body), **_signed(body, write)
        )
    )


@router.put("/overrides/{id}", response_model=None)
def change_override(write: Write, id: Annotated[schemas.Number, Path()], body: schemas.ChangeBody) -> Response:
    """Put another override of the same client in the place of one."""
    return write.done(
        lambda: write.desk.change_override(
            write.actor, _same_client(write, id, body), body.bucket, **_numbers(body), **_signed(body, write)
        )
    )


@router.delete("/overrides/{id}", response_model=None)
def remove_override(
    write: Write, id: Annotated[schemas.Number, Path()], query: Annotated[schemas.RemovalQuery, Query()], said: Said
) -> Response:
    """Let a client have its usual numbers again."""
    return write.done(lambda: write.desk.remove_override(write.actor, id, **_signed(query, write, said)))


@router.post("/blocks", response_model=None)
def block(write: Write, body: schemas.BlockBody) -> Response:
    """Keep somebody out: at once, and in the configuration."""
    return write.done(
        lambda: write.desk.block(
            write.actor, meant(write.desk, body.who.who()), valid_until=body.valid_until, **_signed(body, write)
        )
    )


@router.delete("/blocks/{id}", response_model=None)
def unblock(
    write: Write, id: Annotated[schemas.Number, Path()], query: Annotated[schemas.RemovalQuery, Query()], said: Said
) -> Response:
    """Let somebody in again."""
    return write.done(lambda: write.desk.unblock(write.actor, id, **_signed(query, write, said)))


@router.delete("/blocks", response_model=None)
def unblock_client(write: Write, query: Annotated[schemas.TierRemovalQuery, Query()], said: Said) -> Response:
    """Let a client in again, whatever blocked it: a row of the configuration, or what was told to the nodes alone."""
    return write.done(
        lambda: write.desk.unblock(write.actor, meant(write.desk, query.who()), **_signed(query, write, said))
    )


# ------------------------------------------------------------------ the policy


@router.put("/tiers/{tier}/{limit:path}", response_model=None)
def set_tier(
    write: Write,
    tier: Annotated[schemas.Name, Path()],
    limit: Annotated[schemas.Name, Path()],
    body: schemas.TierNumbersBody,
) -> Response:
    """Give the clients of a tier other numbers on a limit."""
    return write.done(lambda: write.desk.set_tier(write.actor, tier, limit, body.bucket, **_signed(body, write)))


@router.delete("/tiers/{tier}/{limit:path}", response_model=None)
def remove_tier(
    write: Write,
    tier: Annotated[schemas.Name, Path()],
    limit: Annotated[schemas.Name, Path()],
    query: Annotated[schemas.RemovalQuery, Query()],
    said: Said,
) -> Response:
    """Let the policy document say the numbers of a tier again."""
    return write.done(lambda: write.desk.remove_tier(write.actor, tier, limit, **_signed(query, write, said)))


@router.put("/routes", response_model=None)
def set_route(write: Write, body: schemas.RouteBody) -> Response:
    """Say what a request to a route costs, and of which class the route is."""
    return write.done(
        lambda: write.desk.set_route(
            write.actor, body.path, body.cost, route_class=body.route_class, **_signed(body, write)
        )
    )


@router.delete("/routes", response_model=None)
def remove_route(write: Write, query: Annotated[schemas.RouteRemovalQuery, Query()], said: Said) -> Response:
    """Let the policy document say again what a route is."""
    return write.done(lambda: write.desk.remove_route(write.actor, query.path, **_signed(query, write, said)))


@router.put("/policy", response_model=None, responses=answers("if-match-needed"))
def put_policy(write: Write, body: schemas.PolicyBody) -> Response:
    """Take another policy document. If-Match says which version it was made from."""
    write.must_be_based()
    return write.done(lambda: write.desk.put_policy(write.actor, body.text, file=body.file, **_signed(body, write)))


@router.post("/versions/{number}/restore", response_model=None)
def restore(write: Write, number: Annotated[schemas.Number, Path()], body: schemas.RestoreBody) -> Response:
    """Make everything as it was at a version, or only some sections of it."""
    return write.done(lambda: write.desk.rollback(write.actor, number, sections=body.sections, **_signed(body, write)))


def _same_client(write: Write, id: int, body: schemas.ChangeBody) -> int:
    """The id of an override, if it is of the client that was said; who changes another's has mistaken the id."""
    if body.who is not None:
        write.must_be("support", "change overrides")
        if meant(write.desk, body.who.who()) != write.desk.override(id).who:
            raise InvalidInput(f"who: override {id} is of another client; add one for this client, and remove that")
    return id


def _numbers(body: schemas.ChangeBody) -> dict[str, Any]:
    return {
        "limit": body.limit,
        "route_class": body.route_class,
        "valid_from": body.valid_from,
        "valid_until": body.valid_until,
    }
