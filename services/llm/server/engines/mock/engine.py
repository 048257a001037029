"""An engine without a model, for tests, demos and load tests: deterministic tokens at a given pace, and a prefix cache
that is counted as a real one.

    plan      a request as what is to be answered      schedule  which token is due when
    replies   answers as OpenAI's JSON                 cache     blocks and who shares them

One timer serves all requests. Tokens of a request that are due in one tick go out as one reply of several events.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from pierhead.errors import Unavailable
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest, ModelCard, Usage
from pierhead.llm_config import LLMConfig
from pierhead.request import new_request_id

from services.llm.server import bodies
from services.llm.server.answers import not_supported, reply_to
from services.llm.server.engine import EngineLoad, LLMEngine, Replies, Report, Sink
from services.llm.server.engines.mock import text as mock_text
from services.llm.server.engines.mock import vectors as mock_vectors
from services.llm.server.engines.mock.arguments import MockArguments, read_arguments
from services.llm.server.engines.mock.cache import BlockCache, chain_of
from services.llm.server.engines.mock.plan import Plan, check_length, plan_chat, plan_completions
from services.llm.server.engines.mock.replies import News, Writer
from services.llm.server.engines.mock.schedule import Schedule, Sequence, Stage
from services.llm.server.errors import LLMRequestError, LLMStartError, unknown_model

LOADING_STEPS = 10
MOST_INPUTS = 2048

PlanOf = Callable[[bodies.Body, MockArguments], Plan]


class _Job:
    """One request's sequences, and what there is new of them: for the task that answers it, or for a sink."""

    __slots__ = ("_changed", "_news", "_sink", "failure", "left", "patient", "sequences", "writer")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.left = 0
        """Sequences that are not done."""
        self.patient = True
        """Wants to hear of the end only."""
        self.failure: Exception | None = None
        self.writer: Writer | None = None
        """Of a stream whose news a sink may be given."""
        self._news: list[News] = []
        self._changed: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    def tell(self, number: int, count: int, done: bool) -> None:
        """`count` more tokens of sequence `number`. `hand_on` follows, once all that is new was told."""
        self._news.append((number, count, done))
        self.left -= done

    def hand_on(self) -> None:
        """Have what was told go out: by the sink, or by the task. The end is the task's."""
        if self._sink is not None and self.writer is not None and self.left:
            self._pour(self._sink, self.writer)
        elif not self.patient or not self.left:
            self._wake()

    def fail(self, error: Exception) -> None:
        """End it."""
        self.failure = error
        self._wake()

    def deliver(self, sink: Sink) -> None:
        """See Delivering."""
        if self.writer is not None:
            self._sink = sink

    def news(self) -> list[News]:
        """What was told and not handed on, if it is time to hear of it. Raises what it failed with."""
        if self.failure is not None:
            raise self.failure
        if not self._news or (self.patient and self.left):
            return []
        self._sink = None  # until these are on their way: nothing may overtake them
        return self._take()

    def change(self) -> asyncio.Future[None]:
        """A future for the next news, where there are none now."""
        self._changed = changed = asyncio.get_running_loop().create_future()
        return changed

    async def end(self) -> None:
        """Wait for what a patient one hears of. Raises what it failed with."""
        while not self.news():
            await self.change()

    def _take(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def _pour(self, sink: Sink, writer: Writer) -> None:
        try:
            if not sink(writer.events(self._take())):
                self._sink = None
        except Exception as error:  # whoever reads is told
            self._sink = None
            self.fail(error)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


class _Answer:
    """The replies to one request."""

    def __init__(self, job: _Job, replies: AsyncGenerator[LLMReply]) -> None:
        self._replies = replies
        self.deliver = job.deliver

    def __aiter__(self) -> _Answer:
        return self

    def __anext__(self) -> Awaitable[LLMReply]:
        return self._replies.__anext__()

    async def aclose(self) -> None:
        """Abort it."""
        await self._replies.aclose()


class MockEngine(LLMEngine):
    """See MockArguments for its engine_kwargs. Raises LLMStartError for those that cannot be."""

    needs_files = False

    def __init__(self, config: LLMConfig) -> None:
        super().__init__(config)
        self._arguments = read_arguments(config.engine_kwargs)
        self._model = config.model_loading.model_id
        # It reads nothing, but a directory that is named has to be there, as for an engine that does.
        if config.model_loading.source.startswith("/"):
            self.needs_files = True
        self._cache = BlockCache(self._arguments.kv_blocks)
        self._schedule = Schedule(self._arguments.pace(), self._cache, 0.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._jobs: set[_Job] = set()
        self._adapters: dict[str, str] = {}
        self._created = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # ---- its life

    async def start(self, model_path: str, report: Report) -> None:
        """Pretend to load for `loading_s`."""
        arguments = self._arguments
        for step in range(LOADING_STEPS):
            report("loading the mock model's weights", step, LOADING_STEPS)
            await asyncio.sleep(arguments.loading_s / LOADING_STEPS)
            if arguments.fail_start is not None:
                raise LLMStartError(arguments.fail_start)
        self._loop = asyncio.get_running_loop()
        self._schedule = Schedule(arguments.pace(), self._cache, self._loop.time())
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
        """Counts requests' choices, as the schedule does."""
        schedule = self._schedule
        return EngineLoad(schedule.running, schedule.waiting, self._cache.use, schedule.tokens)

    async def check_health(self) -> None:
        """Raises RuntimeError where it was told to."""
        if self._arguments.ill is not None:
            raise RuntimeError(self._arguments.ill)

    async def generate_one_token(self) -> None:
        """Past all that wait."""
        job = _Job()
        sequence = Sequence((job, 0), 1, (), 1)
        async with _Running(self, job, [sequence], at_once=True):
            await job.end()

    # ---- requests

    def chat(self, request: LLMRequest) -> Replies:
        """/v1/chat/completions"""
        return self._generated(request, plan_chat)

    def completions(self, request: LLMRequest) -> Replies:
        """/v1/completions"""
        return self._generated(request, plan_completions)

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

    def pass_through(self, request: LLMRequest) -> Replies:
        """Nothing."""
        return not_supported(request.path)

    def _generated(self, request: LLMRequest, plan_of: PlanOf) -> Replies:
        job = _Job()
        return _Answer(job, self._generate(request, plan_of, job))

    async def _generate(self, request: LLMRequest, plan_of: PlanOf, job: _Job) -> AsyncGenerator[LLMReply]:
        try:
            plan = plan_of(self._read(request), self._arguments)
        except LLMRequestError as error:
            yield reply_to(error)
            return
        sequences = self._sequences(plan, job)
        writer = Writer(plan, new_request_id(), int(time.time()))
        job.patient = not plan.stream
        if plan.stream and self._arguments.fail_after_tokens is None:
            job.writer = writer
        async with _Running(self, job, sequences):
            if plan.stream:
                status = 200
                # Not as long as something is to be made: that may end while a slow reader holds this up.
                while writer.left:
                    while not (news := job.news()):
                        await job.change()
                    reply = writer.events(news)
                    if not writer.left:
                        usage = _usage(plan, sequences)
                        reply.data += writer.end(usage)
                        reply.usage.CopyFrom(usage)
                    reply.status, status = status, 0
                    yield reply
                    self._fail_where_told(plan.completion_tokens - writer.left)
            else:
                await job.end()
                self._fail_where_told(plan.completion_tokens)
                usage = _usage(plan, sequences)
                whole = writer.whole(usage, self._transfer(plan, sequences))
                yield LLMReply(data=whole, status=200, tokens=usage.completion_tokens, usage=usage)

    def _fail_where_told(self, given: int) -> None:
        most = self._arguments.fail_after_tokens
        if most is not None and given >= most:
            raise RuntimeError(f"engine_kwargs.fail_after_tokens = {most}: the request failed as it was told to")

    def _sequences(self, plan: Plan, job: _Job) -> list[Sequence]:
        salt = (self._cache.salt, bodies.adapter_of(plan.model))
        size = self._arguments.block_size
        chains = [chain_of(prompt, size, salt) for prompt in plan.prompts]
        made = []
        for number, answer in enumerate(plan.answers):
            prompt = plan.prompts[answer.prompt]
            chain = chains[answer.prompt]
            made.append(
                Sequence(
                    (job, number),
                    len(prompt),
                    chain,
                    len(answer.pieces),
                    read=plan.read_by_another,
                    grown=functools.partial(self._grown, plan, number, chain, salt),
                )
            )
        return made

    def _grown(self, plan: Plan, number: int, chain: tuple[int, ...], salt: object) -> tuple[int, ...]:
        """The hashes of the blocks that an answer has filled."""
        answer = plan.answers[number]
        text = plan.prompts[answer.prompt] + [mock_text.bytes_of(piece) for piece in answer.pieces]
        return chain_of(text, self._arguments.block_size, salt, chain)

    def _transfer(self, plan: Plan, sequences: list[Sequence]) -> dict[str, Any]:
        """What another replica needs to go on with what was read here, as vLLM's connectors tell it."""
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
        texts = mock_text.prompts(body, "input")
        size = bodies.integer(body, "dimensions", self._arguments.embedding_size, 1, self._arguments.embedding_size)
        encoding = body.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise LLMRequestError(
                f"encoding_format: expected float or base64, found {json.dumps(encoding)}", param="encoding_format"
            )
        await self._compute(texts, "input")
        data = []
        for index, text in enumerate(texts):
            values = mock_vectors.vector(text, size or 1)
            data.append({
                "object": "embedding", "index": index,
                "embedding": mock_vectors.as_base64(values) if encoding == "base64" else values,
            })  # fmt: skip
        return _list_of(data, body, texts), sum(map(len, texts))

    async def _score(self, body: bodies.Body) -> tuple[Any, int]:
        ones, others = mock_text.prompts(body, "text_1"), mock_text.prompts(body, "text_2")
        if len(ones) not in (1, len(others)):
            raise LLMRequestError(
                f"text_1: expected one text, or as many as text_2, {len(others)}, found {len(ones)}", param="text_1"
            )
        await self._compute(ones + others, "text_2")
        size = self._arguments.embedding_size
        pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
        data = [
            {"object": "score", "index": index,
             "score": mock_vectors.likeness(mock_vectors.vector(one, size), mock_vectors.vector(other, size))}
            for index, (one, other) in enumerate(pairs)
        ]  # fmt: skip
        return _list_of(data, body, ones + others), sum(map(len, ones + others))

    async def _tokenize(self, body: bodies.Body) -> tuple[Any, int]:
        tokens = mock_text.conversation(body) if "messages" in body else mock_text.prompts(body, "prompt")[0]
        ids = mock_text.ids_of(tokens)
        return {"count": len(ids), "max_model_len": self._arguments.max_model_len, "tokens": ids}, 0

    async def _detokenize(self, body: bodies.Body) -> tuple[Any, int]:
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise bodies.wrong("tokens", "an array of tokens", ids)
        return {"prompt": mock_text.text_of(mock_text.tokens_of(ids, "tokens"))}, 0

    async def _compute(self, texts: list[list[bytes]], name: str) -> None:
        """Take as long as reading them does."""
        if len(texts) > MOST_INPUTS:
            raise LLMRequestError(f"{name}: expected at most {MOST_INPUTS} texts, found {len(texts)}", param=name)
        for text in texts:
            check_length(len(text), 1, self._arguments)
        job = _Job()
        salt = (self._cache.salt, "pooling")
        size = self._arguments.block_size
        sequences = [
            Sequence((job, number), len(text), chain_of(text, size, salt), 1) for number, text in enumerate(texts)
        ]
        async with _Running(self, job, sequences):
            await job.end()

    # ---- operations

    async def load_adapter(self, adapter: str, path: str) -> None:
        """Raises LLMRequestError for one that is not among `adapters`."""
        await asyncio.sleep(self._arguments.adapter_loading_s)
        known = self._arguments.adapters
        if known is not None and adapter not in known:
            raise LLMRequestError(
                f'the adapter "{adapter}" at {path} does not fit this model: it is not among adapters'
            )
        self._adapters[adapter] = path

    async def unload_adapter(self, adapter: str) -> None:
        """Forget it."""
        self._adapters.pop(adapter, None)

    async def sleep(self, level: int) -> None:
        """Stand still; level 2 forgets the cache."""
        self._schedule.pause(self._now())
        if level > 1:
            self._cache.reset()

    async def wake(self) -> None:
        """Go on."""
        if not self._stalls():
            self._schedule.resume(self._now())
            self.arm()

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

    def arm(self) -> None:
        """Have the timer run when there is something to do next."""
        if self._loop is None:
            return
        at = self._arguments.look_at(*self._schedule.next_at(), self._loop.time())
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if at < math.inf:
            # Not the timer's own `when`: what uvloop gives for a time that has come has none.
            self._timer, self._timer_at = self._loop.call_at(at, self._tick), at

    def _tick(self) -> None:
        self._timer = None
        told: dict[_Job, None] = {}
        try:
            for sequence, count in self._schedule.advance(self._now()):
                job, number = sequence.owner
                job.tell(number, count, sequence.stage is Stage.DONE)
                told[job] = None
            for job in told:
                job.hand_on()
            if self._stalls():
                self._schedule.pause(self._now())
        finally:
            self.arm()  # whatever one request brings out, the clock goes on for all others

    def _stalls(self) -> bool:
        most = self._arguments.stall_after_tokens
        return most is not None and self._schedule.made >= most

    def _now(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def begin(self, job: _Job, sequences: list[Sequence], *, at_once: bool) -> None:
        """Take a job's sequences in."""
        now = self._now()
        job.sequences = sequences
        job.left = len(sequences)
        self._jobs.add(job)
        for sequence in sequences:
            self._schedule.add(sequence, now, at_once=at_once)
        self.arm()

    def end(self, job: _Job) -> None:
        """Forget a job, and abort what is left of it."""
        self._jobs.discard(job)
        if job.left:
            now = self._now()
            for sequence in job.sequences:
                self._schedule.drop(sequence, now)
            self.arm()
        for sequence in job.sequences[:1]:
            self._prompt_tokens += sequence.prompt
            self._cached_tokens += sequence.cached


class _Running:
    """A job that the engine works on, until the block is left."""

    __slots__ = ("_at_once", "_engine", "_job", "_sequences")

    def __init__(self, engine: MockEngine, job: _Job, sequences: list[Sequence], *, at_once: bool = False) -> None:
        self._engine = engine
        self._job = job
        self._sequences = sequences
        self._at_once = at_once

    async def __aenter__(self) -> None:
        self._engine.begin(self._job, self._sequences, at_once=self._at_once)

    async def __aexit__(self, *error: object) -> None:
        self._engine.end(self._job)


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


def _list_of(data: list[Any], body: bodies.Body, texts: list[list[bytes]]) -> dict[str, Any]:
    tokens = sum(map(len, texts))
    return {
        "object": "list",
        "data": data,
        "model": body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
