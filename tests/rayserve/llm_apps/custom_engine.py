"""The seed's custom engine: six methods, and a server that runs it."""

import json

from pierhead.rayserve.llm import LLMConfig, LLMEngine, LLMServingArgs, build_openai_app
from pierhead.rayserve.llm.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    CompletionStreamResponse,
    EmbeddingResponse,
    ErrorResponse,
)


class MyCustomEngine(LLMEngine):
    """Says what it was told."""

    def __init__(self, llm_config):
        self.llm_config = llm_config
        self.started = False

    async def start(self):
        self.started = True

    async def chat(self, request):
        words = request.messages[-1]["content"].split()
        if words[0] == "refuse":
            yield ErrorResponse(error={"message": "no such words", "type": "invalid_request_error", "code": 400})
        elif words[0] == "fail":
            raise ValueError("the engine is confused")
        elif request.stream:
            for word in words:
                if word == "break":
                    raise ValueError("the engine is confused")
                chunk = {"object": "chat.completion.chunk", "id": "c", "created": 1, "model": request.model}
                yield f"data: {json.dumps({**chunk, 'choices': [{'index': 0, 'delta': {'content': word}}]})}\n\n"
        else:
            message = {"role": "assistant", "content": f"{self.llm_config.model_id}: {' '.join(words)}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            yield ChatCompletionResponse(model=request.model, choices=[choice])

    async def completions(self, request):
        yield CompletionResponse(model=request.model, choices=[{"index": 0, "text": str(request.prompt).upper()}])

    async def embeddings(self, request):
        yield EmbeddingResponse(model=request.model, data=[{"index": 0, "embedding": [0.5, 1.0]}])

    async def check_health(self):
        return self.started

    async def shutdown(self):
        self.started = False


class Careless(MyCustomEngine):
    """Answers in the form that the request asks for in words, whatever its `stream` is."""

    async def chat(self, request):
        choices = [{"index": 0, "message": {"content": "a"}, "delta": {"content": "a"}}]
        yield {
            "whole": {"object": "chat.completion", "choices": choices},
            "events": f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': choices})}\n\n",
            "chunk": {"object": "chat.completion.chunk", "choices": choices},
            "either": {"choices": choices},
        }[request.messages[-1]["content"]]

    async def completions(self, request):
        choices = [{"index": 0, "text": "a"}]
        yield {
            "whole": CompletionResponse(model=request.model, choices=choices),
            "events": f"data: {json.dumps({'object': 'text_completion', 'choices': choices})}\n\n",
            "chunk": CompletionStreamResponse(model=request.model, choices=choices),
            "either": {"object": "text_completion", "choices": choices},
        }[request.prompt]


class Transferring(MyCustomEngine):
    """Reads prompts for another engine, and generates with what another one has read."""

    async def chat(self, request):
        read = request.kv_transfer_params
        if read.get("do_remote_decode"):
            yield ChatCompletionResponse(model=request.model, choices=[], kv_transfer_params={"block": 7})
            return
        message = {"role": "assistant", "content": f"decoded with {read}"}
        yield ChatCompletionResponse(model=request.model, choices=[{"index": 0, "message": message}])


def config_of(model, engine="MyCustomEngine", **more):
    return LLMConfig(model_loading_config={"model_id": model}, llm_engine=f"{__name__}:{engine}", **more)


app = build_openai_app(LLMServingArgs(llm_configs=[config_of("small"), config_of("large")]))
