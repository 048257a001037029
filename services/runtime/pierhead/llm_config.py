"""What an LLM service serves, and how: `x-serve.llm`, or in code

    LLMConfig(model_loading=ModelLoading(model_id="qwen", model_source="Qwen/Qwen2.5-0.5B-Instruct"))

The controller checks it and hands it to the replicas in PIERHEAD_LLM_CONFIG, as JSON. Names are Ray Serve LLM's, as far
as they mean the same. Needs pydantic (the extra `llm`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

VARIABLE = "PIERHEAD_LLM_CONFIG"


class _Block(BaseModel):
    """Unknown keys are errors; values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelLoading(_Block):
    """Which model, and where it comes from."""

    model_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]
    """What clients call it; a colon would mark an adapter."""
    model_source: str | None = None
    """A directory inside the container, a Hugging Face id, s3://bucket/prefix or gs://bucket/prefix. None: the model_id
    is a Hugging Face id."""


class Lora(_Block):
    """Adapters of the model, called `<model_id>:<adapter>`."""

    dynamic_lora_loading_path: str
    """A directory, s3:// or gs:// prefix with a directory for each adapter, named as it."""
    max_num_adapters_per_replica: Annotated[int, Field(ge=1, le=1000)] = 1
    """Held at a time; the one whose last use is longest ago goes first."""
    adapters: tuple[str, ...] = ()
    """Those that every replica has before it is ready, and keeps."""


class LLMConfig(_Block):
    """One model's service."""

    engine: str = "vllm"
    """A name of the server's registry, or an import path `package.module:Engine`."""
    model_loading: ModelLoading
    accelerator_type: str | None = None
    """Part of the GPU's name, such as "H100": replicas wait for one whose name has it."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    engine_kwargs: dict[str, Any] = {}
    """The engine's own arguments, by its own names."""
    lora: Lora | None = None
    stall_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds for which an engine may have requests and make no token before it counts as hanging."""
