"""The pages for people: rendered here, whole without a script, and on the same port as the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from starlette.staticfiles import StaticFiles

from headgate.control.admin.pages import audit, clients, login, overrides, overview, policy, tier_forms
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
    "/blocks": overrides.blocks,
    "/blocks/new": overrides.new_block,
    "/policy": policy.policy,
    "/policy/edit": policy.edit,
    "/policy/diff": policy.diff,
    "/policy/versions": policy.versions,
    "/policy/versions/{version:int}": policy.version,
    "/audit": audit.audit,
    "/tokens": audit.tokens,
}
WRITES: Final[dict[str, Handler]] = {
    "/find": clients.find,
    "/search": overrides.search,
    "/client/override": clients.override,
    "/client/block": clients.block,
    "/client/unblock": clients.unblock,
    "/client/reset": clients.reset,
    "/client/tier": clients.tier,
    "/client/why": clients.why,
    "/overrides/{id:int}": overrides.change_override,
    "/overrides/{id:int}/remove": overrides.remove_override,
    "/blocks": overrides.add_block,
    "/blocks/{id:int}/remove": overrides.remove_block,
    "/policy/edit": policy.put,
    "/policy/tiers": tier_forms.set_tier,
    "/policy/tiers/remove": tier_forms.remove_tier,
    "/policy/routes": tier_forms.set_route,
    "/policy/routes/remove": tier_forms.remove_route,
    "/policy/versions/{version:int}/restore": policy.restore,
    "/tokens": audit.make_token,
    "/tokens/{id}/revoke": audit.revoke_token,
}


def router(frame: PageRenderer) -> APIRouter:
    """All pages of a service. They are plain functions, which the server runs in threads."""
    found = APIRouter()
    for path, handler in READS.items():
        found.add_route(path, frame.endpoint(handler), methods=["GET"], include_in_schema=False)
    for path, handler in WRITES.items():
        found.add_route(path, frame.endpoint(handler), methods=["POST"], include_in_schema=False)
    for path, methods, endpoint in login.routes(frame):
        found.add_route(path, endpoint, methods=methods, include_in_schema=False)
    found.mount("/static", StaticFiles(directory=STATIC), name="static")
    return found
