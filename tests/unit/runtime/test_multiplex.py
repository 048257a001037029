"""`@multiplexed`: loading, sharing, keeping and unloading models."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pierhead import Backpressure, BadRequest, Unavailable, multiplexed
from pierhead.held import MAX_TEXT, HeldModels, announcement, parse_announcement
from pierhead.metrics import RuntimeMetrics
from pierhead.multiplex.multiplexed import Multiplexed, close_models
from pierhead.request import CURRENT, RequestContext, current_request

from tests.unit.runtime.harness import Cluster, EchoService, until
from tests.unit.runtime.test_batching import turns

M = TypeVar("M")


class Model:
    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.closed = 0

    async def aclose(self) -> None:
        self.closed += 1


class Loader:
    """Loads models when its gate is open; "bad" cannot be loaded."""

    def __init__(self, bound: int = 2) -> None:
        self.loads: list[str] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.metrics = RuntimeMetrics()
        self.held = HeldModels()
        self.seen: list[RequestContext | None] = []
        self.get = Multiplexed(self.load, bound, name="load", metrics=self.metrics, held=self.held)

    async def load(self, model_id: str) -> Model:
        self.loads.append(model_id)
        self.seen.append(current_request())
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(model_id)
            raise
        if model_id == "bad":
            raise OSError("no such file: bad.bin")
        return Model(model_id)

    async def use(self, model_id: str) -> Model:
        return await use(self.get, model_id)


def models_of(load: Callable[[str], Awaitable[M]], bound: int) -> Multiplexed[M]:
    return Multiplexed(load, bound, name="load", metrics=RuntimeMetrics(), held=HeldModels())


async def use(get: Multiplexed[M], model_id: str) -> M:
    async with get(model_id) as model:
        return model


class Plain:
    """A model that cannot be closed."""


class Broken:
    def close(self) -> None:
        raise ValueError("it is stuck")


class Stuck:
    async def aclose(self) -> None:
        await asyncio.Event().wait()


async def assert_unused(loader: Loader) -> None:
    """No task is left, and every model can be unloaded; metrics and announcement say what is there."""

    def is_quiet() -> bool:
        # A task that has ended has yet to tell the cache, which announces its model until then.
        return asyncio.all_tasks() == {asyncio.current_task()} and set(loader.get.models) == loader.held.models()

    await until(is_quiet, "every task has ended, and what is announced is loaded")
    models = loader.get.models
    count = loader.metrics
    assert count.multiplex_models.values["load",] == len(models)
    assert count.multiplex_loads.values["load",] - count.multiplex_unloads.values["load",] == len(models)
    for model_id in models:
        assert await loader.get.drop(model_id), "no caller uses it"


class TestLoading:
    async def test_a_model_is_loaded_once_for_all_callers_and_kept(self) -> None:
        loader = Loader()
        models = await asyncio.gather(*[loader.use("a") for _ in range(5)])
        models.append(await loader.use("a"))
        assert {id(model) for model in models} == {id(models[0])}
        assert loader.loads == ["a"]

    async def test_different_models_are_loaded_side_by_side_within_the_bound(self) -> None:
        loader = Loader(2)
        loader.gate.clear()
        tasks = [asyncio.create_task(loader.use(model_id)) for model_id in "abc"]
        await until(lambda: loader.loads == ["a", "b"], "two are being loaded")
        await turns(5)
        assert loader.loads == ["a", "b"]
        loader.gate.set()
        assert [model.model_id for model in await asyncio.gather(*tasks)] == ["a", "b", "c"]

    async def test_a_failure_reaches_every_waiting_caller_and_is_not_kept(self) -> None:
        loader = Loader()
        results = await asyncio.gather(*[loader.use("bad") for _ in range(3)], return_exceptions=True)
        assert [str(result) for result in results] == ["no such file: bad.bin"] * 3
        with pytest.raises(OSError, match="no such file"):
            await loader.use("bad")
        assert loader.loads == ["bad", "bad"]
        assert loader.get.models == ()

    async def test_a_load_that_cancels_itself_is_a_failure(self) -> None:
        async def broken(model_id: str) -> Model:
            raise asyncio.CancelledError

        get = Multiplexed(broken, 1, name="broken", metrics=RuntimeMetrics(), held=HeldModels())
        with pytest.raises(RuntimeError, match='broken was cancelled from within while it loaded "a"'):
            await get("a")

    async def test_a_load_has_no_callers_deadline_and_knows_its_model(self) -> None:
        loader = Loader()
        CURRENT.set(RequestContext("r", time.monotonic() + 60, None, "session", "other"))
        await loader.use("a")
        assert loader.seen == [RequestContext("r", float("inf"), None, None, "a")]


class TestUnloading:
    async def test_the_least_recently_used_goes_and_is_closed(self) -> None:
        loader = Loader(2)
        a, b = await loader.use("a"), await loader.use("b")
        await loader.use("a")
        await loader.use("c")
        assert (a.closed, b.closed) == (0, 1)
        assert loader.get.models == ("a", "c")

    async def test_a_model_is_dropped_when_no_caller_uses_it(self) -> None:
        loader = Loader()
        model = await loader.use("a")
        async with loader.get("a"):
            assert not await loader.get.drop("a")
            assert loader.get.models == ("a",)
        assert await loader.get.drop("a")
        assert (*loader.get.models, *loader.held.models()) == ()
        assert model.closed == 1
        assert await loader.get.drop("a"), "it is gone already"
        await loader.use("a")
        assert loader.loads == ["a", "a"]

    @pytest.mark.parametrize(
        ("kind", "logged"),
        [
            (Plain, []),
            (Broken, ['load: closing model "a" failed; its place is given to another']),
            (Stuck, ['load: closing model "a" failed; its place is given to another']),
        ],
    )
    async def test_however_a_model_closes_its_place_and_memory_are_free(
        self, kind: type[Any], logged: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pierhead.multiplex.cache.CLOSE_TIMEOUT_S", 0.01)
        made: list[weakref.ref[Any]] = []

        async def load(model_id: str) -> Any:
            model = kind()
            made.append(weakref.ref(model))
            return model

        get = models_of(load, 1)
        for model_id in "ab":
            await use(get, model_id)
        assert get.models == ("b",)
        assert [record.message for record in caplog.records] == logged
        gc.collect()
        assert logged or made[0]() is None, "nothing but the traceback in a log record holds it"

    async def test_at_the_end_everything_is_unloaded(self) -> None:
        loader = Loader(2)
        a = await loader.get("a")
        loader.gate.clear()
        waiting = [asyncio.create_task(loader.use(model_id)) for model_id in "bc"]
        await until(lambda: loader.loads == ["a", "b"], "another one is being loaded")
        await close_models()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable, Unavailable]
        assert (a.closed, loader.cancelled, loader.get.models) == (1, ["b"], ())
        assert loader.held.models() == frozenset()

    async def test_a_replica_that_stops_unloads_its_models(self, cluster: Cluster, free_port: int) -> None:
        process = await cluster.process(HOLDS_ONE, free_port)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert process.stderr is not None
        assert b"the model was closed" in await process.stderr.read()

    async def test_what_a_health_check_asks_for_is_given_back(self, cluster: Cluster) -> None:
        class Checked(EchoService):
            @multiplexed(max_num_models_per_replica=1)
            async def get_model(self, model_id: str) -> Model:
                return Model(model_id)

            async def check_health(self) -> None:
                await self.get_model("a")

        service = Checked()
        await cluster.start(service)
        async with service.get_model("b") as model:
            assert model.model_id == "b"


HOLDS_ONE = """
import sys
from aiohttp import web
from pierhead import multiplexed, serve

class Model:
    async def aclose(self):
        sys.stderr.write("the model was closed\\n")

class Holds:
    @multiplexed()
    async def get_model(self, model_id):
        return Model()

    async def check_health(self):
        await self.get_model("a")

serve(web.Application(), Holds())
"""


class TestWaiting:
    async def test_a_caller_that_finds_no_place_in_time_gets_the_reason(self) -> None:
        loader = Loader(1)

        async def late() -> None:
            CURRENT.set(RequestContext("r", time.monotonic() + 0.02))
            await loader.get("b")

        async with loader.get("a"):
            with pytest.raises(Backpressure) as caught:
                await asyncio.create_task(late())
        assert str(caught.value) == (
            'load: no place became free in time for model "b"; max_num_models_per_replica = 1: a is loaded, users 1; '
            "try later"
        )
        assert (await loader.use("b")).model_id == "b"

    async def test_a_task_that_keeps_every_place_does_not_wait_for_itself(self) -> None:
        loader = Loader(2)
        await loader.get("a")
        await loader.get("b")
        await loader.get("a")
        with pytest.raises(RuntimeError, match='keeps a, b until it ends and asks for "c"'):
            await loader.get("c")


class TestCancellation:
    async def test_a_load_that_all_callers_have_left_continues_and_the_model_is_kept(self) -> None:
        loader = Loader()
        loader.gate.clear()
        task = asyncio.create_task(loader.use("a"))
        await until(lambda: loader.loads == ["a"], "it is being loaded")
        task.cancel()
        await asyncio.wait([task])
        loader.gate.set()
        assert (await loader.use("a")).model_id == "a"
        assert (loader.loads, loader.cancelled) == (["a"], [])

    async def test_random_cancellations_leave_nothing(self) -> None:
        rng = Random(20)
        loader = Loader(3)
        here: list[str] = []
        """Being loaded, loaded or being closed."""

        class Counted(Model):
            async def aclose(self) -> None:
                await super().aclose()
                await turns(rng.randrange(3))
                here.remove(self.model_id)

        async def load(model_id: str) -> Model:
            assert model_id not in here, "loaded twice at a time"
            here.append(model_id)
            assert len(here) <= 3
            await turns(rng.randrange(4))
            if rng.random() < 0.1:
                here.remove(model_id)
                raise OSError("no such file")
            return Counted(model_id)

        loader.get = Multiplexed(load, 3, name="load", metrics=loader.metrics, held=loader.held)

        async def work(model_id: str, is_entered: bool) -> None:
            if is_entered:
                async with loader.get(model_id) as model:
                    await turns(2)
                    assert model.closed == 0
            else:
                model = await loader.get(model_id)
                await turns(2)
                assert model.closed == 0

        cancelled = 0
        running: set[asyncio.Task[None]] = set()
        failures: set[type[BaseException]] = set()
        while running or cancelled < 5_000:
            if cancelled < 5_000:
                works = [work(rng.choice("abcdefg"), rng.random() < 0.5) for _ in range(rng.randrange(40))]
                running |= {asyncio.create_task(each) for each in works}
            await turns(rng.randrange(8))
            for task in rng.sample(sorted(running, key=id), k=min(len(running), rng.randrange(40))):
                cancelled += task.cancel()
            ended = {task for task in running if task.done()}
            failures |= {type(error) for task in ended if not task.cancelled() and (error := task.exception())}
            running -= ended
        assert failures == {OSError}
        await assert_unused(loader)


class Translator:
    def __init__(self) -> None:
        self.loads: list[str] = []
        self.batches: list[tuple[str, list[int]]] = []

    @multiplexed(max_num_models_per_replica=2)
    async def get_model(self, model_id: str) -> Model:
        self.loads.append(model_id)
        return Model(model_id)


class TestDoor:
    async def test_which_model_a_call_is_for(self) -> None:
        translator, other = Translator(), Translator()
        CURRENT.set(RequestContext("r", time.monotonic() + 60, model_id="fr"))
        assert (await translator.get_model()).model_id == "fr", "the request's"
        assert (await translator.get_model("de")).model_id == "de"
        assert await translator.get_model("de") is not await other.get_model("de"), "of each instance its own"
        used = translator.get_model("de")
        async with used:
            with pytest.raises(RuntimeError, match="this use was entered already"):
                await used.__aenter__()
        for model_id in ("", 7):
            with pytest.raises(
                ValueError, match=r"Translator\.get_model: expected the id of a model, some text, found"
            ):
                await translator.get_model(model_id)  # type: ignore[arg-type]

    @pytest.mark.parametrize("request_", [RequestContext("r", 1e9), None])
    async def test_a_request_without_an_id_is_a_bad_one(self, request_: RequestContext | None) -> None:
        CURRENT.set(request_)
        with pytest.raises(BadRequest) as caught:
            await Translator().get_model()
        assert str(caught.value) == (
            "x-multiplexed-model-id: expected the id of a model in this header (HTTP) or metadata key (gRPC), "
            "found none"
        )

    async def test_a_function_can_be_multiplexed_too(self) -> None:
        @multiplexed(max_num_models_per_replica=-1)
        async def get(model_id: str) -> str:
            return model_id.upper()

        for model_id in "abcdef":
            assert await get(model_id) == model_id.upper()
        assert len(get.models) == 6

    @pytest.mark.parametrize("bound", [0, -2, 1.5, True])
    def test_a_bound_that_makes_no_sense_is_named(self, bound: Any) -> None:
        with pytest.raises(ValueError, match="max_num_models_per_replica: expected an integer >= 1, or -1 for any"):
            multiplexed(max_num_models_per_replica=bound)

    def test_a_function_that_is_not_async_is_refused_at_import(self) -> None:
        def plain(model_id: str) -> str:
            return model_id

        with pytest.raises(TypeError, match="must be `async def`"):
            multiplexed()(plain)  # type: ignore[arg-type]

    async def test_models_belong_to_one_loop_at_a_time_and_end_with_it(self) -> None:
        loader = Loader()

        async def load() -> Model:
            return await loader.get("a")

        first = await asyncio.to_thread(asyncio.run, load())
        assert await load() is not first, "its loop has ended"
        assert loader.held.models() == {"a"}
        with pytest.raises(RuntimeError, match="works for another event loop"):
            await asyncio.to_thread(asyncio.run, load())

    async def test_it_is_counted(self) -> None:
        loader = Loader(1)
        for model_id in "aab":
            await loader.use(model_id)
        with pytest.raises(OSError, match="bad"):
            await loader.use("bad")
        text = loader.metrics.expose().decode()
        labels = '{loader="load",replica="",service=""}'
        for name, value in {
            "models": 0, "hits_total": 1, "misses_total": 3, "loads_total": 2, "unloads_total": 2,
            "load_failures_total": 1, "load_duration_seconds_count": 2,
        }.items():  # fmt: skip
            assert f"pierhead_multiplex_{name}{labels} {float(value)}" in text


class TestAnnouncement:
    async def test_models_that_are_loaded_or_loading_are_announced_and_each_change_is_a_version(self) -> None:
        loader = Loader(1)
        seen = [(loader.held.version, loader.held.text)]
        loader.gate.clear()
        task = asyncio.create_task(loader.use("a/b c"))
        await until(lambda: loader.loads != [], "it is being loaded")
        seen.append((loader.held.version, loader.held.text))
        loader.gate.set()
        await task
        await loader.use("d")
        seen.append((loader.held.version, loader.held.text))
        assert seen == [(1, ""), (2, "a%2Fb%20c"), (4, "d")]
        assert (HeldModels().version, HeldModels().text) == (0, ""), "where nothing is multiplexed"

    def test_a_model_that_two_functions_hold_is_held_until_both_have_unloaded_it(self) -> None:
        held = HeldModels()
        held.add("a")
        version = held.version
        held.add("a")
        held.remove("a")
        assert (set(held.models()), held.version) == ({"a"}, version)
        held.remove("a")
        assert held.models() == frozenset()

    @given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=MAX_TEXT), unique=True))
    @example(["x" * MAX_TEXT])
    @example(["x" * (MAX_TEXT + 1)])
    @example([f"{number:0100}" for number in range(100)])
    def test_an_announcement_says_as_many_as_fit(self, ids: list[str]) -> None:
        text = announcement(ids)
        assert text.isascii()
        assert text.isprintable()
        assert len(text) <= MAX_TEXT
        known = parse_announcement(text)
        assert known is not None
        assert known == set(ids[: len(known)])
        if len(known) < len(ids):
            assert len(text) + 1 + len(quote(ids[len(known)], safe="")) > MAX_TEXT, "the next one does not fit"
