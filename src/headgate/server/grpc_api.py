"""The gRPC API for any language, headgate.v1.RateLimiter: the operations of the JSON API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf import json_format
from pydantic import TypeAdapter, ValidationError

from headgate.errors import InvalidInput, StoreError
from headgate.server.access import AccessDenied, bearer_token
from headgate.server.check_service import (
    CheckBody,
    CommitBody,
    DeadlineExceeded,
    LeaseBody,
    LimitsBody,
    RefundBody,
    ServerOverloaded,
)
from headgate.server.grpc_messages import METHODS, SERVICE_NAME, message_class

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pydantic import BaseModel

    from headgate.server.access import TokenVerifier
    from headgate.server.check_service import CheckService

__all__ = ["api_handler"]

MAX_PROBLEMS: Final = 10

_BODIES: Final[dict[str, type[BaseModel]]] = {
    "CheckRequest": CheckBody,
    "PeekRequest": LimitsBody,
    "LeaseRequest": LeaseBody,
    "CommitRequest": CommitBody,
    "RefundRequest": RefundBody,
}
_ANSWER: Final = TypeAdapter(Any)
_STATUSES: Final = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def api_handler(service: CheckService, verifier: TokenVerifier | None) -> grpc.GenericRpcHandler[Any, Any]:
    """The handler of all calls. With a verifier, they need a token in the metadata `authorization`."""
    handlers = {}
    for name, (request, response) in METHODS.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            _Call(getattr(service, name.lower()), _BODIES[request], message_class(response), verifier).answer,
            request_deserializer=message_class(request).FromString,
            response_serializer=message_class(response).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)


class _Call:
    """One call of the API: from a message to a body, and from an answer to a message."""

    def __init__(
        self,
        operation: Callable[[Any], Awaitable[object]],
        body: type[BaseModel],
        response: Any,
        verifier: TokenVerifier | None,
    ) -> None:
        self._operation = operation
        self._body = body
        self._response = response
        self._verifier = verifier

    async def answer(self, request: Any, context: Any) -> Any:
        """Carry out the call, or abort it with the status of its error."""
        try:
            if self._verifier is not None:
                await self._verify(context, self._verifier)
            fields = json_format.MessageToDict(request, preserving_proto_field_name=True)
            result = await self._operation(self._body.model_validate(fields))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:MAX_PROBLEMS]]
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "; ".join(problems))
        except InvalidInput as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except AccessDenied as error:
            await context.abort(_STATUSES[error.status], str(error))
        except ServerOverloaded as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except DeadlineExceeded as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return json_format.ParseDict(_ANSWER.dump_python(result, exclude_none=True), self._response())

    async def _verify(self, context: Any, verifier: TokenVerifier) -> None:
        values = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        await verifier.verify(bearer_token(values[0]) if len(values) == 1 else None, _address(context.peer()))


def _address(peer: str) -> str:
    """The address in a peer of gRPC, such as "ipv4:203.0.113.9:50123", without its port."""
    return peer.rpartition(":")[0]
