"""The pages for people: rendered here, whole without a script, and on the same port as the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter
from starlette.staticfiles import StaticFiles

from headgate.control.admin.pages import clients, door, lists, numbers, overview, policy, records
from headgate.control.admin.pages.frame import STATIC, Frame

if TYPE_CHECKING:
    from headgate.control.admin.pages.frame import Handler

__all__ = ["Frame", "router"]

READS: Final[dict[str, Handler]] = {
    "/": overview.overview,
    "/overview/live": overview.live,
    "/clients": clients.clients,
    "/client": clients.client,
    "/overrides": lists.overrides,
    "/overrides/{id:int}": lists.override,
    "/blocks": lists.blocks,
    "/blocks/new": lists.new_block,
    "/policy": policy.policy,
    "/policy/edit": policy.edit,
    "/policy/diff": policy.diff,
    "/policy/versions": policy.versions,
    "/policy/versions/{version:int}": policy.version,
    "/audit": records.audit,
    "/tokens": records.tokens,
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
    "/overrides/{id:int}": lists.change_override,
    "/overrides/{id:int}/remove": lists.remove_override,
    "/blocks": lists.add_block,
    "/blocks/{id:int}/remove": lists.remove_block,
    "/policy/edit": policy.put,
    "/policy/tiers": numbers.set_tier,
    "/policy/tiers/remove": numbers.remove_tier,
    "/policy/routes": numbers.set_route,
    "/policy/routes/remove": numbers.remove_route,
    "/policy/versions/{version:int}/restore": policy.restore,
    "/tokens": records.make_token,
    "/tokens/{id}/revoke": records.revoke_token,
}


def router(frame: Frame) -> APIRouter:
    """All pages of a desk. They are plain functions, which the server runs in threads."""
    found = APIRouter()
    for path, handler in READS.items():
        found.add_route(path, frame.endpoint(handler), methods=["GET"], include_in_schema=False)
    for path, handler in WRITES.items():
        found.add_route(path, frame.endpoint(handler), methods=["POST"], include_in_schema=False)
    for path, methods, endpoint in door.routes(frame):
        found.add_route(path, endpoint, methods=methods, include_in_schema=False)
    found.mount("/static", StaticFiles(directory=STATIC), name="static")
    return found
