"""Finds engines and servers by name. Their modules are imported on demand: vLLM's takes seconds and gigabytes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

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
    if ":" not in path:
        raise LLMStartError(f'x-serve.llm.engine: there is no engine "{name}"; expected {ENGINE_EXPECTED}')
    found: type[LLMEngine] = class_at(path, LLMEngine, f'x-serve.llm.engine: the engine "{name}"', "another engine")
    return found


def class_at(path: str, base: type, what: str, otherwise: str) -> Any:
    """The subclass of `base` at an import path. Raises LLMStartError; `otherwise`: what may be named in its place."""
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a module may raise anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise LLMStartError(
            f"{what} cannot be imported from {path}: {why}; use an image that has it installed, or {otherwise}"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, base)):
        key = what.partition(":")[0]
        raise LLMStartError(f"{key}: {path} is not a subclass of {base.__module__}.{base.__name__}")
    return found
