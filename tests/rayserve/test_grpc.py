"""gRPC services of the user in `serve.run`: methods of the first deployment answer, as with Ray Serve's proxy."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from pierhead import rayserve as serve
from pierhead.rayserve.context import _get_serve_request_context

from tests.harness.imports import ROOT
from tests.harness.ports import free_ports

CODEC = (StringValue.FromString, StringValue.SerializeToString)


def add_EchoServicer_to_server(servicer: Any, server: Any) -> None:
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(servicer.One, *CODEC),
        "Slow": grpc.unary_unary_rpc_method_handler(servicer.Slow, *CODEC),
        "Many": grpc.unary_stream_rpc_method_handler(servicer.Many, *CODEC),
        "Join": grpc.stream_unary_rpc_method_handler(servicer.Join, *CODEC),
        "Both": grpc.stream_stream_rpc_method_handler(servicer.Both, *CODEC),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    server.add_registered_method_handlers("test.Echo", handlers)


def add_OlderServicer_to_server(servicer: Any, server: Any) -> None:
    """As generated code of a grpcio before 1.65 does it: by one of the two methods alone."""
    handlers = {"One": grpc.unary_unary_rpc_method_handler(servicer.One, *CODEC)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Older", handlers),))


@serve.deployment
class Echo:
    def One(self, request: Any, grpc_context: Any) -> Any:
        wanted = request.value
        if wanted == "id":
            return StringValue(value=_get_serve_request_context().request_id)
        if wanted in ("set", "raise own"):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details("no such one")
            grpc_context.set_trailing_metadata([("number", "7")])
        if "raise" in wanted:
            raise ValueError(wanted)
        return StringValue(value=f"{wanted} {grpc_context.application()} {grpc_context.peer()[:5]}")

    async def Slow(self, request: Any) -> None:
        await asyncio.sleep(60)

    async def Many(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        grpc_context.set_trailing_metadata([("number", "7")])
        for number in range(3):
            yield StringValue(value=f"{request.value}{number}")

    async def Join(self, request_stream: Any) -> Any:
        return StringValue(value="".join([each.value async for each in request_stream]))

    async def Both(self, request_stream: Any) -> AsyncIterator[Any]:
        async for each in request_stream:
            yield StringValue(value=each.value * 2)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    http, port = free_ports(2)
    serve.start(
        http_options={"port": http},
        grpc_options={
            "port": port,
            "grpc_servicer_functions": [f"{__name__}.add_{name}Servicer_to_server" for name in ("Echo", "Older")],
            "request_timeout_s": 2,
        },
    )
    echo: Any = Echo
    serve.run(echo.bind(), name="echo")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as found:
        yield found
    serve.shutdown()


def call(channel: grpc.Channel, word: str, method: str = "One", **metadata: str) -> tuple[Any, ...]:
    """Status, words or value, and the trailing metadata."""
    ask = channel.unary_unary(f"/test.Echo/{method}", CODEC[1], CODEC[0])
    try:
        reply, done = ask.with_call(StringValue(value=word), metadata=tuple(metadata.items()), timeout=20)
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code().name, failed.details(), dict(failed.trailing_metadata())
    return done.code().name, reply.value, dict(done.trailing_metadata())


def test_a_method_answers_and_the_client_gets_the_requests_id(channel: grpc.Channel) -> None:
    assert call(channel, "hi", application="echo")[:2] == ("OK", "hi echo ipv4:")
    assert call(channel, "hi")[1] == "hi None ipv4:"
    assert call(channel, "id", request_id="r1") == ("OK", "r1", {"request_id": "r1"})
    made = call(channel, "id")
    assert made == ("OK", made[1], {"request_id": made[1]})
    assert made[1]


def test_a_service_that_older_generated_code_registers_is_served(channel: grpc.Channel) -> None:
    ask = channel.unary_unary("/test.Older/One", CODEC[1], CODEC[0])
    assert ask(StringValue(value="hi"), timeout=20).value == "hi None ipv4:"


@pytest.mark.parametrize(
    ("word", "code", "details", "trailing"),
    [
        ("set", "NOT_FOUND", "no such one", {"number": "7"}),
        ("raise own", "NOT_FOUND", "no such one", {}),
        ("raise", "INTERNAL", "ValueError: raise", {}),
    ],
)
def test_errors_have_statuses(
    channel: grpc.Channel, word: str, code: str, details: str, trailing: dict[str, str]
) -> None:
    found = call(channel, word, request_id="r2")
    assert (found[0], found[2]) == (code, {"request_id": "r2", **trailing})
    assert details in found[1]


def test_of_several_applications_the_metadata_names_one(channel: grpc.Channel) -> None:
    echo: Any = Echo
    serve.run(echo.bind(), name="second", route_prefix="/second")
    assert call(channel, "hi", application="second")[1] == "hi second ipv4:"
    assert call(channel, "hi")[1].startswith("Application metadata not set. Ping /ray.serve.")
    code, words, _ = call(channel, "hi", application="third")
    assert (code, words.partition(" Ping ")[0]) == ("NOT_FOUND", "Application 'third' not found.")
    serve.delete("second")


def test_a_request_that_takes_too_long_is_cancelled(channel: grpc.Channel) -> None:
    assert call(channel, "", "Slow")[:2] == ("DEADLINE_EXCEEDED", "Request timed out after 2s.")


def test_streams_of_either_side(channel: grpc.Channel) -> None:
    given = [StringValue(value=word) for word in "abc"]
    many = channel.unary_stream("/test.Echo/Many", CODEC[1], CODEC[0])(given[0], timeout=20)
    assert [each.value for each in many] == ["a0", "a1", "a2"]
    assert ("number", "7") in many.trailing_metadata()
    joined = channel.stream_unary("/test.Echo/Join", CODEC[1], CODEC[0])(iter(given), timeout=20)
    assert joined.value == "abc"
    both = channel.stream_stream("/test.Echo/Both", CODEC[1], CODEC[0])(iter(given), timeout=20)
    assert [each.value for each in both] == ["aa", "bb", "cc"]


def test_a_program_that_ends_with_its_server_writes_no_error() -> None:
    program = f"""
from tests.rayserve.test_grpc import Echo, serve

serve.start(
    proxy_location="Disabled",
    grpc_options={{"port": {free_ports(1)[0]}, "grpc_servicer_functions": ["{__name__}.add_EchoServicer_to_server"]}},
)
serve.run(Echo.bind())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "services" / "runtime"), str(ROOT)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""


def test_ray_serves_own_service_answers(channel: grpc.Channel) -> None:
    for method, text in (("Healthz", "success"), ("ListApplications", "echo")):
        ask: Any = channel.unary_unary(f"/ray.serve.RayServeAPIService/{method}", None, StringValue.FromString)
        assert ask(b"", timeout=20).value == text
