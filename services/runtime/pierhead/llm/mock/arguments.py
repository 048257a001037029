"""The mock engine's `engine_kwargs`."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pierhead.llm.server.engine import checked_kwargs
from pierhead.llm.server.errors import LLMStartError
from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, le=86_400)]
Rate = Annotated[float, Field(gt=0, le=1e9)]


class Scripted(BaseModel):
    """An answer that takes the place of made-up tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    when: str = ""
    """A part of the request's last message or of its prompt; "" = every request gets this answer."""
    text: str
    """The answer. With `tool`: the arguments of the call, as JSON."""
    tool: str | None = None
    """The function that the answer calls."""


class MockArguments(BaseModel):
    """Unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ttft_s: Seconds = 0.0
    """From the end of the prefill to the first token."""
    tokens_per_s: Rate = 2000.0
    """Of the whole engine; the requests that run share it."""
    request_tokens_per_s: Rate = math.inf
    """The most that one request gets."""
    prefill_tokens_per_s: Rate = math.inf
    """Tokens of prompts that are read in a second, one prompt after another, without those in the cache."""
    max_num_seqs: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Answers that run at a time; others wait."""
    max_model_len: Annotated[int, Field(ge=2, le=10_000_000)] = 32_768
    """Tokens of prompt and answer together."""
    kv_blocks: Annotated[int, Field(ge=1, le=10_000_000)] = 16_384
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens of a block."""
    answer_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Length of an answer to a request without max_tokens."""
    script: tuple[Scripted, ...] = ()
    """Answers by request: the first entry that matches counts. A request without a match gets made-up tokens."""
    step_s: Annotated[float, Field(gt=0, le=1)] = 0.005
    """The engine works in steps of this length, as engines with continuous batching do: the tokens that are due come at
    the end of a step."""

    fail_start: str | None = None
    """The start fails with this message."""
    fail_after_tokens: Annotated[int, Field(ge=1)] | None = None
    """Each request fails after this many of its tokens."""
    stall_after_tokens: Annotated[int, Field(ge=0)] | None = None
    """After this many tokens in all it makes no more; check_health still passes."""
    ill: str | None = None
    """check_health fails with this message once the engine has started."""


def read_arguments(engine_kwargs: dict[str, Any]) -> MockArguments:
    """Raises LLMStartError that names each argument that cannot be."""
    arguments = checked_kwargs(MockArguments, "mock", engine_kwargs)
    room = arguments.kv_blocks * arguments.block_size
    if arguments.max_model_len > room:
        raise LLMStartError(
            f"x-serve.llm.engine_kwargs: max_model_len {arguments.max_model_len} is more than the {room} tokens that "
            f"{arguments.kv_blocks} kv_blocks of {arguments.block_size} hold: raise kv_blocks, or lower max_model_len"
        )
    return arguments
