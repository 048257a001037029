"""A service with all four kinds of methods, over tensors; written by hand in the form that generated code has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from pierhead import batch, tensors
from pierhead.tensor.v1.tensor_pb2 import Tensor

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
        self.Split: Any = channel.unary_stream(f"/{NAME}/Split", *codec)
        self.Join: Any = channel.stream_unary(f"/{NAME}/Join", *codec)
        self.Talk: Any = channel.stream_stream(f"/{NAME}/Talk", *codec)


class Tensors(TensorsServicer):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def One(self, request: Tensor, context: Any) -> Tensor:
        return tensors.from_numpy(tensors.to_numpy(request) + 1)

    @batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def batched(self, requests: list[Tensor]) -> list[Tensor]:
        return [tensors.from_numpy(tensors.to_numpy(request) + 1) for request in requests]

    async def Batched(self, request: Tensor, context: Any) -> Tensor:
        return await self.batched(request)

    async def Keep(self, request: Tensor, context: Any) -> Tensor:
        """Keeps the array past the end of the call; an empty tensor drops all."""
        if request.shape:
            self.kept.append(tensors.to_numpy(request))
        else:
            self.kept.clear()
        return Tensor()

    async def Forward(self, request: Tensor, context: Any) -> Tensor:
        return request

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
