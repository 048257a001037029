"""The compose services of an application of language models: the stack's own LLM servers and gateway, where no class of
it, and no engine, is a user's own. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pierhead.llm_app import llm_gateway, llm_service
from pierhead.llm_config import ENGINE_NAMES
from pierhead.rayserve.deployment import BuiltDeployment, ComposePart
from pierhead.rayserve.llm.config import GATEWAY_MAX_ONGOING_REQUESTS, LLMConfig, parts_of
from pierhead.rayserve.options import DeploymentOptions, router_of

GATEWAY: Final = "__rayserve_gateway__"
"""The attribute of an ingress's class that says whether the stack's gateway can take its place."""


def compose_parts(built: Mapping[str, BuiltDeployment], prefix: str) -> dict[str, ComposePart] | None:
    """The services by deployments; without an ingress the gateway is "". None where something is a user's own.

    `built`: the application's first deployment is the last. `prefix`: what the names of services begin with.
    """
    *_, root = built.values()
    has_ingress = hasattr(root.deployment.func_or_class, GATEWAY)
    servers = {name: each for name, each in built.items() if not (has_ingress and each is root)}
    configs = {name: _config_of(each) for name, each in servers.items()}
    if None in configs.values() or (has_ingress and not _is_gateway(root)):
        return None
    start = re.sub("[^a-z0-9]+", "-", prefix.lower()).strip("-") + "-" if prefix else ""
    parts = {name: _server(each, configs[name], start) for name, each in servers.items()}
    readers = {child for each in servers.values() for child in each.children}
    models: dict[str, dict[str, str]] = {}
    for name, config in configs.items():
        if name not in readers and config is not None:
            models[config.model_id] = {"service": parts[name].service}
            for child in servers[name].children:
                models[config.model_id]["prefill"] = parts[child].service
    options = root.options if has_ingress else DeploymentOptions(max_ongoing_requests=GATEWAY_MAX_ONGOING_REQUESTS)
    gateway = ComposePart(f"{start}llm-gateway", True, options, llm_gateway(models, replicas=options.first_replicas))
    return {root.name if has_ingress else "": gateway, **parts}


def _is_gateway(ingress: BuiltDeployment) -> bool:
    more = set(ingress.deployment.init_kwargs) - {"llm_deployments", "model_cards", "lora_paths"}
    return getattr(ingress.deployment.func_or_class, GATEWAY) and not more


def _config_of(server: BuiltDeployment) -> LLMConfig | None:
    """What a deployment serves; None where it is not one of Pierhead's own servers with its own engines."""
    deployment = server.deployment
    arguments = [*deployment.init_args, *deployment.init_kwargs.values()]
    configs = [each for each in arguments if isinstance(each, LLMConfig)]
    own = deployment.func_or_class.__module__ == "pierhead.rayserve.llm.deployment"
    if not own or len(configs) != 1 or len(arguments) != 1 + len(server.children):
        return None
    return configs[0] if configs[0].get_engine_config().engine in ENGINE_NAMES else None


def _server(server: BuiltDeployment, config: LLMConfig | None, start: str) -> ComposePart:
    assert config is not None  # noqa: S101 - it was looked at
    parts, options = parts_of(config), server.options
    actor = dict(options.ray_actor_options or {})
    gpus = actor.pop("num_gpus", 0)
    given: dict[str, Any] = {"ray_actor_options": actor or None}
    router = options.request_router_config
    if router is not None and "PrefixCacheAffinityRouter" in router_of(router)["policy"]:
        given["request_router_config"] = None  # the gateway's default says the same
    definition = llm_service(parts.config, gpus=gpus >= 1)
    block = definition["x-serve"] | ({"gpu": {"fraction": gpus}} if 0 < gpus < 1 else {})
    del block["replicas"]
    environment = {name: value.replace("$", "$$") for name, value in parts.environment.items()}
    definition |= {"environment": definition["environment"] | environment, "x-serve": block}
    kind = server.name.partition(":")[0].lower() + "-" if server.name.startswith(("Prefill:", "Decode:")) else ""
    name = f"{start}llm-{kind}" + re.sub("[^a-z0-9]+", "-", config.model_id.lower())[:36].strip("-")
    notes = {f"{config.model_id}.{field}": words for field, words in parts.notes.items()}
    return ComposePart(name, False, options.changed(**given), definition, notes)
