"""An engine without a model, for tests, demos and load tests: deterministic tokens at a given pace, scripted answers,
and a prefix cache that counts as a real one does.

    plan      a request as what is to be answered      schedule  which token is due when
    replies   answers as OpenAI's JSON                 cache     blocks that requests share

One timer serves all requests. The tokens of a request that are due in one step go out as one reply of several events.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pierhead.errors import Unavailable
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest, ModelCard, Usage
from pierhead.llm_config import LLMConfig
from pierhead.request import new_request_id

from services.llm.server import bodies
from services.llm.server.answers import reply_to
from services.llm.server.engine import EngineLoad, LLMEngine, Replies, Report
from services.llm.server.engines.mock import text, vectors
from services.llm.server.engines.mock.arguments import MockArguments, read_arguments
from services.llm.server.engines.mock.cache import BlockCache, chain_of
from services.llm.server.engines.mock.plan import Plan, check_length, plan_chat, plan_completions
from services.llm.server.engines.mock.replies import News, Writer
from services.llm.server.engines.mock.schedule import Schedule, Sequence
from services.llm.server.errors import LLMRequestError, LLMStartError, unknown_model

MOST_INPUTS = 2048

PlanOf = Callable[[bodies.Body, MockArguments], Plan]


class _Job:
    """One request's sequences, and the tokens that its task has not read yet."""

    def __init__(self, left: int, *, whole: bool) -> None:
        """`whole`: `news` waits for the end of all sequences."""
        self._left = left
        """Sequences that are not done."""
        self._whole = whole
        self._news: list[News] = []
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def add(self, number: int, count: int, *, done: bool) -> None:
        """`count` more tokens of sequence `number`."""
        self._news.append((number, count, done))
        self._left -= done
        if not self._whole or not self._left:
            self._changed.set()

    def fail(self, error: Exception) -> None:
        """Have `news` raise."""
        self._failure = error
        self._changed.set()

    async def news(self) -> list[News]:
        """Wait for what comes next. Raises what the job failed with."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        news, self._news = self._news, []
        return news


class MockEngine(LLMEngine):
    """See MockArguments for its engine_kwargs. Raises LLMStartError for wrong ones."""

    needs_files = False

    def __init__(self, config: LLMConfig) -> None:
        super().__init__(config)
        self._arguments = read_arguments(config.engine_kwargs)
        self._model = config.model_loading.model_id
        # It reads no files, but a directory that is named has to exist, as for an engine that reads it.
        if config.model_loading.source.startswith("/"):
            self.needs_files = True
        self._cache = BlockCache(self._arguments.kv_blocks)
        self._schedule = Schedule(self._arguments.pace(), self._cache)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asleep = False
        self._jobs: set[_Job] = set()
        self._adapters: set[str] = set()
        self._created = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # ---- its life

    async def start(self, model_path: str, report: Report) -> None:
        """Raises LLMStartError where engine_kwargs.fail_start says so."""
        report("loading the mock model's weights", 0, 1)
        if self._arguments.fail_start is not None:
            raise LLMStartError(self._arguments.fail_start)
        self._loop = asyncio.get_running_loop()
        self._created = int(time.time())

    async def shutdown(self) -> None:
        """End what runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for job in self._jobs:
            job.fail(Unavailable("the engine was shut down while it worked on this request"))
        self._loop = None

    def describe(self) -> ModelCard:
        """What is served."""
        return ModelCard(
            model_id=self._model,
            max_model_len=self._arguments.max_model_len,
            engine="mock",
            adapters=sorted(self._adapters),
            created=self._created,
        )

    def load(self) -> EngineLoad:
        """Counts each choice of a request."""
        schedule = self._schedule
        return EngineLoad(schedule.running, schedule.waiting, self._cache.use, schedule.tokens)

    async def check_health(self) -> None:
        """Raises RuntimeError where engine_kwargs.ill says so."""
        if self._arguments.ill is not None:
            raise RuntimeError(self._arguments.ill)

    async def generate_one_token(self) -> None:
        """Past all requests that wait."""
        job = _Job(1, whole=True)
        with self._running(job, [Sequence((job, 0), 1, (), 1)], at_once=True):
            await job.news()

    # ---- requests

    def chat(self, request: LLMRequest) -> Replies:
        """/v1/chat/completions"""
        return self._generate(request, plan_chat)

    def completions(self, request: LLMRequest) -> Replies:
        """/v1/completions"""
        return self._generate(request, plan_completions)

    def embeddings(self, request: LLMRequest) -> Replies:
        """/v1/embeddings"""
        return self._answer(request, self._embed)

    def score(self, request: LLMRequest) -> Replies:
        """/v1/score"""
        return self._answer(request, self._score)

    def tokenize(self, request: LLMRequest) -> Replies:
        """/tokenize"""
        return self._answer(request, self._tokenize)

    def detokenize(self, request: LLMRequest) -> Replies:
        """/detokenize"""
        return self._answer(request, self._detokenize)

    async def _generate(self, request: LLMRequest, plan_of: PlanOf) -> AsyncIterator[LLMReply]:
        try:
            plan = plan_of(self._read(request), self._arguments)
        except LLMRequestError as error:
            yield reply_to(error)
            return
        job = _Job(len(plan.answers), whole=not plan.stream)
        sequences = self._sequences(plan, job)
        writer = Writer(plan, new_request_id(), int(time.time()))
        with self._running(job, sequences):
            if not plan.stream:
                await job.news()
                self._fail_if_asked(plan.completion_tokens)
                usage = _usage(plan, sequences)
                whole = writer.whole(usage, self._transfer(plan, sequences))
                yield LLMReply(data=whole, status=200, tokens=usage.completion_tokens, usage=usage)
                return
            status = 200
            while writer.left:
                reply = writer.events(await job.news())
                if not writer.left:
                    usage = _usage(plan, sequences)
                    reply.data += writer.end(usage)
                    reply.usage.CopyFrom(usage)
                reply.status, status = status, 0
                yield reply
                self._fail_if_asked(plan.completion_tokens - writer.left)

    def _fail_if_asked(self, given: int) -> None:
        most = self._arguments.fail_after_tokens
        if most is not None and given >= most:
            raise RuntimeError(f"engine_kwargs.fail_after_tokens = {most}: the request fails as engine_kwargs say")

    def _sequences(self, plan: Plan, job: _Job) -> list[Sequence]:
        salt = (self._cache.salt, plan.model)
        size = self._arguments.block_size
        chains = [chain_of(prompt, size, salt) for prompt in plan.prompts]
        return [
            Sequence(
                (job, number),
                len(plan.prompts[answer.prompt]),
                chains[answer.prompt],
                len(answer.pieces),
                read=plan.read_by_another,
                grown=functools.partial(self._grown, plan, number, chains[answer.prompt], salt),
            )
            for number, answer in enumerate(plan.answers)
        ]

    def _grown(self, plan: Plan, number: int, chain: tuple[int, ...], salt: object) -> tuple[int, ...]:
        """The hashes of the blocks that an answer has filled."""
        answer = plan.answers[number]
        tokens = plan.prompts[answer.prompt] + [text.bytes_of(piece) for piece in answer.pieces]
        return chain_of(tokens, self._arguments.block_size, salt, chain)

    def _transfer(self, plan: Plan, sequences: list[Sequence]) -> dict[str, Any]:
        """What another replica needs to go on with the prompt that was read here, in the form of vLLM's connectors."""
        if not plan.prefills_for_another:
            return {}
        return {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"mock-{id(self):x}",
                "remote_block_ids": list(range(math.ceil(sequences[0].prompt / self._arguments.block_size))),
                "remote_host": "127.0.0.1",
                "remote_port": 0,
            }
        }

    def _read(self, request: LLMRequest) -> bodies.Body:
        """The body, for a model that is here. Raises LLMRequestError."""
        if self._loop is None:
            raise Unavailable("the engine is not started, or was shut down")
        body = bodies.read(request)
        model = body.get("model")
        if not isinstance(model, str):
            raise bodies.wrong("model", "a string", model)
        base, _, adapter = model.partition(":")
        if base != self._model or (adapter and adapter not in self._adapters) or model.endswith(":"):
            served = ", ".join([self._model, *(f"{self._model}:{each}" for each in sorted(self._adapters))])
            raise unknown_model(model, served)
        return body

    async def _answer(self, request: LLMRequest, make: Callable[[bodies.Body], Any]) -> AsyncIterator[LLMReply]:
        """One reply, of what `make` makes of the body."""
        try:
            answer, prompt_tokens = await make(self._read(request))
        except LLMRequestError as error:
            yield reply_to(error)
            return
        usage = Usage(prompt_tokens=prompt_tokens) if prompt_tokens else None
        yield LLMReply(data=json.dumps(answer).encode(), status=200, usage=usage)

    async def _embed(self, body: bodies.Body) -> tuple[Any, int]:
        inputs = text.prompts(body, "input")
        await self._compute(inputs, "input")
        return vectors.embeddings(body, inputs), sum(map(len, inputs))

    async def _score(self, body: bodies.Body) -> tuple[Any, int]:
        ones, others = text.prompts(body, "text_1"), text.prompts(body, "text_2")
        await self._compute(ones + others, "text_2")
        return vectors.scores(body, ones, others), sum(map(len, ones + others))

    async def _tokenize(self, body: bodies.Body) -> tuple[Any, int]:
        tokens = text.conversation(body) if "messages" in body else text.prompts(body, "prompt")[0]
        ids = text.ids_of(tokens)
        return {"count": len(ids), "max_model_len": self._arguments.max_model_len, "tokens": ids}, 0

    async def _detokenize(self, body: bodies.Body) -> tuple[Any, int]:
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise bodies.wrong("tokens", "an array of tokens", ids)
        return {"prompt": text.text_of(text.tokens_of(ids, "tokens"))}, 0

    async def _compute(self, inputs: list[list[bytes]], name: str) -> None:
        """Take as long as reading them does."""
        if len(inputs) > MOST_INPUTS:
            raise LLMRequestError(f"{name}: expected at most {MOST_INPUTS} texts, found {len(inputs)}", param=name)
        for tokens in inputs:
            check_length(len(tokens), 1, self._arguments)
        job = _Job(len(inputs), whole=True)
        salt, size = (self._cache.salt, "pooling"), self._arguments.block_size
        sequences = [
            Sequence((job, number), len(tokens), chain_of(tokens, size, salt), 1)
            for number, tokens in enumerate(inputs)
        ]
        with self._running(job, sequences):
            await job.news()

    # ---- operations

    async def load_adapter(self, adapter: str, path: str) -> None:
        """Serve the base model's answers under this name, too."""
        self._adapters.add(adapter)

    async def unload_adapter(self, adapter: str) -> None:
        """Forget it."""
        self._adapters.discard(adapter)

    async def sleep(self, level: int) -> None:
        """Stand still; level 2 forgets the cache."""
        self._asleep = True
        self._arm()
        if level > 1:
            self._cache.reset()

    async def wake(self) -> None:
        """Go on."""
        self._asleep = False
        self._schedule.resume(self._now())
        self._arm()

    async def reset_prefix_cache(self) -> None:
        """Forget what was read."""
        self._cache.reset()

    def expose(self) -> bytes:
        """Under vLLM's names, with `mock:` in place of `vllm:`."""
        load = self.load()
        numbers: list[tuple[str, str, float]] = [
            ("num_requests_running", "gauge", load.running),
            ("num_requests_waiting", "gauge", load.waiting),
            ("kv_cache_usage_perc", "gauge", load.kv_use),
            ("prefix_cache_queries", "counter", self._prompt_tokens),
            ("prefix_cache_hits", "counter", self._cached_tokens),
            ("prompt_tokens", "counter", self._schedule.tokens - self._schedule.made),
            ("generation_tokens", "counter", self._schedule.made),
        ]
        lines = []
        for name, kind, value in numbers:
            full = f"mock:{name}_total" if kind == "counter" else f"mock:{name}"
            lines += [f"# TYPE {full} {kind}", f'{full}{{model_name="{self._model}"}} {float(value)}']
        return "\n".join([*lines, ""]).encode()

    # ---- the clock

    def _arm(self) -> None:
        """Have the timer run at the end of the next step, if there is anything to do."""
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
        for sequence, count in self._schedule.advance(self._now()).items():
            job, number = sequence.owner
            job.add(number, count, done=sequence.done)
        self._arm()

    def _now(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    @contextmanager
    def _running(self, job: _Job, sequences: list[Sequence], *, at_once: bool = False) -> Iterator[None]:
        """Work on a job until the block is left: what is not done then is aborted."""
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


def _usage(plan: Plan, sequences: list[Sequence]) -> Usage:
    first = {
        answer.prompt: sequence for answer, sequence in zip(reversed(plan.answers), reversed(sequences), strict=True)
    }
    return Usage(
        prompt_tokens=plan.prompt_tokens,
        completion_tokens=plan.completion_tokens,
        cached_tokens=sum(sequence.cached for sequence in first.values()),
        finish_reason=plan.answers[0].finish,
    )
