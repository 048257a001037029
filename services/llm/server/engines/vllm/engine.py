"""vLLM in this process: its AsyncLLM engine (which runs the model in processes of its own) under its own OpenAI serving
classes, so that requests are checked, templated and answered as by `vllm serve`. Everything that depends on vLLM's
version is here and in start.py; made for 0.32.

Chat and completions call the serving classes; every other path is put to vLLM's own web application, without a socket.
Tokens are counted where the engine hands them out: events go on as vLLM wrote them, and nobody reads them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fastapi.exceptions import RequestValidationError
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest, ModelCard, Usage
from pierhead.llm_config import LLMConfig
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # before vLLM: gRPC's threads do not survive a fork

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from services.llm.server import bodies
from services.llm.server.answers import error_reply, reply_to
from services.llm.server.background import in_background
from services.llm.server.engine import EngineLoad, LLMEngine, Replies, Report
from services.llm.server.engines.vllm.errors import openai_error, reason
from services.llm.server.engines.vllm.start import arguments, explanation, stage_of
from services.llm.server.errors import EngineDiedError, LLMRequestError, LLMStartError, NotSupported

log = logging.getLogger(__name__)

_DONE = "data: [DONE]\n\n"
_LOOK_EVERY_S = 0.5
_MOST_CHUNKS = 16
"""Pieces of an answer of vLLM's web application that wait for a slow reader."""


class VLLMEngine(LLMEngine):
    """engine_kwargs: any argument of `vllm serve`, with underscores (vLLM's documentation lists them), but for those
    that LLMConfig has itself."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__(config)
        self._figures = _Figures()
        self._created = 0
        self._runs: _Running | None = None

    async def start(self, model_path: str, report: Report) -> None:
        """See LLMEngine.start. vLLM's own log tells how far it is."""
        await asyncio.to_thread(_check_path, model_path)
        with tempfile.TemporaryDirectory(prefix="vllm-log-") as place:
            told = _Log(Path(place))
            watch = asyncio.create_task(told.report_stages(report))
            try:
                self._runs = await self._start(model_path)
            except LLMStartError:
                raise
            except (Exception, SystemExit) as error:
                lines = await asyncio.to_thread(told.lines)
                raise LLMStartError(explanation(model_path, f"{type(error).__name__}: {error}", lines)) from error
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
                told.close()
        self._created = int(time.time())

    async def _start(self, model_path: str) -> _Running:
        settings = _settings(self.config, model_path)
        engine = await in_background(_make_engine, settings, self._figures)
        try:
            tasks = await engine.get_supported_tasks()
            app = build_app(settings, tasks, engine.model_config)
            app.state.server = SimpleNamespace(
                should_exit=False
            )  # vLLM's handlers tell their web server of a dead engine
            await init_app_state(engine, app.state, settings, tasks)
        except BaseException:
            await asyncio.to_thread(engine.shutdown)
            raise
        return _Running(engine, app, tasks, settings)

    def chat(self, request: LLMRequest) -> Replies:
        """See LLMEngine.chat."""
        serving = getattr(self._running.app.state, "openai_serving_chat", None)
        if serving is None:
            return self.pass_through(request)
        return self._generate(request, ChatCompletionRequest, serving.create_chat_completion)

    def completions(self, request: LLMRequest) -> Replies:
        """See LLMEngine.completions."""
        serving = getattr(self._running.app.state, "openai_serving_completion", None)
        if serving is None:
            return self.pass_through(request)
        return self._generate(request, CompletionRequest, serving.create_completion)

    async def _generate(
        self, request: LLMRequest, kind: type[BaseModel], create: Callable[[Any], Awaitable[Any]]
    ) -> AsyncIterator[LLMReply]:
        """One request, from its body to its last reply."""
        tally = _Tally()
        parsed = await self._parsed(request, kind)
        if isinstance(parsed, LLMReply):
            yield parsed
            return
        try:
            answer = await _counted(tally, create, parsed)
            if isinstance(answer, AsyncGenerator):
                async for reply in _streamed(answer, tally):
                    yield reply
            else:
                yield _whole(answer, tally)
        finally:
            await tally.close()

    async def _parsed(self, request: LLMRequest, kind: type[BaseModel]) -> BaseModel | LLMReply:
        """The request as vLLM's own type, or the answer to one that is wrong, as `vllm serve` gives it."""
        try:
            return kind.model_validate(bodies.read(request))
        except LLMRequestError as error:
            return reply_to(error)
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            answer = await validation_exception_handler(cast(Any, self._web_request()), RequestValidationError(found))
            return _as_openai(answer.status_code, bytes(answer.body))
        except Exception as error:  # vLLM's validators raise what they like: it knows what that is in HTTP
            return _refusal(error)

    def _web_request(self) -> SimpleNamespace:
        return SimpleNamespace(app=self._running.app, state=SimpleNamespace())

    async def pass_through(self, request: LLMRequest) -> AsyncIterator[LLMReply]:
        """Any path of `vllm serve`: embeddings, scores, tokens, responses, rerank, transcriptions, ... A request
        without a body is a GET."""
        tally = _Tally()
        try:
            body = bodies.written(request) if _is_json(request) else request.body
        except LLMRequestError as error:
            yield reply_to(error)
            return
        asked = _Asked(self._running.app, request, body, tally)
        try:
            async for reply in asked.replies():
                if reply.status >= 400 and reply.data.startswith(b'{"detail"'):  # its framework's own: no such path
                    reply = error_reply(
                        reply.status,
                        f"vLLM does not serve {request.path} for this model: {reply.data.decode()}",
                        kind="invalid_request_error",
                        code="not_found",
                    )
                elif reply.status >= 400:
                    reply = _as_openai(reply.status, reply.data)
                yield reply
        finally:
            await asked.close()
            await tally.close()

    def describe(self) -> ModelCard:
        """See LLMEngine.describe. Adapters: those that are loaded."""
        return ModelCard(
            model_id=self.config.model_loading.model_id,
            max_model_len=self._running.engine.model_config.max_model_len,
            engine="vllm",
            adapters=[name.partition(":")[2] for name in self._running.adapters.lora_requests],
            created=self._created,
        )

    def load(self) -> EngineLoad:
        """From the scheduler's last word, and what this process has handed it: an idle scheduler says nothing more."""
        if self._runs is None:
            return EngineLoad()
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
            running.engine.output_processor.propagate_error(
                EngineDeadError()
            )  # whoever still reads a stream hears of it
            await asyncio.to_thread(running.engine.shutdown)

    async def load_adapter(self, adapter: str, path: str) -> None:
        """See LLMEngine.load_adapter. One that is loaded already stays as it is."""
        self._needs(self._running.settings.enable_lora, "LoRA adapters", "the service's `lora` block")
        name = self._adapter_name(adapter)
        if name in self._running.adapters.lora_requests:
            return
        _check(
            await self._running.adapters.load_lora_adapter(LoadLoRAAdapterRequest(lora_name=name, lora_path=path)),
            f'the adapter "{adapter}" at {path} cannot be loaded: ',
        )

    async def unload_adapter(self, adapter: str) -> None:
        """See LLMEngine.unload_adapter: out of vLLM's list, and out of the accelerator's memory."""
        name = self._adapter_name(adapter)
        held = self._running.adapters.lora_requests.get(name)
        _check(
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
        await self._running.engine.sleep(level or 1)

    async def wake(self) -> None:
        """See LLMEngine.wake."""
        self._needs_sleep()
        await self._running.engine.wake_up()

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
        return generate_latest(cast(CollectorRegistry, _OwnMetrics()))

    @property
    def _running(self) -> _Running:
        if self._runs is None:
            raise LLMStartError("the vLLM engine is not running: it was not started yet, or it was shut down")
        return self._runs

    def _needs(self, there: object, what: str, setting: str) -> None:
        if not there:
            raise NotSupported(f"this vLLM was started without {what}. Start it with {setting}")


class _Running:
    """What a started engine consists of."""

    def __init__(self, engine: AsyncLLM, app: Any, tasks: tuple[str, ...], settings: Namespace) -> None:
        self.engine = engine
        self.app = app
        self.tasks = tasks
        self.settings = settings

    @property
    def adapters(self) -> Any:
        """vLLM's list of models: the one that it was started with, and adapters."""
        return self.app.state.openai_serving_models


# Settings.

_OURS = {
    "model": "model_loading.model_source",
    "model_tag": "model_loading.model_source",
    "served_model_name": "model_loading.model_id",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "enable_lora": "lora",
    "max_loras": "lora.max_num_adapters_per_replica",
}


def _check_path(model_path: str) -> None:
    if model_path.startswith(("/", ".")) and not Path(model_path).is_dir():
        raise LLMStartError(
            f"{model_path}: there is no such directory in the container. Correct model_loading.model_source, or mount "
            "the directory there"
        )


def _settings(config: LLMConfig, model_path: str) -> Namespace:
    """The arguments of `vllm serve`, read and checked by its own parser. Raises LLMStartError."""
    for name, ours in _OURS.items():
        if name in config.engine_kwargs:
            raise LLMStartError(f"engine_kwargs {name}: say it in {ours} of the service's llm block")
    own: dict[str, object] = {
        "model": model_path,
        "served_model_name": config.model_loading.model_id,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }
    if config.lora is not None:
        own |= {"enable_lora": True, "max_loras": config.lora.max_num_adapters_per_replica}
    parser = make_arg_parser(_Parser(prog="engine_kwargs"))
    settings = cast(Namespace, parser.parse_args(arguments((own | config.engine_kwargs).items())))
    validate_parsed_serve_args(settings)
    return settings


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Tells of mistakes by an exception instead of ending the process."""

    def error(self, message: str) -> Any:
        raise LLMStartError(f"engine_kwargs: {message}. Names are those of `vllm serve`, with underscores")


def _make_engine(settings: Namespace, figures: _Figures) -> AsyncLLM:
    """Blocks until the model is loaded."""
    settings_of_engine = AsyncEngineArgs.from_cli_args(settings)
    config = settings_of_engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    return _CountingLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[figures.logger],
        enable_log_requests=settings_of_engine.enable_log_requests,
        disable_log_stats=settings_of_engine.disable_log_stats,
    )


class _Log:
    """vLLM's log, also in a file, where this process can read what the engine's processes say while they start."""

    def __init__(self, place: Path) -> None:
        self._file = place / "log"
        self._file.touch()
        self._own = "VLLM_LOGGING_CONFIG_PATH" not in os.environ
        if self._own:
            configuration = place / "logging.json"
            configuration.write_text(json.dumps(_logging_also_to(self._file)))
            os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(configuration)

    def lines(self) -> list[str]:
        """What it has said so far."""
        return self._file.read_text(errors="replace").splitlines()

    async def report_stages(self, report: Report) -> None:
        """Report each stage that the log begins, until cancelled."""
        seen, last = 0, "starting vLLM"
        report(last, None, 1.0)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            lines = await asyncio.to_thread(self.lines)
            for line in lines[seen:]:
                stage = stage_of(line)
                if stage is not None and stage != last:
                    last = stage
                    report(stage, None, 1.0)
            seen = len(lines)

    def close(self) -> None:
        """No more of it. What little processes that have it open still say goes to a file without a name."""
        if self._own:
            os.environ.pop("VLLM_LOGGING_CONFIG_PATH", None)
            for handler in list(logging.getLogger("vllm").handlers):
                if isinstance(handler, logging.FileHandler):
                    logging.getLogger("vllm").removeHandler(handler)
                    handler.close()


def _logging_also_to(file: Path) -> dict[str, Any]:
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    own = cast(dict[str, Any], json.loads(json.dumps(DEFAULT_LOGGING_CONFIG)))
    handler = {"class": "logging.FileHandler", "filename": str(file), "formatter": "vllm", "level": "INFO"}
    own["handlers"]["start"] = handler
    own["loggers"]["vllm"]["handlers"] = ["vllm", "start"]
    return own


# Counting.

_TALLY: ContextVar[_Tally | None] = ContextVar("tally", default=None)


class _Tally:
    """What the engine has made for one request."""

    __slots__ = ("_made", "_taken", "_works", "cached", "failure", "finish_reason", "prompt")

    def __init__(self) -> None:
        self._works: list[AsyncGenerator[Any, None]] = []
        self._made: dict[tuple[int, int], int] = {}
        self._taken = 0
        self.prompt = 0
        self.cached = 0
        self.finish_reason = ""
        self.failure: Exception | None = None

    @property
    def completion(self) -> int:
        """Tokens made so far, of all choices and prompts."""
        return sum(self._made.values())

    def take(self) -> int:
        """Tokens made since it was asked last."""
        made = self.completion
        new, self._taken = made - self._taken, made
        return new

    def usage(self) -> Usage:
        """The whole request's."""
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=self.completion,
            cached_tokens=self.cached,
            finish_reason=self.finish_reason,
        )

    def count(self, outputs: AsyncGenerator[Any, None], deltas: bool | None) -> AsyncGenerator[Any, None]:
        """The same outputs, counted. `deltas`: each holds what is new, not everything so far; None: nothing is made."""
        self._works.append(outputs)
        return self._counting(len(self._works), outputs, deltas)

    async def _counting(
        self, work: int, outputs: AsyncGenerator[Any, None], deltas: bool | None
    ) -> AsyncGenerator[Any, None]:
        first = True
        try:
            async for result in outputs:
                if first:
                    first = False
                    self.prompt += len(result.prompt_token_ids or ())
                    self.cached += getattr(result, "num_cached_tokens", None) or 0
                if deltas is not None:
                    for output in result.outputs:
                        self._add(work, output, deltas)
                yield result
        except Exception as error:
            self.failure = error
            raise

    def _add(self, work: int, output: Any, deltas: bool) -> None:
        place = (work, output.index)
        before = self._made.get(place, 0) if deltas else 0
        self._made[place] = before + len(output.token_ids)
        if output.finish_reason and place == (1, 0):
            self.finish_reason = output.finish_reason

    async def close(self) -> None:
        """Abort what still runs. Python would do so as well, but when it collects garbage."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):  # it is being ended already
                await work.aclose()


async def _counted(tally: _Tally, call: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
    """What the call answers; what it asks the engine for counts for the tally. A refusal is an ErrorResponse."""
    token = _TALLY.set(tally)
    try:
        answer = await call(argument)
    except Exception as error:  # vLLM knows which of them are the client's, and what each is in HTTP
        return create_error_response(error)
    finally:
        _TALLY.reset(token)
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # vLLM answers "Client disconnected" in place of ending
        raise asyncio.CancelledError
    return answer


class _CountingLLM(AsyncLLM):  # type: ignore[misc]
    """The engine, counting for whoever set a tally."""

    def generate(self, prompt: Any, sampling_params: SamplingParams, *args: Any, **named: Any) -> Any:
        outputs = super().generate(prompt, sampling_params, *args, **named)
        tally = _TALLY.get()
        if tally is None:
            return outputs
        return tally.count(outputs, sampling_params.output_kind is RequestOutputKind.DELTA)

    def encode(self, prompt: Any, pooling_params: PoolingParams, *args: Any, **named: Any) -> Any:
        outputs = super().encode(prompt, pooling_params, *args, **named)
        tally = _TALLY.get()
        return outputs if tally is None else tally.count(outputs, None)


# Answers.


async def _streamed(events: AsyncGenerator[str, None], tally: _Tally) -> AsyncIterator[LLMReply]:
    """vLLM's events as they are. An error before the first token is a reply with its status, a later one is raised."""
    status = 200
    async with contextlib.aclosing(events):
        async for event in events:
            if tally.failure is not None:
                if status:
                    yield _refusal(tally.failure)
                    return
                raise tally.failure
            if event == _DONE:
                yield LLMReply(data=_DONE.encode(), status=status, tokens=tally.take(), usage=tally.usage())
            else:
                if '"finish_reason":"tool_calls"' in event:
                    tally.finish_reason = "tool_calls"
                yield LLMReply(data=event.encode(), status=status, tokens=tally.take())
            status = 0


def _whole(answer: Any, tally: _Tally) -> LLMReply:
    """One reply of a request that does not stream."""
    if isinstance(answer, ErrorResponse):
        return _error(answer)
    usage = tally.usage()
    if answer.choices and answer.choices[0].finish_reason:
        usage.finish_reason = answer.choices[0].finish_reason
    return LLMReply(data=answer.model_dump_json().encode(), status=200, tokens=tally.take(), usage=usage)


def _refusal(error: Exception) -> LLMReply:
    return _error(create_error_response(error))


def _error(answer: ErrorResponse) -> LLMReply:
    told = openai_error(answer.error.code, answer.error.message, answer.error.param)
    return error_reply(answer.error.code, told.message, kind=told.kind, code=told.code, param=told.param)


def _as_openai(status: int, body: bytes) -> LLMReply:
    """An error that vLLM has written already."""
    try:
        return _error(ErrorResponse.model_validate_json(body))
    except ValidationError:  # not one of its own: as it is
        return LLMReply(data=body, status=status)


def _check(answer: ErrorResponse | str, what: str) -> None:
    if isinstance(answer, ErrorResponse):
        raise LLMRequestError(what + reason(answer.error.message))


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether vLLM's log speaks of more than a request that was refused, which its sender was told."""
    error = record.exc_info[1] if record.exc_info else None
    refused = isinstance(error, Exception) and create_error_response(error).error.code < 500
    return not refused and not str(record.msg).startswith("Error with model")


for _module in ("chat_completion", "completion"):
    logging.getLogger(f"vllm.entrypoints.openai.{_module}.serving").addFilter(_is_failure)


class _Asked:
    """One request to vLLM's web application, in this process: it is called as a web server would call it (ASGI)."""

    def __init__(self, app: Any, request: LLMRequest, body: bytes, tally: _Tally) -> None:
        self._tally = tally
        self._body: bytes | None = body
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MOST_CHUNKS)
        self._gone = asyncio.Event()
        token = _TALLY.set(tally)
        try:
            self._task = asyncio.create_task(self._run(app, _scope(request, bool(body))))
        finally:
            _TALLY.reset(token)

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._said.put)
        finally:
            with contextlib.suppress(asyncio.QueueFull):  # whoever finds it full has not read the end yet, and sees it
                self._said.put_nowait({"type": "end"})

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def replies(self) -> AsyncIterator[LLMReply]:
        """The answer, in the pieces that vLLM sends."""
        status, content_type = 0, ""
        while True:
            said = await self._said.get()
            if said["type"] == "http.response.start":
                status = said["status"]
                content_type = dict(said["headers"]).get(b"content-type", b"").decode("latin-1")
                continue
            if said["type"] == "end":
                await self._task  # raises what it raised
                return
            reply = LLMReply(data=said.get("body", b""), status=status, content_type=content_type)
            reply.tokens = self._tally.take()
            last = not said.get("more_body", False)
            if last:
                reply.usage.CopyFrom(self._tally.usage())
            if reply.data or last:
                yield reply
                status, content_type = 0, ""
            if last:
                return

    async def close(self) -> None:
        """The client is gone, or has everything."""
        self._gone.set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task


def _is_json(request: LLMRequest) -> bool:
    return bool(request.body) and request.content_type.partition(";")[0].strip() in ("", "application/json")


def _scope(request: LLMRequest, has_body: bool) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    content_type = request.content_type or "application/json"
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST" if has_body else "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"engine"), (b"content-type", content_type.encode("latin-1"))],
        "client": None,
        "server": ("engine", 80),
        "state": {},
    }


# Figures.


class _Figures:
    """What the scheduler said last, and how many tokens it has worked through."""

    def __init__(self) -> None:
        self._running = 0
        self._kv_use = 0.0
        self._tokens = 0

    def logger(self, config: Any, engine_index: int = 0) -> StatLoggerBase:
        """vLLM's factory of loggers: one for each of its engines."""
        return _FigureLogger(config, engine_index, self)

    def note(self, scheduler: Any, iteration: Any) -> None:
        """After each of the engine's steps."""
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._kv_use = scheduler.kv_cache_usage
        if iteration is not None:
            self._tokens += iteration.num_generation_tokens + iteration.num_prompt_tokens

    def load(self, unfinished: int) -> EngineLoad:
        """`unfinished`: requests that the engine was given and has not ended."""
        running = min(self._running, unfinished)
        return EngineLoad(running, unfinished - running, self._kv_use if unfinished else 0.0, self._tokens)


class _FigureLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, config: Any, engine_index: int = 0, figures: _Figures | None = None) -> None:
        self._figures = figures or _Figures()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
        self._figures.note(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        pass


class _OwnMetrics:
    """The part of the process's metrics that is vLLM's."""

    def collect(self) -> Iterable[Any]:
        return (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))
