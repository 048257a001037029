"""The LLM server: one engine behind the gRPC service that gateways call.

first check_health:  import the engine --> model's files --> engine.start --> pinned adapters --> one real token
then:                engine.check_health, one token when there is nothing to do
twice a second:      watchdog on tokens, which requests check_health when it finds a stall
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from pierhead import BadRequest, PierheadError, Unavailable, progress, recheck
from pierhead.llm.server import bodies
from pierhead.llm.server.answers import not_supported, reply_to
from pierhead.llm.server.background import in_background
from pierhead.llm.server.engine import EngineStats, LLMEngine, Replies, Report
from pierhead.llm.server.errors import LLMRequestError, LLMStartError, NotSupported, unknown_model
from pierhead.llm.server.exposition import show
from pierhead.llm.server.models import loading
from pierhead.llm.server.models.adapters import Adapters, Fetch, adapters_in, unknown_adapter
from pierhead.llm.server.registry import engine_class
from pierhead.llm.server.watchdog import TokenWatchdog
from pierhead.llm.v1.llm_pb2 import DescribeRequest, LLMReply, LLMRequest, ModelCard, Operation, OperationDone
from pierhead.llm.v1.llm_pb2_grpc import LLMServerServicer
from pierhead.llm_config import LLMConfig
from pierhead.metrics import PROCESS, RuntimeMetrics
from pierhead.routing_stats import publish
from pierhead.tasks import end_tasks

logger = logging.getLogger(__name__)

IDLE_TOKEN_S = 30.0
"""How often an engine without requests generates one token, to prove that it can."""

LOOK_S = 0.5
"""Time between two checks of the watchdog: the longest time from a stall to its detection."""

LARGEST_REPLY = 60 * 1024 * 1024
"""Bytes of one reply: a little less than the largest message between services."""


def _method(name: str) -> Any:
    """The method of the service that answers with the engine's method of this name.

    It is the only generator between the engine and the wire: every reply passes each generator on its way.
    """

    async def answer(self: LLMServer, request: LLMRequest, context: Any) -> AsyncIterator[LLMReply]:
        if name == "pass_through" and not bodies.is_for_clients(request.path):
            yield not_supported(request.path[:200])
            return
        call: Callable[[LLMRequest], Replies] = getattr(self._running, name)
        begun = False
        self._begin()
        try:
            async with self._adapter_of(request):
                replies = call(request)
                try:
                    async for reply in replies:
                        _reject_too_large(reply)
                        begun = True
                        yield reply
                finally:
                    if aclose := getattr(replies, "aclose", None):
                        await aclose()  # if the caller has gone, this aborts the request
        except LLMRequestError as error:
            if begun:
                raise
            yield reply_to(error)
        except PierheadError:
            raise
        except Exception:  # check_health reports an engine that has died
            recheck()
            raise
        finally:
            self._end()

    return answer


class LLMServer(LLMServerServicer):
    """Serves one LLMConfig. The first `check_health` starts the engine: nothing comes before it."""

    def __init__(
        self,
        config: LLMConfig,
        cache: Path,
        *,
        make_engine: Callable[[LLMConfig], LLMEngine] | None = None,
        fetch: Fetch = loading.fetch,
        metrics: RuntimeMetrics = PROCESS,
        report: Report = progress,
    ) -> None:
        self.config = config
        self._cache = cache
        self._make_engine = make_engine
        self._fetch = fetch
        self._metrics = metrics
        self._report = report
        self._engine: LLMEngine | None = None
        self._adapters: Adapters | None = None
        self._started = False
        self._asleep = 0
        """The level of its sleep."""
        self._turn = asyncio.Lock()
        """Held by Sleep and Wake: an engine that is falling asleep is not woken up."""
        self._wanted_adapters: tuple[str, ...] = ()
        """The adapters that user_config names."""
        self._requests = 0
        self._watchdog = TokenWatchdog(config.stall_timeout_s, time.monotonic())
        self._watch: asyncio.Task[None] | None = None
        self._last_token = 0.0
        self._created = int(time.time())
        show(metrics, self._load, self._expose)

    # ---- requests

    Chat = _method("chat")
    Completions = _method("completions")
    Embeddings = _method("embeddings")
    Score = _method("score")
    Tokenize = _method("tokenize")
    Detokenize = _method("detokenize")
    PassThrough = _method("pass_through")

    def _adapter_of(self, request: LLMRequest) -> AbstractAsyncContextManager[Any]:
        """Keeps the request's adapter in the engine. Raises LLMRequestError for an unknown model."""
        model = request.model or bodies.model_of(request)
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
    def _ready(self) -> LLMEngine:
        """The engine, asleep or not. Raises Unavailable before it has started."""
        if self._engine is None or not self._started:
            raise Unavailable("the engine is not started yet; ask again when the replica is ready")
        return self._engine

    @property
    def _running(self) -> LLMEngine:
        """The engine. Raises Unavailable while it takes no requests."""
        engine = self._ready
        if self._asleep:
            raise Unavailable("the engine sleeps; wake it up (Operation.Wake), or ask another replica")
        return engine

    def _begin(self) -> None:
        if not self._requests:
            self._watchdog.began(time.monotonic())
        self._requests += 1
        _tell_callers(self._load())

    def _end(self) -> None:
        self._requests -= 1
        _tell_callers(self._load())

    # ---- what is served, and what operators do to it

    async def Describe(self, request: DescribeRequest, context: Any) -> ModelCard:
        """What is served here."""
        card = ModelCard()
        card.CopyFrom(self._ready.describe())
        card.created = card.created or self._created
        if self._adapters is not None:
            card.adapters[:] = sorted({*card.adapters, *await self._adapters.known()})
        return card

    async def Operate(self, request: Operation, context: Any) -> OperationDone:
        """Run the operation, and return when it is done. Raises NotSupported, BadRequest."""
        engine = self._ready
        what = request.WhichOneof("what")
        if what not in (None, "sleep", "wake"):
            self._reject_asleep(what)
        if what == "sleep":
            async with self._turn:
                await self._sleep(engine, request.sleep.level)
        elif what == "wake":
            async with self._turn:
                await self._wake(engine)
        elif what == "reset_prefix_cache":
            await engine.reset_prefix_cache()
        elif what == "load_adapter":
            await self._some_adapters().load(request.load_adapter.adapter)
        elif what == "unload_adapter":
            await self._some_adapters().unload(request.unload_adapter.adapter)
        else:
            raise BadRequest("Operation.what: expected one of its members, found none")
        logger.info("done: %s", what)
        return OperationDone()

    async def _sleep(self, engine: LLMEngine, level: int) -> None:
        level = level or 1
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

    async def _wake(self, engine: LLMEngine) -> None:
        if not self._asleep:
            return
        await engine.wake()
        self._watchdog.began(time.monotonic())  # an engine that sleeps makes no tokens
        self._asleep = 0

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
        wanted = adapters_in(user_config)
        if wanted and self.config.lora is None:
            raise ValueError("user_config.adapters: this service has no adapters: set x-serve.llm.lora")
        self._wanted_adapters = wanted
        if self._adapters is None or not self._started:
            return
        if self._asleep:
            raise ValueError("user_config.adapters: the engine sleeps; they are loaded once it is woken up")
        await self._adapters.pin_only(wanted)

    # ---- its life

    async def check_health(self) -> None:
        """Raises EngineStalledError, or the engine's own error. The first call starts the engine."""
        if not self._started:
            await self._start()
            return
        engine = self._engine
        if engine is None:
            return
        if self._asleep:
            await engine.check_health()
            return
        load, now = self._look(engine), time.monotonic()
        await engine.check_health()
        if load.running + load.waiting == 0 and now - self._last_token >= IDLE_TOKEN_S:
            await self._generate_one(engine)

    def _look(self, engine: LLMEngine) -> EngineStats:
        """Raises EngineStalledError."""
        load = engine.load()
        _tell_callers(load)
        self._watchdog.check(load, time.monotonic())
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

    async def aclose(self) -> None:
        """End the engine; called at the replica's end."""
        if self._watch is not None:
            await end_tasks(self._watch)
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()

    async def _start(self) -> None:
        """Raises LLMStartError."""
        name, source = self.config.engine, self.config.model_loading.source
        try:
            self._report(f"importing the engine {name}", None, 1)
            make = lambda: (self._make_engine or engine_class(name))(self.config)  # noqa: E731
            engine = self._engine = await in_background(make)
            path = source
            if engine.needs_files:
                path = str(await self._fetched(source))
            await engine.start(path, self._report)
            await self._start_adapters(engine)
            self._report("generating a first token", None, 1)
            await self._generate_one(engine)
        except PierheadError:
            raise
        except Exception as error:
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
        self._adapters = Adapters(
            engine, self.config.lora, fetch=self._fetch, cache=self._cache, report=self._report,
            metrics=self._metrics,
        )  # fmt: skip
        try:
            await self._adapters.pin_only(self._wanted_adapters)
        except (LLMRequestError, ValueError) as error:
            raise LLMStartError(
                f"x-serve.llm.lora: an adapter that every replica is to have is not there: {error}"
            ) from error

    async def _generate_one(self, engine: LLMEngine) -> None:
        await engine.generate_one_token()
        self._last_token = time.monotonic()

    # ---- its numbers

    def _load(self) -> EngineStats:
        return EngineStats() if self._engine is None or not self._started else self._engine.load()

    def _expose(self) -> bytes:
        """The engine's own metrics; empty if reading them fails, so that the replica's are still shown."""
        if self._engine is None or not self._started:
            return b""
        try:
            return self._engine.expose()
        except Exception:
            logger.exception("reading the metrics of the engine %s failed", self.config.engine)
            return b""


def _tell_callers(load: EngineStats) -> None:
    """Publish the load to callers. Cheap: the numbers go with replies that are sent anyway."""
    publish(running=load.running, waiting=load.waiting, kv_use=load.kv_use)


def _reject_too_large(reply: LLMReply) -> None:
    """Raises LLMRequestError for an answer that does not fit into one message."""
    if len(reply.data) > LARGEST_REPLY:
        raise LLMRequestError(
            f"the answer has {len(reply.data)} bytes, and at most {LARGEST_REPLY} can be sent at once; ask for fewer "
            "inputs or choices at a time, or for a stream",
            code="answer_too_large",
        )
