"""The gRPC side of the store that replicas and callers share (`pierhead.shared_store`); it serves nothing else.

The controller serves it, and so does the runner of an application's processes. It is not on the way of requests: a
policy that uses it gets an error while the controller is down, and decides without it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from pierhead.discovery.v1 import store_pb2, store_pb2_grpc
from pierhead.errors import StoreUnavailable
from pierhead.store.memory import Store

T = TypeVar("T")
_Context = grpc.aio.ServicerContext


class StoreService(store_pb2_grpc.SharedStoreServicer):
    """Answers from a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def Get(
        self, request: store_pb2.GetRequest, context: _Context[store_pb2.GetRequest, store_pb2.GetResponse]
    ) -> store_pb2.GetResponse:
        """Return the values of those keys that exist."""
        return store_pb2.GetResponse(values=await _answer(context, self._store.get(request.keys)))

    async def Set(
        self, request: store_pb2.SetRequest, context: _Context[store_pb2.SetRequest, store_pb2.SetResponse]
    ) -> store_pb2.SetResponse:
        """Set all keys or none."""
        await _answer(context, self._store.set(request.values, request.ttl_s))
        return store_pb2.SetResponse()

    async def Increment(
        self,
        request: store_pb2.IncrementRequest,
        context: _Context[store_pb2.IncrementRequest, store_pb2.IncrementResponse],
    ) -> store_pb2.IncrementResponse:
        """Add to a whole number."""
        value = await _answer(context, self._store.incr(request.key, request.by, request.ttl_s))
        return store_pb2.IncrementResponse(value=value)


def add_store(store: Store, server: grpc.aio.Server) -> None:
    """Answer a server's requests from a store."""
    store_pb2_grpc.add_SharedStoreServicer_to_server(StoreService(store), server)


async def _answer(context: _Context[Any, Any], asked: Awaitable[T]) -> T:
    try:
        return await asked
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except StoreUnavailable as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
