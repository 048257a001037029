"""Users of a language model in one process: `python -m tests.bench.llm.load URL --users 64 ...`.

Each streams a chat, counts its tokens, and asks again. URL is http://host:port of an OpenAI API, or lane://<gRPC> of
an LLM server, asked as a gateway asks it. Says "begin" when what it sees begins to count, "end" when it no longer does,
and then the result as one line of JSON. Histograms are HdrHistograms (microseconds, 3 digits).

Tokens count when they arrive, also in answers that are unfinished at the end; a request counts if it was sent within
the time, and unfinished ones are given up at the end. Users come one by one during the first half of the warm-up.

With --answers, for engines whose events are not one for each token: each user asks so often, all from the same moment
on, and it ends with the last answer. Its tokens are those of the usage, which it is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import uvloop
from hdrh.histogram import HdrHistogram

from tests.bench import routing_simulation as simulation
from tests.bench.load.generator import new_histogram

AROUND_TOKENS: Final = 3
"""Events of a chat's stream that are no token: the role, the finish reason, [DONE]."""


def prompts_of_512_tokens(user: int, rng: Random) -> Iterator[simulation.Prompt]:
    """Four characters are a token."""
    while True:
        yield simulation.Prompt(f"{rng.getrandbits(4 * 2048):02048x}", 128)


def questions(user: int, rng: Random) -> Iterator[simulation.Prompt]:
    """Short ones, no two of them alike."""
    while True:
        yield simulation.Prompt(f"{rng.getrandbits(64):016x}: tell me a long story of the sea and this number.", 128)


WORKLOADS: Final[Mapping[str, simulation.Workload]] = {
    "512 tokens": prompts_of_512_tokens,
    "questions": questions,
    "8 system prompts": simulation.shared_prefixes,
    "conversations": simulation.sessions,
    "nothing shared": simulation.no_shared_prefixes,
    "one hot prefix": simulation.one_hot_prefix,
}


_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_MOST_USAGE_BYTES = 1024
"""Of a stream's end, which has the usage."""


def tokens_in_usage(end: bytes) -> int:
    """Tokens of an answer, out of the end of its stream; 0 where it does not say."""
    found = _USAGE.findall(end)
    return int(found[-1]) if found else 0


_EXACTLY = {"ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}


def body_of(model: str, text: str, tokens: int, *, exactly: bool = False) -> bytes:
    """A chat's request. `exactly`: for a real model, which would end when it likes."""
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}
    return json.dumps(body | (_EXACTLY if exactly else {})).encode()


@dataclass
class Seen:
    """What has come of it between `begins` and `ends`, times of time.monotonic()."""

    begins: float
    ends: float
    slow_s: float
    tokens: int = 0
    good_tokens: int = 0
    """Of complete answers that were asked for within the time and whose first token was not slow."""
    answers: int = 0
    first: HdrHistogram = field(default_factory=new_histogram)
    whole: HdrHistogram = field(default_factory=new_histogram)
    first_sum_s: float = 0.0
    firsts: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)

    def counts(self, at: float) -> bool:
        return self.begins <= at < self.ends

    def token(self, count: int, now: float) -> None:
        """So many more."""
        if self.counts(now):
            self.tokens += count

    def first_token(self, asked: float, now: float) -> None:
        """The first one of a request."""
        if self.counts(asked):
            self.first.record_value(max(1, round((now - asked) * 1e6)))
            self.first_sum_s += now - asked
            self.firsts += 1

    def answer(self, asked: float, first: float, now: float, tokens: int, error: str) -> None:
        """The end of a request; `error` = "" is a good one."""
        if not self.counts(asked):
            return
        if error:
            self.errors[error] += 1
            return
        self.answers += 1
        self.whole.record_value(max(1, round((now - asked) * 1e6)))
        if first - asked <= self.slow_s:
            self.good_tokens += tokens


@dataclass(frozen=True, slots=True)
class Asking:
    """What all users have in common."""

    seen: Seen
    model: str
    tokens: int
    think_s: float
    answers: int = 0
    """Of each user; 0: until it is cancelled."""

    def turns(self) -> Iterator[None]:
        """One for each request of a user."""
        return itertools.repeat(None, self.answers) if self.answers else itertools.repeat(None)


class Chat(asyncio.Protocol):
    """One connection of one user: counts events as they come."""

    def __init__(self, asking: Asking, host: str, over: Callable[[], None]) -> None:
        self._asking, self._host, self._over = asking, host, over
        self._transport: Any = None
        self._parser: Any = None
        self._asked = self._first = 0.0
        self._events = 0
        self._half = False
        self._busy = False
        self._last = b""

    def ask(self, text: str) -> None:
        """Send the next request."""
        body = body_of(self._asking.model, text, self._asking.tokens, exactly=bool(self._asking.answers))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._asked, self._first, self._events, self._half, self._busy = time.monotonic(), 0.0, 0, False, True
        self._last = b""
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(head.encode() + body)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Give up what is in flight."""
        self._busy = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._end("connection lost")

    def on_body(self, body: bytes) -> None:
        events = body.count(b"\n\n") + (self._half and body.startswith(b"\n"))
        self._half = body.endswith(b"\n") and not body.endswith(b"\n\n")
        now = time.monotonic()
        before, self._events = self._tokens(), self._events + events
        made = self._tokens() - before
        if made and not before:
            self._first = now
            self._asking.seen.first_token(self._asked, now)
        if self._asking.answers:
            self._last = (self._last + body)[-_MOST_USAGE_BYTES:]
        else:
            self._asking.seen.token(made, now)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"status {status}")
        elif self._asking.answers:
            made = tokens_in_usage(self._last)
            self._asking.seen.token(made, time.monotonic())
            self._end("" if made == self._asking.tokens else f"{made} tokens in place of {self._asking.tokens}")
        elif self._events != self._asking.tokens + AROUND_TOKENS:
            self._end(f"{self._events - AROUND_TOKENS} tokens in place of {self._asking.tokens}")
        else:
            self._end("")

    def _tokens(self) -> int:
        """Of the events so far: the first is the role, the last two end the stream."""
        return max(0, min(self._events - 1, self._asking.tokens))

    def _end(self, error: str) -> None:
        if self._busy:
            self._busy = False
            tokens = self._asking.tokens
            self._asking.seen.answer(self._asked, self._first, time.monotonic(), tokens, error)
            # Not from within the parser: it is still reading.
            asyncio.get_running_loop().call_soon(self._over)


async def http_user(asking: Asking, url: str, prompts: Iterator[simulation.Prompt], rng: Random) -> None:
    """Asks until it is cancelled, or has its answers."""
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    over = asyncio.Event()
    chat: Chat | None = None
    try:
        for _ in asking.turns():
            if chat is None or not chat.is_open:
                _, chat = await loop.create_connection(
                    lambda: Chat(asking, parts.netloc, over.set), parts.hostname or "", parts.port or 80
                )
            over.clear()
            chat.ask(next(prompts).text)
            await over.wait()
            await _think(asking, rng)
    finally:
        if chat is not None:
            chat.close()


async def lane_user(asking: Asking, stub: Any, prompts: Iterator[simulation.Prompt], rng: Random) -> None:
    """The same, without HTTP."""
    from pierhead.llm.v1.llm_pb2 import LLMRequest

    for _ in asking.turns():
        body = body_of(asking.model, next(prompts).text, asking.tokens, exactly=bool(asking.answers))
        asked, first, tokens, error = time.monotonic(), 0.0, 0, ""
        try:
            async for reply in stub.Chat(LLMRequest(body=body, model=asking.model), timeout=120):
                now = time.monotonic()
                if reply.tokens and not tokens:
                    first = now
                    asking.seen.first_token(asked, now)
                tokens += reply.tokens
                asking.seen.token(reply.tokens, now)
        except Exception as failed:
            error = type(failed).__name__
        if not error and tokens != asking.tokens:
            error = f"{tokens} tokens in place of {asking.tokens}"
        asking.seen.answer(asked, first, time.monotonic(), tokens, error)
        await _think(asking, rng)


async def _think(asking: Asking, rng: Random) -> None:
    if asking.think_s:
        await asyncio.sleep(rng.expovariate(1 / asking.think_s))


async def run(a: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    if a.answers:
        return await run_answers(a)
    start = time.monotonic() + 0.2
    seen = Seen(start + a.warm_seconds, start + a.warm_seconds + a.seconds, a.slow_seconds)
    asking = Asking(seen, a.model, a.tokens, a.think_seconds)
    user_of = await _users_of(a.url, asking)
    tasks = []
    try:
        for number in range(a.users):
            await asyncio.sleep(start + a.warm_seconds / 2 * number / a.users - time.monotonic())
            rng = Random(f"{a.seed} user {number}")
            tasks.append(asyncio.create_task(user_of(WORKLOADS[a.workload](number, rng), rng)))
        await _say_at("begin", seen.begins)
        await _say_at("end", seen.ends)
        failed = [task.exception() for task in tasks if task.done()]
        seen.errors.update(f"connect: {error}" for error in failed)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if a.url.startswith("lane:"):
            from pierhead import close_handles

            await close_handles()
    return summary(seen, a.seconds)


async def run_answers(a: argparse.Namespace) -> dict[str, Any]:
    """So many answers of each user."""
    seen = Seen(time.monotonic(), math.inf, a.slow_seconds)
    user_of = await _users_of(a.url, Asking(seen, a.model, a.tokens, 0.0, a.answers))
    users = ((number, Random(f"{a.seed} user {number}")) for number in range(a.users))
    print("begin", flush=True)
    began = time.monotonic()
    async with asyncio.timeout(a.seconds):
        await asyncio.gather(*[user_of(WORKLOADS[a.workload](number, rng), rng) for number, rng in users])
    took = time.monotonic() - began
    print("end", flush=True)
    return summary(seen, took)


async def _users_of(url: str, asking: Asking) -> Callable[[Iterator[simulation.Prompt], Random], Any]:
    if not url.startswith("lane:"):
        return lambda prompts, rng: http_user(asking, url, prompts, rng)
    from pierhead import Settings, handle
    from pierhead.calls.clients import Clients
    from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub

    Clients.use(Settings(static={"LLM": (url.removeprefix("lane://"),)}))
    stub = handle(LLMServerStub, "llm")
    return lambda prompts, rng: lane_user(asking, stub, prompts, rng)


async def _say_at(word: str, at: float) -> None:
    await asyncio.sleep(at - time.monotonic())
    print(word, flush=True)


def summary(seen: Seen, seconds: float) -> dict[str, Any]:
    """As JSON types."""
    return {
        "seconds": seconds,
        "tokens": seen.tokens,
        "good_tokens": seen.good_tokens,
        "answers": seen.answers,
        "first": seen.first.encode().decode(),
        "first_mean_ms": 1e3 * seen.first_sum_s / max(1, seen.firsts),
        "whole": seen.whole.encode().decode(),
        "errors": dict(seen.errors),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--users", type=int, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-seconds", type=float, required=True)
    parser.add_argument("--think-seconds", type=float, default=0.0)
    parser.add_argument("--slow-seconds", type=float, default=1.0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--answers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    gc.freeze()
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        print(json.dumps(loop.run_until_complete(run(arguments))), flush=True)


if __name__ == "__main__":
    main()
