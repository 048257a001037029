"""An engine without a model, for tests, demos and load tests: deterministic tokens at a given pace, scripted answers,
and a prefix cache that counts as a real one does.

    answer    all of an answer, as OpenAI's JSON       schedule  which token is due when
    text      tokens of four characters                cache     blocks that requests share

One timer serves all requests. The tokens of a request that are due in one step go out together.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import operator
import random
import struct
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pierhead.errors import Unavailable
from pierhead.llm import objects
from pierhead.llm.mock import schedule, text
from pierhead.llm.mock.answer import MockAnswer, check_length
from pierhead.llm.mock.arguments import read_arguments
from pierhead.llm.mock.cache import BlockCache, chain_of
from pierhead.llm.server import bodies
from pierhead.llm.server.engine import Answers, EngineStats, LLMEngine, ModelDescription
from pierhead.llm.server.errors import LLMStartError, unknown_model
from pierhead.tasks import wake

VECTOR_SIZE = 64


class _Job:
    """One request's sequences. `whole`: it waits for the end of all of them."""

    def __init__(self, *, whole: bool) -> None:
        self.sequences: Sequence[schedule.Sequence] = ()
        self._whole = whole
        self._failure: Exception | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    def note_tokens(self) -> None:
        """One of the sequences has new tokens."""
        if not self._whole or all(sequence.done for sequence in self.sequences):
            self._tell()

    def fail(self, error: Exception) -> None:
        """Make `news` raise."""
        self._failure = error
        self._tell()

    def _tell(self) -> None:
        self._has_news = True
        wake(self._waiter)

    async def news(self) -> list[int]:
        """Wait for what comes next. Returns how many tokens each sequence has. Raises what the job failed with."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_news = False
        if self._failure is not None:
            raise self._failure
        return [sequence.given for sequence in self.sequences]


class MockEngine(LLMEngine):
    """See MockArguments for its engine_kwargs. Raises LLMStartError for wrong ones."""

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        config = self.config
        self._arguments = read_arguments(config.engine_kwargs)
        self._model = config.model_loading.model_id
        # It reads no files, but a directory that is named has to exist, as for an engine that reads it.
        if config.model_loading.source.startswith("/"):
            self.needs_files = True
        self._cache = BlockCache(self._arguments.kv_blocks)
        self._schedule = schedule.Schedule(self._arguments, self._cache)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asleep = False
        self._jobs: set[_Job] = set()
        self._adapters: set[str] = set()
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # ---- its life

    async def start(self) -> None:
        """Raises LLMStartError where engine_kwargs.fail_start says so."""
        self.report("loading the mock model's weights", 0, 1)
        if self._arguments.fail_start is not None:
            raise LLMStartError(self._arguments.fail_start)
        self._loop = asyncio.get_running_loop()

    async def shutdown(self) -> None:
        """End what runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for job in self._jobs:
            job.fail(Unavailable("the engine was shut down while it worked on this request"))
        self._loop = None

    def describe(self) -> ModelDescription:
        """What is served."""
        return ModelDescription(max_model_len=self._arguments.max_model_len, adapters=tuple(sorted(self._adapters)))

    def load(self) -> EngineStats:
        """Counts each choice of a request."""
        plan = self._schedule
        return EngineStats(plan.running, plan.waiting, self._cache.use, plan.read + plan.made)

    async def check_health(self) -> None:
        """Raises RuntimeError where engine_kwargs.ill says so."""
        if self._arguments.ill is not None:
            raise RuntimeError(self._arguments.ill)

    async def generate_one_token(self) -> None:
        """Past all requests that wait."""
        job = _Job(whole=True)
        with self._running(job, [schedule.Sequence(job, 0, (), 1)], at_once=True):
            await job.news()

    # ---- requests

    async def chat(self, request: objects.OpenAIRequest) -> Answers:
        """/v1/chat/completions, /v1/completions"""
        body = self._read(request)
        answer = MockAnswer(body, self._arguments, chat=isinstance(request, objects.ChatCompletionRequest))
        job = _Job(whole=not answer.stream)
        sequences = [self._sequence(job, each.prompt, each.tokens, body["model"]) for each in answer.choices]
        with self._running(job, sequences):
            left = sum(sequence.total for sequence in sequences)
            while left:
                given = await job.news()
                most = self._arguments.fail_after_tokens
                if most is not None and sum(given) >= most:
                    raise RuntimeError(f"engine_kwargs.fail_after_tokens = {most}: it fails as engine_kwargs say")
                if not answer.stream:
                    usage = _usage(answer, sequences)
                    yield request._answer.from_bytes(json.dumps(answer.whole(usage)).encode()).counted(usage)
                    return
                events, tokens = answer.events(given)
                left -= tokens
                if left:
                    yield objects.StreamEvents(events, tokens)
                else:
                    usage = _usage(answer, sequences)
                    yield objects.StreamEvents(events + answer.end(usage), tokens, usage)

    completions = chat

    def embeddings(self, request: objects.EmbeddingRequest) -> Answers:
        """/v1/embeddings"""
        return self._answer(request, self._embed)

    def score(self, request: objects.ScoreRequest) -> Answers:
        """/v1/score"""
        return self._answer(request, self._score)

    def tokenize(self, request: objects.TokenizeRequest) -> Answers:
        """/tokenize"""
        return self._answer(request, self._tokenize)

    def detokenize(self, request: objects.DetokenizeRequest) -> Answers:
        """/detokenize"""
        return self._answer(request, self._detokenize)

    def _sequence(self, job: _Job, prompt: list[str], tokens: list[str], salt: object) -> schedule.Sequence:
        size = self._arguments.block_size
        chain = chain_of(prompt + tokens, size, (self._cache.salt, salt))
        full = len(prompt) // size
        return schedule.Sequence(job, len(prompt), chain[:full], max(len(tokens), 1), chain[full:])

    def _read(self, request: objects.OpenAIRequest) -> bodies.Body:
        """The body, for a model that is here. Raises LLMRequestError."""
        if self._loop is None:
            raise Unavailable("the engine is not started, or was shut down")
        body = request.to_dict()
        model = body.get("model")
        if not isinstance(model, str):
            raise bodies.wrong("model", "a string", model)
        served = [self._model, *(f"{self._model}:{each}" for each in sorted(self._adapters))]
        if model not in served:
            raise unknown_model(model, ", ".join(served))
        return body

    async def _answer(
        self, request: objects.OpenAIRequest, make: Callable[[bodies.Body], Awaitable[dict[str, Any]]]
    ) -> Answers:
        """One answer, of what `make` makes of the body."""
        answer = await make(self._read(request))
        usage = objects.Usage(prompt_tokens=answer.get("usage", {}).get("prompt_tokens", 0))
        yield request._answer.from_bytes(json.dumps(answer).encode()).counted(usage)

    async def _embed(self, body: bodies.Body) -> dict[str, Any]:
        inputs = text.prompts(body, "input")
        vectors = map(_vector, inputs)
        if body.get("encoding_format") == "base64":  # little-endian float32, as OpenAI's clients ask for it
            found: list[Any] = [b64encode(struct.pack(f"<{VECTOR_SIZE}f", *vector)).decode() for vector in vectors]
        else:
            found = list(vectors)
        return await self._pooled(body, inputs, "embedding", found)

    async def _score(self, body: bodies.Body) -> dict[str, Any]:
        ones, others = text.prompts(body, "text_1"), text.prompts(body, "text_2")
        pairs = zip(itertools.cycle(ones), others)  # one text is compared with each of the others
        found = [(1 + sum(map(operator.mul, _vector(one), _vector(other)))) / 2 for one, other in pairs]
        return await self._pooled(body, ones + others, "score", found)

    async def _pooled(self, body: bodies.Body, inputs: list[list[str]], kind: str, found: list[Any]) -> dict[str, Any]:
        """The answer, once as much time has passed as reading the inputs takes."""
        for tokens in inputs:
            check_length(len(tokens), 1, self._arguments)
        job = _Job(whole=True)
        with self._running(job, [self._sequence(job, tokens, [], "pooling") for tokens in inputs]):
            await job.news()
        count = sum(map(len, inputs))
        data = [{"object": kind, "index": index, kind: each} for index, each in enumerate(found)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": body["model"], "usage": usage}

    async def _tokenize(self, body: bodies.Body) -> dict[str, Any]:
        tokens = text.conversation(body) if "messages" in body else text.prompts(body, "prompt")[0]
        numbers = [text.number_of(token) for token in tokens]
        return {"count": len(numbers), "max_model_len": self._arguments.max_model_len, "tokens": numbers}

    async def _detokenize(self, body: bodies.Body) -> dict[str, Any]:
        return {"prompt": "".join(text.prompts(body, "tokens")[0])}

    # ---- operations

    async def load_adapter(self, adapter: str, path: str) -> None:
        """Serve the base model's answers under this name, too."""
        self._adapters.add(adapter)

    async def unload_adapter(self, adapter: str) -> None:
        """Forget it."""
        self._adapters.discard(adapter)

    async def sleep(self, level: int) -> None:
        """Stand still, and forget the cache, as vLLM does at both levels."""
        self._asleep = True
        self._arm()
        self._cache.reset()

    async def wake(self) -> None:
        """Continue to make tokens."""
        self._asleep = False
        self._schedule.resume(self._now())
        self._arm()

    async def reset_prefix_cache(self) -> None:
        """Forget what was read."""
        self._cache.reset()

    def expose(self) -> bytes:
        """Under vLLM's names, with `mock:` in place of `vllm:`."""
        load = self.load()
        numbers = {
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": load.kv_use,
            "prefix_cache_queries_total": self._prompt_tokens,
            "prefix_cache_hits_total": self._cached_tokens,
            "prompt_tokens_total": self._schedule.read,
            "generation_tokens_total": self._schedule.made,
        }
        lines = []
        for name, value in numbers.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE mock:{name} {kind}", f'mock:{name}{{model_name="{self._model}"}} {float(value)}']
        return "\n".join([*lines, ""]).encode()

    # ---- the clock

    def _arm(self) -> None:
        """Set the timer to the end of the next step, if there is anything to do."""
        stalled = self._arguments.stall_after_tokens
        at = self._schedule.next_at()
        if self._loop is None or self._asleep or (stalled is not None and self._schedule.made >= stalled):
            at = math.inf
        if self._timer is not None and at == math.inf:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and at < math.inf and self._loop is not None:
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for job in {sequence.owner for sequence in self._schedule.advance(self._now())}:
            job.note_tokens()
        self._arm()

    def _now(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    @contextmanager
    def _running(self, job: _Job, sequences: list[schedule.Sequence], *, at_once: bool = False) -> Iterator[None]:
        """Work on a job until the block is left: what is not done then is aborted."""
        job.sequences = sequences
        self._jobs.add(job)
        for sequence in sequences:
            self._schedule.add(sequence, self._now(), at_once=at_once)
        self._arm()
        try:
            yield
        finally:
            self._jobs.discard(job)
            for sequence in sequences:
                self._schedule.drop(sequence)
            self._arm()
            self._prompt_tokens += sequences[0].prompt
            self._cached_tokens += sequences[0].cached


def _vector(tokens: list[str]) -> list[float]:
    """A direction that depends on the text alone."""
    draw = random.Random("".join(tokens))  # noqa: S311 - it is to be the same each time
    raw = [draw.random() - 0.5 for _ in range(VECTOR_SIZE)]
    length = math.hypot(*raw)
    return [each / length for each in raw]


def _usage(answer: MockAnswer, sequences: list[schedule.Sequence]) -> objects.Usage:
    firsts = sequences[:: answer.n]
    return objects.Usage(
        prompt_tokens=sum(sequence.prompt for sequence in firsts),
        completion_tokens=sum(sequence.total for sequence in sequences),
        cached_tokens=sum(sequence.cached for sequence in firsts),
        finish_reason=answer.choices[0].finish,
    )
