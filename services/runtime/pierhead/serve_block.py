"""The `x-serve` block: the one declaration of its keys, with their types, bounds and defaults.

compose/reference.yaml explains each key. A new plain key is one line in a block here (a top-level one has a second line
in `XServe`, which editors need), its comment in compose/reference.yaml, and its use. These read the declaration:

- the controller: its checks and messages (controller/files/serve_block.py), a replica's environment, the JSON schema;
- the runtime: `Settings.x_serve` from that environment, the keywords of a service's class, `dev`;
- docs/generate: the pages of `x-serve` and of settings.

It needs only the standard library, since replicas import it and have no pydantic. The controller imports the runtime,
whose wheel is in its image; services never import the controller.

Null means "derived": the rule is a property of the block, or in `controller/files/parse.py`, and in the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

Protocol = Literal["http", "grpc"]
AccessLogWord = Literal["sampled", "all", "off"]
DEFAULT_POLICY: Final = "power_of_two"
"""How callers choose among a service's replicas by default."""
DEFAULT_PORTS: Final[Mapping[Protocol, int]] = {"http": 8080, "grpc": 50051}
DRAIN_MARGIN_S: Final = 5.0
"""Between the longest request and the end of the drain, where graceful_shutdown_timeout_s is not written."""

Said = TypeVar("Said")


# ------------------------------------------------------------------------------------------- what is said of a key


@dataclass(frozen=True, slots=True)
class Between:
    """The bounds of a number; None = no upper one."""

    least: float
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Syntax:
    """A value with a syntax of its own, which controller/files/serve_block.py checks."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """The environment variable in which a replica that is built on the runtime gets the value."""

    name: str
    new_container: bool = True
    """False: running replicas receive a change."""


@dataclass(frozen=True, slots=True)
class NewContainer:
    """A change needs new containers, though the key has no variable."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a block."""

    path: str
    """Inside `x-serve`: "health.probe.path"."""
    hint: Any
    """Its type when it is not null, without what is said of it."""
    said: tuple[object, ...]
    default: Any

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    def get(self, kind: type[Said]) -> Said | None:
        """What is said of that kind; None when nothing is."""
        return next((each for each in self.said if isinstance(each, kind)), None)

    @property
    def needs_new_container(self) -> bool:
        """Whether a change needs new containers. False for a key that only has keys of its own: these answer."""
        variable = self.get(Variable)
        return variable.new_container if variable else self.get(NewContainer) is not None


@dataclass(frozen=True, kw_only=True)
class KeyBlock:
    """A mapping of keys."""

    written: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def values(self) -> dict[str, Any]:
        """The value of each key; blocks as mappings."""
        found = {key.name: getattr(self, key.name) for key in keys_of(type(self))}
        return {name: value.values() if isinstance(value, KeyBlock) else value for name, value in found.items()}

    def at(self, path: str) -> Any:
        """The value at a key's path; None below a block that is null."""
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name, None)
        return found


def keys_of(block: type[KeyBlock], inside: str = "") -> Iterator[Key]:
    """Yield the block's own keys, in their order."""
    hints = get_type_hints(block, include_extras=True)
    for each in fields(block):
        if each.name != "written":
            default = each.default if each.default_factory is MISSING else each.default_factory()
            yield Key(f"{inside}{each.name}", *_split(hints[each.name]), default)


def all_keys(block: type[KeyBlock], inside: str = "") -> Iterator[Key]:
    """Yield the block's keys, and those of the blocks in it."""
    for key in keys_of(block, inside):
        yield key
        if is_block(key.hint):
            yield from all_keys(key.hint, f"{key.path}.")


def is_block(hint: object) -> bool:
    """Whether a type is a mapping of keys."""
    return isinstance(hint, type) and issubclass(hint, KeyBlock)


def _split(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """A type without "or null", and what is said of it."""
    if get_origin(hint) is Annotated:
        inner, said = _split(get_args(hint)[0])
        return inner, (*said, *get_args(hint)[1:])
    options = get_args(hint)
    return _split(options[0]) if options and options[-1] is type(None) else (hint, ())


# -------------------------------------------------------------------------------------------------------- the blocks

Port = Annotated[int, Between(1, 65535)]
Replicas = Annotated[int, Syntax("replicas")]
Delay = Annotated[float, Between(0, 86_400)]
Factor = Annotated[float, Between(0.01, 100)]
ProbePath = Annotated[str, Syntax("probe_path")]


@dataclass(frozen=True, kw_only=True)
class ProbeBlock(KeyBlock):
    """Where a replica's readiness is probed."""

    path: Annotated[ProbePath | None, NewContainer()] = None
    port: Annotated[Port | None, NewContainer()] = None


@dataclass(frozen=True, kw_only=True)
class HealthBlock(KeyBlock):
    """How a replica's readiness is probed, and when it counts as failed."""

    probe: ProbeBlock = field(default_factory=ProbeBlock)
    period_s: Annotated[float, Between(0.1, 3600)] = 1.0
    timeout_s: Annotated[float, Between(0.05, 3600)] = 2.0
    failures: Annotated[int, Between(1, 1000)] = 3
    progress_timeout_s: Annotated[float, Between(1, 86_400)] | None = None


@dataclass(frozen=True, kw_only=True)
class StartupBlock(KeyBlock):
    """How long a replica may take until it is ready."""

    deadline_s: Annotated[float, Between(1, 604_800)] = 1800.0


@dataclass(frozen=True, kw_only=True)
class MetricsBlock(KeyBlock):
    """Where Prometheus finds a replica's metrics."""

    port: Port | None = None
    path: ProbePath = "/metrics"


@dataclass(frozen=True, kw_only=True)
class RouterBlock(KeyBlock):
    """How a caller chooses among the replicas."""

    policy: Annotated[str, Syntax("router_policy")] = DEFAULT_POLICY
    policy_kwargs: Annotated[dict[str, Any], Syntax("policy_kwargs")] = field(default_factory=dict)
    replica_header: bool = False


@dataclass(frozen=True, kw_only=True)
class BackpressureBlock(KeyBlock):
    """The answer to an HTTP client when the queue is full."""

    status_code: Annotated[Literal[503, 429], Variable("PIERHEAD_BACKPRESSURE_STATUS_CODE")] = 503
    retry_after_s: Annotated[float, Between(0, 86_400), Variable("PIERHEAD_BACKPRESSURE_RETRY_AFTER_S")] = 1.0


@dataclass(frozen=True, kw_only=True)
class LoggingBlock(KeyBlock):
    """What is logged, in Ray Serve's names where it has one. Compose's `logging` decides where Docker keeps the log."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Variable("PIERHEAD_LOG_LEVEL")] = "info"
    encoding: Annotated[Literal["json", "text"], Variable("PIERHEAD_LOG_ENCODING")] = "json"
    access_log: Annotated[AccessLogWord | None, Variable("PIERHEAD_ACCESS_LOG")] = None
    slow_request_s: Annotated[float, Between(0.001, 86_400), Variable("PIERHEAD_SLOW_REQUEST_S")] = 1.0


@dataclass(frozen=True, kw_only=True)
class SharedMemoryBlock(KeyBlock):
    """Memory by which large tensors travel between replicas of one machine."""

    size: Annotated[str, Syntax("shared_memory_size"), NewContainer()] | None = None
    threshold: Annotated[str, Syntax("threshold"), NewContainer()] = "100KiB"


@dataclass(frozen=True, kw_only=True)
class AutoscaleBlock(KeyBlock):
    """The bounds of a service's number of replicas, and the rule that decides between them."""

    min: Replicas = 1
    max: Replicas = 1
    initial: Replicas | None = None
    target_ongoing_requests: Annotated[float, Between(0.01, 1_000_000)] = 2.0
    look_back_period_s: Annotated[float, Between(1, 3600)] = 30.0
    upscale_delay_s: Delay = 30.0
    downscale_delay_s: Delay = 600.0
    downscale_to_zero_delay_s: Delay | None = None
    upscaling_factor: Factor = 1.0
    downscaling_factor: Factor = 1.0
    aggregation_function: Literal["mean", "max", "min"] = "mean"
    panic_threshold: Annotated[float, Between(1.1, 1000)] = 2.0
    panic_window_s: Annotated[float, Between(0.5, 600)] = 3.0
    policy: Annotated[Any, Syntax("autoscale_policy")] = None
    policy_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrometheusBlock(KeyBlock):
    """A query to Prometheus, and the target of its value."""

    query: Annotated[str, Syntax("query")]
    target: Annotated[float, Between(0.0001, 1_000_000_000)]
    url: Annotated[str, Syntax("url")] = "http://prometheus:9090"
    period_s: Annotated[float, Between(1, 3600)] = 5.0
    timeout_s: Annotated[float, Between(0.1, 60)] = 4.0


@dataclass(frozen=True, kw_only=True)
class PolicyBlock(KeyBlock):
    """A policy that is written in the block itself."""

    prometheus: PrometheusBlock


@dataclass(frozen=True, kw_only=True)
class RolloutBlock(KeyBlock):
    """How the service goes from one version to the next."""

    max_surge: Annotated[int, Between(0, 1000)] = 1
    max_unavailable: Annotated[int, Between(0, 1000)] = 0
    auto_rollback: bool = True
    bake_s: Annotated[float, Between(0, 86_400)] = 10.0
    incompatible: Literal["refuse", "allow"] = "refuse"


@dataclass(frozen=True, kw_only=True)
class CanaryBlock(KeyBlock):
    """The share of requests that a new version receives while it bakes."""

    weight: Annotated[int, Between(1, 99), "Per cent of the requests, 1 to 99."]


@dataclass(frozen=True, kw_only=True)
class YieldsBlock(KeyBlock):
    """When the service gives its GPUs to another one that waits for them."""

    idle_s: Delay = 3.0
    min_stay_s: Delay = 30.0
    group: Annotated[str, Syntax("group")] | None = None


@dataclass(frozen=True, kw_only=True)
class GpuBlock(KeyBlock):
    """How much of the GPUs one replica gets: one of count, memory and fraction is written, or a reservation says it."""

    count: Annotated[int, Between(1, 64), NewContainer()] | None = None
    memory: Annotated[str, Syntax("gpu_memory"), NewContainer()] | None = None
    fraction: Annotated[float, Between(0.0001, 1), NewContainer()] | None = None
    placement: Literal["pack", "spread"] = "pack"
    yields: YieldsBlock | None = None


@dataclass(frozen=True, kw_only=True)
class ServeBlock(KeyBlock):
    """One `x-serve` block as written; null where the value is derived."""

    replicas: Replicas = 1
    autoscale: AutoscaleBlock | None = None
    rollout: RolloutBlock = field(default_factory=RolloutBlock)
    canary: CanaryBlock | None = None
    max_replicas_per_node: Annotated[int, Between(1, 1000)] | None = None
    gpu: GpuBlock | None = None
    protocol: Annotated[Protocol | None, NewContainer()] = None
    port: Annotated[Port | None, NewContainer()] = None
    listen: Annotated[Literal["socket", "tcp"], NewContainer()] = "socket"
    route: Annotated[str, Syntax("route")] | None = None
    host: Annotated[str, Syntax("host")] | None = None
    strip_prefix: bool = False
    grpc_services: list[Annotated[str, Syntax("grpc_name")]] = field(default_factory=list)
    application: Annotated[str, Syntax("application")] | None = None
    auth: Literal["none", "key", "jwt"] = "none"
    allow: list[Annotated[str, Syntax("network")]] = field(default_factory=list)
    max_ongoing_requests: Annotated[int, Between(1, 1_000_000), Variable("PIERHEAD_MAX_ONGOING_REQUESTS")] = 100
    max_queued_requests: Annotated[int, Between(-1, 1_000_000)] = -1
    router: RouterBlock = field(default_factory=RouterBlock)
    backpressure: BackpressureBlock = field(default_factory=BackpressureBlock)
    request_timeout_s: Annotated[float, Between(0.001, 86_400), Variable("PIERHEAD_REQUEST_TIMEOUT_S")] = 60.0
    body_timeout_s: Annotated[float, Between(0.001, 86_400), Variable("PIERHEAD_BODY_TIMEOUT_S")] = 30.0
    streams_requests: Annotated[bool, NewContainer()] = False
    graceful_shutdown_wait_loop_s: Annotated[float, Between(0.25, 86_400)] | None = None
    graceful_shutdown_timeout_s: Annotated[float, Between(0, 86_460), Variable("PIERHEAD_DRAIN_TIMEOUT_S")] | None = (
        None
    )
    startup: StartupBlock = field(default_factory=StartupBlock)
    run_user_code_in_separate_thread: Annotated[bool, Variable("PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD")] = False
    debug: Annotated[bool, Variable("PIERHEAD_DEBUG")] = False
    logging: LoggingBlock = field(default_factory=LoggingBlock)
    user_config: Annotated[
        dict[str, Any], Syntax("user_config"), Variable("PIERHEAD_USER_CONFIG", new_container=False)
    ] = field(default_factory=dict)
    shared_memory: SharedMemoryBlock | None = None
    llm: Annotated[Any, Syntax("llm"), NewContainer()] = None
    managed: Annotated[bool | None, NewContainer()] = None
    health: HealthBlock = field(default_factory=HealthBlock)
    metrics: MetricsBlock = field(default_factory=MetricsBlock)

    @property
    def own_protocol(self) -> Protocol:
        """As written, or what follows from the route."""
        return self.protocol or ("grpc" if self.route is None else "http")

    @property
    def own_port(self) -> int:
        """As written, or the protocol's default."""
        return self.port or DEFAULT_PORTS[self.own_protocol]

    @property
    def is_managed(self) -> bool:
        """As written; an image with a probe path of its own is not built on Pierhead's runtime."""
        return self.health.probe.path is None if self.managed is None else self.managed


class XServe(TypedDict, total=False):
    """The keywords of a service's class: the keys of ServeBlock, whose order and names a test holds.

    The kinds of values are checked where the compose file is written, all else of them where it is read.
    """

    replicas: int
    autoscale: Mapping[str, Any]
    rollout: Mapping[str, Any]
    canary: Mapping[str, Any]
    max_replicas_per_node: int
    gpu: Mapping[str, Any]
    protocol: str
    port: int
    listen: str
    route: str
    host: str
    strip_prefix: bool
    grpc_services: list[str]
    application: str
    auth: str
    allow: list[str]
    max_ongoing_requests: int
    max_queued_requests: int
    router: Mapping[str, Any]
    backpressure: Mapping[str, Any]
    request_timeout_s: float
    body_timeout_s: float
    streams_requests: bool
    graceful_shutdown_wait_loop_s: float
    graceful_shutdown_timeout_s: float
    startup: Mapping[str, Any]
    run_user_code_in_separate_thread: bool
    debug: bool
    logging: Mapping[str, Any]
    user_config: Mapping[str, Any]
    shared_memory: Mapping[str, Any]
    llm: Mapping[str, Any]
    managed: bool
    health: Mapping[str, Any]
    metrics: Mapping[str, Any]


# ----------------------------------------------------------------------------------------- a replica's environment


def variables() -> dict[str, Key]:
    """The keys that a replica gets by a variable, by the variable's name."""
    return {said.name: key for key in all_keys(ServeBlock) if (said := key.get(Variable))}


def variable_text(value: Any) -> str:
    """A value as the text of its variable."""
    if isinstance(value, float):
        return f"{value:.10g}"
    return value if isinstance(value, str) else json.dumps(value)
