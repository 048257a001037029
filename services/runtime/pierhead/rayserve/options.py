"""The options of a deployment: their values, and what they are in an x-serve block."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from pierhead.rayserve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    RequestRouterConfig,
    made,
    number_of,
)
from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.schema import LoggingConfig
from pierhead.serve_block import DRAIN_MARGIN_S, AutoscaleBlock, ServeBlock, keys_of


class Default:
    """The type of `DEFAULT`."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default()
"""Stands for an option that was not given."""

NO_EFFECT: Final[Mapping[str, str]] = {
    "placement_group_bundles": "a replica is one container; write deploy.resources next to x-serve",
    "placement_group_strategy": "a replica is one container",
    "placement_group_bundle_label_selector": "a replica is one container; write deploy.placement on a Swarm",
    "max_constructor_retry_count": "rollout.auto_rollback and startup.deadline_s decide",
    "rolling_update_percentage": "write rollout.max_surge and rollout.max_unavailable, which are numbers",
    "health_check_timeout_s": "check_health runs in the replica and has 10 s",
    "health_check_period_s": "check_health runs in the replica every 10 s",
    "runtime_env": "the image and the compose file's environment",
    "resources": "write deploy.placement on a Swarm",
    "label_selector": "write deploy.placement on a Swarm",
    "accelerator_type": "write device_ids of the reservation",
}
"""Options that are accepted, change nothing in containers, and what stands in their place."""

_DRAIN: Final = "graceful_shutdown_timeout_s"

REFUSED: Final[Mapping[str, str]] = {
    "gang_scheduling_config": "nothing here places groups of replicas together",
    "deployment_actors": "there are no actors; run the shared state as a deployment of its own with one replica",
    "version": "it was removed from Ray Serve",
}
"""Options that would mean something else than what was asked for, and why."""

_ROUTERS: Final = {
    "PowerOfTwoChoicesRequestRouter": "power_of_two",
    "RoundRobinRouter": "round_robin",
    "RoundRobinRequestRouter": "round_robin",
    "ConsistentHashRouter": "consistent_hash",
    "PrefixCacheAffinityRouter": "pierhead.rayserve.llm.request_router:PrefixCacheAffinityRouter",
}
"""Ray Serve's request routers by the name of their class."""

REFUSED_ROUTERS: Final[Mapping[str, str]] = {
    "KVAwareRouter": "nothing here follows the events of engines' caches; name PrefixCacheAffinityRouter, or write "
    "x-serve.router: {policy: engine_load}",
}
"""Those that are not here, and what to do."""

OWN_LLM: Final = "pierhead.rayserve.llm"
_RAY_LLM: Final = "ray.serve.llm"


def own_path(path: str) -> str:
    """An import path, with Pierhead's package in the place of Ray Serve LLM's."""
    return f"{OWN_LLM}{path.removeprefix(_RAY_LLM)}" if path.startswith(_RAY_LLM) else path


def runtime_env_notes(runtime_env: Mapping[str, Any]) -> dict[str, str]:
    """What of a runtime_env changes nothing, and what stands in its place."""
    said = dict.fromkeys(("pip", "conda", "uv"), "write it into the Dockerfile")
    names = [name for name in runtime_env if name != "env_vars"]
    return {f"runtime_env.{name}": said.get(name, "the image holds the code") for name in names}


@dataclass(frozen=True)
class DeploymentOptions:
    """What `@serve.deployment` and `options` set. Immutable; `changed` makes others."""

    num_replicas: int = 1
    max_ongoing_requests: int = 5
    max_queued_requests: int = -1
    user_config: Any = None
    backpressure_config: BackpressureConfig = field(default_factory=BackpressureConfig)
    autoscaling_config: AutoscalingConfig | None = None
    graceful_shutdown_wait_loop_s: float = 2.0
    graceful_shutdown_timeout_s: float = 20.0
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0
    logging_config: LoggingConfig | None = None
    request_router_config: RequestRouterConfig | None = None
    max_constructor_retry_count: int = 20
    ray_actor_options: Mapping[str, Any] | None = None
    placement_group_bundles: Any = None
    placement_group_strategy: str | None = None
    placement_group_bundle_label_selector: Any = None
    max_replicas_per_node: int | None = None
    rolling_update_percentage: float = 0.2
    max_surge_percent: int = 0
    given: frozenset[str] = frozenset()
    """The options that a user has set."""

    def changed(self, **options: Any) -> DeploymentOptions:
        """With other values. Raises ValueError and TypeError for values that cannot be."""
        kinds = {each.name: str(each.type) for each in fields(self) if each.name != "given"}
        given = {name: number_of(value, kinds.get(name, "")) for name, value in options.items() if value is not DEFAULT}
        _refuse(given, kinds)
        wanted = given.get("num_replicas")
        if wanted == "auto":
            given["autoscaling_config"] = _auto(given.get("autoscaling_config"))
            del given["num_replicas"]
        elif wanted is not None:
            if given.get("autoscaling_config") is not None:
                raise ValueError("Manually setting num_replicas is not allowed when autoscaling_config is provided.")
            given["autoscaling_config"] = None  # a number in place of bounds
        for name, kind in _KINDS.items():
            if name in given:
                given[name] = made(kind, given[name], name)
        for name in ("num_replicas", "backpressure_config"):
            if name in given and given[name] is None:
                del given[name]
        _check(given)
        return replace(self, **given, given=self.given | set(given))

    @property
    def first_replicas(self) -> int:
        """How many replicas there are at the start, at least one."""
        if self.autoscaling_config is None:
            return self.num_replicas
        return max(1, self.autoscaling_config.first)

    def x_serve(self, longest_s: float | None = None) -> dict[str, Any]:
        """The keys of the x-serve block that say the same; `longest_s`: its `request_timeout_s`, None = the default."""
        found: dict[str, Any] = {"max_ongoing_requests": self.max_ongoing_requests}
        if self.autoscaling_config is not None:
            found["autoscale"] = autoscale_of(self.autoscaling_config)
        elif self.num_replicas != 1:
            found["replicas"] = self.num_replicas
        found |= self._line() | self._end(longest_s or ServeBlock.request_timeout_s)
        if self.max_replicas_per_node is not None:
            found["max_replicas_per_node"] = self.max_replicas_per_node
        if self.request_router_config is not None:
            found["router"] = router_of(self.request_router_config)
        if self.logging_config is not None:
            found["logging"] = logging_of(self.logging_config)
        if isinstance(self.user_config, Mapping) and self.user_config:
            found["user_config"] = dict(self.user_config)
        gpus = (self.ray_actor_options or {}).get("num_gpus") or 0
        if gpus:
            found["gpu"] = {"count": int(gpus)} if float(gpus).is_integer() else {"fraction": float(gpus)}
        return found

    def _line(self) -> dict[str, Any]:
        """How many requests wait, and how those beyond are answered."""
        found: dict[str, Any] = {}
        if self.max_queued_requests != -1:
            found["max_queued_requests"] = self.max_queued_requests
        if "backpressure_config" in self.given:
            answer = self.backpressure_config
            found["backpressure"] = {"status_code": answer.status_code}
            if answer.retry_after_s is not None:
                found["backpressure"]["retry_after_s"] = float(answer.retry_after_s)
        return found

    def _end(self, longest_s: float) -> dict[str, Any]:
        """How replicas end, and how a version replaces another one."""
        found: dict[str, Any] = {}
        if "graceful_shutdown_wait_loop_s" in self.given:
            found["graceful_shutdown_wait_loop_s"] = max(0.25, float(self.graceful_shutdown_wait_loop_s))
        # A drain takes as long as requests may: without this key it is that much.
        if _DRAIN in self.given and self.graceful_shutdown_timeout_s > longest_s + DRAIN_MARGIN_S:
            found[_DRAIN] = float(self.graceful_shutdown_timeout_s)
        if "max_surge_percent" in self.given:
            surge = -(-self.max_surge_percent * self.first_replicas // 100)
            found["rollout"] = {"max_surge": surge, "max_unavailable": 0 if surge else 1}
        return found

    def without_effect(self, longest_s: float | None = None) -> dict[str, str]:
        """The given options that change nothing in containers, and what stands in their place. `longest_s`: as for
        `x_serve`.
        """
        given = self.given | set(self.ray_actor_options or ())
        found = {name: words for name, words in NO_EFFECT.items() if name in given}
        longest_s = longest_s or ServeBlock.request_timeout_s
        if _DRAIN in given and self.graceful_shutdown_timeout_s < longest_s + DRAIN_MARGIN_S:
            found[_DRAIN] = f"a drain takes request_timeout_s, which is {longest_s:g} s, and {DRAIN_MARGIN_S:g} s"
        return found


def _refuse(given: dict[str, Any], known: Collection[str]) -> None:
    """Raise for options that are not supported, and for unknown ones."""
    for name, why in REFUSED.items():
        if given.pop(name, None) is not None:
            raise ValueError(f"@serve.deployment: {name} is not supported: {why}")
    for name in given:
        if name not in known:
            raise TypeError(f"@serve.deployment: {name} is not one of {', '.join(sorted(known))}")


def _auto(config: Any) -> AutoscalingConfig:
    """The bounds of num_replicas="auto": Ray Serve's, in which the given ones are put."""
    default = AutoscalingConfig.default()
    if config is None or isinstance(config, Mapping):
        given: AutoscalingConfig = made(AutoscalingConfig, {**default.dict(), **(config or {})}, "autoscaling_config")
        return given
    given, plain = made(AutoscalingConfig, config, "autoscaling_config"), AutoscalingConfig()
    changes = {
        each.name: getattr(given, each.name)
        for each in fields(given)
        if getattr(given, each.name) != getattr(plain, each.name)
    }
    return replace(default, **changes)


_KINDS: Final[Mapping[str, type[Any]]] = {
    "autoscaling_config": AutoscalingConfig,
    "backpressure_config": BackpressureConfig,
    "logging_config": LoggingConfig,
    "request_router_config": RequestRouterConfig,
}


_NO_BOUND: Final = {"max_queued_requests": -1}

_ACTOR_OPTIONS: Final = (
    "accelerator_type",
    "fallback_strategy",
    "label_selector",
    "memory",
    "num_cpus",
    "num_gpus",
    "resources",
    "runtime_env",
)


def _check_actor_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"ray_actor_options: expected a dict, found {options!r:.100}")
    for name in options:
        if name not in _ACTOR_OPTIONS:
            raise ValueError(f"ray_actor_options: {name} is none of {', '.join(_ACTOR_OPTIONS)}")


def _check(given: Mapping[str, Any]) -> None:
    if given.get("num_replicas", 1) == 0:
        raise ValueError("num_replicas is expected to larger than 0")
    for name in ("num_replicas", "max_ongoing_requests", "max_queued_requests", "max_constructor_retry_count"):
        value = given.get(name, 1)
        if value is None:
            raise ValueError(f"`{name}` must be non-null, got None.")
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != _NO_BOUND.get(name)):
            raise ValueError(f"{name}: expected an integer >= 1, found {value!r}")
    if (most := given.get("max_replicas_per_node")) is not None and not 1 <= most <= 100:
        raise ValueError(f"max_replicas_per_node: expected an integer from 1 to 100, found {most!r}")
    for name, may_be_0 in (
        ("graceful_shutdown_wait_loop_s", True),
        ("graceful_shutdown_timeout_s", True),
        ("health_check_period_s", False),
        ("health_check_timeout_s", False),
    ):
        value = given.get(name, 1.0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < 0 or (value == 0 and not may_be_0):
            raise ValueError(f"{name}: expected a number of seconds {'>=' if may_be_0 else '>'} 0, found {value!r}")
    _check_actor_options(given.get("ray_actor_options"))
    if given.get("user_config") is not None:
        try:
            json.dumps(given["user_config"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"user_config must be JSON-serializable: {error}") from None


def autoscale_of(config: AutoscalingConfig) -> dict[str, Any]:
    """x-serve.autoscale. Raises RayServeException for a policy that no import path names."""
    both = config.smoothing_factor
    wanted = {
        **vars(config),
        "min": config.min_replicas,
        "max": config.max_replicas,
        "initial": config.initial_replicas,
        "upscaling_factor": config.upscaling_factor or config.upscale_smoothing_factor or both,
        "downscaling_factor": config.downscaling_factor or config.downscale_smoothing_factor or both,
        "aggregation_function": getattr(config.aggregation_function, "value", config.aggregation_function),
        "policy": None,
    }
    found = {
        key.name: float(wanted[key.name]) if key.hint is float else wanted[key.name]
        for key in keys_of(AutoscaleBlock)
        if wanted.get(key.name) is not None and (key.name in ("min", "max") or wanted[key.name] != key.default)
    }
    policy = made(AutoscalingPolicy, config.policy, "autoscaling_config.policy") or AutoscalingPolicy()
    function = policy.policy_function
    if function is not None and "default_autoscaling_policy" not in str(function):
        found["policy"] = _path_of(function, "autoscaling_config.policy")
        if policy.policy_kwargs:
            found["policy_kwargs"] = dict(policy.policy_kwargs)
    return found


def router_of(config: RequestRouterConfig) -> dict[str, Any]:
    """x-serve.router. Raises RayServeException for a class that no import path names."""
    wanted = config.request_router_class
    name = wanted.rpartition(":")[2].rpartition(".")[2] if isinstance(wanted, str) else wanted.__name__
    if name in REFUSED_ROUTERS:
        raise RayServeException(f"request_router_config: {name} is not supported: {REFUSED_ROUTERS[name]}")
    policy = _ROUTERS.get(name)
    if policy is None:
        named = wanted in ("power_of_two", "round_robin", "least_ongoing", "consistent_hash", "prefix", "engine_load")
        policy = str(wanted) if named else _path_of(wanted, "request_router_config.request_router_class")
    found: dict[str, Any] = {"policy": policy}
    if config.request_router_kwargs:
        found["policy_kwargs"] = dict(config.request_router_kwargs)
    return found


def logging_of(config: LoggingConfig) -> dict[str, Any]:
    """x-serve.logging."""
    level = config.log_level
    if isinstance(level, int):
        level = "debug" if level <= 10 else "info" if level <= 20 else "warning" if level <= 30 else "error"
    encoding = getattr(config.encoding, "value", config.encoding)
    found = {"log_level": str(level).lower().replace("critical", "error"), "encoding": str(encoding).lower()}
    if not config.enable_access_log:
        found["access_log"] = "off"
    return found


def _path_of(function: str | Callable[..., Any], option: str) -> str:
    """`module:name` of something that can be imported."""
    if isinstance(function, str):
        module, _, name = function.rpartition(":") if ":" in function else function.rpartition(".")
    else:
        module, name = function.__module__, function.__qualname__
    if not module or not name.isidentifier():
        raise RayServeException(f"{option}: expected what `module:name` imports, found {function!r}")
    return f"{module}:{name}"
