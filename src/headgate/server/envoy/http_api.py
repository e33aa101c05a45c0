"""The HTTP endpoints of envoyproxy/ratelimit: /json, /healthcheck, /rlconfig, /stats and /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy.service.ratelimit.v3 import rls_pb2  # type: ignore[import-untyped]
from google.protobuf import json_format
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from headgate.server.envoy.service import OVER_LIMIT, ServiceError
from headgate.server.envoy.stats import LIMIT_COUNTERS, RESPONSE_TIME, TOTAL_REQUESTS
from headgate.server.metrics import label_text, metrics_text
from headgate.telemetry.metrics.families import LATENCY_US

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

    from headgate.server.envoy.service import AsyncRateLimitService
    from headgate.server.worker_stats import WorkerStats

__all__ = ["envoy_routes", "prometheus_text"]

LOCAL_CACHE_HITS: Final = "ratelimit.localcache.hitCount"
LIMIT_PREFIX: Final = "ratelimit.service.rate_limit."

_SERVICE_METRICS: Final = {
    "ratelimit.service.config_load_success": "ratelimit_service_config_load_success",
    "ratelimit.service.config_load_error": "ratelimit_service_config_load_error",
    "ratelimit.service.global_shadow_mode": "ratelimit_service_global_shadow_mode",
}
_ERRORS: Final = "ratelimit.service.call.should_rate_limit."


def envoy_routes(
    service: AsyncRateLimitService,
    stats: WorkerStats[int],
    is_healthy: Callable[[], bool],
    metrics: WorkerStats[float] | None = None,
) -> list[Route]:
    """The routes of the HTTP server for users of envoyproxy/ratelimit. `metrics` are further series of /metrics."""

    async def answer_json(request: Request) -> Response:
        body = await request.body()
        message = rls_pb2.RateLimitRequest()
        try:
            json_format.Parse(body, message)
        except (json_format.ParseError, UnicodeDecodeError) as error:
            return PlainTextResponse(f"{error}\n", 400)
        try:
            response = await service.should_rate_limit(message)
        except ServiceError as error:
            return PlainTextResponse(f"{error}\n", 400)
        status = 429 if response.overall_code == OVER_LIMIT else 200
        return Response(json_format.MessageToJson(response, indent=None), status, media_type="application/json")

    async def check_health(_: Request) -> Response:
        return PlainTextResponse("OK", 200) if is_healthy() else PlainTextResponse("", 500)

    async def show_config(_: Request) -> Response:
        configuration = service.configuration
        return PlainTextResponse("" if configuration is None else configuration.describe())

    async def show_stats(request: Request) -> Response:
        totals = dict(sorted(stats.totals().items()))
        if request.query_params.get("format") == "json":
            return JSONResponse(totals)
        return PlainTextResponse("".join(f"{name}: {number}\n" for name, number in totals.items()))

    async def show_metrics(_: Request) -> Response:
        text = prometheus_text(stats.totals())
        if metrics is not None:
            text += metrics_text(metrics.totals())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return [
        Route("/json", answer_json, methods=["POST"]),
        Route("/healthcheck", check_health),
        Route("/rlconfig", show_config),
        Route("/stats", show_stats),
        Route("/metrics", show_metrics),
    ]


def prometheus_text(totals: dict[str, int]) -> str:
    """The counters under the Prometheus names of envoyproxy/ratelimit."""
    families: dict[str, list[str]] = {}
    for name, labels, number in _samples(totals):
        families.setdefault(name, []).append(_line(name, labels, number))
    text = "".join(f"# TYPE {name} counter\n" + "".join(lines) for name, lines in sorted(families.items()))
    return text + "".join(_response_time(totals)) + "".join(_local_cache(totals))


def _line(name: str, labels: dict[str, str], value: float) -> str:
    return f"{name}{{{label_text(labels)}}} {value}\n" if labels else f"{name} {value}\n"


def _response_time(totals: dict[str, int]) -> Iterator[str]:
    if f"{RESPONSE_TIME}.count" not in totals:
        return
    name, labels, number = "ratelimit_service_response_time_seconds", {"grpc_method": "ShouldRateLimit"}, 0
    yield f"# TYPE {name} histogram\n"
    for bound_us in LATENCY_US:
        number += totals[f"{RESPONSE_TIME}.le_{bound_us}_us"]
        yield _line(f"{name}_bucket", {**labels, "le": f"{bound_us / 1_000_000}"}, number)
    count = totals[f"{RESPONSE_TIME}.count"]
    yield _line(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
    yield _line(f"{name}_count", labels, count)
    yield _line(f"{name}_sum", labels, totals[f"{RESPONSE_TIME}.sum_us"] / 1_000_000)


def _local_cache(totals: dict[str, int]) -> Iterator[str]:
    if LOCAL_CACHE_HITS in totals:
        yield "# TYPE ratelimit_localcache_hitCount gauge\n"
        yield f"ratelimit_localcache_hitCount {totals[LOCAL_CACHE_HITS]}\n"


def _samples(totals: dict[str, int]) -> Iterator[tuple[str, dict[str, str], int]]:
    for name, number in sorted(totals.items()):
        key, _, counter = name.rpartition(".")
        if name.startswith(LIMIT_PREFIX) and counter in LIMIT_COUNTERS:
            domain, *keys = key.removeprefix(LIMIT_PREFIX).split(".")
            labels = {"domain": domain, **{f"key{index}": each for index, each in enumerate(keys, 1)}}
            yield f"ratelimit_service_rate_limit_{counter}", labels, number
        elif name == TOTAL_REQUESTS:
            yield "ratelimit_service_total_requests", {"grpc_method": "ShouldRateLimit"}, number
        elif name in _SERVICE_METRICS:
            yield _SERVICE_METRICS[name], {}, number
        elif name.startswith(_ERRORS):
            yield "ratelimit_service_should_rate_limit_error", {"err_type": name.removeprefix(_ERRORS)}, number
        elif name.endswith(".domain_not_found"):
            domain = key.removeprefix(LIMIT_PREFIX)
            yield "ratelimit_service_rate_limit_domain_not_found", {"domain": domain}, number
