"""`pierhead.triton` against the fake Triton and, where PIERHEAD_TEST_TRITONSERVER has its command, against a real one.

The command gets tritonserver's own flags; this is the whole of it where tritonserver is on PATH: `tritonserver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import ml_dtypes
import numpy as np
import pytest
from pierhead import BadRequest, DeadlineExceeded, NotFound, ReplicaDied, Settings, close_handles, triton
from pierhead.calls.clients import Clients
from pierhead.errors import PierheadError, RemoteError
from tritonclient.grpc import service_pb2_grpc

from tests.fakes.fake_triton import FakeTriton
from tests.harness.ports import free_port
from tests.harness.waiting import PATIENCE_S

MODELS = Path(__file__).parent / "triton_models"
COMMAND = os.environ.get("PIERHEAD_TEST_TRITONSERVER")
ONE = np.array([1, 2], np.float32)


class Server(NamedTuple):
    client: triton.Client
    kill: Any


@contextlib.asynccontextmanager
async def fake(port: int) -> AsyncIterator[Any]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])  # as Triton
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield lambda: server.stop(0)
    await server.stop(0)


@contextlib.asynccontextmanager
async def real(port: int) -> AsyncIterator[Any]:
    flags = [
        f"--model-repository={MODELS}", "--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false",
        "--strict-readiness=false", "--exit-timeout-secs=3", f"--grpc-port={port}", "--grpc-address=127.0.0.1",
        "--allow-http=false", "--allow-metrics=false", f"--backend-config=python,shm-region-prefix-name=test{port}",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *shlex.split(COMMAND or ""), *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )

    async def kill() -> None:
        process.send_signal(signal.SIGKILL)

    yield kill
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


async def becomes_ready(client: triton.Client, model: str, ready: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await client.ready(model) is not ready:  # noqa: ASYNC110 - the server cannot announce it
            await asyncio.sleep(0.01)


SERVERS = {"fake": fake, "real": real}


@pytest.fixture(params=list(SERVERS))
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    if request.param == "real" and COMMAND is None:
        pytest.skip("needs a Triton Inference Server: PIERHEAD_TEST_TRITONSERVER=<command>")
    port = free_port()
    Clients.use(Settings(static={"TRITON": (f"127.0.0.1:{port}",)}))
    async with SERVERS[request.param](port) as kill:
        client = triton.client("triton", timeout_s=PATIENCE_S)
        await becomes_ready(client, "same", True)
        yield Server(client, kill)
        await close_handles()


async def test_arrays_go_in_and_come_out(server: Server) -> None:
    client = server.client
    assert (await client.infer("add", {"a": ONE, "b": ONE}, version="1"))["sum"].tolist() == [2, 4]
    large = np.arange(1_000_000, dtype=np.float32)
    reply = await client.infer("add", {"a": large, "b": large[::-1]})
    assert (reply["sum"] == 999_999).all()
    half = np.array([0.5, -2], np.float16)
    for text in (np.array(["ä", "", "x" * 300]), np.array([b"\x00\xff", b""], dtype=object)):
        reply = await client.infer("same", {"text": text, "half": half}, parameters={"priority": 1, "mine": "x"})
        assert [each.decode("latin-1") for each in reply["text_out"]] == [
            (each if isinstance(each, bytes) else str(each).encode()).decode("latin-1") for each in text
        ]
        assert reply["half_out"].dtype == np.float16
        assert reply["half_out"].tolist() == [0.5, -2]
    assert list(await client.infer("same", {"text": text, "half": half}, outputs=["half_out"])) == ["half_out"]


WRONG: list[tuple[str, dict[str, Any], type[PierheadError], str]] = [
    ("nope", {"a": ONE, "b": ONE}, NotFound, "unknown model: 'nope'"),
    ("broken", {"x": ONE[:1]}, NotFound, "unknown model: 'broken'"),
    ("add", {"a": ONE, "b": ONE.astype(np.int32)}, BadRequest, "data-type is 'INT32', but model 'add' expects 'FP32'"),
    ("add", {"a": ONE, "b": ONE.reshape(1, 2)}, BadRequest, "unexpected shape for input 'b'"),
    ("add", {"a": ONE, "c": ONE}, BadRequest, "unexpected inference input 'c'"),
    ("add", {"a": ONE.astype(complex), "b": ONE}, BadRequest, "input a of model add: Triton has no dtype for complex"),
    ("add", {"a": -ONE, "b": ONE}, RemoteError, "ValueError: a: expected a number >= 0"),
    ("repeat", {"values": ONE.astype("i4"), "delay_ms": np.array([0], "i4")}, RemoteError, "decoupled"),
]


async def test_errors_are_ours_with_triton_s_words(server: Server) -> None:
    for model, inputs, kind, words in WRONG:
        with pytest.raises(kind) as raised:
            await server.client.infer(model, inputs)
        assert words in str(raised.value), model
    with pytest.raises(NotFound, match="version 7"):
        await server.client.infer("add", {"a": ONE, "b": ONE}, version="7")
    with pytest.raises(BadRequest, match="parameter p: expected"):
        await server.client.infer("add", {"a": ONE, "b": ONE}, parameters={"p": None})  # type: ignore[dict-item]


async def test_a_full_queue_and_a_late_turn_in_it_are_no_lost_connection(server: Server) -> None:
    sleep = {"seconds": np.array([[1]], np.float32)}
    ended = await asyncio.gather(*(server.client.infer("slow", sleep) for _ in range(5)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in ended) == ["Backpressure"] * 3 + ["DeadlineExceeded", "dict"]


def numbers(*values: int, delay_ms: int = 0) -> dict[str, Any]:
    return {"values": np.array(values, np.int32), "delay_ms": np.array([delay_ms], np.int32)}


async def test_a_decoupled_model_streams(server: Server) -> None:
    client = server.client
    assert [int(part["value"][0]) async for part in client.stream("repeat", numbers(3, 1, 2))] == [3, 1, 2]
    with pytest.raises(RemoteError, match="-1 was asked for"):
        assert [part async for part in client.stream("repeat", numbers(5, -1))] == []
    for model, inputs, kind, words in [
        ("nope", numbers(1), NotFound, "unknown model: 'nope'"),
        ("repeat", {"x": ONE, "delay_ms": ONE.astype("i4")[:1]}, BadRequest, "unexpected inference input 'x'"),
        ("repeat", numbers(1) | {"values": ONE}, BadRequest, "data-type is 'FP32'"),
    ]:
        with pytest.raises(kind, match=words):
            await anext(client.stream(model, inputs))
    with pytest.raises(DeadlineExceeded):
        assert [part async for part in client.stream("repeat", numbers(*range(100), delay_ms=100), timeout=0.5)] == []
    async with contextlib.aclosing(client.stream("repeat", numbers(*range(1000), delay_ms=20))) as parts:
        assert int((await anext(parts))["value"][0]) == 0
    assert [int(part["value"][0]) async for part in client.stream("repeat", numbers(4))] == [4]


async def test_models_are_loaded_unloaded_and_described(server: Server) -> None:
    client = server.client
    assert (await client.metadata("add")).inputs[0].datatype == "FP32"
    assert (await client.config("add")).backend == "python"
    [replica] = await client.index()
    assert {m.name: m.state for m in (await client.index())[replica]}["broken"] == "UNAVAILABLE"
    await client.infer("add", {"a": ONE, "b": ONE})
    [stats] = (await client.statistics("add"))[replica]
    assert stats.inference_count > 0
    with pytest.raises(NotFound, match="not available"):
        await client.statistics("nope")
    await client.unload("add")
    await becomes_ready(client, "add", False)
    with pytest.raises(NotFound, match="has no available versions"):
        await client.infer("add", {"a": ONE, "b": ONE})
    await client.load("add")
    assert {m.name for m in (await client.index(ready=True))[replica]} == {"add", "repeat", "same", "slow"}
    assert (await client.infer("add", {"a": ONE, "b": ONE}))["sum"].tolist() == [2, 4]
    with pytest.raises(NotFound, match="failed to poll from model repository"):
        await client.load("nope")
    with pytest.raises(RemoteError, match="no weights") as raised:
        await client.load("broken")
    assert raised.value.http_status == 500


async def test_a_server_that_dies_during_a_call(server: Server) -> None:
    parts = server.client.stream("repeat", numbers(*range(1000), delay_ms=50))
    await anext(parts)
    await server.kill()
    with pytest.raises(ReplicaDied):
        async for _ in parts:
            pass


def test_bfloat16_is_sent_as_it_is() -> None:
    request = triton.infer_request("m", {"x": np.array([1.5], ml_dtypes.bfloat16)})
    assert (request.inputs[0].datatype, request.raw_input_contents[0]) == ("BF16", b"\xc0\x3f")
