"""The server for gateways and for services in other languages: gRPC for Envoy, HTTP for everything else."""

from __future__ import annotations

__all__: list[str] = []
