"""The compose services of an application of language models: the stack's own LLM servers and gateway. A server or an
engine that is a user's own runs in the user's image. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from pierhead.llm.server import llm_server
from pierhead.llm_app import llm_gateway, llm_service
from pierhead.llm_config import ENGINE_NAMES
from pierhead.policies.prefix import MOST_CHARS
from pierhead.rayserve.config import RequestRouterConfig
from pierhead.rayserve.deployment import BuiltDeployment, ComposePart
from pierhead.rayserve.llm.config import GATEWAY_MAX_ONGOING_REQUESTS, LLMConfig, parts_of
from pierhead.rayserve.options import DeploymentOptions, router_of

GATEWAY: Final = "__rayserve_gateway__"
"""The attribute of an ingress's class that says whether the stack's gateway can take its place."""
SERVERS: Final = "pierhead.rayserve.llm.deployment"
"""The module of the servers that are no user's own."""
_GATEWAY_NAME: Final = "llm-gateway"
_LONGEST_NAME: Final = 40
"""Of a service, in characters."""
_PREFIX_KWARGS: Final = {
    "imbalanced_threshold": "imbalance_threshold",
    "match_rate_threshold": "match_rate_threshold",
    "eviction_threshold_chars": "max_chars",
}
"""Parameters of PrefixCacheAffinityRouter, and those of the policy `prefix` that say the same."""


def compose_parts(
    built: Mapping[str, BuiltDeployment], prefix: str, image: str | None = None
) -> dict[str, ComposePart] | None:
    """The services by deployments; without an ingress the gateway is "". None where the application runs itself: its
    ingress is a user's own, or a server or an engine is, for which there is no `image`.

    `built`: the application's first deployment is the last. `prefix`: what the names of services begin with.
    """
    *_, root = built.values()
    has_ingress = hasattr(root.deployment.func_or_class, GATEWAY)
    servers = {name: each for name, each in built.items() if not (has_ingress and each is root)}
    configs = {name: config for name, each in servers.items() if (config := _config_of(each)) is not None}
    if len(configs) < len(servers) or (has_ingress and not _is_gateway(root)):
        return None
    classes = {name: path for name, each in servers.items() if (path := _class_of(each, configs[name])) is not None}
    if classes and image is None:
        return None
    longest = _LONGEST_NAME - len(f"-{_GATEWAY_NAME}")
    start = re.sub("[^a-z0-9]+", "-", prefix.lower()).strip("-")[:longest].rstrip("-") + "-" if prefix else ""
    gateway_name = f"{start}{_GATEWAY_NAME}"
    parts: dict[str, ComposePart] = {}
    for name, each in servers.items():
        part = _server(each, configs[name], start, classes.get(name), image)
        taken = {gateway_name, *(other.service for other in parts.values())}
        parts[name] = replace(part, service=_free(part.service, taken))
    for name in list(classes)[:1]:
        parts[name] = replace(parts[name], definition={**parts[name].definition, "build": "."})
    readers = {child for each in servers.values() for child in each.children}
    models: dict[str, dict[str, str]] = {}
    for name, config in configs.items():
        if name not in readers:
            models[config.model_id] = {"service": parts[name].service}
            for child in servers[name].children:
                models[config.model_id]["prefill"] = parts[child].service
    options = root.options if has_ingress else DeploymentOptions(max_ongoing_requests=GATEWAY_MAX_ONGOING_REQUESTS)
    called = {"depends_on": sorted(part.service for part in parts.values())}
    definition = llm_gateway(models, replicas=options.first_replicas) | called
    gateway = ComposePart(gateway_name, True, options, definition)
    return {root.name if has_ingress else "": gateway, **parts}


def _free(name: str, taken: Collection[str]) -> str:
    """The name, as long as one may be, with a number where it is taken."""
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (name[: _LONGEST_NAME - len(end)].strip("-") + end for end in ends)
    return next(each for each in names if each not in taken)


def _is_gateway(ingress: BuiltDeployment) -> bool:
    more = set(ingress.deployment.init_kwargs) - {"llm_deployments", "model_cards", "lora_paths"}
    return getattr(ingress.deployment.func_or_class, GATEWAY) and not more


def _config_of(server: BuiltDeployment) -> LLMConfig | None:
    """What a deployment serves; None where it is no LLM server, its constructor gets more than a config, or a class of
    the user's own, which the gateway has not, is to choose its replicas.
    """
    deployment = server.deployment
    cls, arguments = deployment.func_or_class, [*deployment.init_args, *deployment.init_kwargs.values()]
    configs = [each for each in arguments if isinstance(each, LLMConfig)]
    is_server = isinstance(cls, type) and issubclass(cls, llm_server.LLMServer)
    router = server.options.request_router_config
    module, is_path, _ = ("" if router is None else router_of(router)["policy"]).partition(":")
    if is_path and not module.startswith("pierhead."):
        return None
    if not is_server or len(configs) != 1 or len(arguments) != 1 + len(server.children):
        return None
    return configs[0]


def _class_of(server: BuiltDeployment, config: LLMConfig) -> str | None:
    """x-serve.llm.server_cls: the class of a user, or the one that shows Ray Serve's config to an engine of a user."""
    cls = server.deployment.func_or_class
    if cls.__module__ != SERVERS:
        return f"{cls.__module__}:{cls.__qualname__}"
    return None if config.get_engine_config().engine in ENGINE_NAMES else f"{SERVERS}:LLMServer"


def _server(
    server: BuiltDeployment, config: LLMConfig, start: str, server_cls: str | None, image: str | None
) -> ComposePart:
    parts, options = parts_of(config), server.options
    actor = dict(options.ray_actor_options or {})
    gpus = actor.pop("num_gpus", 0)
    given: dict[str, Any] = {"ray_actor_options": actor or None}
    notes = {f"{config.model_id}.{field}": words for field, words in parts.notes.items()}
    router = options.request_router_config
    if router is not None and "PrefixCacheAffinityRouter" in router_of(router)["policy"]:
        kwargs, left_out = _prefix_kwargs(router.request_router_kwargs)
        given["request_router_config"] = RequestRouterConfig(
            request_router_class="prefix", request_router_kwargs=kwargs
        )
        for name, words in left_out.items():
            notes[f"{config.model_id}.request_router_kwargs.{name}"] = words
    said = parts.config.model_copy(update={"server_cls": server_cls})
    definition = llm_service(said, gpus=gpus >= 1, image=image if server_cls else None)
    if server_cls:
        definition["command"] = ["python", "-m", "pierhead.llm.server"]
    block = definition["x-serve"] | ({"gpu": {"fraction": gpus}} if 0 < gpus < 1 else {})
    del block["replicas"]
    environment = {name: value.replace("$", "$$") for name, value in parts.environment.items()}
    definition |= {"environment": definition["environment"] | environment, "x-serve": block}
    kind = server.name.partition(":")[0].lower() + "-" if server.name.startswith(("Prefill:", "Decode:")) else ""
    name = f"{start}llm-{kind}" + re.sub("[^a-z0-9]+", "-", config.model_id.lower()).strip("-")
    return ComposePart(name, False, options.changed(**given), definition, notes)


def _prefix_kwargs(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The parameters of PrefixCacheAffinityRouter as those of the policy `prefix`, and why others are left out."""
    left_out = {name: "the policy `prefix` has no such parameter" for name in given if name not in _PREFIX_KWARGS}
    threshold = given.get("imbalanced_threshold")
    is_taken = isinstance(threshold, int | float) and 1 <= threshold < math.inf  # inf is Ray Serve's default
    if threshold is not None and not is_taken:
        left_out["imbalanced_threshold"] = (
            "the policy `prefix` takes a finite number from 1 on; its default is in force"
        )
    found = {_PREFIX_KWARGS[name]: value for name, value in given.items() if name not in left_out and value is not None}
    if "max_chars" in found:
        found["max_chars"] = max(MOST_CHARS, found["max_chars"])
    return found, left_out
