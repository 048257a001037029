"""Parts of pierhead.rayserve whose answers no HTTP request shows."""

# mypy: disable-error-code="attr-defined, untyped-decorator"
# It takes a decorated class for the class itself.

from __future__ import annotations

import asyncio
import gc
import pickle
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import WSServerHandshakeError
from fastapi import FastAPI, WebSocket
from pierhead import rayserve as serve
from pierhead.calls.absence import stopped
from pierhead.calls.replica import ReplicaListing
from pierhead.errors import BadRequest, SettingsError
from pierhead.metrics import PROCESS
from pierhead.rayserve.config import AutoscalingConfig, HTTPOptions, gRPCOptions
from pierhead.rayserve.context import DeploymentID, ReplicaContext, ReplicaID, _RequestContext
from pierhead.rayserve.deployed_object import DeployedObject
from pierhead.rayserve.deployment import BuiltApplication
from pierhead.rayserve.dispatch import HandleCall
from pierhead.rayserve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RayTaskError,
)
from pierhead.rayserve.grpc_proxy import RayServeGrpc
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.metrics import Counter
from pierhead.rayserve.options import DeploymentOptions
from pierhead.rayserve.pickles import GOOD_S, Seal, copied, failure_of, seal, write_secret
from pierhead.rayserve.proxy import RayServeProxy
from pierhead.rayserve.responses import answer, warm
from pierhead.rayserve.running import RunningApplication
from pierhead.rayserve.schema import ReplicaRank, ReplicaState
from pierhead.rayserve.services import bound_of
from pierhead.request import CURRENT, RequestContext
from pierhead.tasks import end_tasks
from pierhead.testing import local

from tests.harness.waiting import PATIENCE_S, until

# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, {"max_ongoing_requests": 5}),
        ({"num_replicas": 3}, {"max_ongoing_requests": 5, "replicas": 3}),
        ({"max_queued_requests": 7}, {"max_ongoing_requests": 5, "max_queued_requests": 7}),
        ({"num_replicas": "auto"}, {"max_ongoing_requests": 5, "autoscale": {"min": 1, "max": 100}}),
        (
            {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4, "upscale_delay_s": 5}},
            {"max_ongoing_requests": 5, "autoscale": {"min": 1, "max": 4, "upscale_delay_s": 5.0}},
        ),
        (
            {"num_replicas": "auto", "autoscaling_config": {"min_replicas": 2}},
            {"max_ongoing_requests": 5, "autoscale": {"min": 2, "max": 100}},
        ),
        (
            {"num_replicas": "auto", "autoscaling_config": AutoscalingConfig(max_replicas=4)},
            {"max_ongoing_requests": 5, "autoscale": {"min": 1, "max": 4}},
        ),
        (
            {"autoscaling_config": AutoscalingConfig(min_replicas=0, initial_replicas=2, max_replicas=2)},
            {"max_ongoing_requests": 5, "autoscale": {"min": 0, "max": 2, "initial": 2}},
        ),
        (
            {"backpressure_config": {"status_code": 429, "retry_after_s": 2}},
            {"max_ongoing_requests": 5, "backpressure": {"status_code": 429, "retry_after_s": 2.0}},
        ),
        (
            {"autoscaling_config": {"max_replicas": 2, "gone": 1}},
            {"max_ongoing_requests": 5, "autoscale": {"min": 1, "max": 2}},
        ),
        ({"user_config": {"a": 1}}, {"max_ongoing_requests": 5, "user_config": {"a": 1}}),
        ({"ray_actor_options": {"num_gpus": 0.5}}, {"max_ongoing_requests": 5, "gpu": {"fraction": 0.5}}),
        ({"ray_actor_options": {"num_gpus": 2}}, {"max_ongoing_requests": 5, "gpu": {"count": 2}}),
        (
            {"logging_config": {"log_level": "DEBUG", "encoding": "JSON", "enable_access_log": False}},
            {"max_ongoing_requests": 5, "logging": {"log_level": "debug", "encoding": "json", "access_log": "off"}},
        ),
        (
            {"request_router_config": {"request_router_class": "ray.serve.experimental:ConsistentHashRouter"}},
            {"max_ongoing_requests": 5, "router": {"policy": "consistent_hash"}},
        ),
        ({"graceful_shutdown_timeout_s": 5}, {"max_ongoing_requests": 5}),
        ({"graceful_shutdown_timeout_s": 300}, {"max_ongoing_requests": 5, "graceful_shutdown_timeout_s": 300.0}),
    ],
)
def test_options_are_words_of_x_serve(options: dict[str, Any], words: dict[str, Any]) -> None:
    assert DeploymentOptions().changed(**options).x_serve() == words


@pytest.mark.parametrize(("longest_s", "words"), [(20.0, {"graceful_shutdown_timeout_s": 30.0}), (25.0, {})])
def test_a_replica_that_drains_has_time_for_the_longest_request(longest_s: float, words: dict[str, float]) -> None:
    options = DeploymentOptions().changed(graceful_shutdown_timeout_s=30)
    assert options.x_serve(longest_s) == {"max_ongoing_requests": 5, **words}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "larger than 0"),
        ({"max_ongoing_requests": 0}, "expected an integer >= 1"),
        ({"num_replica": 1}, "num_replica is not one of"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "not allowed when autoscaling_config"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "greater than or equal"),
        ({"backpressure_config": {"status": 429}}, "status is none of its fields"),
        ({"logging_config": {"level": "INFO"}}, "logging_config: .*'level'"),
        ({"gang_scheduling_config": {"gang_size": 2}}, "gang_scheduling_config is not supported"),
        ({"deployment_actors": [1]}, "deployment_actors is not supported"),
        ({"user_config": object()}, "JSON"),
        ({"health_check_period_s": -1}, "expected a number of seconds"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        DeploymentOptions().changed(**options)


def test_options_without_effect_are_named() -> None:
    options = DeploymentOptions().changed(rolling_update_percentage=0.5, ray_actor_options={"runtime_env": {}})
    assert set(options.without_effect()) == {"rolling_update_percentage", "runtime_env"}


@pytest.mark.parametrize(("drain_s", "is_named"), [(24.0, True), (25.0, False), (26.0, False)])
def test_a_drain_that_is_shorter_than_requests_is_named(drain_s: float, is_named: bool) -> None:
    options = DeploymentOptions().changed(graceful_shutdown_timeout_s=drain_s)
    words = "a drain takes request_timeout_s, which is 20 s, and 5 s"
    assert options.without_effect(20.0) == ({"graceful_shutdown_timeout_s": words} if is_named else {})


# ---- applications as services


@serve.deployment(num_replicas=2)
class ImageModel:
    pass


@serve.deployment(max_ongoing_requests=9)
class Ingress:
    def __init__(self, *models: Any) -> None:
        self.models = models


def test_an_application_is_a_graph_of_services() -> None:
    shared = ImageModel.bind()
    graph = bound_of(Ingress.bind(shared, [shared], ImageModel.options(name="other-model").bind())).graph()
    assert {name: dict(bound.cls.__x_serve__) for name, bound in graph.items()} == {
        "ingress": {"max_ongoing_requests": 9, "route": "/"},
        "image-model": {"max_ongoing_requests": 5, "replicas": 2},
        "other-model": {"max_ongoing_requests": 5, "replicas": 2},
    }
    assert graph["ingress"].cls.__contract__.service == f"{__name__}.Ingress"


def test_two_deployments_that_would_be_one_service_are_named() -> None:
    app = Ingress.bind(ImageModel.bind(), ImageModel.options(name="image_model").bind())
    with pytest.raises(RayServeException, match="ImageModel and image_model would both be the service image-model"):
        bound_of(app)


def test_deployments_of_one_name_get_numbers() -> None:
    assert list(BuiltApplication(Ingress.bind(ImageModel.bind(), ImageModel.bind())).deployments) == [
        "ImageModel",
        "ImageModel_1",
        "Ingress",
    ]


def test_a_class_with_call_is_no_ingress() -> None:
    class Callable:
        def __call__(self) -> None: ...

    with pytest.raises(ValueError, match="may not have __call__"):
        serve.ingress(lambda: None)(Callable)


def test_what_http_needs_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(SettingsError, match=r"install pierhead\[rayserve\]"):
        warm()


@serve.deployment
class Doubler:
    def __call__(self, x: int) -> int:
        return 2 * x


@serve.deployment
class Asks:
    def __init__(self, doubler: Any) -> None:
        self.doubler = doubler

    async def __call__(self, request: Any) -> int:
        found: int = await self.doubler.remote(int(request.query_params["x"]))
        return found


async def test_a_test_runs_an_application_in_its_loop() -> None:
    async with local(Asks.bind(Doubler.bind())) as running:
        async with running.http.get("/?x=4") as response:
            assert await response.json() == 8
        assert await DeploymentHandle[Any]("Doubler").remote(5) == 10
    with pytest.raises(RayServeException, match="does not exist"):
        DeploymentHandle[Any]("Doubler").remote(5)


async def test_a_broadcast_to_a_deployment_that_has_ended_fails_at_once() -> None:
    async with _run_of(Doubler.bind()) as running:
        assert await running.handle().broadcast("__call__", 4).results_async(timeout_s=PATIENCE_S) == [8]
        running._pool().update(ReplicaListing(absence=stopped))
        with pytest.raises(DeploymentUnavailableError):
            await running.handle().broadcast("__call__", 4).results_async(timeout_s=5)


async def test_a_broadcast_that_is_cancelled_in_its_first_turn_leaves_nothing(recwarn: pytest.WarningsRecorder) -> None:
    async with _run_of(Doubler.bind()) as running:
        [dispatcher] = running._dispatchers.values()
        task = asyncio.create_task(dispatcher.broadcast(HandleCall(_RequestContext("r"), (4,), {})))
        await asyncio.sleep(0)
        await end_tasks(task)
    del task
    gc.collect()
    assert [each for each in recwarn if "never awaited" in str(each.message)] == []


_SOCKETS = FastAPI()


@serve.deployment
@serve.ingress(_SOCKETS)
class Waits:
    @_SOCKETS.websocket("/socket")
    async def socket(self, socket: WebSocket) -> None:
        await asyncio.Event().wait()


async def test_a_websocket_that_is_not_accepted_in_time_is_refused() -> None:
    async with local(Waits.bind()) as running:
        with pytest.raises(WSServerHandshakeError) as caught:
            await running.http.ws_connect("/socket", headers={"x-request-timeout-seconds": "0.1"})
        assert caught.value.status == 408


# ---- user code in threads


async def _servant_of(app: Any) -> DeployedObject:
    (built,) = BuiltApplication(app).deployments.values()
    replica_id = ReplicaID("a", DeploymentID(built.name, "default"))
    rank = ReplicaRank(rank=0, node_rank=0, local_rank=0)
    deployed = DeployedObject(built, ReplicaContext(replica_id, None, built.options, rank, 1, _dispatchers={}))
    await deployed.start((), {}, None)
    return deployed


_BEGUN = threading.Event()
_MAY_END = threading.Event()


@serve.deployment(max_ongoing_requests=1)
class Blocks:
    def __call__(self) -> None:
        _BEGUN.set()
        _MAY_END.wait(10)


async def test_a_cancelled_call_is_in_flight_until_its_thread_ends() -> None:
    deployed = await _servant_of(Blocks.bind())
    call = asyncio.create_task(deployed.call(_RequestContext("r"), (), {}))
    assert await asyncio.to_thread(_BEGUN.wait, PATIENCE_S)
    call.cancel()
    await asyncio.wait([call], timeout=0.2)
    has_ended_before_its_thread = call.done()
    _MAY_END.set()
    await asyncio.wait([call], timeout=5)
    assert call.cancelled()
    assert not has_ended_before_its_thread
    await deployed.close()


async def test_a_request_waits_for_the_thread_of_a_cancelled_call_and_returns_its_own_place_alone() -> None:
    _BEGUN.clear()
    _MAY_END.clear()
    places: list[int] = []
    async with _run_of(Blocks.bind()) as running:
        [service] = running._runner.services.values()
        [replica] = service.replicas.values()
        admission = replica.server.edge.admission
        call = running.handle().remote()
        assert await asyncio.to_thread(_BEGUN.wait, PATIENCE_S)
        call.cancel()

        async def request() -> None:
            async with running.at_a_replica(_RequestContext("r")):
                places.append(admission.ongoing)

        requests = [asyncio.create_task(request()) for _ in range(2)]
        await asyncio.wait(requests, timeout=0.2)
        began_before_the_thread_ended = places[:]
        _MAY_END.set()
        await asyncio.wait_for(asyncio.gather(*requests), PATIENCE_S)
        await until(lambda: admission.ongoing <= 0, "the requests have ended")
        assert (began_before_the_thread_ended, places, admission.ongoing) == ([], [1, 1], 0)
        [seen] = running._pool().replicas()
        assert (seen.inflight, seen.full) == (0, False)


async def test_a_request_that_was_refused_after_its_grant_does_not_count_against_the_bound_again() -> None:
    _BEGUN.clear()
    _MAY_END.clear()
    async with _run_of(Blocks.options(max_queued_requests=1).bind()) as running:
        call = running.handle().remote()
        assert await asyncio.to_thread(_BEGUN.wait, PATIENCE_S)

        async def request() -> None:
            async with running.at_a_replica(_RequestContext("r")):
                pass

        async def request_until_one_may_wait() -> None:
            while True:
                try:
                    return await request()
                except BackPressureError:
                    await asyncio.sleep(0)

        first = asyncio.create_task(request())
        await until(lambda: running.waiting == 1, "the first waits")
        second = asyncio.create_task(request_until_one_may_wait())
        call.cancel()
        await until(lambda: running.waiting == 2, "the first was granted the place of the thread, and waits again")
        _MAY_END.set()
        await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)


_YIELDED: list[int] = []
_CLOSED = threading.Event()


@serve.deployment
class Counts:
    def __call__(self) -> Any:
        try:
            for number in range(1_000_000):
                _YIELDED.append(number)
                yield number
        finally:
            _CLOSED.set()


@pytest.fixture
def counted() -> list[int]:
    _YIELDED.clear()
    _CLOSED.clear()
    return _YIELDED


async def _is_closed() -> bool:
    return await asyncio.to_thread(_CLOSED.wait, 5)


async def test_a_generator_ends_once_its_reader_has_left(counted: list[int]) -> None:
    deployed = await _servant_of(Counts.bind())
    items: Any = deployed.stream(_RequestContext("r"), (), {})
    assert await anext(items) == 0
    await asyncio.sleep(0.1)
    assert len(counted) < 50  # it waits for its reader
    await items.aclose()
    assert _CLOSED.is_set()
    assert len(counted) < 50
    await deployed.close()


@asynccontextmanager
async def _run_of(app: Any) -> AsyncIterator[RunningApplication]:
    application = RunningApplication(app, "default", None)
    application.announce()
    await application.start()
    try:
        yield application
    finally:
        await application.close()


async def test_the_generator_of_a_handle_waits_for_its_reader_and_ends_with_it(counted: list[int]) -> None:
    async with _run_of(Counts.bind()) as running:
        items: Any = running.handle().options(stream=True).remote()
        assert [await anext(items) for _ in range(100)] == list(range(100))
        items.cancel()
        assert await _is_closed()
        assert len(counted) < 100_000


async def test_a_stream_that_is_forgotten_ends(counted: list[int]) -> None:
    async with _run_of(Counts.bind()) as running:
        items: Any = running.handle().options(stream=True).remote()
        assert await anext(items) == 0
        del items
        gc.collect()
        assert await _is_closed()
        assert len(counted) < 200


async def test_the_generator_of_another_container_ends_with_its_reader(counted: list[int]) -> None:
    async with local(Counts.bind()):
        items: Any = DeploymentHandle[Any]("Counts").options(stream=True).remote()
        assert await anext(items) == 0
        items.cancel()
        assert await _is_closed()
        assert len(counted) < 100_000


# ---- replicas that are not well

_ILL = threading.Event()
_HANGS = threading.Event()
_CANNOT_START = threading.Event()
_ENDED: list[int] = []


@serve.deployment(health_check_period_s=0.01, health_check_timeout_s=0.05, graceful_shutdown_timeout_s=0)
class Frail:
    async def __init__(self) -> None:  # type: ignore[misc]
        if _CANNOT_START.is_set():
            raise ValueError("not now")
        if _ILL.is_set():
            await asyncio.sleep(0.3)

    def __call__(self) -> int:
        return id(self)

    def check_health(self) -> None:
        if _HANGS.is_set():
            _MAY_END.wait(10)
        if _ILL.is_set():
            raise ValueError("ill")

    def __del__(self) -> None:
        _ENDED.append(id(self))


@pytest.fixture
def frail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("pierhead.runner.keeper.PAUSE_S", 0.01)
    _MAY_END.clear()
    _ENDED.clear()
    yield
    for each in (_ILL, _HANGS, _CANNOT_START):
        each.clear()
    _MAY_END.set()


@pytest.mark.usefixtures("frail")
async def test_a_replica_is_replaced_once_it_can_be_and_its_deployment_is_unhealthy_until_then() -> None:
    async with _run_of(Frail.bind()) as running:
        _CANNOT_START.set()
        _ILL.set()
        await until(lambda: running.status().status.value == "UNHEALTHY", "it is ill")
        await asyncio.sleep(0.2)
        assert running.status().deployments["Frail"].status.value == "UNHEALTHY"
        assert running.status().deployments["Frail"].replica_states == {
            ReplicaState.RUNNING: 0,
            ReplicaState.STARTING: 1,
        }
        _ILL.clear()
        _CANNOT_START.clear()
        assert isinstance(await asyncio.wait_for(running.handle().remote(), 5), int)
        assert running.status().deployments["Frail"].status.value == "HEALTHY"
        assert running.status().status.value == "RUNNING"


@pytest.mark.usefixtures("frail")
async def test_a_replica_whose_check_hangs_is_replaced() -> None:
    async with _run_of(Frail.bind()) as running:
        _HANGS.set()
        await until(lambda: running.status().status.value == "UNHEALTHY" or bool(_ENDED), "it is ill, or replaced")
        _HANGS.clear()
        _MAY_END.set()
        await until(lambda: running.status().status.value == "RUNNING", "it is well")


@pytest.mark.usefixtures("frail")
async def test_close_ends_the_replacements_that_have_not_started() -> None:
    async with _run_of(Frail.bind()) as running:
        _ILL.set()
        await until(lambda: bool(_ENDED), "it is replaced")
        await asyncio.sleep(0.05)
    _ILL.clear()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(("keeps", "replica"))]
    await asyncio.sleep(0.5)
    assert not running.status().deployments["Frail"].replica_states[ReplicaState.RUNNING]


# ---- servers of serve.run


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1:1"), ("::1", "[::1]:1")])
async def test_grpc_listens_where_http_does(host: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Mock(start=AsyncMock())
    monkeypatch.setattr("grpc.aio.server", lambda **_: server)
    await RayServeGrpc({}, gRPCOptions(port=1), host).start()
    server.add_insecure_port.assert_called_once_with(expected)


# ---- batches


@pytest.mark.parametrize("wrong", [ValueError("no size"), StopIteration(), "no number"])
async def test_a_call_whose_size_cannot_be_told_fails_alone(wrong: Any) -> None:
    def size(items: list[str]) -> Any:
        if "wrong" in items and isinstance(wrong, Exception):
            raise wrong
        return wrong if "wrong" in items else len(items)

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.05, batch_size_fn=size)
    async def upper(items: list[str]) -> list[str]:
        return [each.upper() for each in items]

    async with asyncio.timeout(5):
        for calls in (["wrong"], ["a", "wrong", "b"], ["c"]):
            answers = await asyncio.gather(*map(upper, calls), return_exceptions=True)
            for call, answer in zip(calls, answers, strict=True):
                assert isinstance(answer, Exception) if call == "wrong" else answer == call.upper()


async def test_callers_get_the_cancellation_that_a_batch_raises() -> None:
    @serve.batch(batch_wait_timeout_s=0)
    async def cancels(_: list[str]) -> list[str]:
        raise asyncio.CancelledError

    @serve.batch(batch_wait_timeout_s=0)
    async def cancels_in_stream(items: list[str]) -> AsyncIterator[list[str]]:
        yield items
        raise asyncio.CancelledError

    for _ in range(2):
        call = asyncio.ensure_future(cancels("a"))
        await asyncio.wait([call], timeout=5)
        assert call.cancelled()
    items = cancels_in_stream("a")
    assert await anext(items) == "a"
    last = asyncio.ensure_future(anext(items))
    await asyncio.wait([last], timeout=5)
    assert last.cancelled()


# ---- pickles and their seal


def test_bytes_without_the_seal_are_never_read() -> None:
    class Explodes:
        def __reduce__(self) -> Any:
            return pytest.fail, ("this was read",)

    ours, theirs = Seal(b"k" * 32), Seal(b"x" * 32)
    raw = pickle.dumps(Explodes())
    for forged in (raw, b"", theirs.sealed(raw, "call"), ours.sealed(raw, "reply"), ours.sealed(raw, "call")[:-1]):
        with pytest.raises(BadRequest, match="do not carry the seal"):
            ours.opened(forged, "call")
    assert ours.opened(ours.sealed(b"fine", "call"), "call") == b"fine"


def test_a_seal_is_good_for_one_service_and_for_an_hour() -> None:
    """Bytes that were seen on the network cannot be sent to another service, or later."""
    now = [1000.0]
    stack = Seal(b"k" * 32, lambda: now[0])
    sealed = stack.of("scorer").sealed(b"fine", "call")
    for other in (stack, stack.of("shop")):
        with pytest.raises(BadRequest, match="do not carry the seal"):
            other.opened(sealed, "call")
    for off_s in (-GOOD_S, GOOD_S):
        now[0] = 1000.0 + off_s
        assert stack.of("scorer").opened(sealed, "call") == b"fine"
        now[0] = 1000.0 + off_s * 1.01
        with pytest.raises(BadRequest, match=r"a seal is good for 3600 s; .* set the clocks"):
            stack.of("scorer").opened(sealed, "call")


def test_without_a_secret_only_this_process_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIERHEAD_ALLOW_PICKLE", raising=False)
    monkeypatch.setenv("PIERHEAD_PICKLE_SECRET", "known to somebody else")
    own = seal()
    assert own is seal()
    monkeypatch.setenv("PIERHEAD_ALLOW_PICKLE", "true")
    assert seal().opened(seal().sealed(b"x", "call"), "call") == b"x"
    with pytest.raises(BadRequest):
        own.opened(seal().sealed(b"x", "call"), "call")
    monkeypatch.setenv("PIERHEAD_PICKLE_SECRET", "short")
    with pytest.raises(SettingsError, match="at least 16 characters"):
        seal()


def test_the_secret_may_be_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PIERHEAD_ALLOW_PICKLE", "true")
    monkeypatch.setenv("PIERHEAD_PICKLE_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(SettingsError, match="cannot be read"):
        seal()
    (tmp_path / "secret").write_text("a secret of a file, long enough\n")
    assert seal().opened(seal().sealed(b"x", "call"), "call") == b"x"


def test_a_secret_is_written_once_and_only_where_there_is_none(tmp_path: Any) -> None:
    """How a line is read has its table in tests/unit/controller/test_project.py."""
    assert write_secret(tmp_path / ".env")
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    (tmp_path / ".env").write_bytes(b"A=1\r\nexport PIERHEAD_PICKLE_SECRET = '' # none\r\nB=2")
    assert write_secret(tmp_path / ".env")
    written = (tmp_path / ".env").read_bytes()
    assert re.fullmatch(rb"A=1\r\nPIERHEAD_PICKLE_SECRET=[0-9a-f]{32}\r\nB=2", written)
    assert not write_secret(tmp_path / ".env")
    assert (tmp_path / ".env").read_bytes() == written


# ---- exceptions


class WithArguments(Exception):
    def __init__(self, item: str, *, left: int) -> None:
        super().__init__(item)
        self.left = left

    def __reduce__(self) -> Any:
        return _again, (self.args[0], self.left)


def _again(item: str, left: int) -> WithArguments:
    return WithArguments(item, left=left)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.held: Any = (each for each in "")


@pytest.mark.parametrize(
    "error",
    [ValueError("v"), KeyError("k"), OSError(2, "no file"), StopAsyncIteration("s"), WithArguments("tea", left=2),
     UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), BackPressureError(3, 2), ExceptionGroup("g", [ValueError(1)])],
)  # fmt: skip
def test_an_exception_of_another_replica_is_of_its_own_class_and_of_rays(error: Exception) -> None:
    for found in (failure_of(error).error(), copied(failure_of(error).error())):
        assert isinstance(found, RayTaskError)
        assert isinstance(found, type(error))
        assert type(found).__name__ == f"RayTaskError({type(error).__name__})"
        assert type(found.cause) is type(error)
        assert str(error).splitlines()[0] in str(found)
    again = failure_of(failure_of(error).error()).error()  # passed on by a third one
    assert type(again.cause) is type(error)


def test_attributes_of_an_exception_stay() -> None:
    found: Any = failure_of(WithArguments("tea", left=2)).error()
    assert found.left == 2


def test_an_exception_that_cannot_be_pickled_is_reported_by_name() -> None:
    found = failure_of(Unpicklable()).error()
    assert type(found) is RayTaskError
    assert "Unpicklable isn't serializable" in str(found.cause)


def test_where_nothing_was_started_there_is_nothing_to_end_or_to_call() -> None:
    serve.shutdown()
    for use in (serve.delete, serve.get_app_handle):
        with pytest.raises(RayServeException, match="no Serve instance"):
            use("default")


# ---- metrics


def test_tags_that_prometheus_does_not_take_leave_the_metric_of_the_name_as_it_was() -> None:
    Counter("kept_by_its_name").inc(3)
    with pytest.raises(ValueError, match="Reserved label"):
        Counter("kept_by_its_name", tag_keys=("__own",))
    assert "kept_by_its_name_total{" in PROCESS.expose().decode()


@pytest.mark.parametrize(("deadline", "statuses"), [(0.0, [408]), (float("inf"), [])])
async def test_a_time_of_the_requests_own_is_answered_whichever_timer_is_first(
    deadline: float, statuses: list[int]
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def request() -> None:
        CURRENT.set(RequestContext("slow", deadline))
        await answer("slow", AsyncMock(), send, lambda *_: asyncio.sleep(60), 30.0)

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    task.cancel()  # as the replica does at the deadline, and when the client leaves
    await asyncio.wait([task])
    assert [each["status"] for each in sent if "status" in each] == statuses
    assert task.cancelled() == (not statuses)


_NOT_FOUND = b"Path '/nowhere' not found. Ping http://.../-/routes for available routes."


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"type": "http"}, [("http.response.start", 404), ("http.response.body", _NOT_FOUND)]),
        ({"type": "websocket"}, [("websocket.close", None)]),
        (
            {"type": "websocket", "extensions": {"websocket.http.response": {}}},
            [("websocket.http.response.start", 404), ("websocket.http.response.body", _NOT_FOUND)],
        ),
    ],
)
async def test_an_unknown_path_is_answered_as_the_scope_allows(
    scope: dict[str, Any], expected: list[tuple[str, Any]]
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await RayServeProxy({}, HTTPOptions())({"path": "/nowhere", "headers": [], **scope}, AsyncMock(), send)
    assert [(each["type"], each.get("status") or each.get("body")) for each in sent] == expected
