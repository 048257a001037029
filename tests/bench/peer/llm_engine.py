"""Our mock engine as an engine of Ray Serve LLM: the very same tokens at the very same pace on both sides.

Ray Serve LLM takes it from RAYLLM_VLLM_ENGINE_CLS. Events come ready from the engine, as from vLLM's serving classes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import ChatCompletionRequest
from pierhead.llm_config import LLMConfig as OurConfig
from ray.llm._internal.serve.core.engine.protocol import LLMEngine


class MockedEngine(LLMEngine):  # type: ignore[misc]  # its types are only where the peer is
    """Streams chats; nothing else is measured."""

    def __init__(self, llm_config: Any) -> None:
        config = OurConfig.model_validate_json(os.environ["PEER_LLM_CONFIG"])
        self._model = config.model_loading.model_id
        self._engine = MockEngine(config)

    async def start(self) -> None:
        await self._engine.start()

    async def build_asgi_app(self) -> Any:
        """What direct streaming serves: vLLM's own HTTP application, its chats answered by `create_chat_completion`."""
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), supported_tasks=("generate",))
        app.state.openai_serving_chat = self
        app.state.openai_serving_models = self
        app.state.log_stats = False
        return app

    async def create_chat_completion(self, request: Any, raw_request: Any) -> AsyncIterator[str]:
        return self.chat(request)

    async def show_available_models(self) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

        return ModelList(data=[ModelCard(id=self._model)])

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[str]:
        messages = [{"role": message["role"], "content": message["content"]} for message in request.messages]
        body = {"model": self._model, "messages": messages, "stream": True, "max_tokens": request.max_tokens}
        async for events in self._engine.chat(ChatCompletionRequest(**body)):
            yield str(events)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[str]:
        raise NotImplementedError

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[str]:
        raise NotImplementedError

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[str]:
        raise NotImplementedError

    async def resolve_lora(self, lora_model: Any) -> None:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def check_health(self) -> None:
        await self._engine.check_health()
