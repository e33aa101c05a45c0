"""The gRPC server for Envoy: rate limit service, health and reflection."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
from envoy.service.rate_limit_quota.v3 import rlqs_pb2, rlqs_pb2_grpc  # type: ignore[import-untyped]
from envoy.service.ratelimit.v3 import rls_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headgate.errors import InvalidConfiguration
from headgate.server.call_batcher import CallBatcher
from headgate.server.envoy import ServiceError
from headgate.server.grpc_messages import SERVICE_NAME as API_SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headgate.server.envoy import AsyncRateLimitService
    from headgate.server.envoy.quota_service import QuotaService

__all__ = ["GrpcServer", "TlsFiles"]

QUOTA_SERVICE_NAME: Final = rlqs_pb2.DESCRIPTOR.services_by_name["RateLimitQuotaService"].full_name
SERVICE_NAME: Final = rls_pb2.DESCRIPTOR.services_by_name["RateLimitService"].full_name
HEALTH_NAMES: Final = ("", "ratelimit", SERVICE_NAME, QUOTA_SERVICE_NAME, API_SERVICE_NAME)
"""Names under which health is reported; "ratelimit" is that of envoyproxy/ratelimit."""

MAX_MESSAGE_BYTES: Final = 1_000_000
MAX_CONCURRENT_CALLS: Final = 10_000
"""Calls in progress beyond which further ones fail at once, so that none waits longer than Envoy does."""


class TlsFiles:
    """Certificate, key and, for mutual TLS, the certificate authority of clients. Read again when they change."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        self._paths = [Path(cert), Path(key), *([Path(client_ca)] if client_ca else [])]
        self._fingerprint: object = None
        self._current = self._read()

    @property
    def requires_client_certificate(self) -> bool:
        return len(self._paths) > 2

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files; files that cannot be read leave the previous ones in force."""
        return grpc.dynamic_ssl_server_credentials(
            self._current, self._fetch, require_client_authentication=self.requires_client_certificate
        )

    def context(self) -> ssl.SSLContext:
        """A context for HTTP that follows the files. Client certificates are verified, but not required of all."""
        current = self._load()
        fingerprint = self._stat()

        def choose(connection: Any, *_: object) -> None:
            nonlocal current, fingerprint
            try:
                latest = self._stat()
                if latest != fingerprint:
                    current, fingerprint = self._load(), latest
            except (OSError, InvalidConfiguration):
                pass  # the previous files stay in force
            connection.context = current

        outer = self._load()
        outer.sni_callback = choose  # called for each connection, also without a server name
        return outer

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._paths[0], self._paths[1])
            if self.requires_client_certificate:
                context.load_verify_locations(self._paths[2])
                context.verify_mode = ssl.CERT_OPTIONAL
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfiguration(f"cannot use {self._paths[0]} with {self._paths[1]}: {error}") from None
        return context

    def _fetch(self) -> Any:
        """The new configuration, or None if nothing changed; called for each connection."""
        try:
            if self._stat() == self._fingerprint:
                return None
            return self._read()
        except (OSError, InvalidConfiguration):
            return None

    def _read(self) -> Any:
        try:
            self._fingerprint = self._stat()
            contents = [path.read_bytes() for path in self._paths]
        except OSError as error:
            raise InvalidConfiguration(f"cannot read {error.filename}: {error.strerror}") from None
        authority = contents[2] if len(contents) > 2 else None
        return grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], root_certificates=authority)

    def _stat(self) -> object:
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in map(os.stat, self._paths)]


class GrpcServer:
    """Serves Envoy until it is drained. Several processes may listen on the same port."""

    def __init__(
        self,
        service: AsyncRateLimitService,
        quotas: QuotaService,
        address: str,
        *,
        tls: TlsFiles | None = None,
        api: grpc.GenericRpcHandler[Any, Any] | None = None,
    ) -> None:
        """`api` handles the calls of headgate.v1; without it, the server is for Envoy only."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
            ],
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        self._server.add_generic_rpc_handlers((_rate_limit_handler(service),))
        rlqs_pb2_grpc.add_RateLimitQuotaServiceServicer_to_server(_QuotaServicer(quotas), self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names: tuple[str, ...] = (SERVICE_NAME, QUOTA_SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        if api is not None:
            self._server.add_generic_rpc_handlers((api,))
            names += (API_SERVICE_NAME,)
        reflection.enable_server_reflection(names, self._server)
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise InvalidConfiguration(f"cannot listen on {address}: {error}; choose another --grpc") from None

    async def start(self) -> None:
        """Accept calls, and report healthy."""
        await self._server.start()
        await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, seconds: float) -> None:
        """Report unhealthy, finish the calls in progress within `seconds`, and stop."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(seconds)

    async def _report(self, status: Any) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)


def _rate_limit_handler(service: AsyncRateLimitService) -> grpc.GenericRpcHandler[Any, Any]:
    """The handler of Envoy's calls. Those that need a remote store reach it in batches."""
    batcher = CallBatcher() if service.has_remote_store else None

    async def should_rate_limit(request: Any, context: Any) -> Any:
        if batcher is not None and (turn := batcher.join(context)) is not None:
            await turn
        try:
            return await service.should_rate_limit(request)
        except ServiceError as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))

    method = grpc.unary_unary_rpc_method_handler(
        should_rate_limit, rls_pb2.RateLimitRequest.FromString, rls_pb2.RateLimitResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, {"ShouldRateLimit": method})


class _QuotaServicer(rlqs_pb2_grpc.RateLimitQuotaServiceServicer):  # type: ignore[misc]
    def __init__(self, quotas: QuotaService) -> None:
        self._quotas = quotas

    async def StreamRateLimitQuotas(self, reports: Any, _: Any) -> AsyncIterator[Any]:  # noqa: N802 - the call's name
        async for response in self._quotas.stream(reports):
            yield response
