"""The LLM server: one engine, its adapters, its health. A replica of the stack and an application in one process have
the same.

start:               import the engine --> model's files --> engine.start --> pinned adapters --> one real token
check_health:        engine.check_health, one token when there is nothing to do
twice a second:      watchdog on tokens, which requests check_health when it finds a stall

A server of one's own is a subclass, which x-serve.llm.server_cls names:

    class MyServer(LLMServer):
        async def chat(self, request, raw_request=None):
            async for answer in super().chat(request, raw_request):
                yield answer
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import time
from abc import ABCMeta
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, cast

from pierhead import BadRequest, PierheadError, Unavailable, progress, recheck
from pierhead.llm import objects
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server import bodies
from pierhead.llm.server.background import in_background, to_its_end
from pierhead.llm.server.engine import EngineStats, LLMEngine, ModelDescription, Report
from pierhead.llm.server.errors import LLMStartError, NotSupported, not_started, unknown_model, unknown_path
from pierhead.llm.server.models import loading
from pierhead.llm.server.models.adapters import Adapters, Fetch, adapters_in, unknown_adapter
from pierhead.llm.server.registry import engine_class
from pierhead.llm.server.settings import cache_directory
from pierhead.llm.server.watchdog import TokenWatchdog
from pierhead.llm_config import LLMConfig, config_of
from pierhead.metrics import PROCESS, RuntimeMetrics
from pierhead.routing_stats import publish
from pierhead.tasks import END_S, end_tasks

logger = logging.getLogger(__name__)

IDLE_TOKEN_S = 30.0
"""How often an engine without requests generates one token, to prove that it can."""

LOOK_S = 0.5
"""Time between two checks of the watchdog: the longest time from a stall to its detection."""

MAX_ONGOING_REQUESTS = 1000
"""Of one replica: the engine itself lets requests wait."""

_REQUESTS = ("chat", "completions", "embeddings", "score", "tokenize", "detokenize", "transcriptions", "pass_through")


class AnswerStream(AsyncIterator[Any]):
    """The answers to one request: `async for answer in server.chat(request)`, or `in await server.chat(request)`."""

    def __init__(self, answers: AbstractAsyncContextManager[AsyncIterator[Any]]) -> None:
        self.answers = answers
        """The engine's own iterator within the request. Who enters it iterates without a generator between."""
        self._generator = _each(answers)  # which does not refer to this: left by its reader, it is closed at once

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._generator

    def __anext__(self) -> Awaitable[Any]:
        return self._generator.__anext__()

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        await self._generator.aclose()

    def __await__(self) -> Generator[Any, None, Self]:
        async def itself() -> Self:
            return self

        return itself().__await__()


async def _each(opening: AbstractAsyncContextManager[AsyncIterator[Any]]) -> AsyncGenerator[Any, None]:
    begun = False
    try:
        async with opening as answers:
            async for answer in answers:
                begun = True
                yield answer
    except LLMRequestError as error:
        if begun:
            raise
        yield objects.ErrorResponse.to(error)


def opened(answers: Any) -> AbstractAsyncContextManager[AsyncIterator[Any]]:
    """What a method of an engine or of a server returned, to be iterated: it may be a coroutine that returns one. Left
    before its end, the request is aborted. Entering it raises PierheadError for what is no asynchronous iterator."""
    if isinstance(answers, AnswerStream):
        return answers.answers
    return aclosing(answers) if hasattr(answers, "aclose") else _opened_later(answers)


@asynccontextmanager
async def _opened_later(answers: Any) -> AsyncIterator[AsyncIterator[Any]]:
    if hasattr(answers, "__aiter__"):  # one that cannot be closed
        yield answers
    elif inspect.isawaitable(answers):
        async with opened(await answers) as found:
            yield found
    else:
        raise PierheadError(
            "an engine's or a server's method for requests returned "
            f"{type(answers).__name__}: expected `async def` with `yield` for each answer"
        )


class _AsyncConstructor(ABCMeta):
    """`await LLMServer(config)` is an LLMServer, whose constructor is `async def __init__`."""

    async def __call__(cls, *args: Any, **named: Any) -> Any:
        made: Any = cls.__new__(cls)  # type: ignore[call-arg, arg-type]
        if inspect.isawaitable(constructed := made.__init__(*args, **named)):
            await constructed
        if not hasattr(made, "engine"):
            raise LLMStartError(
                f"{cls.__module__}.{cls.__qualname__}: its __init__ does not start the engine: expected `async def "
                "__init__(self, llm_config)` with `await super().__init__(llm_config)`"
            )
        return made


class LLMServer(metaclass=_AsyncConstructor):
    """Serves one model. `await LLMServer(config)` is started; what `sync_init` returns is not.

    The methods for requests return an iterator of what the engine yields: strings of server-sent events, one response
    object, or one ErrorResponse. A closed iterator is an aborted request.
    """

    async def __init__(  # type: ignore[misc]
        self, llm_config: Any, *, engine_cls: Callable[[Any], LLMEngine] | None = None, **parts: Any
    ) -> None:
        """Return once the engine is ready for requests. `llm_config`: an LLMConfig of pierhead.llm_config or of
        pierhead.rayserve.llm. Raises LLMStartError."""
        self._init_shared(llm_config, engine_cls=engine_cls, **parts)
        await self.start()

    @classmethod
    def sync_init(cls, llm_config: Any, *, engine_cls: Callable[[Any], LLMEngine] | None = None, **parts: Any) -> Self:
        """A server that is not started: `start` starts it."""
        made: Self = cls.__new__(cls)
        made._init_shared(llm_config, engine_cls=engine_cls, **parts)
        return made

    @classmethod
    def of_x_serve(cls, config: Any) -> Awaitable[Self]:
        """Awaited, the server of a service's replica, started; `config`: x-serve.llm."""
        return cast("Awaitable[Self]", cls(config))

    def _init_shared(
        self,
        llm_config: Any,
        *,
        engine_cls: Callable[[Any], LLMEngine] | None = None,
        cache: Path | None = None,
        fetch: Fetch = loading.fetch,
        metrics: RuntimeMetrics = PROCESS,
        report: Report = progress,
    ) -> None:
        self._llm_config = llm_config
        self.config: LLMConfig = config_of(llm_config)
        self.engine: LLMEngine | None = None
        self._engine_cls = engine_cls
        self._cache = cache or cache_directory()
        self._fetch = fetch
        self._metrics = metrics
        self._report = report
        self._with_raw: set[str] = set()
        """The engine's methods that take the raw request as well, as in Ray Serve LLM."""
        self._adapters: Adapters | None = None
        self._started = False
        self._asleep = 0
        """The level of its sleep."""
        self._turn = asyncio.Lock()
        """Held by sleep and wakeup: an engine that is falling asleep is not woken up."""
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._requests = 0
        self._watchdog = TokenWatchdog(self.config.stall_timeout_s, time.monotonic())
        self._watch: asyncio.Task[None] | None = None
        self._last_token = 0.0
        self._created = int(time.time())

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Options of `@serve.deployment` for a deployment of this class: those that the config asks for."""
        found = getattr(llm_config, "get_deployment_options", None)
        return dict(found()) if found is not None else {"max_ongoing_requests": MAX_ONGOING_REQUESTS}

    async def llm_config(self) -> Any:
        """The config that the caller gave."""
        return self._llm_config

    # ---- requests

    def chat(self, request: objects.ChatCompletionRequest, raw_request: Any = None) -> Any:
        """/v1/chat/completions"""
        return AnswerStream(self._run("chat", request, raw_request))

    def completions(self, request: objects.CompletionRequest, raw_request: Any = None) -> Any:
        """/v1/completions"""
        return AnswerStream(self._run("completions", request, raw_request))

    def embeddings(self, request: objects.EmbeddingRequest, raw_request: Any = None) -> Any:
        """/v1/embeddings"""
        return AnswerStream(self._run("embeddings", request, raw_request))

    def score(self, request: objects.ScoreRequest, raw_request: Any = None) -> Any:
        """/v1/score"""
        return AnswerStream(self._run("score", request, raw_request))

    def tokenize(self, request: objects.TokenizeRequest, raw_request: Any = None) -> Any:
        """/tokenize"""
        return AnswerStream(self._run("tokenize", request, raw_request))

    def detokenize(self, request: objects.DetokenizeRequest, raw_request: Any = None) -> Any:
        """/detokenize"""
        return AnswerStream(self._run("detokenize", request, raw_request))

    def transcriptions(self, request: objects.TranscriptionRequest, raw_request: Any = None) -> Any:
        """/v1/audio/transcriptions"""
        return AnswerStream(self._run("transcriptions", request, raw_request))

    def pass_through(self, request: objects.OpenAIRequest, raw_request: Any = None) -> Any:
        """Any other path for clients, which is `request.path`."""
        return AnswerStream(self._run("pass_through", request, raw_request))

    @asynccontextmanager
    async def _run(self, method: str, request: Any, raw_request: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """The engine's answers to a request. Raises LLMRequestError."""
        if method == "pass_through" and not bodies.is_for_clients(request.path):
            raise unknown_path(request.path[:200])
        await self._resumed.wait()
        call = getattr(self._running, method)
        given = (request, raw_request) if raw_request is not None and method in self._with_raw else (request,)
        self._requests += 1
        try:
            if self._requests == 1:
                self._watchdog.began(time.monotonic())
            _tell_callers(self.load())
            async with self._adapter_of(request), opened(call(*given)) as answers:
                yield answers
        except PierheadError:
            raise
        except Exception:  # check_health reports an engine that has died
            recheck()
            raise
        finally:
            self._requests -= 1
            _tell_callers(self.load())

    def _adapter_of(self, request: Any) -> AbstractAsyncContextManager[Any]:
        """Keeps the request's adapter in the engine. Raises LLMRequestError for an unknown model."""
        model = request.model
        if model is None or model == "":
            request.model = model = self.config.model_loading.model_id
        if not isinstance(model, str):
            raise bodies.wrong("model", "a string", model)
        base, colon, adapter = model.partition(":")
        if base != self.config.model_loading.model_id:
            raise unknown_model(model, self._served())
        if not colon:
            return nullcontext()
        if self._adapters is None:
            raise unknown_adapter(adapter, "x-serve.llm.lora, which is not set")
        return self._adapters.use(adapter)

    def _served(self) -> str:
        lora = self.config.lora
        adapters = f", and its adapters from {lora.dynamic_lora_loading_path}" if lora else ""
        return self.config.model_loading.model_id + adapters

    @property
    def ready(self) -> LLMEngine:
        """The engine, asleep or not. Raises Unavailable before it has started."""
        if self.engine is None or not self._started:
            raise not_started()
        return self.engine

    @property
    def _running(self) -> LLMEngine:
        """The engine. Raises Unavailable while it takes no requests."""
        engine = self.ready
        if self._asleep:
            raise Unavailable("the engine sleeps; wake it up (Operation.Wake), or ask another replica")
        return engine

    # ---- what is served, and what operators do to it

    async def describe(self) -> ModelDescription:
        """What is served here."""
        said = self.ready.describe()
        adapters = set(said.adapters)
        if self._adapters is not None:
            adapters |= set(await self._adapters.known())
        return dataclasses.replace(
            said,
            model_id=self.config.model_loading.model_id,
            engine=self.config.engine,
            adapters=tuple(sorted(adapters)),
            created=self._created,
        )

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` works: see LLMEngine.can_sleep; False before the engine has started."""
        return self._started and self.engine is not None and self.engine.can_sleep

    async def sleep(self, level: int = 1, **_: Any) -> None:
        """Free the accelerator's memory; 1 = keep the weights in the machine's memory, 2 = drop them."""
        await to_its_end(self._fall_asleep(level))

    async def _fall_asleep(self, level: int) -> None:
        async with self._turn:
            engine, level = self.ready, level or 1
            if level not in (1, 2):
                raise BadRequest(f"Operation.sleep.level: expected 1 or 2, found {level}")
            if self._asleep == level:
                return
            self._reject_asleep("sleep")
            self._asleep = level  # first, so that no request reaches an engine that is falling asleep
            try:
                await engine.sleep(level)
            except BaseException:
                self._asleep = 0
                raise

    async def wakeup(self, **_: Any) -> None:
        """Undo `sleep`."""
        await to_its_end(self._wake_up())

    async def _wake_up(self) -> None:
        async with self._turn:
            engine = self.ready
            if not self._asleep:
                return
            await engine.wake()
            self._watchdog.began(time.monotonic())  # an engine that sleeps makes no tokens
            self._asleep = 0

    async def is_sleeping(self) -> bool:
        """Whether `sleep` was called last."""
        return self._asleep > 0

    async def pause(self, **_: Any) -> None:
        """Let new requests wait until `resume`; those that run continue."""
        self._resumed.clear()

    async def resume(self, **_: Any) -> None:
        """Undo `pause`."""
        self._resumed.set()

    async def is_paused(self) -> bool:
        """Whether `pause` was called last."""
        return not self._resumed.is_set()

    async def reset_prefix_cache(self) -> None:
        """Empty the engine's prefix cache."""
        engine = self.ready
        self._reject_asleep("reset_prefix_cache")
        await engine.reset_prefix_cache()

    async def load_adapter(self, adapter: str) -> None:
        """Load a LoRA adapter now."""
        self._reject_asleep("load_adapter")
        await self._some_adapters().load(adapter)

    async def unload_adapter(self, adapter: str) -> None:
        """Take an adapter out of the engine. Raises LLMRequestError while requests use it."""
        self._reject_asleep("unload_adapter")
        await self._some_adapters().unload(adapter)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method of each of the engine's workers. Raises NotSupported."""
        call = self._optional("collective_rpc")
        found: list[Any] = await call(method=method, timeout=timeout, args=args, kwargs=kwargs)
        return found

    async def start_profile(self) -> None:
        """Begin to record a profile of the engine. Raises NotSupported."""
        await self._optional("start_profile")()

    async def stop_profile(self) -> None:
        """End it. Raises NotSupported."""
        await self._optional("stop_profile")()

    def _optional(self, method: str) -> Any:
        """A method that not every engine has. Raises NotSupported."""
        found = getattr(self._running, method, None)
        if found is None:
            raise NotSupported(f"the engine {self.config.engine} has no {method}")
        return found

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the engine says for routers, in the form of Ray Serve LLM; nothing before it has started."""
        said: dict[str, Any] = getattr(self.engine, "routing_stats", dict)()
        return said

    def _reject_asleep(self, what: object) -> None:
        if self._asleep:
            raise BadRequest(f"{what}: the engine sleeps (level {self._asleep}); wake it up first (Operation.Wake)")

    def _some_adapters(self) -> Adapters:
        if self._adapters is None:
            raise NotSupported("this service has no adapters: set x-serve.llm.lora")
        return self._adapters

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """{"adapters": ["french"]}: adapters that the replica keeps in addition to `lora.adapters`.

        Raises ValueError for another shape, and what loading raises; the runtime then tries again.
        """
        wanted = wanted_adapters(self.config, user_config)
        if self._adapters is None:
            return
        if self._asleep:
            raise ValueError("user_config.adapters: the engine sleeps; they are loaded once it is woken up")
        await self._adapters.pin_only(wanted)

    # ---- its life

    async def start(self) -> None:
        """Start the engine. Raises LLMStartError; what was begun is then ended."""
        name, source = self.config.engine, self.config.model_loading.source
        try:
            self._report(f"importing the engine {name}", None, 1)
            make = self._engine_cls or engine_class(name)
            self.engine = engine = await in_background(make, self._llm_config)
            _check_life(engine, name)
            self._with_raw = {
                each for each in _REQUESTS if len(inspect.signature(getattr(engine, each)).parameters) > 1
            }
            engine.config, engine.model_path, engine.report = self.config, source, self._report
            if engine.needs_files:
                engine.model_path = str(await self._fetched(source))
            self._report(f"starting the engine {name}", None, 1)
            await engine.start()
            await self._start_adapters(engine)
            self._report("generating a first token", None, 1)
            await self._generate_one(engine)
        except BaseException as error:
            await give_up(self)
            if isinstance(error, PierheadError) or not isinstance(error, Exception):
                raise
            raise LLMStartError(
                f"the engine {name} could not be started with the model {source}: {type(error).__name__}: {error}; the "
                "log above says more, x-serve.llm.engine_kwargs holds the engine's arguments"
            ) from error
        self._started = True
        self._watch = asyncio.create_task(self._keep_looking(engine), name="watchdog on tokens")
        logger.info("the engine %s serves %s from %s", name, self.config.model_loading.model_id, source)

    async def _fetched(self, source: str) -> Path:
        try:
            return await in_background(self._fetch, source, self._cache, self._report)
        except LLMStartError as error:
            raise LLMStartError(f"model_source: {error}") from error

    async def _start_adapters(self, engine: LLMEngine) -> None:
        if self.config.lora is None:
            return
        adapters = Adapters(
            engine, self.config.lora, fetch=self._fetch, cache=self._cache, report=self._report,
            metrics=self._metrics,
        )  # fmt: skip
        try:
            await adapters.pin_only(())
        except (LLMRequestError, ValueError) as error:
            raise LLMStartError(
                f"x-serve.llm.lora: an adapter that every replica is to have is not there: {error}"
            ) from error
        self._adapters = adapters

    async def _generate_one(self, engine: LLMEngine) -> None:
        await engine.generate_one_token()
        self._last_token = time.monotonic()

    async def check_health(self) -> Any:
        """Raises EngineStalledError, or the engine's own error; a subclass may return False."""
        engine = self.engine
        if engine is None:
            return
        load, now = (None, 0.0) if self._asleep else (self._look(engine), time.monotonic())
        if await engine.check_health() is False:
            raise RuntimeError(f"the engine {self.config.engine} says that it is not healthy")
        if load is not None and load.running + load.waiting == 0 and now - self._last_token >= IDLE_TOKEN_S:
            await self._generate_one(engine)

    def _look(self, engine: LLMEngine) -> EngineStats:
        """Raises EngineStalledError."""
        said = engine.load()
        load = said or EngineStats(running=self._requests)
        _tell_callers(load)
        if said is not None:
            self._watchdog.check(said, time.monotonic())
        return load

    async def _keep_looking(self, engine: LLMEngine) -> None:
        """Check the tokens, until cancelled. On a stall, request `check_health`, which finds and raises it again."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if not self._asleep:
                    self._look(engine)
            except Exception:
                recheck()

    async def shutdown(self) -> None:
        """End the engine; called at the replica's end."""
        self._started = False
        if self._watch is not None:
            await end_tasks(self._watch)
            self._watch = None
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.shutdown()

    # ---- its numbers

    def load(self) -> EngineStats:
        """How busy the engine is; the requests that are counted here where it does not say."""
        if self.engine is None or not self._started:
            return EngineStats()
        return self.engine.load() or EngineStats(running=self._requests)

    def expose(self) -> bytes:
        """The engine's own metrics; empty if reading them fails, so that the replica's are still shown."""
        if self.engine is None or not self._started:
            return b""
        try:
            return self.engine.expose()
        except Exception:
            logger.exception("reading the metrics of the engine %s failed", self.config.engine)
            return b""


async def give_up(server: LLMServer) -> None:
    """End a server that could not be started. An end that fails, or takes more than END_S, is logged: it must not hide
    why the start failed."""
    try:
        async with asyncio.timeout(END_S):
            await server.shutdown()
    except Exception:
        logger.exception(
            "ending the engine %s, which could not be started, failed, or took more than %g s",
            server.config.engine,
            END_S,
        )


def wanted_adapters(config: LLMConfig, user_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The adapters that user_config names. Raises ValueError."""
    wanted = adapters_in(user_config)
    if wanted and config.lora is None:
        raise ValueError("user_config.adapters: this service has no adapters: set x-serve.llm.lora")
    return wanted


def _check_life(engine: LLMEngine, name: str) -> None:
    """Raises LLMStartError for methods that cannot be awaited."""
    for method in ("start", "check_health", "shutdown"):
        if not inspect.iscoroutinefunction(getattr(engine, method)):
            raise LLMStartError(f"the engine {name}: {method} must be `async def`")


def _tell_callers(load: EngineStats) -> None:
    """Publish the load to callers. Cheap: the numbers go with replies that are sent anyway."""
    publish(running=load.running, waiting=load.waiting, kv_use=load.kv_use)
