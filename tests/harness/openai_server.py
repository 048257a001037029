"""A small OpenAI-compatible server over HTTP, with any engine of ours in it: what stands behind the openai engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from pierhead.llm import objects
from pierhead.llm.objects import OpenAIRequest
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.engine import LLMEngine
from pierhead.llm.server.service import replies_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve every path by this on a free port; yields the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def handler_of(engine: LLMEngine) -> Handler:
    """What answers as `vllm serve` does, with this engine."""
    model, length = engine.config.model_loading.model_id, engine.describe().max_model_len
    adapters: dict[str, str] = {}
    ways: dict[str, tuple[type[OpenAIRequest], Any]] = {
        "/v1/chat/completions": (objects.ChatCompletionRequest, engine.chat),
        "/v1/completions": (objects.CompletionRequest, engine.completions),
        "/v1/embeddings": (objects.EmbeddingRequest, engine.embeddings),
        "/v1/score": (objects.ScoreRequest, engine.score),
        "/tokenize": (objects.TokenizeRequest, engine.tokenize),
        "/detokenize": (objects.DetokenizeRequest, engine.detokenize),
    }

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            told = {"id": model, "object": "model", "max_model_len": length}
            loaded = [{"id": name, "object": "model", "root": path, "parent": model} for name, path in adapters.items()]
            return web.json_response({"object": "list", "data": [told, *loaded]})
        if request.path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return await _change(engine, adapters, request)
        if request.path == "/metrics":
            return web.Response(body=b"# TYPE mock_up gauge\nmock_up 1\n# TYPE process_x gauge\nprocess_x 1\n")
        kind, way = ways.get(request.path, (OpenAIRequest, engine.pass_through))
        return await _answer(request, way(kind.from_bytes(await request.read()).sent_to(request.path)))

    return handle


async def _change(engine: LLMEngine, adapters: dict[str, str], request: web.Request) -> web.Response:
    """What vLLM's server does of /v1/load_lora_adapter and /v1/unload_lora_adapter, in its words."""
    body = await request.json()
    name, path = body["lora_name"], body.get("lora_path")
    adapter = name.partition(":")[2]
    if path is None:
        if adapters.pop(name, None) is None:
            return _refusal(404, f"The lora adapter '{name}' cannot be found.")
        await engine.unload_adapter(adapter)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
    if name in adapters:
        return _refusal(400, f"The lora adapter '{name}' has already been loaded.")
    try:
        await engine.load_adapter(adapter, path)
    except LLMRequestError as error:
        return _refusal(404, error.message)
    adapters[name] = path
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


def _refusal(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "NotFoundError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


async def _answer(request: web.Request, answers: AsyncIterator[Any]) -> web.StreamResponse:
    response: web.StreamResponse | None = None
    async with contextlib.aclosing(replies_of(answers)) as told:
        async for reply in told:
            if response is None:
                kind = "text/event-stream" if reply.data.startswith(b"data:") else "application/json"
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": kind})
                await response.prepare(request)
            await response.write(reply.data)
    assert response is not None
    await response.write_eof()
    return response
