"""gRPC services of the user in `serve.run`: methods of the first deployment answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pierhead import rayserve as serve

from tests.harness.ports import free_ports


@serve.deployment
class Health:
    async def Check(self, request: Any, grpc_context: Any) -> Any:
        if request.service == "broken":
            raise ValueError("broken")
        if request.service == "own":
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            raise LookupError("no such service")
        return health_pb2.HealthCheckResponse(status=len(request.service))

    async def Watch(self, request: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield health_pb2.HealthCheckResponse(status=number)


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    http, port = free_ports(2)
    functions = ["grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server"]
    serve.start(http_options={"port": http}, grpc_options={"port": port, "grpc_servicer_functions": functions})
    health: Any = Health
    serve.run(health.bind(), name="health")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    serve.shutdown()


def test_a_method_answers(stub: Any) -> None:
    for metadata in ([("application", "health")], []):
        request = health_pb2.HealthCheckRequest(service="ab")
        assert stub.Check(request, metadata=metadata, timeout=20).status == 2


def test_a_stream_answers(stub: Any) -> None:
    replies = stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert [reply.status for reply in replies] == [0, 1, 2]


@pytest.mark.parametrize(("service", "code"), [("broken", "INTERNAL"), ("own", "NOT_FOUND")])
def test_errors_have_statuses(stub: Any, service: str, code: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
    error: Any = raised.value
    assert error.code().name == code
