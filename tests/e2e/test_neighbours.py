"""What a container on the stack's network reaches of others: docs/explanation/threat-model.md."""

from __future__ import annotations

import json

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


def stranger(stack: WrittenStack, *tries: str) -> list[object]:
    """What a container of no service of the stack finds."""
    [replica] = stack.replicas("echo").values()
    labels = {"pierhead.test": "neighbours", "com.docker.compose.project": stack.project}
    said = stack.docker.containers.run(
        replica.attrs["Image"], ["python", "-c", TRY, json.dumps(tries)], remove=True, labels=labels,
        network=f"{stack.project}_default",
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


def test_a_caller_that_names_no_service_is_told_what_to_write(echo: WrittenStack) -> None:
    line = "    depends_on: [echo-child] # which it calls\n"
    assert line in ECHO
    echo.write(ECHO.replace(line, ""))
    what = "name echo-child in depends_on of this service, if it has x-serve, or write x-serve.listen: tcp"
    eventually(lambda: what in echo.get("/echo?message=hi").body.decode(), "its clients are told, too")
