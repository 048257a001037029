"""The caller's side of a service's class: an object with the same methods, each of which calls a replica."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import grpc

from pierhead.calls.channel import HandleChannel
from pierhead.calls.replica import CONNECT_S, Replica
from pierhead.classes.contract import ClassMethod, Contract
from pierhead.classes.service import Bound, Service
from pierhead.classes.threads import in_thread
from pierhead.errors import NoReplica
from pierhead.request import MAX_ID_LENGTH, MODEL_KEY, SESSION_KEY, accept_opaque, current_request

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class CallOptions(NamedTuple):
    """What `options` sets for the calls of one handle."""

    timeout_s: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()


class ClassStub:
    """The methods of a contract on a channel: what generated stubs are to a .proto."""

    def __init__(self, contract: Contract, channel: grpc.aio.Channel) -> None:
        self.contract = contract
        self._channel = channel
        self._starts: dict[str, Callable[..., Any]] = {}

    def start_of(self, method: ClassMethod) -> Callable[..., Any]:
        """What begins a call: `start(request, timeout=..., metadata=...)`."""
        start = self._starts.get(method.name)
        if start is None:
            make: Any = self._channel.unary_stream if method.streams else self._channel.unary_unary
            codec = (method.request_class.SerializeToString, method.reply_class.FromString)
            start = self._starts[method.name] = make(f"/{method.label}", *codec, _registered_method=True)
        return start


class ClassHandle:
    """Stands for a service in another replica. A method is made at its first use."""

    def __init__(self, stub: ClassStub, call_options: CallOptions) -> None:
        self.__stub = stub
        self.__options = call_options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # no method, and asked for before there is a stub, by `copy`
            raise AttributeError(name)
        methods = self.__stub.contract.methods
        if name not in methods:
            raise AttributeError(
                f"{self.__stub.contract.service} has no method {name!r} that can be called; it has "
                f"{', '.join(methods) or 'none'}"
            )
        method = methods[name]
        call = _stream if method.streams else _unary
        made = call(method, self.__stub.start_of(method), self.__options)
        vars(self)[name] = made
        return made

    def _with_options(self, call_options: CallOptions) -> ClassHandle:
        """Another handle on the same channel."""
        return ClassHandle(self.__stub, call_options)


def handle_to(bound: Bound) -> ClassHandle:
    """The handle that a constructor gets in the place of a bound service."""
    return handle_on(bound.cls, HandleChannel(bound.name))


def handle_on(cls: type[Service], channel: grpc.aio.Channel) -> ClassHandle:
    """A handle on any channel."""
    return ClassHandle(ClassStub(cls.__contract__, channel), CallOptions())


async def each_replica(bound: Bound) -> list[Callable[[], Awaitable[ClassHandle]]]:
    """For each replica of a bound service that does not drain, once there is one: what makes a handle whose calls go to
    it alone.

    That waits until the replica may be called, at most CONNECT_S, and raises NoReplica for one that has gone. So does
    this where none will come. Both raise NoReplica shortly before the end of the time that the current request, or else
    any call, may take: the caller is to learn the reason.
    """
    binding = HandleChannel(bound.name).binding()
    pool, request = binding.pool, current_request()
    deadline = time.monotonic() + min(binding.timeout_s, math.inf if request is None else request.remaining_s())

    async def wait_for(is_there: Callable[[], object], what: str, most_s: float = math.inf) -> None:
        limit_s = min(most_s, binding.patience(deadline - time.monotonic(), returned=True))
        try:
            async with asyncio.timeout(limit_s):
                while not is_there():
                    if (hopeless := pool.hopeless()) is not None:
                        raise hopeless
                    await pool.changed()
        except TimeoutError:
            raise NoReplica(f"{what} within {limit_s:.3g} s: {pool.describe()}; try later") from None

    async def handle_at(replica: Replica) -> ClassHandle:
        name = f"{replica.name} of {bound.name}"
        await wait_for(lambda: replica.callable or replica.drains, f"{name} cannot be called", CONNECT_S)
        if replica.drains:
            raise NoReplica(f"{name} has gone, or drains")
        kwargs = {"replica": replica.name}
        channel = HandleChannel(bound.name, policy="pierhead.policies.named:Named", policy_kwargs=kwargs)
        return handle_on(bound.cls, channel)._with_options(CallOptions(deadline - time.monotonic()))

    def found() -> list[Replica]:
        return sorted((each for each in pool.replicas() if not each.drains), key=lambda each: each.name)

    await wait_for(found, f"no replica of {bound.name} can be called")
    return [partial(handle_at, replica) for replica in found()]


def options(
    handle: T, *, timeout_s: float | None = None, session_id: str | None = None, model_id: str | None = None
) -> T:
    """The same handle for calls with a deadline, a session or a model of their own.

        await options(self.scorer, timeout_s=0.2).score(user)

    A service itself, as in a unit test, is returned unchanged.
    Raises ValueError for a timeout that is not above 0, and for an id that a header cannot hold.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s: expected a number of seconds above 0, found {timeout_s}")
    named = [("session_id", SESSION_KEY, session_id), ("model_id", MODEL_KEY, model_id)]
    for name, _, value in named:
        if value is not None and accept_opaque(value) is None:
            raise ValueError(
                f"{name}: expected up to {MAX_ID_LENGTH} printable ASCII characters, found {value[:200]!r}"
            )
    if not isinstance(handle, ClassHandle):
        return handle
    metadata = tuple((key, value) for _, key, value in named if value is not None)
    return cast("T", handle._with_options(CallOptions(timeout_s, metadata)))


async def call(method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a `def` method of another service: `await call(self.scorer.rank, x)`.

    A service itself, as in a unit test, runs the method in a thread.
    """
    if isinstance(getattr(method, "__self__", None), Service) and not inspect.iscoroutinefunction(method):
        return cast("R", await in_thread(method, *args, **kwargs))
    result: Any = method(*args, **kwargs)
    return cast("R", await result if inspect.isawaitable(result) else result)


def _unary(method: ClassMethod, start: Callable[..., Any], call_options: CallOptions) -> Callable[..., Any]:
    timeout_s, metadata = call_options
    request_of, result_of = method.request, method.result

    async def unary(*args: Any, **kwargs: Any) -> Any:
        return result_of(await start(request_of(*args, **kwargs), timeout=timeout_s, metadata=metadata))

    unary.__name__ = unary.__qualname__ = method.name
    return unary


def _stream(method: ClassMethod, start: Callable[..., Any], call_options: CallOptions) -> Callable[..., Any]:
    timeout_s, metadata = call_options

    def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return _StreamItems(method, start(method.request(*args, **kwargs), timeout=timeout_s, metadata=metadata))

    stream.__name__ = stream.__qualname__ = method.name
    return stream


class _StreamItems(AsyncIterator[Any]):
    """The items of a stream. Dropping it, or `aclose()`, cancels the call."""

    __slots__ = ("_next", "_replies", "_result")

    def __init__(self, method: ClassMethod, replies: Any) -> None:
        self._replies = replies
        self._next = replies.__anext__
        self._result = method.result

    async def __anext__(self) -> Any:
        return self._result(await self._next())

    def read_ready(self) -> list[Any]:
        """The items that have arrived already, without waiting."""
        ready = getattr(self._replies, "read_ready", None)
        return [] if ready is None else [self._result(reply) for reply in ready()]

    def deliver(self, sink: Callable[[list[Any]], bool]) -> None:
        """Call `sink(items)` in the turn in which items arrive, as a call through generated stubs does."""
        deliver, result = getattr(self._replies, "deliver", None), self._result
        if deliver is not None:
            deliver(lambda replies: sink([result(reply) for reply in replies]))

    async def aclose(self) -> None:
        """Cancel the call unless it has ended."""
        await self._replies.aclose()
