"""Counts the tokens of each request where vLLM's engine hands them out."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from pierhead.llm.objects import Usage
from pierhead.llm.server.engines.vllm.figures import Figures
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

TALLY: ContextVar[TokenTally | None] = ContextVar("tally", default=None)


class TokenTally:
    """The tokens that the engine has made for one request."""

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
        """Tokens made since the last call."""
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
        """Abort what still runs. Python would do so as well, but only when it collects garbage."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):  # it is ending already
                await work.aclose()


async def counted(tally: TokenTally, call: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
    """What the call answers; what it asks the engine for counts for the tally. A refusal is an ErrorResponse."""
    token = TALLY.set(tally)
    try:
        answer = await call(argument)
    except Exception as error:  # vLLM knows which of them are the client's, and what each is in HTTP
        return create_error_response(error)
    finally:
        TALLY.reset(token)
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # vLLM answers "Client disconnected" in place of ending
        raise asyncio.CancelledError
    return answer


class _CountingLLM(AsyncLLM):  # type: ignore[misc]
    """The engine, which counts for the tally that is set, if any."""

    def generate(self, prompt: Any, sampling_params: SamplingParams, *args: Any, **named: Any) -> Any:
        outputs = super().generate(prompt, sampling_params, *args, **named)
        tally = TALLY.get()
        if tally is None:
            return outputs
        return tally.count(outputs, sampling_params.output_kind is RequestOutputKind.DELTA)

    def encode(self, prompt: Any, pooling_params: PoolingParams, *args: Any, **named: Any) -> Any:
        outputs = super().encode(prompt, pooling_params, *args, **named)
        tally = TALLY.get()
        return outputs if tally is None else tally.count(outputs, None)


def make_engine(settings: Namespace, figures: Figures) -> AsyncLLM:
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
