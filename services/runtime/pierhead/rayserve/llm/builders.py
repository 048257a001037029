"""Applications of language models: a deployment for each model, and an ingress with OpenAI's API before them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pierhead.rayserve.deployment import Application, deployment
from pierhead.rayserve.llm.config import (
    DPServingArgs,
    IngressArgs,
    LLMConfig,
    LLMServingArgs,
    PDServingArgs,
    class_at,
    parts_of,
)
from pierhead.rayserve.llm.deployment import DPServer, LLMServer, PDDecodeServer, PDPrefillServer
from pierhead.rayserve.llm.openai_api_models import to_model_metadata

logger = logging.getLogger("ray.serve")


def build_llm_deployment(
    llm_config: LLMConfig,
    *,
    name_prefix: str | None = None,
    bind_kwargs: Mapping[str, Any] | None = None,
    override_serve_options: Mapping[str, Any] | None = None,
    deployment_cls: type[Any] | str | None = None,
) -> Application:
    """One model's deployment, called `LLMServer:<model>`.

    - name_prefix: in the place of the class's name and a colon.
    - bind_kwargs: more arguments of the constructor.
    - override_serve_options: options of `@serve.deployment`, in the place of the config's.
    - deployment_cls: a class or its import path, in the place of the config's server_cls, else LLMServer.
    """
    cls: Any = class_at(deployment_cls or llm_config.server_cls or LLMServer)
    for field, words in parts_of(llm_config).notes.items():
        logger.warning("%s: %s has no effect: %s", llm_config.model_id, field, words)
    options = dict(cls.get_deployment_options(llm_config))
    name = options.get("name") or llm_config.model_id.replace("/", "--").replace(".", "_")
    options |= {"name": (name_prefix or f"{cls.__name__}:") + name} | dict(override_serve_options or {})
    bound: Application = deployment(cls, **options).bind(llm_config=llm_config, **(bind_kwargs or {}))
    return bound


def build_openai_app(llm_serving_args: Mapping[str, Any] | LLMServingArgs) -> Application:
    """All of the models behind OpenAI's API: `build_openai_app({"llm_configs": [config, ...]})`.

    A config may be a mapping, or the path of a file of YAML. Raises ValueError; see LLMServingArgs.
    """
    args = LLMServingArgs.model_validate(llm_serving_args)
    return _behind_ingress(args, [(each, build_llm_deployment(each)) for each in args.llm_configs])


def build_pd_openai_app(pd_serving_args: Mapping[str, Any] | PDServingArgs) -> Application:
    """A model behind OpenAI's API, whose prompts are read by replicas of their own: `prefill_config`, `decode_config`.

    Both engines have a `kv_transfer_config` in engine_kwargs. Raises ValueError; see PDServingArgs.
    """
    args = PDServingArgs.model_validate(pd_serving_args)
    prefill = build_llm_deployment(args.prefill_config, name_prefix="Prefill:", deployment_cls=PDPrefillServer)
    decode = build_llm_deployment(
        args.decode_config,
        name_prefix="Decode:",
        deployment_cls=PDDecodeServer,
        bind_kwargs={"prefill_server": prefill},
    )
    return _behind_ingress(args, [(args.decode_config, decode)])


def build_dp_deployment(
    llm_config: LLMConfig,
    *,
    name_prefix: str | None = None,
    bind_kwargs: Mapping[str, Any] | None = None,
    override_serve_options: Mapping[str, Any] | None = None,
    deployment_cls: type[Any] | str | None = None,
) -> Application:
    """As `build_llm_deployment`: one replica has all ranks of engine_kwargs.data_parallel_size."""
    return build_llm_deployment(
        llm_config,
        name_prefix=name_prefix,
        bind_kwargs=bind_kwargs,
        override_serve_options=override_serve_options,
        deployment_cls=deployment_cls or llm_config.server_cls or DPServer,
    )


def build_dp_openai_app(dp_serving_args: Mapping[str, Any] | DPServingArgs) -> Application:
    """The model of `llm_config` behind OpenAI's API."""
    args = DPServingArgs.model_validate(dp_serving_args)
    return _behind_ingress(args, [(args.llm_config, build_dp_deployment(args.llm_config))])


def _behind_ingress(args: IngressArgs, servers: list[tuple[LLMConfig, Application]]) -> Application:
    from pierhead.rayserve.llm.ingress import OpenAiIngress, make_fastapi_ingress  # needs FastAPI

    cls: Any = args.ingress_cls_config.ingress_cls or OpenAiIngress
    configs = [config for config, _ in servers]
    options = cls.get_deployment_options(configs) | (args.ingress_deployment_config or {})
    bound: Application = deployment(make_fastapi_ingress(cls), **options).bind(
        llm_deployments={config.model_id: server for config, server in servers},
        model_cards={config.model_id: to_model_metadata(config.model_id, config) for config in configs},
        lora_paths={
            config.model_id: config.lora_config.dynamic_lora_loading_path
            for config in configs
            if config.lora_config is not None
        },
        **(args.ingress_cls_config.ingress_extra_kwargs or {}),
    )
    return bound
