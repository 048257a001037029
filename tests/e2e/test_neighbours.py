"""What a container on the stack's network reaches of others: docs/explanation/threat-model.md."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, address_of
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

ECHO = (ROOT / "compose/apps/echo.yaml").read_text()

TRY = """
import http.client, json, os, pathlib, socket, sys

def connects(host, port):
    try:
        with socket.create_connection((host, int(port)), 5):
            return "connected"
    except OSError as error:
        return type(error).__name__

def asks(method, host, port, path, **body):
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    return connection.getresponse().status

def seen():
    here = pathlib.Path("/run/pierhead/sockets")
    return sorted(str(one.relative_to(here)) for one in here.glob("*")) if here.exists() else None

def writes(path):
    try:
        pathlib.Path(path).write_text("x")
        return "written"
    except OSError as error:
        return os.strerror(error.errno)

print(json.dumps({name: eval(name) for name in json.loads(sys.argv[1])}))
"""


@pytest.fixture
def echo(written: WrittenStack) -> WrittenStack:
    written.become(ECHO, echo=1, **{"echo-child": 1})
    return written


def stranger(stack: WrittenStack, *tries: str, network: str = "default") -> list[object]:
    """What a container of no service of the stack finds."""
    [replica] = stack.replicas("echo").values()
    labels = {"pierhead.test": "neighbours", "com.docker.compose.project": stack.project}
    said = stack.docker.containers.run(
        replica.attrs["Image"], ["python", "-c", TRY, json.dumps(tries)], remove=True, labels=labels,
        network=f"{stack.project}_{network}",
    )  # fmt: skip
    found = json.loads(said)
    print(*(f"{one}: {found[one]}" for one in tries), sep="\n")
    return [found[one] for one in tries]


def test_a_stranger_reaches_the_edge_and_reads_metrics_and_nothing_else(echo: WrittenStack) -> None:
    [front], [child] = (echo.replicas(name).values() for name in ("echo", "echo-child"))
    edge, api = (address_of(echo.container(name)) for name in ("haproxy", "controller"))
    front_ip, child_ip = address_of(front), address_of(child)
    found = stranger(
        echo,
        f"asks('GET', '{edge}', 8000, '/echo?message=hi')",
        f"asks('GET', '{child_ip}', 9100, '/metrics')",
        f"connects('{front_ip}', 8080)",
        f"connects('{child_ip}', 50051)",
        f"connects('{edge}', 9999)",
        f"asks('PUT', '{child_ip}', 9100, '/user-config', greeting='mine')",
        f"asks('PUT', '{api}', 8100, '/api/v1/services/echo/scale', replicas=0)",
        f"asks('GET', '{api}', 8100, '/api/v1/services/echo/logs')",
        f"asks('GET', '{api}', 8100, '/metrics')",
        "seen()",
    )
    assert found == [200, 200, *["ConnectionRefusedError"] * 3, 403, 403, 403, 200, None]


def test_a_caller_has_the_sockets_of_the_services_that_it_names_and_cannot_replace_them(echo: WrittenStack) -> None:
    [front] = echo.replicas("echo").values()
    tries = ["seen()", "writes('/run/pierhead/sockets/echo-child/mine')"]
    code, said = front.exec_run(["python", "-c", TRY, json.dumps(tries)])
    assert isinstance(said, bytes)
    assert (code, list(json.loads(said).values())) == (0, [["echo-child"], "Read-only file system"])


def test_calls_travel_by_a_socket_of_their_own(echo: WrittenStack) -> None:
    [front] = echo.replicas("echo").values()
    assert echo.get("/echo?message=hi").status == 200
    connected = "awk '$6 == \"03\" && $8 ~ /[.]lane$/' /proc/net/unix"  # in the network of the side that connects
    code, said = front.exec_run(["sh", "-c", connected])
    assert isinstance(said, bytes)
    assert (code, len(said.splitlines())) == (0, 1), said


def test_a_caller_that_names_no_service_is_told_what_to_write(echo: WrittenStack) -> None:
    line = "    depends_on: [echo-child] # which it calls\n"
    assert line in ECHO
    echo.write(ECHO.replace(line, ""))
    what = "name echo-child in depends_on of this service, if it has x-serve, or write x-serve.listen: tcp"
    eventually(lambda: what in echo.get("/echo?message=hi").body.decode(), "its clients are told, too")


APART = (
    ECHO
    + """
  haproxy: {networks: [default, models]}
  controller: {networks: [default, models]}
  foreign:
    image: pierhead/echo:${PIERHEAD_TAG:-latest}
    scale: 0
    networks: [models]
    command: [python, -m, http.server, "8080"]
    x-serve: {route: /foreign, strip_prefix: true, port: 8080, health: {probe: {path: /}}, rollout: {bake_s: 1}}
networks: {models: {}}
"""
)


@pytest.fixture
def apart(echo: WrittenStack) -> Iterator[WrittenStack]:
    """A stack whose HAProxy and controller are on one more network, with an image of others on that one alone."""
    echo.write(APART)
    try:
        echo.up()
        echo.settle(foreign=1)
        yield echo
    finally:
        echo.write(ECHO)
        echo.up()
        eventually(lambda: not echo.replicas("foreign"), "its replica is removed")
        echo.docker.networks.get(f"{echo.project}_models").remove()


def test_an_image_of_others_in_a_network_of_its_own_is_reached_by_haproxy_and_by_those_of_its_network(
    apart: WrittenStack,
) -> None:
    [foreign] = apart.replicas("foreign").values()
    address = foreign.attrs["NetworkSettings"]["Networks"][f"{apart.project}_models"]["IPAddress"]
    tries = [f"connects('{address}', 8080)", f"connects('{foreign.short_id}', 8080)", "connects('foreign', 8080)"]
    assert apart.get("/foreign").status == 200
    assert stranger(apart, *tries) == ["TimeoutError", "gaierror", "gaierror"]
    assert stranger(apart, *tries, network="models") == ["connected"] * 3
