"""The configuration of an LLM service: `x-serve.llm` in a compose file, or in code

    LLMConfig(model_loading=ModelLoading(model_id="qwen", model_source="Qwen/Qwen2.5-0.5B-Instruct"))

The controller checks it and passes it to the replicas in PIERHEAD_LLM_CONFIG, as JSON. Names are those of Ray Serve LLM
where they mean the same; compose/reference.yaml explains each of them. Needs pydantic (the extra `llm`).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pierhead.json_data import find_not_json

VARIABLE = "PIERHEAD_LLM_CONFIG"
LARGEST_CONFIG = 64 * 1024
"""Largest config in bytes of JSON: half of Linux's limit for an environment variable."""

ENGINE_NAMES = ("vllm", "openai", "mock")
"""The engines of the server's registry; any other engine is an import path."""
ENGINE_EXPECTED = f'{", ".join(map(json.dumps, ENGINE_NAMES))}, or an import path such as "my_package.engine:MyEngine"'

DATA_PARALLEL = "data_parallel_size"
"""In engine_kwargs: copies of the model in one replica, each on GPUs of its own."""

SERVER_EXPECTED = 'an import path such as "my_package.server:MyServer"'

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""No slash and no dot in front: a name is one directory of those below the given one."""
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_REMOTE = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[^\s]*)?")
_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(@[A-Za-z0-9._/-]+)?")


def _expected(expectation: str) -> PydanticCustomError:
    """The error for a wrong value: what is expected. The report adds the place and the value found."""
    return PydanticCustomError("expected", "expected {expectation}", {"expectation": expectation})


def _check_model_id(model_id: str) -> str:
    if not _MODEL_ID.fullmatch(model_id):
        raise _expected(
            'a name of letters, digits and "._-/" such as "qwen2.5-7b" (at most 200; a colon would name an adapter)'
        )
    return model_id


def _check_model_source(source: str) -> str:
    if source.startswith("/") or _REMOTE.fullmatch(source) or _HUB.fullmatch(source):
        return source
    raise _expected(
        'a directory inside the container ("/models/qwen"), a Hugging Face id ("Qwen/Qwen2.5-7B-Instruct", '
        '"...@revision"), or s3://bucket/prefix or gs://bucket/prefix'
    )


def _check_adapters_path(path: str) -> str:
    if path.startswith("/") or _REMOTE.fullmatch(path):
        return path
    raise _expected('a directory inside the container ("/adapters"), or s3://bucket/prefix or gs://bucket/prefix')


def _check_adapter(adapter: str) -> str:
    if not ADAPTER_NAME.fullmatch(adapter):
        raise _expected('the name of an adapter: letters, digits and "._-", at most 100')
    return adapter


def _check_engine(engine: str) -> str:
    if engine not in ENGINE_NAMES and not _IMPORT_PATH.fullmatch(engine):
        raise _expected(ENGINE_EXPECTED)
    return engine


def _check_server(server: str) -> str:
    if not _IMPORT_PATH.fullmatch(server):
        raise _expected(SERVER_EXPECTED)
    return server


def _check_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        wrong = find_not_json(arguments) is not None
    except RecursionError:
        wrong = True
    if wrong:
        raise _expected("what JSON can hold: text, finite numbers, true, false, null, lists and mappings")
    copies = arguments.get(DATA_PARALLEL, 1)
    if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
        raise _expected(f"{DATA_PARALLEL} as an integer of at least 1")
    text = json.dumps(arguments)
    if len(text) > LARGEST_CONFIG // 2:
        raise _expected(f"at most {LARGEST_CONFIG // 2} bytes as JSON (these are {len(text)})")
    return arguments


class _Block(BaseModel):
    """Unknown keys are errors; values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelLoading(_Block):
    """Which model, and where it comes from."""

    model_id: Annotated[str, AfterValidator(_check_model_id)]
    model_source: Annotated[str, AfterValidator(_check_model_source)] | None = None

    @property
    def source(self) -> str:
        """Where the model comes from; without a model_source the model_id is a Hugging Face id."""
        return self.model_source or self.model_id


class Lora(_Block):
    """Adapters of the model; clients call them `<model_id>:<adapter>`."""

    dynamic_lora_loading_path: Annotated[str, AfterValidator(_check_adapters_path)]
    max_num_adapters_per_replica: Annotated[int, Field(ge=1, le=1000)] = 1
    adapters: list[Annotated[str, AfterValidator(_check_adapter)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        wanted, most = len(set(self.adapters)), self.max_num_adapters_per_replica
        if wanted > most:
            raise _expected(
                f"max_num_adapters_per_replica of at least {wanted}, as many as adapters names for every replica "
                f"(it is {most})"
            )
        return self


class LLMConfig(_Block):
    """One model's service."""

    engine: Annotated[str, AfterValidator(_check_engine)] = "vllm"
    server_cls: Annotated[str, AfterValidator(_check_server)] | None = None
    model_loading: ModelLoading
    accelerator_type: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    engine_kwargs: Annotated[dict[str, Any], AfterValidator(_check_kwargs)] = Field(default_factory=dict)
    lora: Lora | None = None
    stall_timeout_s: Annotated[float, Field(ge=0.1, le=86_400)] = 60.0

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        size = len(self.to_json())
        if size > LARGEST_CONFIG:
            raise _expected(f"at most {LARGEST_CONFIG} bytes as JSON in all (these are {size})")
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one replica, if it uses GPUs."""
        copies: int = self.engine_kwargs.get(DATA_PARALLEL, 1)
        return self.tensor_parallel_size * self.pipeline_parallel_size * copies

    def to_json(self) -> str:
        """The text for PIERHEAD_LLM_CONFIG: equal configs have equal texts, also of a build that has further keys."""
        later = {"server_cls"} if self.server_cls is None else None
        return json.dumps(self.model_dump(mode="json", exclude=later), sort_keys=True, separators=(",", ":"))


def config_of(config: Any) -> LLMConfig:
    """What x-serve.llm says of a config of this or of Ray Serve LLM's kind."""
    found: LLMConfig = config if isinstance(config, LLMConfig) else config.get_engine_config()
    return found
