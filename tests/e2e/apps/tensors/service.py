"""Two services, by the first argument: `front` (HTTP) sends tensors to `back` (gRPC), which answers with new ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from aiohttp import web
from pierhead import handle, serve, tensors
from pierhead.tensor.v1.tensor_pb2 import Tensor

NAME = "test.Tensors"
REPLIES = 4
HOLD_S = 50.0


class TensorsStub:
    """Stub and servicer are as generated for a service of tensors."""

    def __init__(self, channel: Any) -> None:
        code = {"request_serializer": Tensor.SerializeToString, "response_deserializer": Tensor.FromString}
        self.Negate = channel.unary_unary(f"/{NAME}/Negate", **code)
        self.Hold = channel.unary_unary(f"/{NAME}/Hold", **code)
        self.Count = channel.unary_stream(f"/{NAME}/Count", **code)


class TensorsServicer:
    """The base of the servicer."""


def add_TensorsServicer_to_server(servicer: Any, server: Any) -> None:
    code: dict[str, Any] = {"request_deserializer": Tensor.FromString, "response_serializer": Tensor.SerializeToString}
    handlers: dict[str, Any] = {
        "Negate": grpc.unary_unary_rpc_method_handler(servicer.Negate, **code),
        "Hold": grpc.unary_unary_rpc_method_handler(servicer.Hold, **code),
        "Count": grpc.unary_stream_rpc_method_handler(servicer.Count, **code),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


class Back(TensorsServicer):
    async def Negate(self, request: Tensor, context: Any) -> Tensor:
        return tensors.from_numpy(255 - tensors.to_numpy(request))

    async def Count(self, request: Tensor, context: Any) -> AsyncIterator[Tensor]:
        content = tensors.to_numpy(request)
        for number in range(REPLIES):
            yield tensors.from_numpy(content + np.uint8(number))

    async def Hold(self, request: Tensor, context: Any) -> Tensor:
        content = tensors.to_numpy(request)
        await asyncio.sleep(HOLD_S)
        return tensors.from_numpy(content[:1].copy())


def front() -> web.Application:
    backs = {transport: handle(TensorsStub, "back", transport=transport) for transport in ("lane", "grpc")}

    def asked(request: web.Request) -> tuple[Any, Any]:
        size = int(request.query["size"])
        return backs[request.query.get("transport", "lane")], np.arange(size, dtype=np.uint32).astype(np.uint8)

    def answer(is_right: bool) -> web.Response:
        return web.Response(status=200 if is_right else 500, text=f"right: {is_right}")

    async def negate(request: web.Request) -> web.Response:
        """Sends `count` tensors that are all in memory at a time."""
        back, content = asked(request)
        sent = [tensors.from_numpy(content) for _ in range(int(request.query.get("count", "1")))]
        replies = await asyncio.gather(*(back.Negate(tensor) for tensor in sent))
        return answer(all(np.array_equal(tensors.to_numpy(reply), 255 - content) for reply in replies))

    async def count(request: web.Request) -> web.Response:
        back, content = asked(request)
        number = 0
        async for reply in back.Count(tensors.from_numpy(content)):
            if not np.array_equal(tensors.to_numpy(reply), content + np.uint8(number)):
                return answer(False)
            number += 1
        return answer(number == REPLIES)

    async def hold(request: web.Request) -> web.Response:
        back, content = asked(request)
        await back.Hold(tensors.from_numpy(content))
        return answer(True)

    app = web.Application()
    app.add_routes([web.get("/negate", negate), web.get("/count", count), web.get("/hold", hold)])
    return app


if __name__ == "__main__":
    serve(front() if sys.argv[1] == "front" else Back())
