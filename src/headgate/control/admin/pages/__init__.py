"""The admin pages, rendered on the server and usable without JavaScript, on the same port as the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from starlette.staticfiles import StaticFiles

from headgate.control.admin.pages import (
    access,
    actions,
    blocks,
    clients,
    ledger,
    limit_requests,
    lists,
    overview,
    policy,
    regions,
    suggestions,
)
from headgate.control.admin.pages.base import STATIC, PageRenderer

if TYPE_CHECKING:
    from headgate.control.admin.pages.base import Handler, PublicHandler

__all__ = ["PageRenderer", "router"]

READS: Final[dict[str, Handler]] = {
    "/": overview.overview,
    "/overview/live": overview.live,
    "/clients": lists.show_list,
    "/client": clients.client,
    "/overrides": lists.show_list,
    "/overrides/{id:int}": clients.override_page,
    "/blocks": lists.show_list,
    "/blocks/new": blocks.new_block,
    "/actions": actions.actions,
    "/policy": policy.policy,
    "/policy/edit": policy.edit,
    "/policy/diff": policy.diff,
    "/policy/suggestions": suggestions.suggestions,
    "/policy/versions": policy.versions,
    "/policy/versions/{version:int}": policy.version,
    "/requests": limit_requests.show_requests,
    "/regions": regions.regions,
    "/regions/live": regions.live,
    "/ledger": lists.show_list,
    "/ledger/account": ledger.account,
    "/audit": lists.show_list,
    "/tokens": access.tokens,
}
WRITES: Final[dict[str, Handler]] = {
    "/find": clients.find,
    "/search": lists.search,
    "/client/override": clients.override,
    "/client/block": clients.block,
    "/client/unblock": clients.unblock,
    "/client/reset": clients.reset,
    "/client/tier": clients.tier,
    "/client/why": clients.why,
    "/overrides/{id:int}": clients.change_override,
    "/overrides/{id:int}/remove": clients.remove_override,
    "/blocks": blocks.add_block,
    "/blocks/{id:int}/remove": blocks.remove_block,
    "/requests/{id}/approve": limit_requests.approve,
    "/requests/{id}/decline": limit_requests.decline,
    "/actions/{id}/undo": actions.undo,
    "/policy/edit": policy.put,
    "/policy/canary/promote": policy.promote,
    "/policy/canary/rollback": policy.rollback_canary,
    "/policy/scripts/promote": policy.promote_scripts,
    "/policy/scripts/rollback": policy.rollback_scripts,
    "/policy/tiers": policy.set_tier,
    "/policy/tiers/remove": policy.remove_tier,
    "/policy/routes": policy.set_route,
    "/policy/routes/remove": policy.remove_route,
    "/policy/versions/{version:int}/restore": policy.restore,
    "/ledger/grants": ledger.grant,
    "/ledger/adjustments": ledger.adjust,
    "/tokens": access.create_token,
    "/tokens/{id}/revoke": access.revoke_token,
}

PUBLIC: Final[tuple[tuple[str, str, PublicHandler], ...]] = (
    ("GET", "/login", access.login),
    ("POST", "/login", access.sign_in),
    ("GET", "/enter", access.enter),
    ("POST", "/logout", access.sign_out),
    ("GET", "/limit-request/{token}", limit_requests.request_form),
    ("POST", "/limit-request/{token}", limit_requests.send_request),
)
"""Pages that do not require a session."""


def router(renderer: PageRenderer) -> APIRouter:
    """The routes of all pages. Handlers are synchronous, so the server runs them in threads."""
    router = APIRouter()
    endpoints = [("GET", path, renderer.endpoint(handler)) for path, handler in READS.items()]
    endpoints += [("POST", path, renderer.endpoint(handler)) for path, handler in WRITES.items()]
    endpoints += [(method, path, renderer.public_endpoint(handler)) for method, path, handler in PUBLIC]
    for method, path, endpoint in endpoints:
        router.add_route(path, endpoint, methods=[method], include_in_schema=False)
    router.mount("/static", StaticFiles(directory=STATIC), name="static")
    return router
