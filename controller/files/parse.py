"""The parsed output of `docker compose config` -> Spec. Pure.

All problems are reported at once, each as "path: what was expected, what was found". A spec with problems is not used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from pierhead.compose_names import image_name
from pierhead.serve_block import DRAIN_MARGIN_S, AutoscaleBlock, ServeBlock

from ..errors import SpecError
from ..model.spec import (
    MOST_REPLICAS,
    AccessLog,
    AutoscaleSpec,
    BackpressureAnswer,
    FunctionPolicy,
    GpuRequest,
    ProbeSpec,
    PrometheusPolicy,
    RolloutSpec,
    ServiceSpec,
    Spec,
    YieldSpec,
)
from ..model.text import shown
from .access_log import access_log, stack_access_log
from .definition import ADMIN_PORT, definition_hash, managed_environment
from .dialect import Dialect
from .gpus import gpu_request
from .llm_block import check_llm, llm_gpus, model_names
from .problems import Problems, ServiceSource, at
from .serve_block import SERVICE_NAME, parse_block, parse_policy, user_config_text
from .shared_memory import SharedMemoryLimits, check_memory_limit, shared_memory, stack_size, with_memory_sockets
from .sockets import ServiceSockets, StackSockets, service_sockets, stack_has_sockets, with_sockets
from .stack_options import StackOptions
from .traces import stack_traces
from .translate import translate

CONTROLLER_SERVICE = "controller"
EDGE_SERVICE = "haproxy"
ENGINE_VARIABLE = "PIERHEAD_ENGINE"
_NO_DIALECTS: Mapping[str, Dialect] = MappingProxyType({})
STOP_MARGIN_S = 10.0
"""Between the end of the drain and SIGKILL, where stop_grace_period is not written."""

_BLOCK = "x-serve"
_ALIKE = 0.85
"""difflib's ratio of a name with one letter added, removed, changed or moved."""
_PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_SECTIONS = ("networks", "volumes", "secrets", "configs")


def parse(project_name: str, config: object, dialects: Mapping[str, Dialect] = _NO_DIALECTS) -> Spec:
    """Read the services with an `x-serve` block. `dialects`: by the value of PIERHEAD_ENGINE.

    Raises SpecError with every problem found.
    """
    problems = Problems()
    if not _PROJECT_NAME.fullmatch(project_name):
        problems.expected("name", "a project name of lower-case letters, digits, hyphens and underscores", project_name)
    if not isinstance(config, Mapping):
        problems.expected("compose file", "a mapping", config)
        raise SpecError(problems.lines)
    sections = {section: problems.mapping(section, config.get(section)) for section in _SECTIONS}
    definitions = problems.mapping("services", config.get("services"))
    stack = StackOptions(definitions, CONTROLLER_SERVICE, problems)
    dialect = dialects.get(str(stack.get(ENGINE_VARIABLE)).lower())
    served = frozenset(str(name) for name, one in definitions.items() if isinstance(one, Mapping) and _BLOCK in one)
    sockets = StackSockets(stack_has_sockets(stack, sections["volumes"]) and dialect is None, served)
    of_stack = _OfStack(stack_size(stack), stack_access_log(stack), stack_traces(stack), sockets)
    blocks: dict[str, ServeBlock] = {}
    services: dict[str, ServiceSpec] = {}
    for name in sorted(definitions, key=str):
        definition = definitions[name]
        if not isinstance(definition, Mapping):
            continue
        _check_extensions(at("services", str(name)), definition, problems)
        if _BLOCK not in definition:
            continue
        control_networks = _control_networks(definitions, definition[_BLOCK])
        source = ServiceSource(project_name, str(name), definition, sections, control_networks, dialect)
        block, service = _service(source, of_stack, problems)
        if block is not None:
            blocks[source.name] = block
        if service is not None:
            services[service.name] = service
    _check_turns(services, problems)
    _check_routes(blocks, problems)
    _check_grpc_services(blocks, problems)
    if problems.lines:
        raise SpecError(list(dict.fromkeys(problems.lines)))
    warnings = (*_shared_builds(services), *_without_effect(definitions, services))
    return Spec(project=project_name, services=services, warnings=warnings)


def _shared_builds(services: Mapping[str, ServiceSpec]) -> Iterator[str]:
    """Yield a warning for each service that builds the same image as another service."""
    builders: dict[str, str] = {}
    for name, service in services.items():
        if not service.has_build:
            continue
        image = service.image if ":" in service.image.rpartition("/")[2] else f"{service.image}:latest"
        first = builders.setdefault(image, name)
        if first != name:
            yield (
                f"services.{name}.build: {first} and {name} both build {image}; Compose labels the image with the "
                "service's name, so each build replaces the other's and both services roll out without an edit: keep "
                f"build in services.{first} and remove it here"
            )


def _without_effect(definitions: Mapping[Any, Any], services: Mapping[str, ServiceSpec]) -> Iterator[str]:
    """Yield a warning for each key of Compose that holds a container back and does not hold a replica back."""
    for name in services:
        if definitions[name].get("profiles"):
            yield (
                f"services.{name}.profiles: holds no replica back: they run whatever profile is chosen, and Compose "
                "builds the image and makes the networks only where it is chosen; remove it, and keep a service that "
                "not every machine runs in a file that COMPOSE_FILE names there"
            )
        needed = definitions[name].get("depends_on")
        for other, how in needed.items() if isinstance(needed, Mapping) else ():
            if isinstance(how, Mapping) and how.get("condition") == "service_completed_successfully":
                yield (
                    f"services.{name}.depends_on.{other}.condition: has no effect with x-serve: replicas do not "
                    f"wait for the end of {other}; run it before `up` and `deploy`: `docker compose run --rm {other}`"
                )


def _check_extensions(path: str, definition: Mapping[Any, Any], problems: Problems) -> None:
    """Add a problem for a misspelt x-serve: treated as a user's own extension, it would end the service."""
    for key in map(str, definition):
        written = key.lower()
        if key != _BLOCK and written.startswith("x-") and difflib.get_close_matches(written, [_BLOCK], cutoff=_ALIKE):
            problems.add(
                at(path, key),
                f'unknown key; did you mean "{_BLOCK}"? A service without it is left to Compose; an extension of your '
                "own needs a name that is less like it",
            )


def _control_networks(definitions: Mapping[Any, Any], block: object) -> frozenset[str] | None:
    """Compose's names of the networks of the controller, and of HAProxy if it has requests for the service.

    None: the files have no controller.
    """
    of_controller, of_edge = _networks(definitions.get(CONTROLLER_SERVICE)), _networks(definitions.get(EDGE_SERVICE))
    is_routed = isinstance(block, Mapping) and (block.get("route") is not None or bool(block.get("grpc_services")))
    return of_controller & of_edge if of_controller is not None and of_edge is not None and is_routed else of_controller


def _networks(definition: object) -> frozenset[str] | None:
    if not isinstance(definition, Mapping) or "network_mode" in definition:
        return None
    networks = definition.get("networks")
    return frozenset(str(name) for name in networks) if isinstance(networks, Mapping | list) else frozenset({"default"})


class _OfStack(NamedTuple):
    """What of the whole stack counts for each service."""

    memory: str | None
    access_log: AccessLog
    traces: Mapping[str, str]
    sockets: StackSockets


def _service(
    source: ServiceSource, of_stack: _OfStack, problems: Problems
) -> tuple[ServeBlock | None, ServiceSpec | None]:
    """Read one service. The block is None when it has a problem, the service when anything in it has one."""
    before = len(problems.lines)
    path = source.path
    if not SERVICE_NAME.fullmatch(source.name):
        problems.add(
            path,
            "expected a service name of lower-case letters, digits and hyphens (at most 40, no hyphen at the ends), "
            "as it becomes a name in DNS and in HAProxy",
        )
    _check_scale(path, source.definition, problems)
    block = parse_block(at(path, _BLOCK), source.definition[_BLOCK], problems)
    autoscale = _autoscale(at(path, _BLOCK), block, problems) if block else None
    most = 0 if block is None else autoscale.max if autoscale else block.replicas
    rollout = _rollout(at(path, _BLOCK), block, problems) if block else RolloutSpec()
    yields = _yields(at(path, _BLOCK), block, autoscale, problems) if block else None
    gpu = gpu_request(path, source.definition, block.gpu if block else None, most, problems)
    if block and block.llm:
        gpu = llm_gpus(at(path, _BLOCK), block.llm, gpu, problems)
    _check_gpu_isolation(path, source.definition, gpu, problems)
    if source.dialect:
        source.dialect.check(source, block, gpu, problems)
    if block:
        _check_block(at(path, _BLOCK), block, problems)
    probe = _probe(at(path, _BLOCK), block, problems) if block else None
    metrics_port = _metrics_port(at(path, _BLOCK), block, problems) if block else None
    drain_s = _drain_s(at(path, _BLOCK), block, problems) if block else 0.0
    grace_s = _stop_grace_period_s(path, source.definition, block, drain_s, problems)
    image = _image(source, problems)
    memory = shared_memory(at(path, _BLOCK), block, of_stack.memory, problems) if block else SharedMemoryLimits()
    log = access_log(block.logging, of_stack.access_log) if block else of_stack.access_log
    callees = _callees(source.definition)
    sockets = ServiceSockets()
    if block:
        sockets = service_sockets(at(path, _BLOCK), block, callees, of_stack.sockets, problems)
    mounted = with_sockets(with_memory_sockets(source) if memory.size else source, sockets)
    environment: Mapping[str, str] = {}
    if block and block.is_managed:
        environment = managed_environment(source, block, drain_s, memory, log, of_stack.traces)
    container = translate(mounted, image, environment, grace_s, problems)
    constraints = tuple((container.get("Placement") or {}).get("Constraints") or ())
    gpu = replace(gpu, constraints=constraints) if gpu else None
    check_memory_limit(at(path, _BLOCK), memory, container, problems)
    if block is None or probe is None or len(problems.lines) > before:
        return block, None
    return block, ServiceSpec(
        name=source.name,
        image=image,
        protocol=block.own_protocol,
        port=block.own_port,
        replicas=autoscale.first if autoscale else block.replicas,
        autoscale=autoscale,
        rollout=rollout,
        callees=callees,
        probe=probe,
        route=block.route,
        host=block.host,
        strip_prefix=block.strip_prefix,
        grpc_services=tuple(block.grpc_services),
        application=block.application,
        auth=block.auth,
        allow=tuple(block.allow),
        max_replicas_per_node=block.max_replicas_per_node,
        max_ongoing_requests=block.max_ongoing_requests,
        max_queued_requests=block.max_queued_requests,
        router_policy=block.router.policy,
        router_policy_kwargs=user_config_text(block.router.policy_kwargs) if block.router.policy_kwargs else "",
        replica_header=block.router.replica_header,
        backpressure=BackpressureAnswer(block.backpressure.status_code, block.backpressure.retry_after_s),
        access_log=log,
        request_timeout_s=block.request_timeout_s,
        body_timeout_s=block.body_timeout_s,
        streams_requests=block.streams_requests,
        graceful_shutdown_wait_loop_s=block.graceful_shutdown_wait_loop_s,
        graceful_shutdown_timeout_s=drain_s,
        stop_grace_period_s=grace_s,
        startup_deadline_s=block.startup.deadline_s,
        user_config=user_config_text(block.user_config),
        metrics_port=metrics_port,
        metrics_path=block.metrics.path,
        gpu=gpu,
        yields=yields,
        has_socket=sockets.listens,
        models=model_names(block.llm) if block.llm else (),
        managed=block.is_managed,
        has_build=source.definition.get("build") is not None,
        container=container,
        definition_hash=definition_hash(container, port=block.own_port, managed=block.is_managed, gpu=gpu, probe=probe),
    )


def _image(source: ServiceSource, problems: Problems) -> str:
    image = source.definition.get("image")
    if image is None and source.definition.get("build") is not None:
        return image_name(source.project, source.name, source.definition)
    return problems.text(at(source.path, "image"), image) or ""


def _check_scale(path: str, definition: Mapping[str, Any], problems: Problems) -> None:
    deploy = definition.get("deploy")
    written = definition.get("scale")
    if written is None and isinstance(deploy, Mapping):
        written = deploy.get("replicas")
    if written != 0 or isinstance(written, bool):
        found = "nothing, which means 1" if written is None else shown(written)
        problems.add(
            at(path, "scale"),
            f"expected 0, found {found}: Compose would start containers without GPUs of their own that no request "
            "reaches; write scale: 0 here, and the number of replicas into x-serve.replicas",
        )


def _autoscale(path: str, block: ServeBlock, problems: Problems) -> AutoscaleSpec | None:
    """The autoscaler's settings; None for a fixed number of replicas."""
    if block.autoscale is None:
        return None
    if "replicas" in block.written:
        problems.add(
            at(path, "replicas"),
            "has no effect together with autoscale, which decides the number; "
            "remove it (autoscale.initial is the first one)",
        )
    bounds, here = block.autoscale, at(path, "autoscale")
    if bounds.max < max(bounds.min, 1):
        problems.expected(at(here, "max"), f"an integer from {max(bounds.min, 1)} (min) to {MOST_REPLICAS}", bounds.max)
    elif bounds.initial is not None and not bounds.min <= bounds.initial <= bounds.max:
        problems.expected(
            at(here, "initial"), f"an integer from {bounds.min} (min) to {bounds.max} (max)", bounds.initial
        )
    fields = bounds.values()
    del fields["policy_kwargs"]
    fields["policy"] = policy = _policy(here, bounds, problems)
    if policy is not None and "target_ongoing_requests" not in bounds.written:
        fields["panic_threshold"] = None  # the load of one replica is not known, so no load is a burst
    return AutoscaleSpec(**fields)


def _yields(path: str, block: ServeBlock, autoscale: AutoscaleSpec | None, problems: Problems) -> YieldSpec | None:
    """When the service gives way on GPUs; None = it does not."""
    rule = block.gpu.yields if block.gpu else None
    if rule is None:
        return None
    if autoscale is None or autoscale.min:
        problems.add(
            at(path, "gpu.yields"),
            "needs a service that scales to zero, as its replicas leave for others: write autoscale: {min: 0, max: 1} "
            "in place of replicas, or remove yields, and no other service takes its GPUs",
        )
    return YieldSpec(**rule.values())


def _check_turns(services: Mapping[str, ServiceSpec], problems: Problems) -> None:
    """Check that no request times out before the first service that it waits for has given way."""
    turns = {name: service for name, service in services.items() if service.yields}
    for name, service in turns.items():
        stay_s = service.yields.min_stay_s if service.yields else 0.0
        others = [other for other in turns.values() if other is not service and other.request_timeout_s <= stay_s]
        if others:
            least = min(others, key=lambda other: other.request_timeout_s)
            problems.expected(
                at("services", f"{name}.{_BLOCK}.gpu.yields.min_stay_s"),
                f"less than {least.request_timeout_s:g}, the request_timeout_s of {least.name}, whose requests may "
                "have to wait so long",
                stay_s,
            )


def _policy(path: str, bounds: AutoscaleBlock, problems: Problems) -> FunctionPolicy | PrometheusPolicy | None:
    if isinstance(bounds.policy, str):
        return FunctionPolicy(bounds.policy, bounds.policy_kwargs)
    if bounds.policy_kwargs:
        problems.add(at(path, "policy_kwargs"), "has no effect without a policy that is an import path; remove it")
    if bounds.policy is None:
        return None
    block = parse_policy(at(path, "policy"), bounds.policy, problems)
    return PrometheusPolicy(**block.prometheus.values()) if block else None


def _rollout(path: str, block: ServeBlock, problems: Problems) -> RolloutSpec:
    rules = block.rollout
    if not rules.max_surge and not rules.max_unavailable:
        problems.add(
            at(path, "rollout.max_surge"),
            "expected at least 1, found 0, while max_unavailable is 0: no version could ever follow another one; raise "
            "one of the two",
        )
    weight = block.canary.weight if block.canary else None
    return RolloutSpec(**rules.values(), canary_weight=weight)


def _callees(definition: Mapping[str, Any]) -> tuple[str, ...]:
    """The services in Compose's depends_on; services without x-serve are filtered out where this is used."""
    named = definition.get("depends_on")
    return tuple(sorted(str(name) for name in named)) if isinstance(named, Mapping | list) else ()


def _check_block(path: str, block: ServeBlock, problems: Problems) -> None:
    """Check that the settings fit together."""
    _check_protocol(path, block, problems)
    _check_process(path, block, problems)
    check_llm(path, block, problems)
    if block.is_managed and block.own_port == ADMIN_PORT:
        problems.add(at(path, "port"), f"{ADMIN_PORT} is the admin port of a managed replica; choose another one")


def _check_protocol(path: str, block: ServeBlock, problems: Problems) -> None:
    protocol = block.own_protocol
    if protocol == "grpc" and block.route is not None:
        problems.add(
            at(path, "route"),
            'a route takes HTTP requests and this service has protocol "grpc"; write grpc_services in its place, '
            "or protocol: http",
        )
    if protocol == "http" and block.grpc_services:
        problems.add(
            at(path, "grpc_services"),
            'gRPC needs protocol "grpc" and this service has "http" (the default of a service with a route)',
        )
    if block.strip_prefix and block.route is None:
        problems.add(at(path, "strip_prefix"), "strips the route from the path, and this service has no route")
    if block.host is not None and block.route is None:
        problems.add(at(path, "host"), "is for requests to a route, and this service has none; write route: /")
    if block.application is not None and not block.grpc_services:
        problems.add(
            at(path, "application"), "is how gRPC clients choose between services, and this one has no grpc_services"
        )
    for_outside = {
        "router.replica_header": block.router.replica_header,
        "auth": block.auth != "none",
        "allow": bool(block.allow),
    }
    for key, is_written in for_outside.items():
        if is_written and block.route is None and not block.grpc_services:
            problems.add(
                at(path, key),
                "is for requests from outside, and none come here: this service has no route and no grpc_services",
            )


def _check_process(path: str, block: ServeBlock, problems: Problems) -> None:
    """Check settings that need Pierhead's runtime, some of them with one of the two protocols."""
    managed = block.is_managed
    for key in ("run_user_code_in_separate_thread", "debug"):
        if not managed and getattr(block, key):
            problems.add(
                at(path, key), "has no effect on an image that is not built on Pierhead's runtime (managed: false)"
            )
    for key in sorted(block.logging.written & {"log_level", "encoding"}) if not managed else ():
        problems.add(
            at(path, f"logging.{key}"),
            "has no effect on an image that is not built on Pierhead's runtime (managed: false): its own program "
            "decides what it logs; configure it there (command, environment), and remove this",
        )
    if block.user_config and (not managed or block.health.probe.path is not None):
        why = (
            "has no effect on an image that is not built on Pierhead's runtime (managed: false): its program cannot "
            "receive a change while it runs; write environment, or a file that it reads"
            if not managed
            else "needs the probe path of a managed replica (/readyz), which reports the user_config in force; remove "
            "health.probe.path"
        )
        problems.add(at(path, "user_config"), why)
    if managed and block.own_protocol == "http" and block.run_user_code_in_separate_thread:
        problems.add(
            at(path, "run_user_code_in_separate_thread"),
            'needs protocol "grpc": the handlers of an HTTP application read and write their connections and stay on '
            "the server's event loop; put what blocks into asyncio.to_thread, or write more replicas",
        )


def _probe(path: str, block: ServeBlock, problems: Problems) -> ProbeSpec:
    health, asked, managed = block.health, block.health.probe, block.is_managed
    here = at(path, "health.probe")
    if asked.path is None and not managed:
        problems.add(
            at(here, "path"),
            "expected a path, found null: an image that is not built on Pierhead's runtime (managed: false) needs a "
            "path that answers whether it is ready",
        )
    elif asked.path is None and asked.port is not None:
        problems.add(at(here, "port"), "has no effect without health.probe.path; write both or none")
    elif asked.path is not None and asked.port is None and not managed and block.own_protocol == "grpc":
        problems.add(at(here, "port"), "expected a port, found null: the probe uses HTTP, and port takes gRPC")
    if health.progress_timeout_s is not None and not managed:
        problems.add(
            at(path, "health.progress_timeout_s"),
            "has no effect on an image that is not built on Pierhead's runtime (managed: false): stuck "
            "replicas are found by the requests in flight that they report",
        )
    return ProbeSpec(
        port=asked.port or (ADMIN_PORT if managed else block.own_port),
        path=asked.path or "/readyz",
        period_s=health.period_s,
        timeout_s=health.timeout_s,
        failures=health.failures,
        progress_timeout_s=health.progress_timeout_s,
    )


def _metrics_port(path: str, block: ServeBlock, problems: Problems) -> int | None:
    if block.metrics.port is not None:
        return block.metrics.port
    if "path" in block.metrics.written and not block.is_managed:
        problems.add(at(path, "metrics.port"), "expected a port, found null: metrics.path has no effect without it")
    return ADMIN_PORT if block.is_managed else None


def _drain_s(path: str, block: ServeBlock, problems: Problems) -> float:
    """Seconds that a draining replica has for its requests: longer than the longest request, or requests would be lost,
    and longer than graceful_shutdown_wait_loop_s."""
    written = block.graceful_shutdown_timeout_s
    drain_s = block.request_timeout_s + DRAIN_MARGIN_S if written is None else written
    stay_s = block.graceful_shutdown_wait_loop_s
    if stay_s is not None and stay_s >= drain_s:
        problems.add(
            at(path, "graceful_shutdown_wait_loop_s"),
            f"expected less than graceful_shutdown_timeout_s ({_drain_words(block, drain_s)}), found {stay_s:.10g}: a "
            "replica that drains would be stopped before it has stayed that long; lower it, or raise "
            "graceful_shutdown_timeout_s",
        )
    if written is not None and written <= block.request_timeout_s:
        problems.add(
            at(path, "graceful_shutdown_timeout_s"),
            f"expected more than request_timeout_s ({block.request_timeout_s:.10g} s), found {written:.10g}: a replica "
            "that drains would cut off requests that are still allowed to run; raise it, lower request_timeout_s, or "
            f"leave it out (then it is {block.request_timeout_s + DRAIN_MARGIN_S:.10g} s)",
        )
    return drain_s


def _drain_words(block: ServeBlock | None, drain_s: float) -> str:
    derived = block is not None and block.graceful_shutdown_timeout_s is None
    return f"{drain_s:.10g} s" + (f", {DRAIN_MARGIN_S:g} s more than request_timeout_s" if derived else "")


def _stop_grace_period_s(
    path: str, definition: Mapping[str, Any], block: ServeBlock | None, drain_s: float, problems: Problems
) -> float:
    """Seconds from SIGTERM to SIGKILL; must be longer than the drain that SIGTERM starts."""
    written = definition.get("stop_grace_period")
    if written is None:
        return drain_s + STOP_MARGIN_S
    nanoseconds = problems.duration_ns(at(path, "stop_grace_period"), written)
    grace_s = (nanoseconds or 0) / 1e9
    if nanoseconds is not None and drain_s and grace_s <= drain_s:
        problems.add(
            at(path, "stop_grace_period"),
            f"expected more than x-serve.graceful_shutdown_timeout_s ({_drain_words(block, drain_s)}), found "
            f"{shown(written)}: the engine would kill replicas that still finish requests; raise it, lower "
            f"graceful_shutdown_timeout_s, or leave it out (then it is {drain_s + STOP_MARGIN_S:.10g} s)",
        )
    return grace_s


def _check_gpu_isolation(path: str, definition: Mapping[str, Any], gpu: GpuRequest | None, problems: Problems) -> None:
    """Add a problem for settings that give a replica access to GPUs that are not its own."""
    if gpu is None:
        return
    if definition.get("privileged") is True:
        problems.add(
            at(path, "privileged"), "gives a replica every GPU of the machine; remove it or the GPU reservation"
        )
    environment = definition.get("environment")
    if isinstance(environment, Mapping) and "NVIDIA_VISIBLE_DEVICES" in environment:
        problems.add(
            at(path, "environment.NVIDIA_VISIBLE_DEVICES"),
            "the controller chooses the GPUs of each replica; remove it or the GPU reservation",
        )


# ------------------------------------------------------------------------------------------- across all services


def _check_routes(blocks: Mapping[str, ServeBlock], problems: Problems) -> None:
    owners: dict[tuple[str | None, str], str] = {}
    for name, block in blocks.items():
        if block.route is None:
            continue
        owner = owners.setdefault((block.host, block.route), name)
        if owner != name:
            where = f"of {block.host} " if block.host else ""
            problems.add(
                at(at("services", name), "x-serve.route"),
                f'route "{block.route}" {where}is already taken by service "{owner}"; each route belongs to one '
                "service, or give each a host of its own",
            )


def _check_grpc_services(blocks: Mapping[str, ServeBlock], problems: Problems) -> None:
    """Services may share a gRPC service where each has an application of its own, by which clients choose."""
    owners: dict[str, list[str]] = {}
    for name, block in blocks.items():
        for number, grpc_service in enumerate(block.grpc_services):
            here = at(at(at("services", name), "x-serve.grpc_services"), number)
            others = owners.setdefault(grpc_service, [])
            if grpc_service in block.grpc_services[:number]:
                problems.add(here, f'"{grpc_service}" is named twice')
                continue
            for other in others:
                if None in (block.application, blocks[other].application):
                    problems.add(
                        here,
                        f'"{grpc_service}" is already taken by service "{other}"; write x-serve.application into both, '
                        'and clients choose one of them by the metadata "application"',
                    )
                    break
                if block.application == blocks[other].application:
                    problems.add(
                        here,
                        f'"{grpc_service}" is already taken by service "{other}", whose x-serve.application is '
                        f'"{block.application}", too; clients choose by it, so write another name into one of the two',
                    )
                    break
            others.append(name)
