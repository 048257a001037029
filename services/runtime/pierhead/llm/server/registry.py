"""Finds engines by name. An engine's module is imported on demand: vLLM's takes seconds and gigabytes."""

from __future__ import annotations

import importlib
import inspect

from pierhead.llm.server.engine import LLMEngine
from pierhead.llm.server.errors import LLMStartError
from pierhead.llm_config import ENGINE_EXPECTED

ENGINES = {
    "mock": "pierhead.llm.mock.engine:MockEngine",
    "openai": "pierhead.llm.server.engines.openai.engine:OpenAIEngine",
    "vllm": "pierhead.llm.server.engines.vllm.engine:VLLMEngine",
}


def engine_class(name: str) -> type[LLMEngine]:
    """The engine of a registry name, or of an import path `package.module:Engine`. Raises LLMStartError."""
    path = ENGINES.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise LLMStartError(f'x-serve.llm.engine: there is no engine "{name}"; expected {ENGINE_EXPECTED}')
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise LLMStartError(
            f'x-serve.llm.engine: the engine "{name}" cannot be imported from {path}: {error}; use an image that has '
            "it installed, or another engine"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, LLMEngine)):
        raise LLMStartError(f"x-serve.llm.engine: {path} is not a subclass of pierhead.llm.server.engine.LLMEngine")
    return found
