"""The page on which a customer requests a higher limit, and the list from which support decides such requests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, RedirectResponse, Response

from headgate.control.admin.pages.forms import change_context, submit, until
from headgate.control.admin.problems import of_error
from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from starlette.requests import Request

    from headgate.control.admin.pages.base import PageRenderer, Visit
    from headgate.control.admin.pages.forms import Submission
    from headgate.control.service import Change

__all__ = ["approve", "decline", "request_form", "send_request", "show_requests"]


def request_form(renderer: PageRenderer, request: Request) -> Response:
    """The page behind a customer's link; the link is the permission to see it."""
    return _form(renderer, request)


def send_request(renderer: PageRenderer, request: Request) -> Response:
    growth, form = renderer.service.growth, renderer.form(request)
    link = growth.open_link(request.path_params["token"])
    fields = {name: form.get(name, "") for name in ("limit", "wanted", "message")}
    try:
        growth.submit(link, **fields)
    except InvalidInput as error:
        return _form(renderer, request, values=fields, error=of_error(error).detail)
    return RedirectResponse(request.url.path, 303)


def show_requests(visit: Visit, submission: Submission | None = None) -> Response:
    found = visit.service.growth.list()
    return visit.page("limit_requests.html", "/requests", submission=submission, found=found)


def approve(visit: Visit) -> Response:
    id = visit.request.path_params["id"]

    def change() -> Change:
        bucket = visit.form.get("bucket", "")
        return visit.service.growth.approve(change_context(visit), id, bucket=bucket, valid_until=until(visit))

    texts: Any = {"question": "Approve this request?", "done": "Request approved: the override applies now."}
    return submit(visit, f"approve-{id}", change, **texts, redirect="/requests", page=show_requests)


def decline(visit: Visit) -> Response:
    id = visit.request.path_params["id"]

    def change() -> Change:
        return visit.service.growth.decline(change_context(visit), id)

    return submit(visit, f"decline-{id}", change, done="Request declined.", redirect="/requests", page=show_requests)


def _form(
    renderer: PageRenderer, request: Request, *, values: dict[str, str] | None = None, error: str = ""
) -> Response:
    token, growth = request.path_params["token"], renderer.service.growth
    link = growth.open_link(token)
    text = renderer.render(
        "limit_request.html",
        link=link,
        path=f"/limit-request/{token}",
        limits=[(each, _end(each.valid_until_us)) for each in growth.limits_of(link.client)],
        requests=growth.list(client=link.client),
        values=values or dict.fromkeys(("limit", "wanted", "message"), ""),
        error=error,
    )
    return HTMLResponse(text, 422 if error else 200)


def _end(at_us: int | None) -> str:
    return "" if at_us is None else f"{datetime.fromtimestamp(at_us / 1_000_000, UTC):%Y-%m-%d %H:%M} UTC"
