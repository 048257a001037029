"""The interface of LLM engines: they take OpenAI's requests and answer as OpenAI does. A user's engine needs six
methods: chat, completions, embeddings, start, check_health and shutdown.

    class MyEngine(LLMEngine):
        async def chat(self, request):
            if request.stream:
                yield "data: {...}\n\n"                         # as many as there are; `data: [DONE]` need not be sent
            else:
                yield ChatCompletionResponse(model=request.model, choices=[...])

An answer is one response object of pierhead.llm.objects (a dict or a pydantic model will do), or strings of server-sent
events, or one ErrorResponse. LLMRequestError, raised before the first of them, is that ErrorResponse; every other
exception is a failure of the engine. A closed iterator is an aborted request.

Engines of the registry yield StreamEvents and answers that are `counted`: nobody parses them to count the tokens. The
contract suite (tests/contract/test_llm_engines.py) checks every engine.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from pierhead import progress
from pierhead.llm import objects
from pierhead.llm.server.errors import LLMStartError, NotSupported, unknown_path
from pierhead.llm_config import LLMConfig, config_of
from pydantic import BaseModel, ValidationError

Kwargs = TypeVar("Kwargs", bound=BaseModel)

Answers = AsyncGenerator[str | objects.OpenAIAnswer | objects.RawAnswer, None]
"""What engines of the registry yield for one request."""

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


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is served. An engine need not say what the server knows: the names and the time."""

    model_id: str = ""
    engine: str = ""
    max_model_len: int = 0
    """The most tokens of prompt and answer together; 0 = not known."""
    adapters: tuple[str, ...] = ()
    """Those that are loaded, and from the server those that can be: their names without the model's."""
    created: int = 0
    """When the replica was started, in seconds since 1970."""


class LLMEngine(ABC):
    """An engine of one model. Made with its config; nothing happens before `start`."""

    needs_files: bool = False
    """Whether `start` needs the model's files on this machine."""
    model_path: str = ""
    """Set before `start`: a directory with the files if the engine needs them, else the name of the model's source."""
    report: Report = staticmethod(progress)
    """Called by `start`, which may as well call `pierhead.progress`."""

    def __init__(self, llm_config: Any) -> None:
        self.llm_config = llm_config
        """What the caller gave."""
        self.config: LLMConfig = config_of(llm_config)
        """What x-serve.llm says of it."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model and be ready for requests. Raises LLMStartError with a message that says what to do."""

    @abstractmethod
    def chat(self, request: objects.ChatCompletionRequest) -> AsyncIterator[Any]:
        """/v1/chat/completions"""

    @abstractmethod
    def completions(self, request: objects.CompletionRequest) -> AsyncIterator[Any]:
        """/v1/completions"""

    @abstractmethod
    def embeddings(self, request: objects.EmbeddingRequest) -> AsyncIterator[Any]:
        """/v1/embeddings"""

    @abstractmethod
    async def check_health(self) -> Any:
        """Returns False, or raises, when the engine is unhealthy. A subclass of `pierhead.Broken` means that it will
        not recover: the replica is then replaced at once. Cheap."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine; requests in progress are aborted."""

    # ---- what an engine may have

    def score(self, request: objects.ScoreRequest) -> AsyncIterator[Any]:
        """/v1/score"""
        return self.pass_through(request)

    def tokenize(self, request: objects.TokenizeRequest) -> AsyncIterator[Any]:
        """/tokenize"""
        return self.pass_through(request)

    def detokenize(self, request: objects.DetokenizeRequest) -> AsyncIterator[Any]:
        """/detokenize"""
        return self.pass_through(request)

    def transcriptions(self, request: objects.TranscriptionRequest) -> AsyncIterator[Any]:
        """/v1/audio/transcriptions"""
        return self.pass_through(request)

    async def pass_through(self, request: objects.OpenAIRequest) -> AsyncIterator[Any]:
        """Any other path, which is `request.path`; 404 for a path that the engine does not serve."""
        yield objects.ErrorResponse.to(unknown_path(request.path))

    def describe(self) -> ModelDescription:
        """The model and its adapters."""
        return ModelDescription()

    def load(self) -> EngineStats | None:
        """How busy it is. None = not known: the server counts the requests, and cannot notice a stall."""
        return None

    async def generate_one_token(self) -> None:  # noqa: B027 - not every engine can be asked so
        """Generate one real token, ahead of waiting requests if the engine can. Raises when it fails."""

    async def load_adapter(self, adapter: str, path: str) -> None:
        """Load a LoRA adapter under this name. Raises LLMRequestError where it cannot be."""
        resolve = getattr(self, "resolve_lora", None)  # as Ray Serve LLM has it
        if resolve is None:
            raise self._cannot("LoRA adapters")
        name = f"{self.config.model_loading.model_id}:{adapter}"
        await resolve(SimpleNamespace(model_id=name, local_path=path, max_total_tokens=None, lora_assigned_int_id=None))

    async def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter that is loaded."""
        if not hasattr(self, "resolve_lora"):
            raise self._cannot("LoRA adapters")

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` works. For an engine that needs an option for it: whether it has that."""
        return type(self).sleep is not LLMEngine.sleep

    async def sleep(self, level: int) -> None:
        """Free the accelerator's memory; 1 = keep the weights in the machine's memory, 2 = drop them."""
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
