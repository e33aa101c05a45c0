"""What went wrong, as programs are told (RFC 9457): the one place that turns errors into statuses."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from headgate.control.admin.sessions import FormRefused
from headgate.control.config import ConfigUnavailable, Conflict
from headgate.control.service.errors import LogUnavailable, NeedsConfirmation, NotAllowed, NotFound
from headgate.errors import HeadgateError, InvalidInput, InvalidPolicy, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "MEDIA_TYPE",
    "ProblemDetails",
    "ProblemModel",
    "RequestRejected",
    "RiskModel",
    "answers",
    "of_error",
    "of_fields",
    "too_many_failures",
]

logger = logging.getLogger("headgate")

MEDIA_TYPE: Final = "application/problem+json"

TITLES: Final = {
    "bad-request": (400, "This is no request that can be read"),
    "token-needed": (401, "A token is needed"),
    "role-too-low": (403, "Your role does not allow this"),
    "form-refused": (403, "The form was refused"),
    "not-found": (404, "Not found"),
    "wrong-method": (405, "This can't be done here"),
    "too-slow": (408, "Request Timeout"),
    "confirmation-needed": (409, "This needs a confirmation"),
    "in-progress": (409, "The same request is at work"),
    "outcome-unknown": (409, "Nobody knows what became of this request"),
    "changed-meanwhile": (412, "It has changed meanwhile"),
    "too-large": (413, "Content Too Large"),
    "invalid": (422, "This can't be done"),
    "key-reused": (422, "The Idempotency-Key belongs to another request"),
    "if-match-needed": (428, "If-Match is needed"),
    "too-many-failures": (429, "Too many failed attempts"),
    "failed": (500, "The server has failed"),
    "config-away": (503, "The config store is away"),
    "log-away": (503, "The decision log is away"),
    "store-away": (503, "The store is away"),
}
"""The types of problems, with their statuses and titles. They are part of the API."""


class RiskModel(BaseModel):
    code: str = Field(description="What to put into `confirm`", examples=["ten-times"])
    text: str = Field(description="What it would do, in words")


class ProblemModel(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="allow", title="ProblemDetails")

    type: str = Field(description="For programs", examples=["changed-meanwhile"])
    title: str
    status: int
    detail: str = Field(description="For people: what is wrong, and what helps")
    dangers: list[RiskModel] | None = Field(None, description="With confirmation-needed: what to confirm")
    problems: list[str] | None = Field(None, description="With invalid: everything that is wrong")
    version: int | None = Field(None, description="With changed-meanwhile: the version to look at now")


class ProblemDetails(NamedTuple):
    """A problem, before it is known whether a program or a person is told."""

    type: str
    detail: str
    more: Mapping[str, Any] = {}
    headers: Mapping[str, str] = {}

    @property
    def status(self) -> int:
        return TITLES[self.type][0]

    @property
    def title(self) -> str:
        return TITLES[self.type][1]

    def response(self) -> Response:
        """The problem for programs."""
        members = {"type": self.type, "title": self.title, "status": self.status, "detail": self.detail, **self.more}
        return Response(
            json.dumps(members),
            self.status,
            headers={**self.headers, "Cache-Control": "no-store"},
            media_type=MEDIA_TYPE,
        )


class RequestRejected(HeadgateError):
    """A request that is refused before the service hears of it."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def of_error(error: HeadgateError) -> ProblemDetails:
    """What to tell of an error. What it says reaches people who may know: it holds no secret, nor where stores are."""
    for kind, told in _TOLD:
        if isinstance(error, kind):
            return told(error)
    logger.error("the admin server has no answer for %s", type(error).__name__, exc_info=error)
    return ProblemDetails("failed", "The server's log says more.")


def of_fields(errors: Sequence[Any]) -> ProblemDetails:
    """What to tell of fields that are missing, unknown or wrong: where and what, and never the value itself."""
    problems = [f"{_place(each)}: {_complaint(each)}" for each in errors[:20]]
    if any(each["type"] == "json_invalid" for each in errors):
        problems = ["body: it is not JSON"]
    return ProblemDetails("invalid", "; ".join(problems), {"problems": problems})


def too_many_failures(wait: int) -> ProblemDetails:
    """The problem for an address with too many failed attempts; valid tokens are accepted all the same."""
    seconds = f"{wait} second{'' if wait == 1 else 's'}"
    detail = f"Too many attempts from this address without a valid token. Try again in {seconds}."
    return ProblemDetails("too-many-failures", detail, headers={"Retry-After": f"{wait}"})


def answers(*types: str) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of these types of problems."""
    by_status: dict[int, list[str]] = {}
    for name in types:
        by_status.setdefault(TITLES[name][0] if name in TITLES else 429, []).append(name)
    return {
        status: {
            "description": "; ".join(f"`{name}`: {TITLES[name][1]}" if name in TITLES else name for name in names),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status, names in by_status.items()
    }


def _unavailable(error: Any) -> ProblemDetails:
    logger.warning("the admin server could not ask: %s", error)
    return ProblemDetails(
        "config-away",
        "The config store cannot be reached, or it refused. Nodes go on with what they have. "
        "The log of this server says why.",
        headers={"Retry-After": "5"},
    )


def _log(error: Any) -> ProblemDetails:
    logger.warning("the admin server could not read the decision log: %s", error)
    detail = "The decision log cannot be read now. The server's log says why."
    return ProblemDetails("log-away", detail, headers={"Retry-After": "5"})


def _store(error: Any) -> ProblemDetails:
    logger.warning("the admin server could not ask: %s", error)
    return ProblemDetails(
        "store-away", "The counters cannot be reached. The server's log says why.", headers={"Retry-After": "5"}
    )


def _dangerous(error: Any) -> ProblemDetails:
    dangers = [{"code": each.code, "text": each.text} for each in error.risks]
    codes = ", ".join(f'"{each["code"]}"' for each in dangers)
    return ProblemDetails(
        "confirmation-needed",
        f"{' '.join(each['text'] for each in dangers)} To do it all the same, send confirm: [{codes}].",
        {"dangers": dangers},
    )


def _invalid(error: Any) -> ProblemDetails:
    problems = list(error.problems) if isinstance(error, InvalidPolicy) else [str(error)]
    return ProblemDetails("invalid", str(error), {"problems": problems})


_TOLD: Final[tuple[tuple[type[HeadgateError], Callable[[Any], ProblemDetails]], ...]] = (
    (RequestRejected, lambda error: error.problem),
    (NeedsConfirmation, _dangerous),
    (Conflict, lambda error: ProblemDetails("changed-meanwhile", str(error), {"version": error.version})),
    (NotAllowed, lambda error: ProblemDetails("role-too-low", str(error))),
    (NotFound, lambda error: ProblemDetails("not-found", str(error))),
    (FormRefused, lambda error: ProblemDetails("form-refused", str(error))),
    (InvalidInput, _invalid),
    (ConfigUnavailable, _unavailable),
    (LogUnavailable, _log),
    (StoreError, _store),
)
"""Read from the top; the first that fits."""

_FIELD: Final = re.compile(r"[A-Za-z_-]{1,40}")
_UNKNOWN: Final = re.compile(r"[a-z_]{1,20}")


def _place(error: Any) -> str:
    """Where it is. A name that nobody knows is only told if it can be a field's: it may be a value in a wrong place."""
    *words, last = (str(word) for word in error["loc"])
    form = _UNKNOWN if error["type"] == "extra_forbidden" else _FIELD
    shown = [word for word in words if _FIELD.fullmatch(word) or word.isdigit()]
    return ".".join([*shown, last if form.fullmatch(last) or last.isdigit() else "?"])


def _complaint(error: Any) -> str:
    match error["type"]:
        case "missing":
            return "it is needed"
        case "extra_forbidden":
            return "there is no such field"
        case "string_pattern_mismatch" if error["ctx"]["pattern"].startswith("^[^\\x00"):
            return "it has control characters, or a line break"
    text = str(error["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
