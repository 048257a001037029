"""The methods of a service's class behind the edge of a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from pierhead.classes.contract import ClassMethod, Contract
from pierhead.classes.threads import in_thread
from pierhead.edge.methods import ServedMethod, decoder


def served_methods(service: object, contract: Contract) -> list[ServedMethod]:
    """The methods of an object of the class, for calls from gRPC or a lane."""
    return [_served(contract, method, getattr(service, method.name)) for method in contract.methods.values()]


def _served(contract: Contract, method: ClassMethod, function: Callable[..., Any]) -> ServedMethod:
    behaviour = _stream if method.streams else _thread if method.threaded else _unary
    return ServedMethod(
        name=method.label,
        service=contract.service,
        request_streaming=False,
        response_streaming=method.streams,
        behaviour=behaviour(method, function),
        decode=decoder(method.label, method.request_class.FromString),
        encode=method.reply_class.SerializeToString,
    )


def _unary(method: ClassMethod, function: Callable[..., Any]) -> Callable[..., Any]:
    begin, reply = method.begin, method.reply

    async def unary(request: Any, _: Any) -> Any:
        return reply(await begin(function, request))

    return unary


def _thread(method: ClassMethod, function: Callable[..., Any]) -> Callable[..., Any]:
    async def thread(request: Any, _: Any) -> Any:
        return method.reply(await method.begin(partial(in_thread, function), request))

    return thread


def _stream(method: ClassMethod, function: Callable[..., Any]) -> Callable[..., Any]:
    begin, reply = method.begin, method.reply

    async def stream(request: Any, _: Any) -> AsyncIterator[Any]:
        async with aclosing(begin(function, request)) as items:
            async for item in items:
                yield reply(item)

    return stream
