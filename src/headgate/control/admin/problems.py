"""Problem details (RFC 9457): the mapping from errors to problem types, statuses and texts."""

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
from headgate.quotas import LedgerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "MEDIA_TYPE",
    "ProblemDetails",
    "ProblemModel",
    "RequestRejected",
    "RiskModel",
    "invalid",
    "of_error",
    "of_fields",
    "problem_responses",
    "too_many_failures",
]

logger = logging.getLogger("headgate")

MEDIA_TYPE: Final = "application/problem+json"
CONFIG_UNAVAILABLE: Final = "The config store is unavailable. Nodes keep their current configuration."

TITLES: Final = {
    "bad-request": (400, "The request cannot be parsed"),
    "token-needed": (401, "A token is required"),
    "role-too-low": (403, "Your role does not allow this"),
    "form-refused": (403, "The form was refused"),
    "not-found": (404, "Not found"),
    "wrong-method": (405, "Method not allowed"),
    "too-slow": (408, "Request Timeout"),
    "confirmation-needed": (409, "Confirmation required"),
    "in-progress": (409, "The same request is in progress"),
    "outcome-unknown": (409, "The outcome of this request is unknown"),
    "changed-meanwhile": (412, "Changed in the meantime"),
    "too-large": (413, "Content Too Large"),
    "too-long": (414, "URI Too Long"),
    "unknown-host": (421, "Misdirected Request"),
    "invalid": (422, "Invalid request"),
    "key-reused": (422, "The Idempotency-Key belongs to another request"),
    "if-match-needed": (428, "If-Match is required"),
    "too-many-failures": (429, "Too many failed attempts"),
    "failed": (500, "Internal server error"),
    "config-away": (503, "The config store is unavailable"),
    "log-away": (503, "The decision log is unavailable"),
    "ledger-away": (503, "The ledger is unavailable"),
    "store-away": (503, "The store is unavailable"),
}
"""Problem types with their statuses and titles. The types and statuses are part of the API."""


class RiskModel(BaseModel):
    code: str = Field(description="The code to send in `confirm`", examples=["ten-times"])
    text: str = Field(description="The effect of the change")


class ProblemModel(BaseModel):
    """Problem details of a failed request."""

    model_config = ConfigDict(extra="allow", title="Problem")

    type: str = Field(description="The problem type, for programs", examples=["changed-meanwhile"])
    title: str
    status: int
    detail: str = Field(description="The cause and the remedy, for people")
    dangers: list[RiskModel] | None = Field(None, description="With confirmation-needed: the risks to confirm")
    problems: list[str] | None = Field(None, description="With invalid: all errors")
    version: int | None = Field(None, description="With changed-meanwhile: the newest version")


class ProblemDetails(NamedTuple):
    """A problem, to be returned as JSON or shown as a page."""

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
        """The problem as JSON."""
        members = {"type": self.type, "title": self.title, "status": self.status, "detail": self.detail, **self.more}
        headers = {**self.headers, "Cache-Control": "no-store"}
        return Response(json.dumps(members), self.status, headers, MEDIA_TYPE)


class RequestRejected(HeadgateError):
    """A request that is rejected with a problem."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def invalid(message: str) -> RequestRejected:
    """The error for a request with one invalid field: "limit: it is required"."""
    return RequestRejected(ProblemDetails("invalid", message, {"problems": [message]}))


def of_error(error: HeadgateError) -> ProblemDetails:
    """The problem for an error, without secrets or addresses of stores."""
    for kind, to_problem in _PROBLEMS:
        if isinstance(error, kind):
            return to_problem(error)
    logger.error("unexpected %s in the admin server", type(error).__name__, exc_info=error)
    return ProblemDetails("failed", "See the server's log.")


def of_fields(errors: Sequence[Any]) -> ProblemDetails:
    """The problem for missing, unknown or invalid fields, without their values."""
    problems = [f"{_location(each)}: {_message(each)}" for each in errors[:20]]
    if any(each["type"] == "json_invalid" for each in errors):
        problems = ["body: it is not JSON"]
    return ProblemDetails("invalid", "; ".join(problems), {"problems": problems})


def too_many_failures(wait: int) -> ProblemDetails:
    """The problem for an address with too many failed attempts; valid tokens are still accepted."""
    seconds = f"{wait} second{'' if wait == 1 else 's'}"
    detail = f"Too many attempts from this address without a valid token. Try again in {seconds}."
    return ProblemDetails("too-many-failures", detail, headers={"Retry-After": f"{wait}"})


def problem_responses(*types: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses for problem types."""
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


def _unavailable(type: str, detail: str) -> Callable[[Any], ProblemDetails]:
    def to_problem(error: Any) -> ProblemDetails:
        logger.warning("%s: %s", TITLES[type][1], error)
        return ProblemDetails(type, f"{detail} See the server's log.", headers={"Retry-After": "5"})

    return to_problem


def _needs_confirmation(error: Any) -> ProblemDetails:
    risks = [{"code": each.code, "text": each.text} for each in error.risks]
    codes = ", ".join(f'"{each["code"]}"' for each in risks)
    detail = f"{' '.join(each['text'] for each in risks)} To do it anyway, send confirm: [{codes}]."
    return ProblemDetails("confirmation-needed", detail, {"dangers": risks})


def _invalid(error: Any) -> ProblemDetails:
    problems = list(error.problems) if isinstance(error, InvalidPolicy) else [str(error)]
    return ProblemDetails("invalid", str(error), {"problems": problems})


_PROBLEMS: Final[tuple[tuple[type[HeadgateError], Callable[[Any], ProblemDetails]], ...]] = (
    (RequestRejected, lambda error: error.problem),
    (NeedsConfirmation, _needs_confirmation),
    (Conflict, lambda error: ProblemDetails("changed-meanwhile", str(error), {"version": error.version})),
    (NotAllowed, lambda error: ProblemDetails("role-too-low", str(error))),
    (NotFound, lambda error: ProblemDetails("not-found", str(error))),
    (FormRefused, lambda error: ProblemDetails("form-refused", str(error))),
    (InvalidInput, _invalid),
    (ConfigUnavailable, _unavailable("config-away", CONFIG_UNAVAILABLE)),
    (LogUnavailable, _unavailable("log-away", "The decision log cannot be read.")),
    (LedgerUnavailable, _unavailable("ledger-away", "The ledger cannot be reached.")),
    (StoreError, _unavailable("store-away", "The counters are unavailable.")),
)
"""The first matching entry applies."""

_FIELD: Final = re.compile(r"[A-Za-z_-]{1,40}")
_UNKNOWN: Final = re.compile(r"[a-z_]{1,20}")


def _location(error: Any) -> str:
    """The path of a field. An unknown name is repeated only if it can be a field name: it may be a misplaced value."""
    *names, last = (str(name) for name in error["loc"])
    pattern = _UNKNOWN if error["type"] == "extra_forbidden" else _FIELD
    shown = [name for name in names if _FIELD.fullmatch(name) or name.isdigit()]
    return ".".join([*shown, last if pattern.fullmatch(last) or last.isdigit() else "?"])


def _message(error: Any) -> str:
    match error["type"]:
        case "missing":
            return "it is required"
        case "extra_forbidden":
            return "there is no such field"
        case "string_pattern_mismatch" if error["ctx"]["pattern"].startswith("^[^\\x00"):
            return "it contains control characters or a line break"
    text = str(error["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
