"""Tokens, for admins."""

import json
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints

from headgate.control.admin.api import schemas
from headgate.control.admin.api.dependencies import Asking, Write, WriteAnswer, answer
from headgate.control.admin.api.reads import ALWAYS
from headgate.control.admin.api.response_models import listed
from headgate.control.admin.api.writes import REPEATABLE
from headgate.control.admin.idempotency import RecordedResponse
from headgate.control.admin.problems import answers
from headgate.control.admin.tokens import Token
from headgate.control.service.models import Role

__all__ = ["router"]

router: Final = APIRouter(responses=answers(*ALWAYS, "role-too-low"))

_WRITES: Final = answers(*ALWAYS, "key-reused", "in-progress", "outcome-unknown")


class TokenModel(BaseModel):
    """What is known of a token."""

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


class MadeModel(TokenModel):
    """A token that was just made."""

    token: str | None
    """The token itself, which is told only now; null in an answer that is told again."""


@router.get("/tokens", response_model=None, responses={200: {"model": listed(TokenModel)}})
def tokens(caller: Asking) -> JSONResponse:
    """All tokens, the newest first; not the tokens themselves, which nobody knows but who has them."""
    caller.actor.require("admin", "see the tokens")
    now_us = caller.parts.tokens.clock.now_us()
    return answer({"items": [_shown(each, now_us) for each in caller.parts.tokens.list()], "next": None})


@router.post("/tokens", response_model=None, responses={**_WRITES, 200: {"model": MadeModel, "headers": REPEATABLE}})
def make_token(write: Write, body: schemas.TokenBody) -> Response:
    """Make a token for a person or a program. It is in this answer, and nowhere else."""
    write.actor.require("admin", "make tokens")

    def made() -> RecordedResponse:
        write.service.refuse_keys(body.name)
        token, text = write.tokens.make(body.name, body.role, by=write.actor.name, days=body.days)
        write.service.audit.record(write.actor, "made token", f"{token.name} ({token.role}, {token.id})")
        return RecordedResponse(200, json.dumps({**_shown(token, token.made_us), "token": text}))

    def without_token(answered: RecordedResponse) -> RecordedResponse:
        return answered._replace(body=json.dumps({**json.loads(answered.body), "token": None}))

    return write.answered(made, kept=without_token)


@router.delete(
    "/tokens/{id}",
    response_model=None,
    responses={**_WRITES, **answers("not-found"), 200: {"model": WriteAnswer, "headers": REPEATABLE}},
)
def revoke_token(write: Write, id: Annotated[str, Path(), StringConstraints(pattern=r"^[0-9a-z]{1,20}$")]) -> Response:
    """End a token, and all sessions that began with it, at once."""
    write.actor.require("admin", "revoke tokens")

    def revoked() -> RecordedResponse:
        token = write.tokens.revoke(id, by=write.actor.name)
        write.service.audit.record(write.actor, "revoked token", f"{token.name} ({token.role}, {token.id})")
        told: dict[str, Any] = {"version": None, "notes": [], "what": f"revoked token {token.name}", "ids": []}
        return RecordedResponse(200, json.dumps(told))

    return write.answered(revoked)


def _shown(token: Token, now_us: int) -> dict[str, Any]:
    return {**token._asdict(), "state": token.state(now_us)}
