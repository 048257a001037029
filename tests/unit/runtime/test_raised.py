"""Whatever user code raises is an error of it, with an id: at every edge, and in everything that is called for it.

What is no `Exception` is not only Ctrl-C: Rust code panics so (pyo3's PanicException), and libraries derive from
GeneratorExit.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import pytest
from aiohttp import ClientError, ClientSession, WSMsgType, web
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from pierhead import (
    PierheadError,
    Service,
    Settings,
    UserCodeError,
    batch,
    call,
    endpoint,
    multiplexed,
    override_handle,
    register_policy,
)
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.classes.handles import handle_on
from pierhead.metrics import RuntimeMetrics
from pierhead.policies.policy import RoutedCall
from pierhead.raised import as_holdable

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, address, until
from tests.unit.runtime.pipes import PipesServicer, PipesStub

Make: TypeAlias = Callable[[], BaseException]


class Panic(BaseException):
    """As pyo3's PanicException."""


class Closed(GeneratorExit):
    """As of libraries that end their own generators."""


RAISED: dict[str, Make] = {
    "an exception": lambda: ValueError("x"),
    "a panic": lambda: Panic("x"),
    "a subclass of GeneratorExit": lambda: Closed("x"),
    "GeneratorExit": lambda: GeneratorExit("x"),
    "a cancellation of its own": lambda: asyncio.CancelledError("x"),
    "StopIteration": lambda: StopIteration("x"),
    "StopAsyncIteration": lambda: StopAsyncIteration("x"),
    "a group of panics": lambda: BaseExceptionGroup("x", [Panic("x")]),
}


class Raises(Service):
    """Raises in each way that a method can."""

    def __init__(self, make: Make) -> None:
        self._make = make

    async def on_the_loop(self, word: str) -> str:
        raise self._make()

    def in_a_thread(self, word: str) -> str:
        raise self._make()

    async def stream(self, word: str) -> AsyncIterator[str]:
        yield word
        raise self._make()

    @batch(max_batch_size=2, batch_wait_timeout_s=0)
    async def _batched(self, words: list[str]) -> list[str]:
        raise self._make()

    async def batched(self, word: str) -> str:
        return await self._batched(word)

    @multiplexed(max_num_models_per_replica=2)
    async def _model(self, name: str) -> str:
        raise self._make()

    async def with_model(self, word: str) -> str:
        return await self._model(word)


app = FastAPI()


class Routes(Service, asgi=app):
    def __init__(self, make: Make) -> None:
        self._make = make

    @app.get("/on-the-loop")  # type: ignore[untyped-decorator]
    async def route(self) -> str:
        raise self._make()

    @app.get("/in-a-thread")  # type: ignore[untyped-decorator]
    def threaded_route(self) -> str:
        raise self._make()

    @app.get("/stream")  # type: ignore[untyped-decorator]
    async def streaming_route(self) -> StreamingResponse:
        return StreamingResponse(_pieces(self._make, 0))

    @app.websocket("/socket")  # type: ignore[untyped-decorator]
    async def socket(self, socket: WebSocket) -> None:
        await socket.accept()
        raise self._make()


async def _pieces(make: Make, count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield "one"
    raise make()


class Endpoints(Service):
    def __init__(self, make: Make) -> None:
        self._make = make

    @endpoint("GET", "/on-the-loop")
    async def answer(self) -> str:
        raise self._make()

    @endpoint("GET", "/stream")
    async def events(self) -> AsyncIterator[str]:
        return _pieces(self._make, 0)

    @endpoint("GET", "/stream-later")
    async def later(self) -> AsyncIterator[str]:
        return _pieces(self._make, 1)

    @endpoint("GET", "/socket")
    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        raise self._make()


class Pipes(PipesServicer):
    """A servicer whose methods raise."""

    def __init__(self, make: Make) -> None:
        self._make = make

    async def One(self, request: bytes, context: Any) -> bytes:
        raise self._make()

    async def Split(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        raise self._make()

    async def Join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        await anext(requests)
        raise self._make()

    async def Talk(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests)
        raise self._make()


def _of_pipes(stub: PipesStub) -> dict[str, Awaitable[Any]]:
    async def requests() -> AsyncIterator[bytes]:
        # It stays open: grpc.aio loses the status of a call whose end meets a write ("Internal error from Core").
        yield b"x"
        await asyncio.Event().wait()

    return {
        "One": stub.One(b"x"),
        "Split": _all(stub.Split(b"x")),
        "Join": stub.Join(requests()),
        "Talk": _all(stub.Talk(requests())),
    }


async def _all(stream: Any) -> list[Any]:
    return [item async for item in stream]


SOON_S = 10.0
"""An answer that takes longer is none."""

ID = re.compile(r"\[error id [0-9a-f]{16}\]")


async def seen(calls: dict[str, Awaitable[Any]]) -> dict[str, str]:
    """By call, "an id" for an error of user code with one; else what was seen."""

    async def one(call: Awaitable[Any]) -> str:
        try:
            async with asyncio.timeout(SOON_S):
                return f"answered {await call!r}"
        except UserCodeError as error:
            return "an id" if ID.search(str(error)) else f"no id: {error}"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    return dict(zip(calls, await asyncio.gather(*map(one, calls.values())), strict=True))


def all_ids(found: dict[str, str]) -> bool:
    return found == dict.fromkeys(found, "an id")


@pytest.fixture(params=RAISED)
def make(request: pytest.FixtureRequest) -> Make:
    return RAISED[request.param]


@pytest.mark.parametrize("transport", ["lane", "grpc", "user's thread", "in process"])
class TestCalls:
    async def test_of_a_servicer(self, cluster: Cluster, make: Make, transport: str) -> None:
        async with _placed(cluster, Pipes(make), transport):
            found = await seen(_of_pipes(PipesStub(HandleChannel("raises", metrics=RuntimeMetrics()))))
        assert all_ids(found), found

    async def test_of_a_class(self, cluster: Cluster, make: Make, transport: str) -> None:
        stub: Any = handle_on(Raises, HandleChannel("raises", metrics=RuntimeMetrics()))
        async with _placed(cluster, Raises(make), transport):
            found = await seen(
                {
                    "on the loop": stub.on_the_loop("x"),
                    "in a thread": call(stub.in_a_thread, "x"),
                    "stream": _all(stub.stream("x")),
                    "batched": stub.batched("x"),
                    "with a model": stub.with_model("x"),
                }
            )
        assert all_ids(found), found


@asynccontextmanager
async def _placed(cluster: Cluster, part: object, transport: str) -> AsyncIterator[None]:
    """While the block runs, the service "raises" is a replica of that part."""
    if transport == "in process":
        with override_handle("raises", part):
            yield
        return
    server = await cluster.start(part, run_user_code_in_separate_thread=transport == "user's thread", debug=True)
    Clients.use(Settings(static={"RAISES": (address(server),)}, transport="grpc" if transport == "grpc" else "lane"))
    yield
    assert server.state == "ready"


@pytest.mark.parametrize(
    ("part", "paths"),
    [(Routes, ("on-the-loop", "in-a-thread", "stream")), (Endpoints, ("on-the-loop", "stream"))],
    ids=["FastAPI", "endpoints"],
)
async def test_over_http(
    cluster: Cluster, client: ClientSession, make: Make, part: type[Service], paths: tuple[str, ...]
) -> None:
    server = await cluster.start(part(make))  # type: ignore[call-arg]
    url = f"http://127.0.0.1:{server.http_port}"
    found = {}
    if part is Routes and isinstance(make(), asyncio.CancelledError):
        paths = paths[:2]  # Starlette streams in a task group, which takes this for its own cancellation
    for path in paths:
        try:
            async with client.get(f"{url}/{path}") as response:
                text = await response.text()
        except ClientError as error:
            text = repr(error)
        told = {"code": "internal"}.items() <= _error_of(text).items() and ID.search(text)
        found[path] = "an id" if told else text
    async with client.ws_connect(f"{url}/socket") as socket:
        ended = await socket.receive(timeout=PATIENCE_S)
        found["socket"] = "an id" if (ended.type, ended.data) == (WSMsgType.CLOSE, 1011) else str(ended)
    if part is Endpoints:
        async with client.get(f"{url}/stream-later") as response:
            events = await response.text()
            found["stream later"] = "an id" if ID.search(events) and "event: error" in events else events
    assert all_ids(found), found
    assert server.state == "ready"


def _error_of(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)["error"]
    except (ValueError, KeyError):
        return {}
    return found


class Hooks:
    """A part all of whose hooks raise."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self.raises = False

    async def check_health(self) -> None:
        if self.raises:
            raise self._make()

    def reconfigure(self, config: Any) -> None:
        if config:
            raise self._make()


@pytest.mark.parametrize("separate", [False, True], ids=["loop", "thread"])
async def test_hooks_make_the_replica_ill_and_do_not_end_it(cluster: Cluster, make: Make, separate: bool) -> None:
    hooks = Hooks(make)
    server = await cluster.start(Pipes(make), hooks, health_period_s=0.01, run_user_code_in_separate_thread=separate)
    server._config.offer('{"a": 1}')
    await until(lambda: bool(server._config.report().error), "the config is refused")
    hooks.raises = True
    await until(lambda: server.state == "starting", "it is ill")
    hooks.raises = False
    await until(lambda: server.state == "ready", "it is well again")


async def test_user_code_that_is_cancelled_before_it_begins_is_not_called() -> None:
    async def check() -> None:
        raise AssertionError("it was called")

    task = asyncio.create_task(as_holdable(check))
    task.cancel()
    assert await asyncio.wait([task]) == ({task}, set())
    assert task.cancelled()


class Ends(Pipes):
    def close(self) -> None:
        raise self._make()


@pytest.mark.parametrize("separate", [False, True], ids=["loop", "thread"])
async def test_a_destructor_that_raises_keeps_no_replica_alive(cluster: Cluster, make: Make, separate: bool) -> None:
    await cluster.drained(await cluster.start(Ends(make), run_user_code_in_separate_thread=separate))


class OfPolicy:
    """A policy that raises."""

    def __init__(self, make: Make, method: str) -> None:
        self._make = make
        self._method = method

    def choose(self, of: Sequence[Any], call: RoutedCall) -> Any:
        if self._method == "choose":
            raise self._make()
        return of[0]

    def on_routed(self, candidate: Any, call: RoutedCall) -> None:
        if self._method == "on_routed":
            raise self._make()


class OfAsyncPolicy(OfPolicy):
    async def choose(self, of: Sequence[Any], call: RoutedCall) -> Any:
        return super().choose(of, call)


@pytest.mark.parametrize("policy", [OfPolicy, OfAsyncPolicy])
@pytest.mark.parametrize("method", ["choose", "on_routed"])
async def test_a_policy_fails_the_call_alone(cluster: Cluster, make: Make, policy: type[OfPolicy], method: str) -> None:
    name = f"raises {method} {policy.__name__} {type(make()).__name__} {make()!r}"
    register_policy(name, lambda _: policy(make, method))
    async with _placed(cluster, Pipes(make), "lane"):
        stub = PipesStub(HandleChannel("raises", metrics=RuntimeMetrics(), policy=name))
        found = await seen({"call": stub.One(b"x")})
    assert all_ids(found), found


@pytest.mark.parametrize("word", ["SystemExit(3)", "KeyboardInterrupt()"])
@pytest.mark.parametrize("edge", ["lane", "grpc", "endpoint", "route"])
async def test_an_exit_ends_the_replica_at_every_edge(cluster: Cluster, free_port: int, edge: str, word: str) -> None:
    part = {"endpoint": "Endpoints", "route": "Routes"}.get(edge, "Pipes")
    source = f"from pierhead import serve\nfrom {__name__} import {part}\nserve({part}(lambda: {word}))"
    process = await cluster.process(source, free_port)
    # How the caller of a replica that has ended learns of that is not at stake.
    with suppress(PierheadError, ClientError):
        if part == "Pipes":
            Clients.use(Settings(static={"RAISES": (f"127.0.0.1:{free_port}",)}, transport=edge))
            await PipesStub(HandleChannel("raises", metrics=RuntimeMetrics())).One(b"x")
        else:
            async with ClientSession() as client, client.get(f"http://127.0.0.1:{free_port}/on-the-loop") as response:
                await response.read()
    async with asyncio.timeout(PATIENCE_S):
        status = await process.wait()
    assert status in ((3,) if "Exit" in word else (130, -2)), status
