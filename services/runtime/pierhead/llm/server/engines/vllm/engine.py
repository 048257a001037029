"""vLLM in this process: its AsyncLLM engine (which runs the model in processes of its own) under its own OpenAI serving
classes, so that requests are checked, templated and answered as by `vllm serve`. Only the modules of this folder depend
on vLLM's version; made for 0.32.

Chat and completions call the serving classes; every other path is put to vLLM's own web application, without a socket.
Tokens are counted where the engine yields them: events are passed on as vLLM wrote them, and are not parsed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fastapi.exceptions import RequestValidationError
from pierhead.tasks import end_tasks
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # before vLLM: gRPC's threads do not survive a fork
# The gateway allows hosts; an answer of one must not lead to another.
os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")

from pierhead.llm import objects
from pierhead.llm.objects import ErrorResponse, OpenAIRequest
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.background import in_background
from pierhead.llm.server.engine import Answers, EngineStats, LLMEngine, ModelDescription
from pierhead.llm.server.engines.vllm.answers import as_openai, check, refusal, streamed, whole
from pierhead.llm.server.engines.vllm.counting import TokenTally, counted, make_engine
from pierhead.llm.server.engines.vllm.figures import Figures, OwnMetrics
from pierhead.llm.server.engines.vllm.log import StartLog
from pierhead.llm.server.engines.vllm.settings import check_path, read_settings
from pierhead.llm.server.engines.vllm.start import explanation
from pierhead.llm.server.engines.vllm.waking import wake_up
from pierhead.llm.server.engines.vllm.web import WebRequest
from pierhead.llm.server.errors import EngineDiedError, LLMStartError, NotSupported
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError


class VLLMEngine(LLMEngine):
    """engine_kwargs: any argument of `vllm serve`, with underscores (vLLM's documentation lists them), but for those
    that LLMConfig has itself."""

    needs_files = True

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self._figures = Figures()
        self._runs: _Running | None = None
        self._level = 1
        """Of its last sleep."""

    async def start(self) -> None:
        """See LLMEngine.start. The progress is read from vLLM's own log."""
        model_path = self.model_path
        await asyncio.to_thread(check_path, model_path)
        with tempfile.TemporaryDirectory(prefix="vllm-log-") as place:
            log = StartLog(Path(place))
            watch = asyncio.create_task(log.report_stages(self.report))
            try:
                self._runs = await self._start(model_path)
            except LLMStartError:
                raise
            except (Exception, SystemExit) as error:
                lines = await asyncio.to_thread(log.lines)
                raise LLMStartError(explanation(model_path, f"{type(error).__name__}: {error}", lines)) from error
            finally:
                await end_tasks(watch)
                log.close()

    async def _start(self, model_path: str) -> _Running:
        settings = read_settings(self.config, model_path)
        if settings.enforce_eager and current_platform.is_cpu():
            # Else it compiles a function at the first request with logprobs: for a minute, while every stream waits.
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if settings.kv_transfer_config is not None:
            # NIXL tells it to other engines, which take caches from there. By default it is "localhost".
            os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", socket.gethostbyname(socket.gethostname()))
        engine = await in_background(make_engine, settings, self._figures)
        try:
            tasks = await engine.get_supported_tasks()
            app = build_app(settings, tasks, engine.model_config)
            # vLLM's handlers set this flag of their web server when the engine has died.
            app.state.server = SimpleNamespace(should_exit=False)
            await init_app_state(engine, app.state, settings, tasks)
        except BaseException:
            await asyncio.to_thread(engine.shutdown)
            raise
        return _Running(engine, app, tasks, settings)

    def chat(self, request: objects.ChatCompletionRequest) -> Answers:
        """See LLMEngine.chat."""
        serving = getattr(self._running.app.state, "openai_serving_chat", None)
        if serving is None:
            return self.pass_through(request)
        return self._generate(request, ChatCompletionRequest, serving.create_chat_completion)

    def completions(self, request: objects.CompletionRequest) -> Answers:
        """See LLMEngine.completions."""
        serving = getattr(self._running.app.state, "openai_serving_completion", None)
        if serving is None:
            return self.pass_through(request)
        return self._generate(request, CompletionRequest, serving.create_completion)

    async def _generate(
        self, request: OpenAIRequest, parsed_as: type[BaseModel], create: Callable[[Any], Awaitable[Any]]
    ) -> Answers:
        """One request, from its body to its last answer."""
        tally = TokenTally()
        parsed = await self._parsed(request, parsed_as)
        if isinstance(parsed, ErrorResponse):
            yield parsed
            return
        try:
            answer = await counted(tally, create, parsed)
            if isinstance(answer, AsyncGenerator):
                async for events in streamed(answer, tally):
                    yield events
            else:
                yield whole(answer, tally, request._answer)
        finally:
            await tally.close()

    async def _parsed(self, request: OpenAIRequest, kind: type[BaseModel]) -> BaseModel | ErrorResponse:
        """The request as vLLM's own type, or the answer of `vllm serve` to a wrong one. Raises LLMRequestError."""
        body = request.to_dict()
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            answer = await validation_exception_handler(cast(Any, self._web_request()), RequestValidationError(found))
            return as_openai(answer.status_code, bytes(answer.body))
        except Exception as error:  # vLLM's validators raise anything; vLLM maps it to an HTTP status
            return refusal(error)

    def _web_request(self) -> SimpleNamespace:
        return SimpleNamespace(app=self._running.app, state=SimpleNamespace())

    async def pass_through(self, request: OpenAIRequest) -> Answers:
        """What vLLM's web application answers: any path of `vllm serve`. A request without a body is a GET. Raises
        LLMRequestError."""
        tally = TokenTally()
        asked = WebRequest(self._running.app, request, tally)
        try:
            async for part in asked.parts():
                if part.status >= 400 and part.data.startswith(b'{"detail"'):  # its framework's own: no such path
                    yield ErrorResponse.of(
                        part.status,
                        f"vLLM does not serve {request.path} for this model: {part.data.decode()}",
                        kind="invalid_request_error",
                        code="not_found",
                    )
                elif part.status >= 400:
                    yield as_openai(part.status, part.data)
                elif part.usage is not None and part.content_type.startswith("application/json"):  # it is all of it
                    yield request._answer.from_bytes(part.data).counted(part.usage)
                else:
                    yield part
        finally:
            await asked.close()
            await tally.close()

    embeddings = pass_through

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """Call a method of each of vLLM's workers. Returns what they return."""
        found: list[Any] = await self._running.engine.collective_rpc(method, timeout, args, kwargs)
        return found

    async def start_profile(self) -> None:
        """Begin to record a profile, as engine_kwargs.profiler_config says."""
        await self._running.engine.start_profile()

    async def stop_profile(self) -> None:
        """Write the profile."""
        await self._running.engine.stop_profile()

    def describe(self) -> ModelDescription:
        """See LLMEngine.describe. Adapters: the loaded ones."""
        return ModelDescription(
            max_model_len=self._running.engine.model_config.max_model_len,
            adapters=tuple(name.partition(":")[2] for name in self._running.adapters.lora_requests),
        )

    def load(self) -> EngineStats:
        """From the scheduler's last report, and the requests in progress: an idle scheduler reports nothing."""
        if self._runs is None:
            return EngineStats()
        unfinished = self._runs.engine.get_num_unfinished_requests()
        return self._figures.load(unfinished)

    async def generate_one_token(self) -> None:
        """See LLMEngine.generate_one_token. Goes first where vLLM schedules by priority."""
        running = self._running
        prompt, name = {"prompt_token_ids": [0]}, f"one-token-{time.monotonic_ns()}"
        first = -(2**31) if running.settings.scheduling_policy == "priority" else 0
        outputs: AsyncIterator[Any]
        if "generate" in running.tasks:
            params = SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            outputs = running.engine.generate(cast(Any, prompt), params, name, priority=first)
        else:
            pooling = PoolingParams(task=cast(Any, running.tasks[0]))
            outputs = running.engine.encode(cast(Any, prompt), pooling, name, priority=first)
        async with contextlib.aclosing(cast(AsyncGenerator[Any, None], outputs)) as made:
            async for _ in made:
                pass

    async def check_health(self) -> None:
        """See LLMEngine.check_health: vLLM notices when one of its processes is gone. Raises EngineDiedError then."""
        try:
            await self._running.engine.check_health()
        except EngineDeadError as error:
            raise EngineDiedError(f"vLLM's engine has died: {error}; its log says why") from error

    async def shutdown(self) -> None:
        """See LLMEngine.shutdown."""
        running, self._runs = self._runs, None
        if running is not None:
            # Streams that are still read end with this error.
            running.engine.output_processor.propagate_error(EngineDeadError())
            await asyncio.to_thread(running.engine.shutdown)

    async def load_adapter(self, adapter: str, path: str) -> None:
        """See LLMEngine.load_adapter. One that is loaded already does not change."""
        self._needs(self._running.settings.enable_lora, "LoRA adapters", "the service's `lora` block")
        name = self._adapter_name(adapter)
        if name in self._running.adapters.lora_requests:
            return
        check(
            await self._running.adapters.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path)),
            f'the adapter "{adapter}" at {path} cannot be loaded: ',
        )

    async def unload_adapter(self, adapter: str) -> None:
        """See LLMEngine.unload_adapter: out of vLLM's list, and out of the accelerator's memory."""
        name = self._adapter_name(adapter)
        held = self._running.adapters.lora_requests.get(name)
        check(
            await self._running.adapters.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)),
            f'the adapter "{adapter}" cannot be unloaded: ',
        )
        if held is not None:
            await self._running.engine.remove_lora(held.lora_int_id)

    def _adapter_name(self, adapter: str) -> str:
        return f"{self.config.model_loading.model_id}:{adapter}"

    async def sleep(self, level: int) -> None:
        """See LLMEngine.sleep. Requests that run are aborted."""
        self._needs_sleep()
        self._level = level or 1
        await self._running.engine.sleep(self._level)

    async def wake(self) -> None:
        """See LLMEngine.wake."""
        self._needs_sleep()
        await wake_up(self._running.engine, self._level)

    @property
    def can_sleep(self) -> bool:
        """See LLMEngine.can_sleep: with enable_sleep_mode, on GPUs, and without a connector, which keeps addresses in
        the cache that a sleep gives back."""
        settings = self._runs.settings if self._runs is not None else None
        has_mode = settings is not None and settings.enable_sleep_mode and settings.kv_transfer_config is None
        return has_mode and current_platform.is_sleep_mode_available()

    def _needs_sleep(self) -> None:
        if not current_platform.is_sleep_mode_available():  # a worker on a CPU would ignore it, and vLLM call it done
            raise NotSupported(
                f"vLLM has no sleep mode on {current_platform.device_type}: only GPUs' memory can be given back. Scale "
                "the service to 0 replicas in its place"
            )
        self._needs(self._running.settings.enable_sleep_mode, "sleep", "engine_kwargs enable_sleep_mode: true")

    async def reset_prefix_cache(self) -> None:
        """See LLMEngine.reset_prefix_cache. Raises LLMRequestError while requests use the cache."""
        if not await self._running.engine.reset_prefix_cache():
            raise LLMRequestError("the prefix cache is in use by running requests. Repeat it when they have ended")

    def expose(self) -> bytes:
        """vLLM's own metrics under their own names, which begin with `vllm:`."""
        return generate_latest(cast(CollectorRegistry, OwnMetrics()))

    @property
    def _running(self) -> _Running:
        if self._runs is None:
            raise LLMStartError("the vLLM engine is not running: it was not started yet, or it was shut down")
        return self._runs

    def _needs(self, there: object, what: str, setting: str) -> None:
        if not there:
            raise NotSupported(f"this vLLM was started without {what}. Start it with {setting}")


@dataclass(frozen=True)
class _Running:
    """What a started engine consists of."""

    engine: AsyncLLM
    app: Any
    tasks: tuple[str, ...]
    settings: Namespace

    @property
    def adapters(self) -> Any:
        """vLLM's list of models: its own and the adapters."""
        return self.app.state.openai_serving_models
