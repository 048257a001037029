"""Ray Serve LLM's configuration objects, and what each of them is in Pierhead (`parts_of`)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from pierhead import llm_config as own
from pierhead.llm_app import MAX_ONGOING_REQUESTS, WITHOUT_VLLM
from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.options import OWN_LLM, DeploymentOptions, own_path, router_of, runtime_env_notes

GATEWAY_MAX_ONGOING_REQUESTS: Final = 4096
"""Of the ingress: it waits for engines most of the time."""

TARGET_ONGOING_REQUESTS: Final = 64
"""Of a replica, as `pierhead llm build` writes it: Ray Serve LLM's default of 10^9 never adds one."""

SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size")
"""Of engine_kwargs: keys of x-serve.llm here."""


class InputModality(str, Enum):  # noqa: UP042 - its str() is that of Ray Serve
    """What a model reads. The engine finds out itself, so it changes nothing."""

    text = "text"
    image = "image"
    TEXT = text
    IMAGE = image
    MULTIMODAL = "multimodal"


class _Fields(BaseModel):
    """Unknown fields are errors; the values can be changed."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    @classmethod
    def parse_yaml(cls, file: Any, **_: Any) -> Self:
        """Made of YAML: a text, or an open file."""
        import yaml

        return cls.model_validate(yaml.safe_load(file))

    @classmethod
    def from_file(cls, path: str | Path, **_: Any) -> Self:
        """Made of a file of YAML."""
        return cls.parse_yaml(Path(path).read_text(encoding="utf-8"))


class ExtraFiles(_Fields):
    """Files next to the model's own."""

    bucket_uri: str
    destination_path: str


class CloudMirrorConfig(_Fields):
    """A bucket that holds the model."""

    bucket_uri: str | None = None
    extra_files: list[ExtraFiles] = Field(default_factory=list)

    @property
    def storage_type(self) -> str | None:
        """s3, gcs, abfss or azure; None without a bucket."""
        kind = (self.bucket_uri or "").partition("://")[0] or None
        return "gcs" if kind == "gs" else kind


class ModelLoadingConfig(_Fields):
    """Which model, and where it comes from; `input_modality` changes nothing."""

    model_id: str
    model_source: str | CloudMirrorConfig | None = None
    tokenizer_source: str | None = None
    input_modality: InputModality = InputModality.text


class LoraConfig(_Fields):
    """Adapters, whose names clients write behind the model's and a colon."""

    dynamic_lora_loading_path: str | None = None
    max_num_adapters_per_replica: PositiveInt = 16
    download_timeout_s: float | None = 30.0
    max_download_tries: int = 3


def class_at(value: Any) -> Any:
    """The class of an import path, `module:Class` or `module.Class`; anything else unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    module, _, name = own_path(value).rpartition(":" if ":" in value else ".")
    if module.startswith("ray."):
        raise ValueError(
            f"{value} is Ray's own: name a class of yours, derived from LLMServer or OpenAiIngress of {OWN_LLM}"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{value}: expected a class as module:Class; {error}") from None


Class = Annotated[Any, BeforeValidator(class_at)]


class LLMConfig(_Fields):
    """One model's service, in Ray Serve LLM's words. Raises ValueError for what cannot be."""

    model_loading_config: ModelLoadingConfig
    llm_engine: str = "vLLM"
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    accelerator_type: str | None = None
    accelerator_config: dict[str, Any] | None = None
    placement_group_config: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    deployment_config: dict[str, Any] = Field(default_factory=dict)
    runtime_env: dict[str, Any] | None = None
    server_cls: Class = None
    experimental_configs: dict[str, Any] = Field(default_factory=dict)
    log_engine_metrics: bool | None = True
    callback_config: dict[str, Any] = Field(default_factory=dict)
    _more: dict[str, Any] = PrivateAttr(default_factory=dict)
    """What x-serve.llm says in addition."""

    _without_ray: ClassVar[Mapping[str, str]] = {
        "apply_checkpoint_info": "the engine reads the checkpoint in its replica",
        "get_or_create_callback": "write what it does into a subclass of LLMServer, and name that in server_cls",
        "setup_engine_backend": "the engine sets up its connectors itself: leave the call out",
        "kv_connector_backend": "the engine sets up its connectors itself; build_pd_openai_app asks both servers",
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        _ = parts_of(self)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in LLMConfig._without_ray:
            raise AttributeError(f"LLMConfig.{name} is not supported: {LLMConfig._without_ray[name]}")
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def model_id(self) -> str:
        """The name that clients use."""
        return self.model_loading_config.model_id

    @property
    def input_modality(self) -> str:
        """What model_loading_config says."""
        return self.model_loading_config.input_modality.value

    @property
    def supports_vision(self) -> bool:
        """Whether it reads more than text."""
        return self.model_loading_config.input_modality is not InputModality.text

    @property
    def model_architecture(self) -> str:
        """Not known outside the replica."""
        return "UNSPECIFIED"

    @property
    def max_request_context_length(self) -> int | None:
        """engine_kwargs.max_model_len."""
        return self.engine_kwargs.get("max_model_len")

    def multiplex_config(self) -> LoraConfig | None:
        """The adapters."""
        return self.lora_config

    def get_engine_config(self) -> own.LLMConfig:
        """The same as x-serve.llm says it."""
        return parts_of(self).config.model_copy(update=self._more)

    def get_deployment_options(self) -> dict[str, Any]:
        """Options of `@serve.deployment`: deployment_config, and the GPUs of a replica."""
        return parts_of(self).options

    def update_engine_kwargs(self, **kwargs: Any) -> None:
        """Set some of engine_kwargs."""
        self.engine_kwargs.update(kwargs)


def config_at(value: Any) -> Any:
    """An LLMConfig, of one, a mapping, or the path of a file of YAML. Raises ValueError."""
    if isinstance(value, str):
        if not Path(value).exists():
            raise ValueError(f"Could not load model config from {value}, as the file does not exist.")
        return LLMConfig.from_file(value)
    return value


def of_x_serve(config: own.LLMConfig) -> LLMConfig:
    """The config of a service's replica, for servers and engines that read Ray Serve LLM's."""
    kwargs = config.engine_kwargs
    lora = None if config.lora is None else config.lora.model_dump(exclude={"adapters"})
    made = LLMConfig(
        model_loading_config=ModelLoadingConfig(**config.model_loading.model_dump()),
        llm_engine=config.engine,
        engine_kwargs={**{name: getattr(config, name) for name in SIZES if getattr(config, name) != 1}, **kwargs},
        accelerator_type=config.accelerator_type,
        lora_config=None if lora is None else LoraConfig(**lora),
        log_engine_metrics=not kwargs.get("disable_log_stats"),
    )
    made._more = {name: getattr(config, name) for name in ("server_cls", "lora", "stall_timeout_s")}
    return made


AnyConfig = Annotated[LLMConfig, BeforeValidator(config_at)]


# ---- what it is in Pierhead


@dataclass(frozen=True)
class LLMParts:
    """One LLMConfig as Pierhead has it."""

    config: own.LLMConfig
    """x-serve.llm."""
    options: dict[str, Any]
    """Those of `@serve.deployment`: number of replicas, line, GPUs (`ray_actor_options.num_gpus`)."""
    environment: dict[str, str]
    notes: dict[str, str]
    """Fields that change nothing, and what stands in their place."""


_REFUSED_ENGINE_KWARGS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "model": (bool, "write model_loading_config.model_source"),
    "served_model_name": (bool, "write model_loading_config.model_id"),
    "distributed_executor_backend": (lambda value: value == "ray", 'there is no Ray: leave it out, or write "mp"'),
    "data_parallel_backend": (lambda value: value == "ray", 'there is no Ray: leave it out, or write "mp"'),
}
"""When a value is refused, and what to do."""

_EXPERIMENTS: Final[Mapping[str, str]] = {
    "stream_batching_interval_ms": "the tokens of one step of the engine travel together at once",
    "num_ingress_replicas": "write ingress_deployment_config: {num_replicas: N}",
    "dp_size_per_node": "all ranks of an engine are in its container",
}
"""Keys of experimental_configs that change nothing."""


def parts_of(config: LLMConfig) -> LLMParts:
    """What a config is in Pierhead. Raises ValueError that names what means nothing without Ray. Pure."""
    _refuse(config)
    loading, engine = config.model_loading_config, engine_of(config.llm_engine)
    kwargs = dict(config.engine_kwargs)
    sizes: dict[str, Any] = {name: kwargs.pop(name) for name in SIZES if name in kwargs}
    if kwargs.get("task") in ("multimodal", "auto"):  # the engine finds out itself
        del kwargs["task"]
    if loading.tokenizer_source is not None:
        kwargs.setdefault("tokenizer", loading.tokenizer_source)
    gpus = _gpus_of(config, engine)
    given: dict[str, Any] = {
        "engine": engine,
        "model_loading": {"model_id": loading.model_id, "model_source": _source_of(loading)},
        "accelerator_type": _gpu_name(config.accelerator_type) if gpus else None,
        **sizes,
        "engine_kwargs": kwargs,
        "lora": _lora_of(config, kwargs),
    }
    try:
        made = own.LLMConfig.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'LLMConfig'}: {first['msg']}") from None
    if gpus >= 1 and gpus != made.gpus:
        raise ValueError(
            f"placement_group_config has {gpus:g} GPUs and the model is spread over {made.gpus} (engine_kwargs: "
            "tensor_parallel_size x pipeline_parallel_size x data_parallel_size): make the two equal"
        )
    runtime_env = config.runtime_env or {}
    environment = {str(name): str(value) for name, value in (runtime_env.get("env_vars") or {}).items()}
    return LLMParts(made, _options_of(config, gpus), environment, _notes_of(config))


def engine_of(name: str) -> str:
    """The engine of `llm_engine`. Raises ValueError for one that is none."""
    engine = name.lower() if ":" not in name else name
    if ":" in engine or engine in own.ENGINE_NAMES:
        return engine
    raise ValueError(
        f'llm_engine: there is no engine {name} here; run its server, and write llm_engine="openai" with '
        'engine_kwargs={"base_url": "http://server:30000/v1"}, or name a class as "my_package.engine:MyEngine"'
    )


def _refuse(config: LLMConfig) -> None:
    for name, (is_refused, words) in _REFUSED_ENGINE_KWARGS.items():
        if is_refused(config.engine_kwargs.get(name)):
            raise ValueError(f"engine_kwargs.{name} is not supported: {words}")
    if config.callback_config.get("callback_class"):
        raise ValueError(
            "callback_config.callback_class is not supported: there are no hooks of Ray's nodes; write what it does "
            "into a subclass of LLMServer, and name that in server_cls"
        )
    if "num_router_replicas" in config.experimental_configs:
        raise ValueError(
            "The 'num_router_replicas' key in experimental_configs has been renamed to 'num_ingress_replicas'."
        )
    if config.log_engine_metrics and config.engine_kwargs.get("disable_log_stats"):
        raise ValueError("disable_log_stats cannot be set to True when log_engine_metrics is enabled.")
    for name in ("placement_group_bundles", "placement_group_strategy"):
        if name in config.deployment_config:
            raise ValueError(
                f"deployment_config.{name} is not supported: write placement_group_config of the LLMConfig"
            )
    if "TPU" in str(config.accelerator_type).upper() or (config.accelerator_config or {}).get("kind") == "tpu":
        raise ValueError("accelerator_type: TPUs are not supported: engines run on GPUs and CPUs here")


def _gpu_name(accelerator: str | None) -> str | None:
    """A part of the GPU's own name, which says the memory elsewhere."""
    return accelerator and accelerator.removesuffix("-40G").removesuffix("-80G")


def _source_of(loading: ModelLoadingConfig) -> str | None:
    source = loading.model_source
    if isinstance(source, CloudMirrorConfig):
        if source.extra_files:
            raise ValueError("model_source.extra_files is not supported: put the files into the bucket of the model")
        source = source.bucket_uri
    scheme = (source or "").partition("://")[0]
    if scheme in ("abfss", "azure") or scheme.startswith("pyarrow-"):
        raise ValueError(
            f"model_source: {scheme}:// is not supported: copy the model to s3:// or gs://, or mount it as a directory"
        )
    return source


def _lora_of(config: LLMConfig, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """x-serve.llm.lora; takes vLLM's arguments that say the same out of `kwargs`."""
    enabled, lora = kwargs.pop("enable_lora", False), config.lora_config
    most = kwargs.pop("max_loras", None)
    if lora is None or lora.dynamic_lora_loading_path is None:
        if enabled or lora is not None:
            raise ValueError("lora_config.dynamic_lora_loading_path: expected where the adapters are, found nothing")
        return None
    path = lora.dynamic_lora_loading_path.rstrip("/")
    return {
        "dynamic_lora_loading_path": path,
        "max_num_adapters_per_replica": max(most or 1, lora.max_num_adapters_per_replica),
    }


def _gpus_of(config: LLMConfig, engine: str) -> float:
    """The GPUs of one replica; below 1 a share of one, 0 = none."""
    workers = math.prod(int(config.engine_kwargs.get(name) or 1) for name in (*SIZES, own.DATA_PARALLEL))
    placement = config.placement_group_config
    if placement is None:
        is_cpu = (config.accelerator_config or {}).get("kind") == "cpu"
        return 0 if is_cpu or engine in WITHOUT_VLLM else workers
    per_worker, bundles = placement.get("bundle_per_worker"), placement.get("bundles")
    if (per_worker is None) is (bundles is None):
        raise ValueError("placement_group_config: expected either bundle_per_worker or bundles")
    each: Sequence[Mapping[str, float]] = bundles or [per_worker or {}] * workers
    if any(bundle.get("TPU") for bundle in each):
        raise ValueError("placement_group_config: TPUs are not supported: engines run on GPUs and CPUs here")
    if placement.get("strategy") == "STRICT_SPREAD" and len(each) > 1:
        raise ValueError(
            "placement_group_config.strategy STRICT_SPREAD is not supported: a replica is one container on one "
            "machine; leave it out, and take a machine with as many GPUs"
        )
    found = float(sum(bundle.get("GPU", 0) for bundle in each))
    if not found.is_integer() and found > 1:
        raise ValueError("placement_group_config: a share of a GPU is for a model on one GPU; write whole ones")
    if not found and config.accelerator_type:
        raise ValueError(
            f"accelerator_type={config.accelerator_type!r} cannot be used with CPU-only configurations: leave it out, "
            "or write GPU into placement_group_config"
        )
    return found


def _options_of(config: LLMConfig, gpus: float) -> dict[str, Any]:
    """Options of the deployment. A target of 2 requests, Ray Serve's default, would scale up an engine that idles."""
    options: dict[str, Any] = {"max_ongoing_requests": MAX_ONGOING_REQUESTS, **config.deployment_config}
    scaling = options.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        target = min(TARGET_ONGOING_REQUESTS, options["max_ongoing_requests"] // 2) or 1
        options["autoscaling_config"] = {"target_ongoing_requests": target, **scaling}
    actor = dict(options.get("ray_actor_options") or {})
    if gpus:
        actor["num_gpus"] = int(gpus) if gpus >= 1 else gpus
    if actor:
        options["ray_actor_options"] = actor
    try:
        made = DeploymentOptions().changed(**{name: value for name, value in options.items() if name != "name"})
        if made.request_router_config is not None:
            router_of(made.request_router_config)
    except (TypeError, ValueError, RayServeException) as error:
        raise ValueError(f"deployment_config: {error}") from None
    return options


def _notes_of(config: LLMConfig) -> dict[str, str]:
    found = {
        f"experimental_configs.{name}": _EXPERIMENTS.get(name, "there is no counterpart")
        for name in config.experimental_configs
    }
    found |= runtime_env_notes(config.runtime_env or {})
    if config.log_engine_metrics is False:
        found["log_engine_metrics"] = "the engine's metrics are always exposed"
    lora = config.lora_config
    if lora is not None:
        plain = LoraConfig()
        for name in ("download_timeout_s", "max_download_tries"):
            if getattr(lora, name) != getattr(plain, name):
                found[f"lora_config.{name}"] = "a load that fails fails its request, and the next request tries again"
    if (config.placement_group_config or {}).get("strategy", "PACK") != "PACK":
        found["placement_group_config.strategy"] = "a replica is one container"
    return found


# ---- arguments of the builders


class IngressClsConfig(_Fields):
    """The class of the ingress, and more arguments of its constructor."""

    ingress_cls: Class = None
    """None = OpenAiIngress."""
    ingress_extra_kwargs: dict[str, Any] | None = Field(default_factory=dict)


class IngressArgs(_Fields):
    """What every builder of an OpenAI application takes."""

    ingress_cls_config: IngressClsConfig = Field(default_factory=IngressClsConfig)
    ingress_deployment_config: dict[str, Any] | None = Field(default_factory=dict)


class LLMServingArgs(IngressArgs):
    """Those of `build_openai_app`. Raises ValueError for no model, and for two of one name."""

    llm_configs: list[AnyConfig]

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [each.model_id for each in self.llm_configs]
        if not names:
            raise ValueError(
                "List of models is empty. Maybe some parameters cannot be parsed into the LLMConfig config."
            )
        if len(set(names)) < len(names):
            raise ValueError("Duplicate models found. Make sure model ids are unique.")
        return self


class DPServingArgs(IngressArgs):
    """Those of `build_dp_openai_app`."""

    llm_config: AnyConfig


class PDServingArgs(IngressArgs):
    """Those of `build_pd_openai_app`. Raises ValueError for configs that do not belong together."""

    prefill_config: AnyConfig
    decode_config: AnyConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        prefill, decode = self.prefill_config, self.decode_config
        if prefill.model_id != decode.model_id:
            raise ValueError("P/D model id mismatch")
        if prefill.lora_config != decode.lora_config:
            raise ValueError("P/D LoRA must be configured on both prefill and decode, with the same loading path")
        for each in (prefill, decode):
            if each.engine_kwargs.get("kv_transfer_config") is None:
                raise ValueError("kv_transfer_config is required for P/D disaggregation")
        return self
