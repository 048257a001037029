"""A user's engine with the six methods that every engine must have, and nothing else. It answers as plainly as it may:
whole answers as dicts and as objects, streams as strings without an end, errors as pydantic's objects.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OpenAIAnswer
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.engine import LLMEngine
from pydantic import BaseModel


class Problem(BaseModel):
    """As vLLM's ErrorResponse."""

    error: dict[str, Any]


class SixMethods(LLMEngine):
    """The mock engine's words."""

    def __init__(self, llm_config: Any) -> None:  # as a user writes it, who calls no other constructor
        self.mock = MockEngine(llm_config)

    async def start(self) -> None:
        """Start."""
        await self.mock.start()

    async def chat(self, request: ChatCompletionRequest) -> AsyncIterator[Any]:
        """Strings, or a dict."""
        async for answer in _plainly(self.mock.chat(request)):
            yield json.loads(answer.to_bytes()) if isinstance(answer, OpenAIAnswer) else answer

    async def completions(self, request: CompletionRequest) -> AsyncIterator[Any]:
        """Strings, or an object."""
        async for answer in _plainly(self.mock.completions(request)):
            yield type(answer)(**answer.to_dict()) if isinstance(answer, OpenAIAnswer) else answer

    async def embeddings(self, request: EmbeddingRequest) -> AsyncIterator[Any]:
        """A dict."""
        async for answer in _plainly(self.mock.embeddings(request)):
            yield answer

    async def check_health(self) -> bool:
        """It is well."""
        return True

    async def shutdown(self) -> None:
        """End."""
        await self.mock.shutdown()


async def _plainly(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for answer in answers:
            if isinstance(answer, str):
                for event in answer.split("\n\n")[:-1]:
                    if event != "data: [DONE]":
                        yield f"{event}\n\n"
            else:
                yield answer
    except LLMRequestError as error:
        kind = "invalid_request_error"
        members = {"message": error.message, "type": kind, "param": error.param, "code": error.error_code}
        yield Problem(error=members | ({"code": 404} if error.http_status == 404 else {}))
    finally:
        await answers.aclose()  # type: ignore[attr-defined]
