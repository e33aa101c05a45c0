"""`headgate serve` with an echo beside each protocol, in the same process and on the same ports.

The echo of gRPC gets the same `RateLimitRequest`, parsed by the same server, and answers with a fixed
`RateLimitResponse`. That of HTTP is the first route of the app, parses the JSON of the body and returns it.
"""

import argparse
import asyncio
import json
import sys
from typing import Any

import grpc
import uvicorn
from envoy.service.ratelimit.v3 import rls_pb2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headgate.server.run import ServerOptions, announce_worker, run_worker, run_workers

ECHO_METHOD = "/bench.Echo/Echo"
ECHO_PATH = "/echo"
OK = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", help="the fields of ServerOptions, as JSON")
    parser.add_argument("--grpc", help="in place of the one in options; given by the parent process")
    parser.add_argument("--http", help="the same")
    parser.add_argument("--worker", action="store_true", help="run as one of several workers")
    given = parser.parse_args()
    addresses = {name: value for name in ("grpc", "http") if (value := getattr(given, name)) is not None}
    options = ServerOptions(**json.loads(given.options) | addresses)
    if options.workers > 1 and not given.worker:
        command = [sys.executable, "-m", "bench.serve_worker", given.options, "--worker"]
        sys.exit(run_workers(options, command, _print_ports))
    _add_echoes()
    asyncio.run(run_worker(options, announce_worker if given.worker else _print_ports))


def _print_ports(ports: dict[str, int]) -> None:
    print(json.dumps(ports), flush=True)


def _add_echoes() -> None:
    """Add the echoes where the servers are made: to the gRPC server, and to the app that uvicorn gets."""
    make_server, config = grpc.aio.server, uvicorn.Config

    def server_with_echo(*args: Any, **options: Any) -> Any:
        server = make_server(*args, **options)
        server.add_generic_rpc_handlers((_EchoHandler(),))
        return server

    def config_with_echo(app: Any, **options: Any) -> Any:
        app.router.routes.insert(0, Route(ECHO_PATH, _echo, methods=["POST"]))
        return config(app, **options)

    grpc.aio.server = server_with_echo
    uvicorn.Config = config_with_echo  # type: ignore[assignment,misc]


class _EchoHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(
            _echo_call, rls_pb2.RateLimitRequest.FromString, rls_pb2.RateLimitResponse.SerializeToString
        )

    def service(self, handler_call_details: Any) -> Any:
        return self._handler if handler_call_details.method == ECHO_METHOD else None


async def _echo_call(request: Any, _: Any) -> Any:
    return rls_pb2.RateLimitResponse(overall_code=OK)


async def _echo(request: Request) -> Response:
    return JSONResponse(json.loads(await request.body()))


if __name__ == "__main__":
    main()
