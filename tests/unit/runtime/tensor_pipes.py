"""A service with all four kinds of methods, over tensors; written by hand in the form that generated code has. Its
replicas run in processes of their own."""

from __future__ import annotations

import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from pierhead import Service, batch, tensors
from pierhead.tensor.v1.tensor_pb2 import Tensor

from tests.unit.runtime.harness import Cluster

NAME = "pierhead.test.Tensors"

_CODEC = (Tensor.FromString, Tensor.SerializeToString)


class TensorsServicer:
    """One method of each kind: tensors plus one."""


def add_TensorsServicer_to_server(servicer: Any, server: Any) -> None:
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(servicer.One, *_CODEC),
        "Batched": grpc.unary_unary_rpc_method_handler(servicer.Batched, *_CODEC),
        "Keep": grpc.unary_unary_rpc_method_handler(servicer.Keep, *_CODEC),
        "Forward": grpc.unary_unary_rpc_method_handler(servicer.Forward, *_CODEC),
        "Die": grpc.unary_unary_rpc_method_handler(servicer.Die, *_CODEC),
        "Split": grpc.unary_stream_rpc_method_handler(servicer.Split, *_CODEC),
        "Join": grpc.stream_unary_rpc_method_handler(servicer.Join, *_CODEC),
        "Talk": grpc.stream_stream_rpc_method_handler(servicer.Talk, *_CODEC),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


class TensorsStub:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        codec = (Tensor.SerializeToString, Tensor.FromString)
        self.One: Any = channel.unary_unary(f"/{NAME}/One", *codec)
        self.Batched: Any = channel.unary_unary(f"/{NAME}/Batched", *codec)
        self.Keep: Any = channel.unary_unary(f"/{NAME}/Keep", *codec)
        self.Forward: Any = channel.unary_unary(f"/{NAME}/Forward", *codec)
        self.Missing: Any = channel.unary_unary(f"/{NAME}/Missing", *codec)
        self.Die: Any = channel.unary_unary(f"/{NAME}/Die", *codec)
        self.Split: Any = channel.unary_stream(f"/{NAME}/Split", *codec)
        self.Join: Any = channel.stream_unary(f"/{NAME}/Join", *codec)
        self.Talk: Any = channel.stream_stream(f"/{NAME}/Talk", *codec)


class Fatal(np.ndarray):
    """An array whose copying kills the process half-way."""

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.copyto:
            room = args[0].reshape(-1)
            room[: room.size // 2] = -1
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__array_function__(function, types, args, kwargs)


class Tensors(TensorsServicer):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def One(self, request: Tensor, context: Any) -> Tensor:
        array = tensors.to_numpy(request)
        assert in_place(array) or not request.HasField("shared")
        return tensors.from_numpy(array + 1)

    @batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def batched(self, requests: list[Tensor]) -> list[Tensor]:
        return [tensors.from_numpy(tensors.to_numpy(request) + 1) for request in requests]

    async def Batched(self, request: Tensor, context: Any) -> Tensor:
        return await self.batched(request)

    async def Keep(self, request: Tensor, context: Any) -> Tensor:
        """Keeps the array past the end of the call; an empty tensor drops all, and is answered with the lowest and the
        highest number of each."""
        if request.shape:
            self.kept.append(tensors.to_numpy(request))
            return Tensor()
        extremes = [(array.min(), array.max()) for array in self.kept]
        self.kept.clear()
        return tensors.from_numpy(np.array(extremes, np.float32))

    async def Forward(self, request: Tensor, context: Any) -> Tensor:
        return request

    async def Die(self, request: Tensor, context: Any) -> Tensor:
        """The process is killed when half of its reply is written."""
        return tensors.from_numpy(np.zeros(request.shape, np.float32).view(Fatal))

    async def Split(self, request: Tensor, context: Any) -> AsyncIterator[Tensor]:
        array = tensors.to_numpy(request)
        for number in range(20):
            yield tensors.from_numpy(array + number)

    async def Join(self, requests: AsyncIterator[Tensor], context: Any) -> Tensor:
        total: Any = 0
        async for request in requests:
            total = total + tensors.to_numpy(request)
        return tensors.from_numpy(np.asarray(total))

    async def Talk(self, requests: AsyncIterator[Tensor], context: Any) -> AsyncIterator[Tensor]:
        async for request in requests:
            yield tensors.from_numpy(tensors.to_numpy(request) + 1)


class TensorsClass(Service):
    """The same, written as a class."""

    async def one(self, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        assert in_place(array)
        return array + np.float32(1)

    async def split(self, array: npt.NDArray[np.float32]) -> AsyncIterator[npt.NDArray[np.float32]]:
        for number in range(20):
            yield array + np.float32(number)


async def tensors_replica(
    cluster: Cluster, port: int, directory: Path, servicer: str = "Tensors", **environ: str
) -> Process:
    """A replica in a process of its own, with shared memory."""
    source = (
        f"from tests.unit.runtime import tensor_pipes; from pierhead import serve; serve(tensor_pipes.{servicer}())"
    )
    memory = {"PIERHEAD_SHARED_MEMORY_BYTES": str(64 << 20), "PIERHEAD_SHARED_MEMORY_DIR": str(directory)}
    return await cluster.process(source, port, PYTHONPATH=".", **(memory | environ))


def held(process: int | str) -> tuple[int, int]:
    """How many descriptors of memfds a process has open, and how many mappings of them."""
    proc = Path("/proc", str(process))
    opened = 0
    for each in (proc / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the listing
            opened += os.readlink(each).startswith("/memfd:")
    return opened, (proc / "maps").read_text().count(" /memfd:")


def in_place(array: Any) -> bool:
    """Whether an array lies in a memfd that this process maps: it is no copy."""
    maps = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line
    ]
    return any(int(begin, 16) <= array.ctypes.data < int(end, 16) for begin, end in maps)
