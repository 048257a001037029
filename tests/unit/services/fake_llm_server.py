"""An LLM service for the gateway's tests: says what it was asked, and answers as the request's member `fake` says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from pierhead import Backpressure, Unavailable
from pierhead.llm.v1.llm_pb2 import DescribeRequest, LLMReply, LLMRequest, ModelCard, Operation, OperationDone, Usage
from pierhead.llm.v1.llm_pb2_grpc import LLMServerServicer
from pierhead.request import RequestContext, current_request


def _method(rpc: str) -> Any:
    async def answer(self: Any, request: LLMRequest, context: Any) -> AsyncIterator[LLMReply]:
        async with aclosing(self._answer(rpc, request)) as replies:
            async for reply in replies:
                yield reply

    return answer


class FakeLLMServer(LLMServerServicer):
    """Words as tokens; the last of them ends the answer."""

    words: tuple[str, ...] = ("The", " capital", " is", " Paris", ".")

    def __init__(self, model_id: str = "qwen", adapters: tuple[str, ...] = ()) -> None:
        self.card = ModelCard(
            model_id=model_id, max_model_len=4096, engine="fake", adapters=adapters, created=1_700_000_000
        )
        self.asked: list[tuple[str, LLMRequest]] = []
        self.contexts: list[RequestContext | None] = []
        self.transfer: object = None
        self.unavailable = ""
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Describe(self, request: DescribeRequest, context: Any) -> ModelCard:
        if self.unavailable:
            raise Unavailable(self.unavailable)
        return self.card

    async def Operate(self, request: Operation, context: Any) -> OperationDone:
        raise NotImplementedError

    def _answer(self, rpc: str, request: LLMRequest) -> AsyncGenerator[LLMReply, None]:
        self.asked.append((rpc, request))
        self.contexts.append(current_request())
        try:
            body = json.loads(request.body)
        except ValueError:
            body = {}
        body |= json.loads(request.overrides or "{}")
        return self._stream(body) if body.get("stream") and rpc != "Embeddings" else self._whole(rpc, body)

    async def _whole(self, rpc: str, body: dict[str, Any]) -> AsyncGenerator[LLMReply, None]:
        if self.unavailable:
            raise Unavailable(self.unavailable)
        fake = body.get("fake")
        if fake == "refuse":
            error = {
                "error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": "too_long"}
            }
            yield LLMReply(status=400, data=json.dumps(error).encode())
            return
        if fake == "raise":
            raise RuntimeError("the engine broke")
        if fake == "full":
            raise Backpressure("the engine is full")
        if fake == "nothing":
            return
        if fake == "wait":
            await self._wait()
        if fake == "sound":
            yield LLMReply(status=200, content_type="audio/mpeg", data=b"\x00\x01")
            yield LLMReply(data=b"\x02")
            return
        if fake == "uncounted":
            yield LLMReply(status=200, data=b"{}", usage=Usage())
            return
        answer: dict[str, Any] = {"rpc": rpc, "text": "".join(self.words)}
        if body.get("kv_transfer_params"):
            answer["kv_transfer_params"] = self.transfer
        usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, finish_reason="stop")
        yield LLMReply(status=200, data=json.dumps(answer).encode(), tokens=5, usage=usage)

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[LLMReply, None]:
        status = 200
        for index, word in enumerate(self.words):
            if index == 2 and body.get("fake") == "raise":
                raise RuntimeError("the engine broke")
            if index == 2 and body.get("fake") == "wait":
                await self._wait()
            yield LLMReply(status=status, data=event(word), tokens=1)
            status = 0
        usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, finish_reason="stop")
        yield LLMReply(data=b"data: [DONE]\n\n", usage=usage)

    async def _wait(self) -> None:
        self.waiting.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    Chat = _method("Chat")
    Completions = _method("Completions")
    Embeddings = _method("Embeddings")
    Score = _method("Score")
    Tokenize = _method("Tokenize")
    Detokenize = _method("Detokenize")
    PassThrough = _method("PassThrough")


def event(word: str) -> bytes:
    """One event, byte for byte."""
    return f"data: {json.dumps({'word': word})}\n\n".encode()
