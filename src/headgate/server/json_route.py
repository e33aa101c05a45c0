"""A FastAPI route that handles JSON bodies directly, for calls that are made with every request of an app."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.routing import request_response

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["JsonRoute"]

JSON = b"application/json"
_PARAMETERS = frozenset({"body", "request"})


class JsonRoute(APIRoute):
    """A route whose endpoint has a `body`, and perhaps the `request`, and returns a model.

    The schema is FastAPI's, and so are the errors. The body is parsed and validated in one step, and the answer, a
    model or a union of models, is not validated again. Routes with dependencies or other parameters are handled by
    FastAPI.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self._is_direct():
            # Starlette's, without the exit stacks for dependencies, which take as long as the check itself.
            self.app = request_response(self.get_route_handler())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if not self._is_direct():
            return super().get_route_handler()
        endpoint = self.endpoint
        hints = get_type_hints(endpoint, include_extras=True)
        body_type = TypeAdapter(hints["body"])
        answer_types = {each: TypeAdapter(each) for each in get_args(hints["return"]) or (hints["return"],)}
        needs_request = "request" in hints

        async def handle(request: Request) -> Response:
            content = await request.body()
            if not _is_json(next((value for name, value in request.scope["headers"] if name == b"content-type"), b"")):
                # Browsers send other types without asking; a page must not use up limits through its visitors.
                raise RequestValidationError([_problem("the content type must be application/json")])
            try:
                body = body_type.validate_json(content)
            except ValidationError as error:
                problems = error.errors(include_url=False, include_context=False, include_input=False)
                raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in problems]) from None
            answer = await (endpoint(body=body, request=request) if needs_request else endpoint(body=body))
            return Response(answer_types[type(answer)].dump_json(answer), media_type="application/json")

        return handle

    def _is_direct(self) -> bool:
        parameters = get_type_hints(self.endpoint).keys() - {"return"}
        return not self.dependencies and "body" in parameters and parameters <= _PARAMETERS


@lru_cache
def _is_json(content_type: bytes) -> bool:
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == JSON or (media_type.startswith(b"application/") and media_type.endswith(b"+json"))


def _problem(message: str) -> dict[str, Any]:
    return {"type": "content_type", "loc": ("header", "content-type"), "msg": message}
