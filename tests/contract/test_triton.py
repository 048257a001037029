"""`pierhead.triton` against the fake Triton and the real one that `tests/environments/triton.py` makes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import gc
import os
import signal
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import ml_dtypes
import numpy as np
import pytest
from pierhead import BadRequest, DeadlineExceeded, NotFound, ReplicaDied, Settings, close_handles, triton
from pierhead.calls.clients import Clients
from pierhead.errors import PierheadError, RemoteError
from pierhead.metrics import PROCESS
from pierhead.triton import cuda
from pierhead.triton import regions as triton_regions
from pierhead.triton.messages import infer_request
from pierhead.triton.regions import TritonRegions
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.environments.triton import SERVER, TRITON
from tests.fakes.fake_triton import FakeTriton
from tests.harness.ports import free_port
from tests.harness.waiting import PATIENCE_S, until

MODELS = Path(__file__).parent / "triton_models"
ONE = np.array([1, 2], np.float32)


class Server(NamedTuple):
    client: triton.Client
    kill: Any
    stub: Any
    """tritonclient's own, over a channel of the test."""


@contextlib.asynccontextmanager
async def fake(port: int, triton_in_memory: FakeTriton | None = None) -> AsyncIterator[Any]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])  # as Triton
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton_in_memory or FakeTriton(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield lambda: server.stop(0)
    await server.stop(0)


@contextlib.asynccontextmanager
async def real(port: int) -> AsyncIterator[Any]:
    flags = [
        f"--backend-directory={SERVER}/backends",
        f"--model-repository={MODELS}", "--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false",
        "--strict-readiness=false", "--exit-timeout-secs=3", f"--grpc-port={port}", "--grpc-address=127.0.0.1",
        "--allow-http=false", "--allow-metrics=false", f"--backend-config=python,shm-region-prefix-name=test{port}",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        SERVER / "bin" / "tritonserver", *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )

    async def kill() -> None:
        process.send_signal(signal.SIGKILL)

    yield kill
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


def files(names: set[str]) -> set[str]:
    """The files of the connections that have made these regions."""
    owners = {name.rpartition("-")[0] for name in names}
    return {path.name for owner in owners for path in Path("/dev/shm").glob(f"*{owner}*")}


async def registered(server: Server) -> set[str]:
    """The regions that the server has; none where it died."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        return set((await server.stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest())).regions)
    return set()


async def becomes_ready(client: triton.Client, model: str, ready: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await client.ready(model) is not ready:  # noqa: ASYNC110 - the server cannot announce it
            await asyncio.sleep(0.01)


REAL = (
    pytest.mark.long,
    pytest.mark.skipif(not TRITON.is_made(), reason="no Triton here; python -m tests.environments.triton makes it"),
)


@pytest.fixture(params=[pytest.param(fake, id="fake"), pytest.param(real, id="real", marks=REAL)])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    port = free_port()
    Clients.use(Settings(static={"TRITON": (f"127.0.0.1:{port}",)}, triton_shared_memory_dir="/dev/shm"))
    async with request.param(port) as kill:
        client = triton.client("triton", timeout_s=PATIENCE_S)
        await becomes_ready(client, "same", True)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            server = Server(client, kill, stub)
            yield server
            names = await registered(server)
            await close_handles()
            assert files(names) == set()


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
    ended: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while "DeadlineExceeded" not in ended:  # none waits if all arrive before the first one is out of the queue
            calls = [server.client.infer("slow", sleep) for _ in range(5)]
            ended = sorted(type(each).__name__ for each in await asyncio.gather(*calls, return_exceptions=True))
    assert ended == ["Backpressure"] * 3 + ["DeadlineExceeded", "dict"]


MEGA = np.arange(1 << 20, dtype=np.float32)


def shared() -> float:
    """Tensors that travelled in memory so far."""
    return PROCESS.shared_memory_tensors.values.get(("shared",), 0)


async def shared_sum(client: triton.Client) -> Any:
    """A sum whose three tensors all travelled in memory: the first calls find none yet."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            before = shared()
            reply = await client.infer("add", {"a": MEGA, "b": MEGA[::-1]}, outputs={"sum": MEGA.nbytes})
            assert (reply["sum"] == MEGA[-1]).all()
            if shared() - before == 3:
                return reply["sum"]


async def test_large_tensors_travel_in_shared_memory(server: Server) -> None:
    first, second = await shared_sum(server.client), await shared_sum(server.client)
    assert not np.shares_memory(first, second)
    assert (first == second).all()
    kept = await registered(server)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    del first, second
    await registered(server)  # a turn of the loop, in which their memory is free again
    await shared_sum(server.client)
    assert await registered(server) == kept  # they were used again
    assert len(files(kept)) == 1  # which says that their owner lives
    await close_handles()
    assert await registered(server) == set()


async def test_calls_that_fail_or_are_cancelled_leave_no_memory(server: Server) -> None:
    client, sleep = server.client, np.full((1, MEGA.size), 0.5, np.float32)
    for call, kind, regions in [
        (client.infer("add", {"a": MEGA - 1, "b": MEGA}, outputs={"sum": MEGA.nbytes}), RemoteError, 2),
        (client.infer("add", {"a": MEGA, "b": MEGA}, outputs={"sum": MEGA.nbytes - 64}), BadRequest, 2),
        (client.infer("slow", {"seconds": sleep}, timeout=0.2), DeadlineExceeded, 1),
    ]:
        await shared_sum(client)
        before = await registered(server)
        with pytest.raises(kind):
            await call
        async with asyncio.timeout(PATIENCE_S):
            while len(before - await registered(server)) < regions:  # noqa: ASYNC110 - a server keeps what it reads
                await asyncio.sleep(0.01)


class Holding(FakeTriton):
    """Leaves callers without a reply: one that registers or unregisters, or each that unregisters."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        self.asked = asyncio.Event()

    async def _hold(self) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        reply = await super().SystemSharedMemoryRegister(request, context)
        if self.held == "register" and len(self.regions) == 2:
            await self._hold()
        return reply

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        if self.held == "each unregister" or (self.held == "unregister" and not self.asked.is_set()):
            await self._hold()
        return await super().SystemSharedMemoryUnregister(request, context)


@pytest.mark.parametrize("held", ["register", "unregister", "each unregister", "reading", "gone"])
async def test_regions_serve_small_tensors_and_close_while_the_server_is_asked(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, server, bounded = free_port(), Holding(held), held == "each unregister"
    async with fake(port, server) as kill, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        regions = TritonRegions(service_pb2_grpc.GRPCInferenceServiceStub(channel), "/dev/shm")
        new = PROCESS.shared_memory_tensors.values.get(("new",), 0)
        assert regions.take([100]) is None
        assert PROCESS.shared_memory_tensors.values[("new",)] == new + 1
        async with asyncio.timeout(PATIENCE_S):
            while (region := regions.take([100])) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if held == "register":
                assert regions.take([100]) is None
            elif held == "reading":
                server.reading[region.name.decode()] += 1
                asyncio.get_running_loop().call_later(0.1, server.reading.clear)
                server.asked.set()
            elif held == "gone":
                await kill()
                server.asked.set()
            else:
                regions.end(region, failed=True)
            await server.asked.wait()
            monkeypatch.setattr(triton_regions, "CLOSE_TIMEOUT_S", 0.2 if bounded else 2 * PATIENCE_S)
            await regions.close()
        assert bool(server.regions) is (held in ("each unregister", "gone"))
        assert regions.take([100]) is None
        assert files({region.name.decode()}) == set()


@pytest.mark.parametrize("removable", [True, False], ids=["", "file of another user"])
async def test_memory_that_killed_processes_left_is_removed(
    server: Server, removable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = (Path(f"/dev/shm/pierhead-{token * 16}") for token in "01")
    with contextlib.ExitStack() as stack:
        for owner in (dead, alive):
            file = stack.enter_context(owner.open("w"))
            stack.callback(owner.unlink, missing_ok=True)
            if owner is alive:
                fcntl.flock(file, fcntl.LOCK_EX)
            part = owner.with_name(f"{owner.name}-0")
            part.write_bytes(bytes(4096))
            stack.callback(part.unlink, missing_ok=True)
            await server.stub.SystemSharedMemoryRegister(
                service_pb2.SystemSharedMemoryRegisterRequest(name=part.name, key=f"/{part.name}", byte_size=4096)
            )
        if not removable:
            unlink = Path.unlink

            def refused(path: Path, missing_ok: bool = False) -> None:
                if dead.name in path.name:
                    raise PermissionError(errno.EPERM, "Operation not permitted")
                unlink(path, missing_ok)

            stack.enter_context(monkeypatch.context()).setattr(Path, "unlink", refused)
        await shared_sum(server.client)
        async with asyncio.timeout(PATIENCE_S):
            while f"{dead.name}-0" in await registered(server):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert files({f"{dead.name}-0"}) == (set() if removable else {dead.name, f"{dead.name}-0"})
        assert files({part.name}) == {alive.name, part.name}
        assert part.name in await registered(server)


@pytest.mark.parametrize("way", ["elsewhere", "full"])
async def test_without_memory_messages_carry_the_bytes(
    server: Server, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if way == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        clients = Clients.current().settings
        await close_handles()
        Clients.use(dataclasses.replace(clients, triton_shared_memory_dir=str(tmp_path)))
    counts = PROCESS.shared_memory_tensors.values
    before = dict(counts)
    async with asyncio.timeout(PATIENCE_S):
        while counts.get((way,), 0) < before.get((way,), 0) + 4:
            assert ((await server.client.infer("add", {"a": MEGA, "b": MEGA}))["sum"] == 2 * MEGA).all()
    assert counts.get(("shared",)) == before.get(("shared",))
    assert await registered(server) == set()
    assert await asyncio.to_thread(lambda: [*tmp_path.glob("pierhead-*-*")]) == []


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


async def loaded(client: triton.Client) -> dict[str, set[str]]:
    return {replica: {each.name for each in found} for replica, found in (await client.index(ready=True)).items()}


async def test_models_are_loaded_on_demand_and_the_least_recently_used_one_is_unloaded(server: Server) -> None:
    plain, client = server.client, triton.client("triton", timeout_s=PATIENCE_S, max_num_models_per_replica=2)
    for model in ("add", "repeat", "same", "slow"):
        await plain.unload(model)
        await becomes_ready(plain, model, False)

    def add() -> Any:
        return client.infer("add", {"a": ONE, "b": ONE})

    def same() -> Any:
        return client.infer("same", {"text": np.array(["x"]), "half": ONE.astype("f2")})

    before = PROCESS.multiplex_loads.values.get(("triton triton",), 0)
    assert [reply["sum"].tolist() for reply in await asyncio.gather(*(add() for _ in range(8)))] == [[2, 4]] * 8
    assert PROCESS.multiplex_loads.values[("triton triton",)] == before + 1
    await same()
    await add()
    assert [int(part["value"][0]) async for part in client.stream("repeat", numbers(3, 1, 2))] == [3, 1, 2]
    await becomes_ready(plain, "same", False)
    assert [*(await loaded(client)).values()] == [{"add", "repeat"}]
    for model, call in (("add", add), ("repeat", lambda: anext(client.stream("repeat", numbers(1))))):
        await plain.unload(model)  # as another process may
        await becomes_ready(plain, model, False)
        await call()
    with pytest.raises(NotFound, match="failed to poll from model repository"):
        await client.infer("nope", {"a": ONE})
    with pytest.raises(RemoteError, match="no weights"):
        await client.infer("broken", {"x": ONE[:1]})
    with pytest.raises(NotFound, match="version 7"):
        await client.infer("add", {"a": ONE, "b": ONE}, version="7")
    with pytest.raises(DeadlineExceeded):
        await client.infer("slow", {"seconds": ONE.reshape(1, 2)}, timeout=0.001)
    with pytest.raises(NotFound, match="unknown model"):
        await plain.infer("slow", {"seconds": ONE.reshape(1, 2)})


async def test_models_that_this_process_has_not_loaded_are_not_unloaded(server: Server) -> None:
    plain, client = server.client, triton.client("triton", timeout_s=PATIENCE_S, max_num_models_per_replica=1)
    await plain.unload("repeat")
    await becomes_ready(plain, "repeat", False)
    for _ in range(2):
        await client.infer("add", {"a": ONE, "b": ONE})
        await becomes_ready(plain, "repeat", False)
        await anext(client.stream("repeat", numbers(1)))
        assert await plain.ready("add")


async def test_calls_that_meet_a_model_unloaded_elsewhere_load_it_once_and_in_their_time() -> None:
    server, port = FakeTriton(), free_port()
    async with fake(port, server):
        Clients.use(Settings(static={"TRITON": (f"127.0.0.1:{port}",)}))
        client = triton.client("triton", timeout_s=PATIENCE_S, max_num_models_per_replica=2)
        await client.infer("add", {"a": ONE, "b": ONE})
        server.loaded.remove("add")
        server.refusal_s = 0.5
        server.limits.clear()
        await asyncio.gather(*(client.infer("add", {"a": ONE, "b": ONE}, timeout=9) for _ in range(8)))
        assert server.loads == ["add"]
        assert len(server.limits) == 16
        assert sorted(server.limits)[7] < 9 - server.refusal_s / 2  # gRPC rounds, longer ones to whole seconds
        server.loaded.remove("add")
        server.explicit = False
        for call in (client.load("add"), client.infer("add", {"a": ONE, "b": ONE})):
            with pytest.raises(RemoteError, match="explicit model load / unload is not allowed"):
                await call
        await close_handles()


async def test_several_replicas() -> None:
    """Calls go to the replica that holds their model; a load is tried at all replicas, and all failures are said."""
    fakes, ports = (FakeTriton(), FakeTriton(), FakeTriton()), [free_port() for _ in range(3)]
    for each in fakes:
        each.loaded.clear()
    async with contextlib.AsyncExitStack() as stack:
        for each, port in zip(fakes, ports, strict=True):
            await stack.enter_async_context(fake(port, each))
        Clients.use(Settings(static={"TRITON": tuple(f"127.0.0.1:{port}" for port in ports)}))
        stack.push_async_callback(close_handles)
        client = triton.client("triton", timeout_s=PATIENCE_S, max_num_models_per_replica=2)
        async with asyncio.timeout(PATIENCE_S):
            while len(await client.index()) < 3:  # noqa: ASYNC110 - until all are connected
                await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.gather(*(client.infer("add", {"a": ONE, "b": ONE}) for _ in range(4)))
            await asyncio.gather(*(client.infer("repeat", numbers(1)) for _ in range(4)), return_exceptions=True)
        assert sorted(each.loads for each in fakes) == [[], ["add"], ["repeat"]]
        fakes[0].lacks.add("same")
        fakes[1].lacks.add("same")
        with pytest.raises(NotFound, match=r"2 of 3 replicas failed: .*failed to poll.*; .*failed to poll"):
            await client.load("same")
        assert [found for found in (await loaded(client)).values() if "same" in found]


async def test_a_server_that_dies_during_a_call(server: Server) -> None:
    parts = server.client.stream("repeat", numbers(*range(1000), delay_ms=50))
    await anext(parts)
    await server.kill()
    with pytest.raises(ReplicaDied):
        async for _ in parts:
            pass


class OnGpu:
    """A float32 array in what stands for GPU memory, 256 bytes into an allocation."""

    def __init__(self, array: Any, **more: Any) -> None:
        self.memory = np.zeros(4096, np.uint8)
        self.memory[256 : 256 + array.nbytes] = array.view(np.uint8).ravel()
        place = self.memory.ctypes.data + 256, False
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": "<f4", "data": place, "version": 3, **more}


def ipc_of(pointer: int, _: int | None) -> cuda.Allocation:
    return cuda.Allocation((pointer - 256).to_bytes(64), 0, pointer - 256, 4096)


async def test_an_array_in_gpu_memory_is_registered_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ipc_of", ipc_of)
    port, gpu_server = free_port(), FakeTriton(gpu=True)
    Clients.use(Settings(static={"TRITON": (f"127.0.0.1:{port}",)}))
    client = triton.client("triton", timeout_s=PATIENCE_S)

    def begin(seconds: float) -> tuple[asyncio.Task[Any], weakref.ref[OnGpu]]:
        array = OnGpu(np.array([[seconds]], np.float32))
        return asyncio.create_task(client.infer("slow", {"seconds": array})), weakref.ref(array)

    async with fake(port, gpu_server) as kill:
        assert (await client.infer("add", {"a": OnGpu(ONE), "b": ONE}))["sum"].tolist() == [2, 4]
        await until(lambda: not gpu_server.on_gpu, "the server maps nothing")
        with pytest.raises(RemoteError, match="expected a number"):
            await client.infer("add", {"a": OnGpu(-ONE), "b": OnGpu(ONE)})
        await until(lambda: not gpu_server.on_gpu, "the server maps nothing")
        assert gpu_server.registering == 3

        call, array = begin(0.5)
        await until(gpu_server.reading.total, "the server reads it")
        call.cancel()
        await asyncio.wait([call])
        assert array() is not None  # the server reads it still
        assert gpu_server.on_gpu
        del call
        await until(lambda: not gpu_server.on_gpu and gc.collect() >= 0 and array() is None, "the array is free")

        gpu_server.may_register.clear()
        call, _ = begin(0)
        await until(lambda: gpu_server.registering == 5, "all register")
        call.cancel()
        await asyncio.wait([call])
        gpu_server.may_register.set()
        await until(lambda: gpu_server.registered == 5 and not gpu_server.on_gpu, "all are unregistered")

        call, array = begin(60)
        await until(gpu_server.reading.total, "the server reads it")
        await kill()
        with pytest.raises(ReplicaDied):
            await call
        await close_handles()
        del call
        assert gc.collect() >= 0
        assert array() is None


async def test_a_server_that_cannot_map_gpu_memory_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ipc_of", ipc_of)
    array = OnGpu(ONE)
    gone = weakref.ref(array)
    with pytest.raises(BadRequest) as raised:
        await server.client.infer("add", {"a": array, "b": ONE})
    assert "input a of model add is in GPU memory: Triton cannot map it" in str(raised.value)
    assert ": failed to register shared memory region: invalid args. Copy it to the host" in str(raised.value)
    del array, raised
    await until(lambda: gc.collect() >= 0 and gone() is None, "the array is free")


def test_an_array_in_gpu_memory_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="input x of model m is in GPU memory: only `infer` can send it"):
        infer_request("m", {"x": OnGpu(ONE)})
    with pytest.raises(BadRequest, match="not C-contiguous"):
        infer_request("m", {"x": OnGpu(ONE, strides=(8,))})
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(BadRequest, match="package cuda-bindings, which is missing"):
        cuda.DeviceArray("x", OnGpu(ONE)).locate()


@pytest.mark.parametrize(
    ("stream", "wait"), [(None, []), (7, [("cuStreamSynchronize", 7)]), (2, [("cuCtxSynchronize",)])]
)
def test_the_array_s_stream_is_through_before_the_handle_is_given(
    stream: int | None, wait: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    raw = ctypes.create_string_buffer(b"h" * 64, 64)
    handle = SimpleNamespace(getPtr=lambda: ctypes.addressof(raw))

    class Driver:
        CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        CUpointer_attribute = SimpleNamespace(
            CU_POINTER_ATTRIBUTE_CONTEXT="context", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=3
        )

        def __getattr__(self, name: str) -> Any:
            def function(*arguments: Any) -> Any:
                calls.append((name, *arguments))
                found = {"cuMemGetAddressRange": (1000, 4096), "cuIpcGetMemHandle": (handle,)}
                return (0, *found.get(name, arguments[:1]))

            return function

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Driver())
    assert cuda.ipc_of(1256, stream) == cuda.Allocation(b"h" * 64, 3, 1000, 4096)
    assert calls[1:-2] == [
        ("cuCtxPushCurrent", "context"), *wait, ("cuMemGetAddressRange", 1256), ("cuIpcGetMemHandle", 1000)
    ]  # fmt: skip
    assert calls[-1] == ("cuCtxPopCurrent",)


def test_bfloat16_is_sent_as_it_is() -> None:
    request = infer_request("m", {"x": np.array([1.5], ml_dtypes.bfloat16)})
    assert (request.inputs[0].datatype, request.raw_input_contents[0]) == ("BF16", b"\xc0\x3f")
