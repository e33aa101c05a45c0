"""The admin pages, rendered on the server and usable without JavaScript, on the same port as the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from starlette.staticfiles import StaticFiles

from headgate.control.admin.pages import (
    audit,
    blocks,
    clients,
    login,
    overrides,
    overview,
    policy,
    search,
    tier_forms,
    tokens,
)
from headgate.control.admin.pages.base import STATIC, PageRenderer

if TYPE_CHECKING:
    from headgate.control.admin.pages.base import Handler

__all__ = ["PageRenderer", "router"]

READS: Final[dict[str, Handler]] = {
    "/": overview.overview,
    "/overview/live": overview.live,
    "/clients": clients.clients,
    "/client": clients.client,
    "/overrides": overrides.overrides,
    "/overrides/{id:int}": overrides.override,
    "/blocks": blocks.blocks,
    "/blocks/new": blocks.new_block,
    "/policy": policy.policy,
    "/policy/edit": policy.edit,
    "/policy/diff": policy.diff,
    "/policy/versions": policy.versions,
    "/policy/versions/{version:int}": policy.version,
    "/audit": audit.audit,
    "/tokens": tokens.tokens,
}
WRITES: Final[dict[str, Handler]] = {
    "/find": clients.find,
    "/search": search.search,
    "/client/override": clients.override,
    "/client/block": clients.block,
    "/client/unblock": clients.unblock,
    "/client/reset": clients.reset,
    "/client/tier": clients.tier,
    "/client/why": clients.why,
    "/overrides/{id:int}": overrides.change_override,
    "/overrides/{id:int}/remove": overrides.remove_override,
    "/blocks": blocks.add_block,
    "/blocks/{id:int}/remove": blocks.remove_block,
    "/policy/edit": policy.put,
    "/policy/tiers": tier_forms.set_tier,
    "/policy/tiers/remove": tier_forms.remove_tier,
    "/policy/routes": tier_forms.set_route,
    "/policy/routes/remove": tier_forms.remove_route,
    "/policy/versions/{version:int}/restore": policy.restore,
    "/tokens": tokens.create_token,
    "/tokens/{id}/revoke": tokens.revoke_token,
}


def router(renderer: PageRenderer) -> APIRouter:
    """The routes of all pages. Handlers are synchronous, so the server runs them in threads."""
    router = APIRouter()
    for path, handler in READS.items():
        router.add_route(path, renderer.endpoint(handler), methods=["GET"], include_in_schema=False)
    for path, handler in WRITES.items():
        router.add_route(path, renderer.endpoint(handler), methods=["POST"], include_in_schema=False)
    for path, methods, endpoint in login.routes(renderer):
        router.add_route(path, endpoint, methods=methods, include_in_schema=False)
    router.mount("/static", StaticFiles(directory=STATIC), name="static")
    return router
