"""Who calls, and how a write is carried out: once, on the version that was looked at, and answered alike."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, TypeAdapter

from headgate.control.admin.api.schemas import AttributedBody, ClientFilter, Reason, RemovalBody, WhoBody
from headgate.control.admin.idempotency import IdempotencyStore, RecordedResponse, fingerprint
from headgate.control.admin.middleware import BODY, FAILED_TOKENS
from headgate.control.admin.problems import ProblemDetails, RequestRejected, too_many_failures
from headgate.control.admin.tokens import Token, Tokens
from headgate.control.service.errors import NotFound
from headgate.control.service.models import Actor, Change, ChangeContext, ClientRef
from headgate.control.service.redaction import may_be_key
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from headgate.control.service.service import AdminService

__all__ = [
    "REASON_FIELD",
    "Asking",
    "Caller",
    "ChangeRequest",
    "HeaderReason",
    "Parts",
    "Write",
    "WriteAnswer",
    "answer",
]

REASON_FIELD: Final = "Headgate-Reason"

LARGEST: Final = 2**53 - 1
"""What every reader of JSON can hold, and every database."""


class Parts(NamedTuple):
    """What endpoints are made of; `app.state.parts` holds it."""

    service: "AdminService"
    tokens: Tokens
    replays: IdempotencyStore


class Caller(NamedTuple):
    """Who has sent a request, and what they talk to."""

    parts: Parts
    token: Token
    secret: bytes

    def __repr__(self) -> str:
        return f"Caller({self.token.actor!r})"

    @property
    def actor(self) -> Actor:
        return self.token.actor

    @property
    def service(self) -> "AdminService":
        return self.parts.service

    def client(self, given: WhoBody | ClientFilter) -> ClientRef:
        """The client that a request names, in its canonical spelling. NotFound for a kind that no limit counts by.
        InvalidInput for a known API key given as another kind, which would be stored and shown as it is."""
        kind, value = given.ref()
        if kind != "api_key" and may_be_key(value):
            with suppress(NotFound):
                if self.service.clients.find(value).kind == "api_key":
                    raise InvalidInput("who: this is an API key; give it with the kind api_key")
        return self.service.clients.find(f"{kind}={value}")


_reason: Final[TypeAdapter[str]] = TypeAdapter(Reason)
_bearer: Final = HTTPBearer(
    auto_error=False, scheme_name="token", description="A token of this server: hg_<id>_<secret>. Each has a role."
)


def _caller(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Caller:
    parts: Parts = request.app.state.parts
    if request.url.query and not request.scope["route"].dependant.query_params:
        told = "query: nothing belongs there"
        raise RequestRejected(ProblemDetails("invalid", told, {"problems": [told]}))
    if credentials is None:
        raise RequestRejected(
            _failed(request, "Send the header field Authorization: Bearer hg_..., with a token of this server.")
        )
    token = parts.tokens.check(credentials.credentials)
    if token is None:
        raise RequestRejected(
            _failed(request, "This token is mistyped, expired or revoked. An admin can create a new one.")
        )
    return Caller(parts, token, credentials.credentials.encode())


Asking = Annotated[Caller, Depends(_caller)]


class WriteAnswer(BaseModel):
    """What a write has done."""

    model_config = ConfigDict(extra="forbid")

    version: int | None
    """The version that it made; null if all was so already, or if it changes no configuration."""
    notes: list[str]
    what: str
    ids: list[int]
    """Of the rows that were put or removed."""


class ChangeRequest:
    """A write that is asked for."""

    def __init__(
        self,
        request: Request,
        caller: Asking,
        if_match: Annotated[
            str | None,
            Header(description='The version that this change is based on, as ETag told it: `"12"`', max_length=40),
        ] = None,
        idempotency_key: Annotated[
            str | None,
            Header(
                description="Made up by the client: the same request with the same key is done once",
                pattern=r"^[!-~]{1,255}$",
            ),
        ] = None,
    ) -> None:
        self._request = request
        self._caller = caller
        self._key = idempotency_key
        self.service = caller.service
        self.tokens = caller.parts.tokens
        self.actor = caller.actor
        self.based_on = _version(if_match)
        """The version that was looked at; None for whatever holds now."""

    def context(self, given: AttributedBody | RemovalBody, header_reason: str | None = None) -> ChangeContext:
        """The attribution, confirmed risks and base version of the change."""
        reason = given.reason if header_reason is None else header_reason
        if reason is None:
            told = f"reason: say it in the header field {REASON_FIELD}, or in the query"
            raise RequestRejected(ProblemDetails("invalid", told, {"problems": [told]}))
        return ChangeContext(self.actor, reason, confirmed=tuple(given.confirm), based_on=self.based_on)

    def client(self, given: WhoBody | ClientFilter) -> ClientRef:
        return self._caller.client(given)

    def require_if_match(self) -> None:
        """Reject a request without If-Match, for content too large to overwrite without having read it."""
        if self.based_on is None:
            detail = (
                "Send If-Match with the ETag of GET /api/v1/policy, so that nobody's change is written over unseen."
            )
            raise RequestRejected(ProblemDetails("if-match-needed", detail))

    def run(self, work: Callable[[], Change]) -> Response:
        """Carry it out, and answer."""

        def changed() -> RecordedResponse:
            change = work()
            made = change.version
            told = {**change.as_dict(), "what": self.service.clients.insert_names(change.what)}
            body = {**told, "ids": [] if made is None else list(made.ids)}
            return RecordedResponse(200, json.dumps(body), None if made is None else made.number)

        return self.answered(changed)

    def answered(
        self,
        work: Callable[[], RecordedResponse],
        *,
        kept: Callable[[RecordedResponse], RecordedResponse] = lambda answered: answered,
    ) -> Response:
        """The same for what is no change of the configuration. `kept` is what may be kept of its answer."""
        if self._key is None:
            answered = work()
        else:
            scope = self._request.scope
            parts = (scope["method"], scope["path"]), (scope["query_string"], scope[BODY])
            reason = self._request.headers.get(REASON_FIELD, "").encode()
            same = [*(each.encode() for each in parts[0]), *parts[1], str(self.based_on).encode(), reason]
            answered = self._caller.parts.replays.once(
                self._caller.token.id,
                self._key,
                print=fingerprint(*same, secret=self._caller.secret),
                work=work,
                kept=kept,
            )
        headers = {} if answered.etag is None else {"ETag": f'"{answered.etag}"'}
        if answered.is_replayed:
            headers["Idempotency-Replayed"] = "true"
        return Response(answered.body, answered.status, headers, "application/json")


Write = Annotated[ChangeRequest, Depends()]


def _said(
    text: Annotated[
        str | None,
        Header(
            alias=REASON_FIELD,
            description="Why something is removed; letters beyond ASCII, and %, percent-encoded as in a URL",
            min_length=1,
            max_length=6000,
            pattern=r"^[ -~]+$",
        ),
    ] = None,
) -> str | None:
    if text is None:
        return None
    try:
        return _reason.validate_python(unquote(text, errors="strict").strip())
    except ValueError:
        told = f"{REASON_FIELD}: write 1 to 500 characters, in one line, and no API key among them"
        raise RequestRejected(ProblemDetails("invalid", told, {"problems": [told]})) from None


HeaderReason = Annotated[str | None, Depends(_said)]
"""The reason of a write that has no body, out of a header field: proxies keep addresses in their logs."""


def answer(value: Any, version: int | None = None) -> JSONResponse:
    """What was asked for; with the version of the configuration that it is of, if it is."""
    return JSONResponse(value, headers={} if version is None else {"ETag": f'"{version}"'})


def _failed(request: Request, detail: str) -> ProblemDetails:
    """Count a request without a valid token, and say what is wrong; or only to wait, after too many."""
    wait = request.app.state.failures.count(request.scope, FAILED_TOKENS)
    if wait is not None:
        return too_many_failures(wait)
    return ProblemDetails("token-needed", detail, headers={"WWW-Authenticate": 'Bearer realm="headgate"'})


def _version(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    match = re.fullmatch(r'\s*(?:"(\d{1,16})"|(\d{1,16}))\s*', if_match)
    number = int(match[1] or match[2]) if match else LARGEST + 1
    if number > LARGEST:
        told = 'If-Match: it is no version of this server; send one as ETag told it, like "12"'
        raise RequestRejected(ProblemDetails("invalid", told, {"problems": [told]}))
    return number
