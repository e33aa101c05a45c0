"""The files in ops/ that run `headgate serve`: image, Kubernetes manifests and systemd unit.

Linters read them, and their commands, probes and build steps run for real, with other ports and directories.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement

from headgate.server.run import DRAIN_TIMEOUT_S
from support.gateways import _App, gateway_program
from support.paths import ROOT
from support.servers import HOST, RedisServer, _port_of, _reserve_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OPS = ROOT / "ops"
DOCKERFILE = OPS / "docker" / "Dockerfile"
SHARED, SIDECAR = MANIFESTS = OPS / "kubernetes" / "deployment.yaml", OPS / "kubernetes" / "sidecar.yaml"
UNIT = OPS / "systemd" / "headgate.service"
SOCKET = OPS / "systemd" / "unix-socket.conf"
OLDEST_KUBERNETES = "1.30"
PROGRAMS = Path(sys.executable).parent
QUESTION = b'{"domain": "shop", "descriptors": [{"entries": [{"key": "remote_address", "value": "192.0.2.1"}]}]}'

every_manifest = pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)


def instructions(name: str) -> list[str]:
    parser = DockerfileParser(fileobj=io.BytesIO(DOCKERFILE.read_bytes()))
    return [each["value"] for each in parser.structure if each["instruction"] == name]


def resources(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text("utf-8")))


def resource(file: Path, kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = (each for each in resources(file) if each["kind"] == kind and name in (None, each["metadata"]["name"]))
    return found


def pod(file: Path) -> dict[str, Any]:
    spec: dict[str, Any] = resource(file, "Deployment")["spec"]["template"]["spec"]
    return spec


def containers(file: Path) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in (*pod(file).get("initContainers", ()), *pod(file)["containers"])}


def unit_command(file: Path) -> list[str]:
    """The last ExecStart of a unit or of a file that overrides it."""
    return shlex.split(re.findall(r"^ExecStart=(.+)$", file.read_text("utf-8"), re.MULTILINE)[-1])


def unit_seconds(name: str) -> int:
    (value,) = re.findall(rf"^{name}=(\d+)s$", UNIT.read_text("utf-8"), re.MULTILINE)
    return int(value)


def own_command(command: Sequence[str], replacements: Mapping[str, object]) -> list[str]:
    """The command of a container or unit, with the headgate of this environment and other addresses and paths."""
    program, *arguments = command
    for old, new in replacements.items():
        arguments = [each.replace(old, str(new)) for each in arguments]
    return [str(PROGRAMS / Path(program).name), *arguments]


@contextmanager
def running(
    command: Sequence[str], addresses: int, *, store: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """Run `headgate serve` until the end of the block; yields its process and its ports, 0 for a unix socket."""
    environment = {**os.environ, "HEADGATE_STORE": store}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(addresses)]
            if not all(lines):
                errors.seek(0)
                pytest.fail(f"{shlex.join(command)} did not start: {errors.read()}")
            yield process, {line.split()[0]: 0 if "unix:" in line else int(line.rpartition(":")[2]) for line in lines}
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def status(port: int, path: str, body: bytes | None = None) -> int:
    try:
        with urlopen(f"http://{HOST}:{port}{path}", body, timeout=5) as response:
            return int(response.status)
    except HTTPError as error:
        error.close()
        return error.code


def grpc_health(port: int) -> str:
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def probe(command: Sequence[str], port: int) -> int:
    """The exit code of a probe that runs inside of the container."""
    program, *arguments = [each.replace(":8080/", f":{port}/") for each in command]
    assert program == "python"
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=20).returncode


def write_config_map(file: Path, name: str, folder: Path) -> Path:
    """The files of a ConfigMap in a folder, as Kubernetes mounts them: links to a hidden folder."""
    (folder / "..data").mkdir(parents=True)
    for each, text in resource(file, "ConfigMap", name)["data"].items():
        (folder / "..data" / each).write_text(text, "utf-8")
        (folder / each).symlink_to(Path("..data", each))
    return folder


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


# The image


def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run([PROGRAMS / "hadolint", "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    copied = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    assert sorted(copied) == sorted(line.removeprefix("!") for line in lines if line.startswith("!"))
    assert all((ROOT / each).exists() for each in copied)


def test_the_image_builds_serves_and_stops(tmp_path: Path) -> None:
    built, installed = tmp_path / "build", tmp_path / "installed"
    for line in instructions("COPY"):
        for word in line.split()[:-1]:
            if (ROOT / word).is_dir():
                shutil.copytree(
                    ROOT / word, built / word, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
                )
            elif "--from" not in line and (ROOT / word).is_file():
                built.mkdir(exist_ok=True)
                shutil.copy(ROOT / word, built)
    # Offline: with the setuptools of this environment, and with its copies of the packages that the wheel requires.
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "PIP_NO_BUILD_ISOLATION": "0"}
    (run,) = instructions("RUN")
    for step in run.split("&&"):
        text = step.replace("/build", str(built)).replace("/opt/headgate", str(installed)).strip()
        if " pip install " in text:
            text += " --no-deps --no-index"
        done = subprocess.run(
            ["sh", "-c", text], cwd=built, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        if " -m venv " in text:
            (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", run)
            link_dependencies(
                "headgate", set(extras.split(",")), next(installed.glob("lib/python*/site-packages")), set()
            )
    pins = (built / "constraints.txt").read_text("utf-8").split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)

    (tmp_path / "ratelimit").mkdir()
    (tmp_path / "ratelimit" / "shop.yaml").write_text("domain: shop\n", "utf-8")
    program, *arguments = [word for name in ("ENTRYPOINT", "CMD") for word in json.loads(instructions(name)[0])]
    replacements = {"0.0.0.0:8081": f"{HOST}:0", "0.0.0.0:8080": f"{HOST}:0", "/etc/headgate": str(tmp_path)}
    command = [str(installed / "bin" / program), *own_command(["headgate", *arguments], replacements)[1:]]
    (health,) = instructions("HEALTHCHECK")
    check = json.loads(health[health.index("[") :])
    with running(command, 2, store="memory://") as (process, ports):
        assert probe(check, ports["http"]) == 0
        process.terminate()
        assert process.wait(20) == 0
        assert probe(check, ports["http"]) != 0


def link_dependencies(name: str, extras: set[str], packages: Path, done: set[tuple[str, str]]) -> None:
    """Install what a distribution requires into another environment, by links to the files of this one."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": e}) for e in extras | {""}):
            continue
        key = requirement.name.lower(), ",".join(sorted(requirement.extras))
        if key in done:
            continue
        done.add(key)
        found = distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), line
        for file in found.files or () if requirement.name.lower() != "headgate" else ():
            target = packages / file
            if ".." not in file.parts and file.suffix != ".pyc" and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(found.locate_file(file))))
        link_dependencies(requirement.name, requirement.extras, packages, done)


# Kubernetes


@every_manifest
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_kubernetes_accepts_the_manifests(file: Path, version: str) -> None:
    assert f"Kubernetes {OLDEST_KUBERNETES} or newer" in file.read_text("utf-8")
    for each in resources(file):
        kubernetes_validate.validate(each, version, strict=True)


@every_manifest
def test_names_in_the_manifests_match(file: Path) -> None:
    labels = resource(file, "Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {
        port["name"]: port["containerPort"] for each in containers(file).values() for port in each.get("ports", ())
    }
    assert resource(file, "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert resource(file, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert resource(file, "Service")["spec"]["selector"] == labels
    assert {port["targetPort"] for port in resource(file, "Service")["spec"]["ports"]} == ports.keys()
    assert {each["configMap"]["name"] for each in pod(file)["volumes"] if "configMap" in each} == {
        each["metadata"]["name"] for each in resources(file) if each["kind"] == "ConfigMap"
    }
    for container in containers(file).values():
        mounted = {each["name"] for each in container.get("volumeMounts", ())}
        assert mounted <= {each["name"] for each in pod(file)["volumes"]}
        for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
            for method in ("httpGet", "tcpSocket", "grpc"):
                if method in container.get(kind, {}):
                    assert container[kind][method]["port"] in (*ports, *ports.values())


def test_the_shared_service_has_the_ports_of_the_image() -> None:
    container = containers(SHARED)["headgate"]
    assert instructions("EXPOSE") == [" ".join(str(port["containerPort"]) for port in container["ports"])]
    assert {each.rpartition(":")[2] for each in container["args"] if each.startswith(("--grpc", "--http"))} == {
        str(port["containerPort"]) for port in container["ports"]
    }
    allowed = resource(SHARED, "NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for rule in allowed for port in rule["ports"]} == {port["name"] for port in container["ports"]}
    assert resource(SHARED, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "headgate"


@every_manifest
def test_containers_run_without_privileges(file: Path) -> None:
    (user,) = instructions("USER")
    assert containers(file)["headgate"]["image"].startswith("registry.example.com/headgate:")
    assert pod(file)["securityContext"]["runAsNonRoot"] is True
    for container in containers(file).values():
        own = {**pod(file)["securityContext"], **container["securityContext"]}
        assert own["runAsUser"] != 0
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        if container["name"] == "headgate":
            assert user == f"{own['runAsUser']}:{own['runAsGroup']}"


@every_manifest
def test_the_grace_period_is_longer_than_the_drain(file: Path) -> None:
    delays = [each.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}}) for each in containers(file).values()]
    # gRPC and HTTP drain one after the other.
    assert (
        pod(file)["terminationGracePeriodSeconds"]
        > max(each["sleep"]["seconds"] for each in delays) + 2 * DRAIN_TIMEOUT_S
    )


def test_the_store_is_configured_by_a_variable() -> None:
    for file in (SHARED, SIDECAR):
        assert [each["name"] for each in containers(file)["headgate"]["env"]] == ["HEADGATE_STORE"]
    assert re.search("^Environment=HEADGATE_STORE=", UNIT.read_text("utf-8"), re.MULTILINE)


def test_probes_of_the_shared_service_while_redis_works_and_fails(own_redis: RedisServer, tmp_path: Path) -> None:
    container = containers(SHARED)["headgate"]
    rules = write_config_map(SHARED, "headgate-ratelimit", tmp_path / "ratelimit")
    addresses = {f"0.0.0.0:{port['containerPort']}": f"{HOST}:0" for port in container["ports"]}
    replacements = {**addresses, "/etc/headgate/ratelimit": rules}
    ready = container["readinessProbe"]["httpGet"]["path"]
    assert container["livenessProbe"]["grpc"] == container["startupProbe"]["grpc"]
    with running(own_command(["headgate", "serve", *container["args"]], replacements), 2, store=own_redis.url) as (
        process,
        ports,
    ):
        assert "shop.path_/export.remote_address" in urlopen(f"http://{HOST}:{ports['http']}/rlconfig").read().decode()
        wait_until(lambda: status(ports["http"], ready) == 200, "the server is ready")
        assert grpc_health(ports["grpc"]) == "SERVING"
        own_redis.kill()

        # Requests notice the outage. After five failures in a row, the store is probed in the background.
        failures: list[int] = []

        def is_out() -> bool:
            failures.append(status(ports["http"], "/json", QUESTION))
            return failures.count(400) >= 50 and status(ports["http"], ready) == 500

        wait_until(is_out, "the server is not ready")
        assert grpc_health(ports["grpc"]) == "SERVING"
        own_redis.start()
        wait_until(lambda: status(ports["http"], ready) == 200, "the server is ready again")
        process.terminate()
        assert process.wait(20) == 0


def test_open_streams_end_within_the_grace_period(tmp_path: Path) -> None:
    container = containers(SHARED)["headgate"]
    rules = write_config_map(SHARED, "headgate-ratelimit", tmp_path / "ratelimit")
    addresses = {f"0.0.0.0:{port['containerPort']}": f"{HOST}:0" for port in container["ports"]}
    replacements = {**addresses, "/etc/headgate/ratelimit": rules}
    grace = pod(SHARED)["terminationGracePeriodSeconds"] - container["lifecycle"]["preStop"]["sleep"]["seconds"]
    with (
        running(own_command(["headgate", "serve", *container["args"]], replacements), 2, store="memory://") as (
            process,
            ports,
        ),
        grpc.insecure_channel(f"{HOST}:{ports['grpc']}") as channel,
    ):
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        started = time.monotonic()
        assert process.wait(grace) == 0
        assert time.monotonic() - started < unit_seconds("TimeoutStopSec")


def test_the_sidecar_limits_the_app_while_redis_works_and_fails(own_redis: RedisServer, tmp_path: Path) -> None:
    sidecar, nginx = containers(SIDECAR)["headgate"], containers(SIDECAR)["nginx"]
    limits = write_config_map(SIDECAR, "shop-limits", tmp_path / "limits")
    policy = limits / "limits.yaml"
    policy.write_text(policy.read_text("utf-8").replace("20/minute", "20/day"), "utf-8")  # no window ends meanwhile
    replacements = {"127.0.0.1:8080": f"{HOST}:0", "/etc/headgate": limits}
    command = [*own_command(["headgate", "serve", *sidecar["args"]], replacements), "--budget=0.05"]
    with ExitStack() as stack:
        _, ports = stack.enter_context(running(command, 1, store=own_redis.url))
        assert probe(sidecar["startupProbe"]["exec"]["command"], ports["http"]) == 0
        port = stack.enter_context(nginx_in_front(SIDECAR, nginx["command"], ports["http"], tmp_path))
        wait_until(lambda: get(port, nginx["readinessProbe"]["httpGet"]["path"]) == 200, "the pod is ready")
        assert [get(port, "/") for _ in range(21)] == [200] * 20 + [429]
        own_redis.kill()
        wait_until(lambda: get(port, "/") == 200, "the failure mode answers")
        assert probe(sidecar["livenessProbe"]["exec"]["command"], ports["http"]) == 0
        assert get(port, nginx["readinessProbe"]["httpGet"]["path"]) == 200


@contextmanager
def nginx_in_front(file: Path, command: Sequence[str], headgate: int, folder: Path) -> Iterator[int]:
    """nginx with the configuration of the manifest, in front of a service; yields its port."""
    with ExitStack() as stack:
        app = ThreadingHTTPServer((HOST, 0), _App)
        stack.callback(app.server_close)
        threading.Thread(target=app.serve_forever, daemon=True).start()
        stack.callback(app.shutdown)
        reserved = stack.enter_context(_reserve_port())
        port = _port_of(reserved)
        text = resource(file, "ConfigMap", "shop-nginx")["data"]["nginx.conf"]
        for old, new in {
            "127.0.0.1:8080": f"{HOST}:{headgate}",
            "127.0.0.1:9000": f"{HOST}:{app.server_port}",
            "listen 8000": f"listen {HOST}:{port}",
            "/tmp/": f"{folder}/",
        }.items():
            assert old in text, old
            text = text.replace(old, new)
        (folder / "nginx.conf").write_text(text, "utf-8")
        folder.chmod(0o755)
        program, *arguments = [each.replace("/etc/shop", str(folder)) for each in command]
        server = subprocess.Popen([gateway_program(program), *arguments], stderr=subprocess.DEVNULL)
        try:
            yield port
        finally:
            server.terminate()
            server.wait(20)


def get(port: int, path: str) -> int:
    """The status of a request on a connection of its own; 0 if it was refused."""
    connection = HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return 0
    finally:
        connection.close()


# systemd


@pytest.mark.parametrize("overrides", [(), (SOCKET,)], ids=["ports", "unix socket"])
def test_systemd_accepts_the_unit(overrides: Sequence[Path], tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    folder = tmp_path / f"{UNIT.name}.d"
    folder.mkdir()
    for source, target in ((UNIT, unit), *((each, folder / each.name) for each in overrides)):
        target.write_text(source.read_text("utf-8").replace("/opt/headgate/bin", str(PROGRAMS)), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    if overrides:  # the override is read: a mistake in it is found
        (folder / "wrong.conf").write_text("[Service]\nUmask=7\n", "utf-8")
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
        assert "Umask" in done.stderr


def test_the_unit_is_hardened() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", UNIT]  # 1.5 of 10
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_unit_stops_after_the_drain() -> None:
    assert unit_seconds("TimeoutStopSec") > 2 * DRAIN_TIMEOUT_S


@pytest.mark.parametrize("file", [UNIT, SOCKET], ids=lambda file: file.name)
def test_the_command_of_the_unit_serves(file: Path, tmp_path: Path) -> None:
    limits = write_config_map(SIDECAR, "shop-limits", tmp_path / "etc")
    with tempfile.TemporaryDirectory(prefix="headgate-") as short:  # the path of a socket has at most 107 characters
        replacements = {
            "127.0.0.1:8080": f"{HOST}:0",
            "/run/headgate": short,
            "/etc/headgate": str(limits),
        }
        with running(own_command(unit_command(file), replacements), 1, store="memory://") as (process, ports):
            if file == UNIT:
                assert status(ports["http"], "/healthcheck") == 200
            else:
                assert Path(short, "http.sock").is_socket()
            process.terminate()
            assert process.wait(20) == 0
