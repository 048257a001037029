from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from .text import whole_number

Protocol = Literal["http", "grpc"]
Auth = Literal["none", "key", "jwt"]
Aggregation = Literal["mean", "max", "min"]
Placement = Literal["pack", "spread"]
AccessLogWord = Literal["sampled", "all", "off"]

DEFAULT_POLICY = "power_of_two"
"""How callers choose among a service's replicas by default."""

NO_USER_CONFIG = "{}"
"""The text of an empty user_config, which is in force in a replica that has just started."""

LABEL_PREFIX = "pierhead."
"""Of the controller's own labels on containers."""
COMPOSE_LABEL_PREFIX = "com.docker.compose."

MOST_REPLICAS = 1000
"""Upper bound of a service's replicas."""

GPU_PARTS = 10_000
"""The steps in which fractions of a GPU count, as in Ray."""


# ---------------------------------------------------------------------------------------------------------------- spec


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """How the controller and HAProxy ask a replica whether it is ready: GET http://<ip>:<port><path>, 2xx = ready."""

    port: int
    path: str
    period_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 3
    """Consecutive failures after which a replica that was ready counts as FAILED."""
    progress_timeout_s: float | None = None
    """How long a ready replica may have requests in flight without progress; None = forever."""
    haproxy_asks: bool = True
    """False: HAProxy only sees whether a replica takes connections (controller/desired/edge.py)."""


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """A share of one GPU: bytes of its memory, or a fraction of it. Several slots can share a GPU.

    Exactly one of the two is set. A fraction counts in steps of 0.0001, as in Ray.
    """

    memory_bytes: int | None = None
    fraction: float | None = None

    def of(self, size: int) -> int | None:
        """The part of `size` that a fraction is, in the same unit; None for a slot of memory."""
        return None if self.fraction is None else size * round(self.fraction * GPU_PARTS) // GPU_PARTS

    def __str__(self) -> str:
        """The text in a replica's label: "memory:17179869184", "fraction:0.5"."""
        if self.fraction is None:
            return f"memory:{self.memory_bytes}"
        return f"fraction:{self.fraction:.4f}".rstrip("0").rstrip(".")

    @classmethod
    def read(cls, text: str) -> GpuSlot | None:
        """The slot that `str` gave this text; None for any other text."""
        kind, _, amount = text.partition(":")
        if kind == "memory" and (size := whole_number(amount)):
            return cls(memory_bytes=size)
        if kind == "fraction" and re.fullmatch(r"0\.\d{1,4}|1", amount, re.ASCII) and float(amount) > 0:
            return cls(fraction=float(amount))
        return None


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The GPUs that one replica needs: a number of whole GPUs, or a slot of one."""

    count: int
    device_ids: tuple[str, ...] = ()
    """Only these UUIDs; empty = any GPU."""
    capabilities: tuple[str, ...] = ("gpu",)
    """What the nvidia driver shall mount ("gpu", "utility", "video", ...); with CDI, the CDI files define it."""
    slot: GpuSlot | None = None
    """None = whole GPUs; a slot is of one GPU, and `count` then is 1."""
    placement: Placement = "pack"
    """Whether slots go onto as few GPUs as possible, or onto as many."""
    kind: str = ""
    """Only GPUs whose name contains this, such as "H100"; "" = any."""
    constraints: tuple[str, ...] = ()
    """Only GPUs of nodes that fulfil these (the service's placement constraints)."""

    def takes(self, gpu_name: str) -> bool:
        """Whether a GPU of that name fits the request. A GPU without a known name does."""
        return not self.kind or not gpu_name or self.kind.casefold() in gpu_name.casefold()


@dataclass(frozen=True, slots=True)
class YieldSpec:
    """When a service gives its GPUs to one that waits for them (controller/plan/turns.py)."""

    idle_s: float = 3.0
    """It gives way at once when it has had no request for so long."""
    min_stay_s: float = 30.0
    """It stays so long after it was ready and, while it is in use, after another service began to wait."""
    group: str | None = None
    """Services with the same word start together and give way together."""


@dataclass(frozen=True, slots=True)
class BackpressureAnswer:
    """The answer to an HTTP client when the queue is full."""

    status_code: Literal[503, 429] = 503
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Which requests of a service have a line in the log of its replicas, and in HAProxy's."""

    word: AccessLogWord = "sampled"
    """`sampled`: errors, slow requests, and the sample."""
    sample: float = 0.01
    """Share of the requests, 0 to 1. One for the stack: a request of the sample has a line in every part."""
    slow_request_s: float = 1.0


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """A user's function decides: `package.module:function`, called with these keyword arguments."""

    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrometheusPolicy:
    """A query of Prometheus decides: the number of replicas that brings its value to `target`, as in Kubernetes."""

    query: str
    """PromQL with one number as its result; $service stands for the service's name."""
    target: float
    url: str = "http://prometheus:9090"
    """The stack's own Prometheus by default."""
    period_s: float = 5.0
    timeout_s: float = 4.0

    @property
    def stale_after_s(self) -> float:
        """Age from which a value no longer counts. An answer may take longer than `period_s`."""
        return 3 * max(self.period_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class AutoscaleSpec:
    """The bounds of a service's number of replicas, and the rule between them. Names and defaults are Ray Serve's."""

    min: int = 1
    max: int = 1
    initial: int | None = None
    """Replicas of a service that was never scaled; None = `min`."""
    target_ongoing_requests: float = 2.0
    """Requests per replica, in flight and waiting, that the autoscaler aims at."""
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    downscale_to_zero_delay_s: float | None = None
    """The delay of the step from one replica to none; None = `downscale_delay_s`."""
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    aggregation_function: Aggregation = "mean"
    panic_threshold: float | None = 2.0
    """A load of this many times what the running replicas are sized for is a burst; None = there are no bursts."""
    panic_window_s: float = 3.0
    policy: FunctionPolicy | PrometheusPolicy | None = None
    """The rule; None = Ray Serve's formula on the load."""

    @property
    def first(self) -> int:
        """The initial target."""
        return self.clamp(self.min if self.initial is None else self.initial)

    def clamp(self, replicas: int) -> int:
        """The nearest number that the bounds allow."""
        return max(self.min, min(self.max, replicas))


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How a service goes from one version to the next."""

    max_surge: int = 1
    """Replicas above the target while versions change."""
    max_unavailable: int = 0
    """Ready replicas that may be missing during a rollout."""
    auto_rollback: bool = True
    bake_s: float = 10.0
    """How long the first replicas of a new version serve with the old ones before more follow, and how long the whole
    is watched once all are new."""
    canary_weight: int | None = None
    """Per cent of the requests that a new version gets while it bakes; None = by its number of replicas."""
    incompatible: Literal["refuse", "allow"] = "refuse"
    """What becomes of a version whose contract is incompatible with that of the running one."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One Compose service that carries an `x-serve` block, as the user wrote it (defaults filled in)."""

    name: str
    image: str
    protocol: Protocol
    port: int
    """Port that takes the service's requests inside the container."""
    replicas: int
    """With `autoscale`: the first target."""
    probe: ProbeSpec
    autoscale: AutoscaleSpec | None = None
    rollout: RolloutSpec = RolloutSpec()
    callees: tuple[str, ...] = ()
    """Services that it needs (Compose's depends_on): their new versions come first."""
    route: str | None = None
    """HTTP path prefix without a trailing slash ("/" = everything); None = not reachable over HTTP from outside."""
    host: str | None = None
    """The name, or "*.name", that requests for the route are sent to; None = whatever name."""
    strip_prefix: bool = False
    grpc_services: tuple[str, ...] = ()
    """Full names of the gRPC services that port 9000 routes to this service."""
    application: str | None = None
    """The metadata by which gRPC clients choose it where other services have the same gRPC service."""
    auth: Auth = "none"
    """What HAProxy asks of clients: "key" = a key of the stack."""
    allow: tuple[str, ...] = ()
    """Networks, as 10.0.0.0/8, of the clients that HAProxy serves; () = all."""
    max_replicas_per_node: int | None = None
    """How many replicas may be on this machine at a time; None = as many as fit."""
    max_ongoing_requests: int = 100
    max_queued_requests: int = -1
    router_policy: str = DEFAULT_POLICY
    """How callers choose among its replicas: a policy of the runtime by name, or an import path in their images."""
    router_policy_kwargs: str = ""
    """The arguments of that policy: a JSON object; "" = none."""
    replica_header: bool = False
    """Whether requests from outside may name their replica in a header."""
    backpressure: BackpressureAnswer = BackpressureAnswer()
    access_log: AccessLog = AccessLog()
    request_timeout_s: float = 60.0
    body_timeout_s: float = 30.0
    """How long a client may take to send a body: at HAProxy its first 8 kB, at a managed replica all of it."""
    streams_requests: bool = False
    """Whether HAProxy passes a request on before any of its body has arrived."""
    graceful_shutdown_wait_loop_s: float | None = None
    """How long a draining replica serves at least, for callers that have not received the drain yet; None = as long as
    Discovery needs to reach them."""
    graceful_shutdown_timeout_s: float = 20.0
    """How long a draining replica may finish its requests before it is stopped."""
    stop_grace_period_s: float = 30.0
    """Compose's stop_grace_period: time between SIGTERM and SIGKILL."""
    startup_deadline_s: float = 1800.0
    user_config: str = NO_USER_CONFIG
    """The argument of `reconfigure` in its replicas, as canonical JSON; a change is sent to running replicas."""
    metrics_port: int | None = None
    """Port of GET <metrics_path>; None = the replica exports no metrics."""
    metrics_path: str = "/metrics"
    gpu: GpuRequest | None = None
    yields: YieldSpec | None = None
    """None = no other service takes its GPUs."""
    has_socket: bool = False
    """Whether its replicas take requests at Unix sockets (`unix_address`), too."""
    models: tuple[str, ...] = ()
    """Of a language model: its name, and `name:adapter` for each adapter that its replicas load at first."""
    managed: bool = True
    """True when the image is built on our runtime, which has an admin port and reads our environment."""
    has_build: bool = False
    """True when Compose can build the image; it is then never pulled."""
    container: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the engine's create call, without name, GPU and Pierhead labels. Canonical: sorted, JSON types."""
    definition_hash: str = ""
    """Hash of everything above that needs a new container when it changes (not of replicas, route or policies)."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where a replica has a file as a secret or config, and a digest of its content; by RESTART, when an operator last
    asked for other replicas of the same definition."""
    files_changed_at: float = field(default=0.0, compare=False)
    """When one of them last changed (unix time), also where its content is what it was."""

    @property
    def constraints(self) -> tuple[str, ...]:
        """The nodes on which its replicas may be: Compose's deploy.placement.constraints."""
        return tuple((self.container.get("Placement") or {}).get("Constraints") or ())

    @property
    def matched(self) -> str:
        """What HTTP requests have that come here: "/shop" or "shop.example/"; "" = none do."""
        return "" if self.route is None else f"{self.host or ''}{self.route}"

    @property
    def is_routed(self) -> bool:
        """Whether HAProxy routes requests to the service; only then it has a backend for it."""
        return self.route is not None or bool(self.grpc_services)


def by_precedence(spec: ServiceSpec) -> tuple[bool, bool, int, str]:
    """Sorts services with a route as HAProxy tries them: a name before "*.", before none, then the longest route."""
    host, route = spec.host or "", spec.route or ""
    return not host, host.startswith("*"), -len(route), spec.matched


RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the user wrote; `project` is the Compose project name."""

    project: str
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Compose's warnings about the files, for example a variable that is not set."""

    @property
    def takes_tokens(self) -> bool:
        """Whether a service asks its clients for a JSON Web Token."""
        return any(service.auth == "jwt" for service in self.services.values())


def socket_address(ip: str, port: int) -> str:
    """`ip:port`, an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


SOCKETS = "/run/pierhead/sockets"
"""Where HAProxy, the controller and callers have the sockets of replicas: a directory for each service."""
SOCKETS_VOLUME = "replica-sockets"
"""The volume's name in the top-level section (compose/compose.yaml)."""
LISTEN = "/run/pierhead/listen"
"""Where a replica makes its own; see controller/engines/sockets.py."""
ADMIN_SUFFIX = ".admin"
"""Of the socket with a replica's admin pages."""


def unix_address(service: str, replica: str) -> str:
    """`unix:<path>` of the socket that takes a replica's requests; "" for what is no replica's name.

    The path does not tell the project: it may have 107 characters.
    """
    _, *rest = replica.rsplit("-", 2)
    return f"unix:{SOCKETS}/{service}/{'-'.join(rest)}" if len(rest) == 2 else ""


def backend_name(service: str) -> str:
    """HAProxy's backend of a service."""
    return f"svc_{service}"


_GIB, _MIB = 1024**3, 1024**2


def slot_words(slot: GpuSlot) -> str:
    """A slot's amount: "16 GiB", "0.5"."""
    return _number(slot.fraction or 0.0) if slot.memory_bytes is None else size_words(slot.memory_bytes)


def size_words(size_bytes: int) -> str:
    """Bytes in a readable unit, rounded down: "2.1 GiB", "512 MiB"."""
    if size_bytes < _GIB:
        return f"{size_bytes // _MIB} MiB"
    return f"{_number(size_bytes * 10 // _GIB / 10)} GiB"


def _number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


@lru_cache(maxsize=1024)  # every replica is looked at in every tick
def digest(text: str) -> str:
    """Twelve hex digits that stand for a user_config; pierhead.replica.user_config makes the same."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
