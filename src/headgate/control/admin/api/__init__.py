"""The admin API: JSON under /api/v1, for programs and for the `headgate` command."""

from headgate.control.admin.api import reads, writes
from headgate.control.admin.api.dependencies import Parts

__all__ = ["PREFIX", "ROUTERS", "Parts"]

PREFIX = "/api/v1"
ROUTERS = (reads.router, writes.router, writes.token_router)
