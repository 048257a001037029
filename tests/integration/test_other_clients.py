"""gRPC clients that have none of our code call replicas: one by reflection alone, one in another language."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.other_clients import NodeClient, reflecting
from tests.harness.ports import own_address
from tests.harness.stack import ROOT
from tests.harness.waiting import eventually

pytestmark = pytest.mark.timeout(600)

ECHO, ECHO_FILE = "pierhead.echo.v1.Echo", "pierhead/echo/v1/echo.proto"


def serving(module: str, log: Path) -> Iterator[str]:
    """A replica as a process of its own; its address."""
    host, port = own_address(), 50051
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIERHEAD_")}
    environ |= {"PIERHEAD_HOST": host, "PIERHEAD_PORT": str(port)}
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env=environ, stderr=output)
    try:
        eventually(lambda: '"ready"' in log.read_text(), f"{module} is ready", within_s=120)
        yield f"{host}:{port}"
    finally:
        process.terminate()
        process.wait(timeout=120)


@pytest.fixture(scope="module")
def echo_child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serving("services.echo_proto.child", tmp_path_factory.mktemp("echo") / "log")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> NodeClient:
    return NodeClient(tmp_path_factory.mktemp("node"))


class TestByReflection:
    def test_a_replica_tells_what_it_serves(self, echo_child: str) -> None:
        assert reflecting(echo_child) == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", ECHO]

    def test_calls_and_streams(self, echo_child: str) -> None:
        assert reflecting(echo_child, f"{ECHO}/Echo", '{"message": "hi"}') == ['{"response": "Echo: hi"}']
        tokens = reflecting(echo_child, f"{ECHO}/Generate", '{"message": "hi", "num_tokens": 3}')
        assert [json.loads(token)["text"] for token in tokens] == ["hi 0", "hi 1", "hi 2"]

    def test_errors_arrive_as_grpc_has_them(self, echo_child: str) -> None:
        [told] = reflecting(echo_child, f"{ECHO}/Generate", '{"message": "hi"}', status=1)
        assert told == "INVALID_ARGUMENT: num_tokens: expected at least 1, found 0"

    def test_health(self, echo_child: str) -> None:
        assert reflecting(echo_child, "grpc.health.v1.Health/Check") == ['{"status": "SERVING"}']


class TestInAnotherLanguage:
    def test_calls_and_streams(self, node: NodeClient, echo_child: str) -> None:
        assert node.call(echo_child, ECHO_FILE, f"{ECHO}/Echo", '{"message": "hi"}') == [{"response": "Echo: hi"}]
        tokens = node.call(echo_child, ECHO_FILE, f"{ECHO}/Generate", '{"message": "hi", "num_tokens": 3}')
        assert tokens == [{"text": f"hi {index}", "index": index} for index in range(3)]

    def test_errors_arrive_as_grpc_has_them(self, node: NodeClient, echo_child: str) -> None:
        told = node.call(echo_child, ECHO_FILE, f"{ECHO}/Generate", '{"message": "hi"}', status=1)
        assert told == [{"code": 3, "details": "num_tokens: expected at least 1, found 0"}]
