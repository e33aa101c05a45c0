"""FastAPI dependencies: the authenticated caller, and changes with their preconditions and idempotency."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Final, NamedTuple, TypeVar
from urllib.parse import unquote

from fastapi import Depends, Header, Query, Request
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import TypeAdapter

from headgate.control.admin.api import schemas
from headgate.control.admin.idempotency import IdempotencyStore, RecordedResponse, fingerprint
from headgate.control.admin.middleware import BODY, FAILED_TOKENS
from headgate.control.admin.problems import ProblemDetails, RequestRejected, invalid, too_many_failures
from headgate.control.admin.tokens import Token, Tokens
from headgate.control.service.errors import NotFound
from headgate.control.service.models import Actor, Change, ChangeContext, ClientRef
from headgate.control.service.redaction import may_be_key
from headgate.control.service.service import AdminService
from headgate.errors import InvalidInput

__all__ = ["Caller", "CallerDependency", "ChangeRequest", "HeaderReason", "InQuery", "Parts", "Write"]

REASON_HEADER: Final = "Headgate-Reason"

Model = TypeVar("Model")
InQuery = Annotated[Model, Query()]
"""A model whose fields are query parameters."""


class Parts(NamedTuple):
    """The objects that endpoints use, as `app.state.parts`."""

    service: AdminService
    tokens: Tokens
    idempotency: IdempotencyStore


class Caller(NamedTuple):
    """The authenticated caller of a request."""

    parts: Parts
    token: Token
    secret: bytes

    def __repr__(self) -> str:
        return f"Caller({self.token.actor!r})"

    @property
    def actor(self) -> Actor:
        return self.token.actor

    @property
    def service(self) -> AdminService:
        return self.parts.service

    def client(self, given: schemas.WhoBody | schemas.ClientFilter) -> ClientRef:
        """The client that a request names, in its canonical spelling. NotFound for a kind that no limit counts by;
        InvalidInput for a known API key given as another kind, which would be stored and shown as it is."""
        kind, value = given.kind, given.value
        if kind != "api_key" and may_be_key(value):
            with suppress(NotFound):
                if self.service.clients.find(value).kind == "api_key":
                    raise InvalidInput("who: this is an API key; give it with the kind api_key")
        return self.service.clients.find(f"{kind}={value}")

    def filter(self, given: schemas.OptionalClientFilter) -> ClientRef | None:
        """The client that a list is about; None for all clients."""
        return (
            None if given.kind is None else self.client(schemas.ClientFilter(kind=given.kind, value=given.value or ""))
        )


_reason: Final[TypeAdapter[str]] = TypeAdapter(schemas.Reason)
_REASON: Final = Header(
    alias=REASON_HEADER, min_length=1, max_length=6000, pattern=r"^[ -~]+$",
    description="The reason for a removal; non-ASCII characters and % are percent-encoded as in a URL",
)  # fmt: skip
_IF_MATCH: Final = Header(
    max_length=40, description='The version that the change is based on, as the ETag of a read: `"12"`'
)
_IDEMPOTENCY_KEY: Final = Header(
    pattern=r"^[!-~]{1,255}$",
    description="Chosen by the client; a request sent again with the same key is carried out once",
)
_bearer: Final = HTTPBearer(
    auto_error=False, scheme_name="token", description="A token of this server: hg_<id>_<secret>. Each has a role."
)


def _caller(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Caller:
    parts: Parts = request.app.state.parts
    if request.url.query and not request.scope["route"].dependant.query_params:
        raise invalid("query: this endpoint takes no query parameters")
    if credentials is None:
        raise RequestRejected(_unauthenticated(request, "Send a token of this server: Authorization: Bearer hg_..."))
    token = parts.tokens.check(credentials.credentials)
    if token is None:
        detail = "This token is mistyped, expired or revoked. An admin can create a new one."
        raise RequestRejected(_unauthenticated(request, detail))
    return Caller(parts, token, credentials.credentials.encode())


CallerDependency = Annotated[Caller, Depends(_caller)]


class ChangeRequest:
    """A request that changes something: once per Idempotency-Key, and on the version of If-Match."""

    def __init__(
        self,
        request: Request,
        caller: CallerDependency,
        if_match: Annotated[str | None, _IF_MATCH] = None,
        idempotency_key: Annotated[str | None, _IDEMPOTENCY_KEY] = None,
    ) -> None:
        self._request = request
        self._caller = caller
        self._key = idempotency_key
        self._based_on = _parse_if_match(if_match)
        self.service = caller.service
        self.tokens = caller.parts.tokens
        self.actor = caller.actor
        self.client = caller.client

    def context(
        self, given: schemas.AttributedBody | schemas.RemovalQuery, header_reason: str | None = None
    ) -> ChangeContext:
        """The actor, reason, confirmed risks and base version of the change."""
        reason = given.reason if header_reason is None else header_reason
        if reason is None:
            raise invalid(f"reason: give it in the header {REASON_HEADER}, or in the query")
        return ChangeContext(self.actor, reason, confirmed=tuple(given.confirm), based_on=self._based_on)

    def require_if_match(self) -> None:
        """Reject a request without If-Match, for content that must not be overwritten unread."""
        if self._based_on is None:
            detail = "Send If-Match with the ETag of GET /api/v1/policy, so that no change is overwritten unread."
            raise RequestRejected(ProblemDetails("if-match-needed", detail))

    def run(self, change: Callable[[], Change]) -> Response:
        """Carry out a change, and respond with its result."""

        def work() -> RecordedResponse:
            done = change()
            number, ids = (None, ()) if done.version is None else (done.version.number, done.version.ids)
            body = {**done.as_dict(), "what": self.service.clients.insert_names(done.what), "ids": ids}
            return RecordedResponse(200, json.dumps(body), number)

        return self.respond(work)

    def respond(
        self,
        work: Callable[[], RecordedResponse],
        *,
        redact: Callable[[RecordedResponse], RecordedResponse] = lambda response: response,
    ) -> Response:
        """Carry out the work once per Idempotency-Key, and respond. `redact` returns the response to store."""
        if self._key is None:
            response = work()
        else:
            scope = self._request.scope
            target = scope["method"].encode(), scope["path"].encode(), scope["query_string"]
            headers = str(self._based_on).encode(), self._request.headers.get(REASON_HEADER, "").encode()
            mark = fingerprint(*target, scope[BODY], *headers, secret=self._caller.secret)
            response = self._caller.parts.idempotency.once(
                self._caller.token.id, self._key, fingerprint=mark, work=work, redact=redact
            )
        sent = {} if response.etag is None else {"ETag": f'"{response.etag}"'}
        if response.is_replayed:
            sent["Idempotency-Replayed"] = "true"
        return Response(response.body, response.status, sent, "application/json")


Write = Annotated[ChangeRequest, Depends()]


def _header_reason(text: Annotated[str | None, _REASON] = None) -> str | None:
    if text is None:
        return None
    try:
        return _reason.validate_python(unquote(text, errors="strict").strip())
    except ValueError:
        raise invalid(f"{REASON_HEADER}: write 1 to 500 characters on one line, without an API key") from None


HeaderReason = Annotated[str | None, Depends(_header_reason)]
"""The reason for a change without a body, in a header because proxies log URLs."""


def _unauthenticated(request: Request, detail: str) -> ProblemDetails:
    """Count a request without a valid token; after too many of them, the problem is only to wait."""
    wait = request.app.state.failures.count(request.scope, FAILED_TOKENS)
    if wait is not None:
        return too_many_failures(wait)
    return ProblemDetails("token-needed", detail, headers={"WWW-Authenticate": 'Bearer realm="headgate"'})


def _parse_if_match(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    match = re.fullmatch(r'\s*(?:"(\d{1,16})"|(\d{1,16}))\s*', if_match)
    number = int(match[1] or match[2]) if match else schemas.MAX_INTEGER + 1
    if number > schemas.MAX_INTEGER:
        raise invalid('If-Match: this is not a version; send the ETag of a read, like "12"')
    return number
