"""Endpoints for tokens, for admins."""

import json
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import CallerDependency, Write, WriteAnswer, answer
from headgate.control.admin.api.reads import COMMON_PROBLEMS
from headgate.control.admin.api.response_models import list_model
from headgate.control.admin.api.writes import REPEATABLE
from headgate.control.admin.idempotency import RecordedResponse
from headgate.control.admin.problems import problem_responses
from headgate.control.admin.tokens import Token
from headgate.control.service.models import Role

__all__ = ["router"]

router: Final = APIRouter(responses=problem_responses(*COMMON_PROBLEMS, "role-too-low"))

_WRITES: Final = problem_responses(*COMMON_PROBLEMS, "key-reused", "in-progress", "outcome-unknown")


class TokenModel(BaseModel):
    """A token without its secret."""

    model_config = ConfigDict(extra="forbid")

    id: str
    name: str
    role: Role
    made_us: int
    made_by: str
    expires_us: int
    used_us: int | None
    revoked_us: int | None
    revoked_by: str | None
    state: Literal["active", "expired", "revoked"]


class CreatedTokenModel(TokenModel):
    """A new token."""

    token: str | None
    """The token itself, which is returned only once; null in a replayed response."""


@router.get("/tokens", response_model=None, responses={200: {"model": list_model(TokenModel)}})
def tokens(caller: CallerDependency) -> JSONResponse:
    """All tokens, newest first, without their secrets."""
    caller.actor.require("admin", "see the tokens")
    now_us = caller.parts.tokens.clock.now_us()
    return answer({"items": [_to_json(each, now_us) for each in caller.parts.tokens.list()], "next": None})


@router.post(
    "/tokens", response_model=None, responses={**_WRITES, 200: {"model": CreatedTokenModel, "headers": REPEATABLE}}
)
def make_token(write: Write, body: schemas.TokenBody) -> Response:
    """Create a token for a person or a program. It is returned in this response only."""
    write.actor.require("admin", "make tokens")

    def create() -> RecordedResponse:
        write.service.refuse_keys(body.name)
        token, text = write.tokens.make(body.name, body.role, by=write.actor.name, days=body.days)
        write.service.audit.record(write.actor, "made token", f"{token.name} ({token.role}, {token.id})")
        return RecordedResponse(200, json.dumps({**_to_json(token, token.made_us), "token": text}))

    def without_token(response: RecordedResponse) -> RecordedResponse:
        return response._replace(body=json.dumps({**json.loads(response.body), "token": None}))

    return write.respond(create, redact=without_token)


@router.delete(
    "/tokens/{id}",
    response_model=None,
    responses={**_WRITES, **problem_responses("not-found"), 200: {"model": WriteAnswer, "headers": REPEATABLE}},
)
def revoke_token(write: Write, id: Annotated[str, Path(), StringConstraints(pattern=r"^[0-9a-z]{1,20}$")]) -> Response:
    """Revoke a token, and end all sessions that were started with it."""
    write.actor.require("admin", "revoke tokens")

    def revoke() -> RecordedResponse:
        token = write.tokens.revoke(id, by=write.actor.name)
        write.service.audit.record(write.actor, "revoked token", f"{token.name} ({token.role}, {token.id})")
        body: dict[str, Any] = {"version": None, "notes": [], "what": f"revoked token {token.name}", "ids": []}
        return RecordedResponse(200, json.dumps(body))

    return write.respond(revoke)


def _to_json(token: Token, now_us: int) -> dict[str, Any]:
    return {**token._asdict(), "state": token.state(now_us)}
