"""The mock engine with two more paths: Anthropic's messages and OpenAI's responses, as far as clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import ChatCompletionRequest, OpenAIAnswer, OpenAIRequest, StreamEvents, TokenizeRequest

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesEngine(MockEngine):
    async def pass_through(self, request: OpenAIRequest) -> AsyncIterator[Any]:
        body = request.to_dict()
        if request.path == "/v1/messages/count_tokens":
            counted = await _only(self.tokenize(TokenizeRequest(**body)))
            yield OpenAIAnswer(input_tokens=counted["count"])
        elif request.path in ("/v1/messages", "/v1/responses"):
            make = _message if request.path == "/v1/messages" else _response
            whole, events = make(body, await self._chat(body))
            if body.get("stream"):
                for event in events:
                    yield StreamEvents(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n")
            else:
                yield OpenAIAnswer(**whole)
        else:
            async for answer in super().pass_through(request):
                yield answer

    async def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body.get("messages") or [{"role": "user", "content": body["input"]}]
        limit = body.get("max_tokens") or body.get("max_output_tokens")
        return await _only(self.chat(ChatCompletionRequest(model=body["model"], messages=asked, max_tokens=limit)))


async def _only(answers: AsyncIterator[Any]) -> dict[str, Any]:
    """The members of an answer that is not streamed."""
    [found] = [each async for each in answers]
    members: dict[str, Any] = found.to_dict()
    return members


def _message(body: dict[str, Any], chat: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Anthropic's answer, whole and as events."""
    [choice] = chat["choices"]
    said = choice["message"]["content"]
    block: dict[str, Any] = {"type": "text", "text": said}
    empty: dict[str, Any] = {"text": ""}
    delta = {"type": "text_delta", "text": said}
    for call in choice["message"].get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": json.loads(arguments)}
        empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
    stop = {"stop_reason": _STOPS[choice["finish_reason"]], "stop_sequence": None}
    usage = {
        "input_tokens": chat["usage"]["prompt_tokens"], "output_tokens": chat["usage"]["completion_tokens"],
    }  # fmt: skip
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "usage": usage}
    begun = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    return message | {"content": [block]} | stop, [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": block | empty},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": stop, "usage": usage},
        {"type": "message_stop"},
    ]


def _response(body: dict[str, Any], chat: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """OpenAI's response, whole and as events."""
    said = chat["choices"][0]["message"]["content"]
    part = {"type": "output_text", "text": said, "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    response = {
        "id": "resp_1", "object": "response", "created_at": chat["created"], "model": body["model"],
        "status": "completed", "output": [item], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    of_item = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response | {"status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
        {"type": "response.content_part.added", **of_item, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **of_item, "delta": said, "logprobs": []},
        {"type": "response.output_text.done", **of_item, "text": said, "logprobs": []},
        {"type": "response.content_part.done", **of_item, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ]
    return response, [event | {"sequence_number": number} for number, event in enumerate(events)]
