"""OpenAI's requests and answers, by the names of `ray.serve.llm.openai_api_models`. Needs no vLLM."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pierhead.llm.objects import (
    AnswerPart,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorInfo,
    ErrorResponse,
    ScoreRequest,
    ScoreResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeRequest,
    TokenizeResponse,
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionStreamResponse,
)
from pierhead.rayserve.llm.config import LLMConfig

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionStreamResponse",
    "CompletionRequest",
    "CompletionResponse",
    "CompletionStreamResponse",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "EmbeddingChatRequest",
    "EmbeddingCompletionRequest",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "ErrorInfo",
    "ErrorResponse",
    "ScoreRequest",
    "ScoreResponse",
    "TokenizeChatRequest",
    "TokenizeCompletionRequest",
    "TokenizeRequest",
    "TokenizeResponse",
    "TranscriptionRequest",
    "TranscriptionResponse",
    "TranscriptionStreamResponse",
    "to_model_metadata",
]


def to_model_metadata(model_id: str, model_config: LLMConfig, overrides: Mapping[str, Any] | None = None) -> AnswerPart:
    """A model's entry in /v1/models: the gateway's, with Ray Serve LLM's member `metadata`."""
    metadata = {
        "model_id": model_config.model_id,
        "input_modality": model_config.input_modality,
        "max_request_context_length": model_config.max_request_context_length,
    }
    return AnswerPart(
        id=model_id,
        object="model",
        created=int(time.time()),
        owned_by="pierhead",
        root=model_config.model_id,
        parent=model_config.model_id if model_id != model_config.model_id else None,
        metadata=AnswerPart(metadata | dict(overrides or {})),
    )
