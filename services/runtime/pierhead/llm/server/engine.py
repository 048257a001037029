"""The interface of LLM engines: they take OpenAI's requests and answer as OpenAI does. A new engine is a class and a
line in `registry.py`; the contract suite (tests/contract/test_llm_engines.py) checks it.

    start --> ready for requests --> shutdown
                 chat, completions, ... : one request each; a closed iterator is an aborted request
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pierhead.llm.server.answers import not_supported, only
from pierhead.llm.server.errors import LLMStartError, NotSupported
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest, ModelCard
from pierhead.llm_config import LLMConfig
from pydantic import BaseModel, ValidationError

Kwargs = TypeVar("Kwargs", bound=BaseModel)

Replies = AsyncIterator[LLMReply]
"""Replies of one request; see LLMReply. Errors of the client are replies with a status and OpenAI's error object;
exceptions are failures of the engine. Closing the iterator aborts the request in the engine."""

Report = Callable[[str, float | None, float], None]
"""Called with the progress of the start: the stage, how much of it is done (None = not known), of how much."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of an engine; read often, so cheap to make."""

    running: int = 0
    """Requests that it generates for."""
    waiting: int = 0
    """Requests that wait to be run."""
    kv_use: float = 0.0
    """Share of the key-value cache in use, 0 to 1."""
    tokens: int = 0
    """Tokens generated and prompt tokens read since the start: while the number grows the engine does not stall."""


class LLMEngine(ABC):
    """An engine of one model. Made with its config; nothing happens before `start`."""

    needs_files: bool = True
    """Whether `start` needs the model's files on this machine; False: it gets the name of the source."""

    def __init__(self, config: LLMConfig) -> None:
        self.config = config

    @abstractmethod
    async def start(self, model_path: str, report: Report) -> None:
        """Load the model and be ready for requests. `model_path`: a local directory, or the configured source.

        Raises LLMStartError with a message that says what to do.
        """

    @abstractmethod
    def chat(self, request: LLMRequest) -> Replies:
        """/v1/chat/completions"""

    @abstractmethod
    def completions(self, request: LLMRequest) -> Replies:
        """/v1/completions"""

    def embeddings(self, request: LLMRequest) -> Replies:
        """/v1/embeddings"""
        return self.pass_through(request)

    def score(self, request: LLMRequest) -> Replies:
        """/v1/score"""
        return self.pass_through(request)

    def tokenize(self, request: LLMRequest) -> Replies:
        """/tokenize"""
        return self.pass_through(request)

    def detokenize(self, request: LLMRequest) -> Replies:
        """/detokenize"""
        return self.pass_through(request)

    def pass_through(self, request: LLMRequest) -> Replies:
        """Any other path; 404 for a path that the engine does not serve."""
        return only(not_supported(request.path))

    @abstractmethod
    def describe(self) -> ModelCard:
        """The model and its adapters."""

    @abstractmethod
    def load(self) -> EngineStats:
        """How busy it is."""

    @abstractmethod
    async def generate_one_token(self) -> None:
        """Generate one real token, ahead of waiting requests if the engine can. Raises when it fails."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raises when the engine is unhealthy. A subclass of `pierhead.Broken` means that it will not recover: the
        replica is then replaced at once. Cheap."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine; requests in progress are aborted."""

    async def load_adapter(self, adapter: str, path: str) -> None:
        """Load a LoRA adapter under this name. Raises LLMRequestError where it cannot be."""
        raise self._cannot("LoRA adapters")

    async def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter that is loaded."""
        raise self._cannot("LoRA adapters")

    async def sleep(self, level: int) -> None:
        """Free the accelerator's memory; see Operation.Sleep."""
        raise self._cannot("sleep")

    async def wake(self) -> None:
        """Undo `sleep`."""
        raise self._cannot("wake")

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        raise self._cannot("reset_prefix_cache")

    def expose(self) -> bytes:
        """The engine's own metrics, in Prometheus' text format, to be exposed with the replica's."""
        return b""

    def _cannot(self, what: str) -> Exception:
        return NotSupported(f"the engine {self.config.engine} has no {what}")


def checked_kwargs(kind: type[Kwargs], engine: str, engine_kwargs: dict[str, Any]) -> Kwargs:
    """An engine's `engine_kwargs`, read as JSON. Raises LLMStartError that names each wrong argument."""
    try:
        return kind.model_validate_json(json.dumps(engine_kwargs))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise LLMStartError(
            f"x-serve.llm.engine_kwargs of the engine {engine}: {'; '.join(problems)}; it takes "
            f"{', '.join(kind.model_fields)}"
        ) from None
