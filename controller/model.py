"""The controller's nouns: immutable values without I/O, shared by the planner, the executor and the boundaries.

Spec (what the user wrote), desired (spec plus overrides) and observed (one snapshot of the world) are separate types.
Times are seconds of one monotonic-enough wall clock (`time.time()`), handed in by the loop; durations end in `_s`.

States of a replica, derived from the snapshot and never stored:

    PENDING ----> STARTING ----> RUNNING ----> DRAINING ----> STOPPING ----> (gone)
    no container  container,     ready by      no new calls,  SIGTERM sent,
    yet: reason   not ready yet  its probe     finishing      until it exits
                      |             |
                      +--> FAILED <-+   exited by itself, startup deadline passed, or probe failed too often
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal["http", "grpc"]
Aggregation = Literal["mean", "max", "min"]
EventOutcome = Literal["ok", "failed", "info", "warning"]
"""How what an event tells of ended."""
Placement = Literal["pack", "spread"]

DEFAULT_POLICY = "power_of_two"
"""How callers choose among a service's replicas, unless it says otherwise."""

NO_USER_CONFIG = "{}"
"""The text of a user_config that sets nothing: what is in force in a replica that has just begun."""

GPU_PARTS = 10_000
"""Into how many parts a GPU can be divided: the steps in which fractions count, as in Ray."""


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
    """How long a ready replica may have requests in flight of which none moves; None = for ever."""
    haproxy_asks: bool = True
    """False: HAProxy only sees whether a replica takes connections (controller/edge.py)."""


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """A share of one GPU, beside which others may stand: so many bytes of its memory, or a fraction of it.

    Exactly one of the two. A fraction counts in steps of 0.0001, as Ray's do.
    """

    memory_bytes: int | None = None
    fraction: float | None = None

    def of(self, size: int) -> int | None:
        """How much of a GPU of that size a fraction is, in the same unit; None for memory."""
        return None if self.fraction is None else size * round(self.fraction * GPU_PARTS) // GPU_PARTS

    def __str__(self) -> str:
        """As a replica's label keeps it: "memory:17179869184", "fraction:0.5"."""
        if self.fraction is None:
            return f"memory:{self.memory_bytes}"
        return f"fraction:{self.fraction:.4f}".rstrip("0").rstrip(".")

    @classmethod
    def read(cls, text: str) -> GpuSlot | None:
        """The slot that `str` gave this text; None for any other text."""
        kind, _, amount = text.partition(":")
        if kind == "memory" and amount.isascii() and amount.isdecimal() and int(amount) > 0:
            return cls(memory_bytes=int(amount))
        if kind == "fraction" and re.fullmatch(r"0\.\d{1,4}|1", amount, re.ASCII) and float(amount) > 0:
            return cls(fraction=float(amount))
        return None


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """What one replica asks for: a number of whole GPUs, or a slot of one."""

    count: int
    device_ids: tuple[str, ...] = ()
    """Only these UUIDs; empty = whichever GPUs there are."""
    capabilities: tuple[str, ...] = ("gpu",)
    """What the nvidia driver shall mount ("gpu", "utility", "video", ...); CDI files say it themselves."""
    slot: GpuSlot | None = None
    """None = whole GPUs; a slot is of one GPU, and `count` then is 1."""
    placement: Placement = "pack"
    """Where slots go: onto as few GPUs as they fit on, or onto as many as there are."""
    kind: str = ""
    """Only GPUs whose name has this in it, such as "H100"; "" = any."""

    def takes(self, gpu_name: str) -> bool:
        """Whether a GPU of that name will do. One whose name is not known does: nothing says that it is another."""
        return not self.kind or not gpu_name or self.kind.casefold() in gpu_name.casefold()


@dataclass(frozen=True, slots=True)
class Backpressure:
    """What an HTTP client is told when there is no room for its request."""

    status_code: Literal[503, 429] = 503
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """A function of the user's own decides: `package.module:function`, called with these keyword arguments."""

    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrometheusPolicy:
    """A measured value decides: replicas are wanted so that it comes to `target`, as Kubernetes' autoscaler does it."""

    query: str
    """PromQL with one number as its result; $service stands for the service's name."""
    target: float
    url: str = "http://prometheus:9090"
    """The stack's own, unless written otherwise."""
    period_s: float = 5.0
    timeout_s: float = 4.0

    @property
    def stale_after_s(self) -> float:
        """A value that is older counts no more. An answer may take longer than the pause between two questions."""
        return 3 * max(self.period_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class AutoscaleSpec:
    """How many replicas a service may have, and what decides between. Names, meaning and defaults are Ray Serve's."""

    min: int = 1
    max: int = 1
    initial: int | None = None
    """Replicas of a service that was never scaled; None = `min`."""
    target_ongoing_requests: float = 2.0
    """Requests that one replica shall have, working and waiting, on average."""
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    downscale_to_zero_delay_s: float | None = None
    """For the step from one replica to none; None = `downscale_delay_s`."""
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    aggregation_function: Aggregation = "mean"
    panic_threshold: float | None = 2.0
    """A burst is load of this many times what the running replicas are for; None = no load is one."""
    panic_window_s: float = 3.0
    policy: FunctionPolicy | PrometheusPolicy | None = None
    """What decides; None = Ray Serve's formula on the load."""

    @property
    def first(self) -> int:
        """The target of a service that nothing was decided for."""
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
    """Ready replicas that may be missing meanwhile."""
    auto_rollback: bool = True
    bake_s: float = 10.0
    """How long the first replicas of a new version serve beside the old ones before more follow, and how long the whole
    is watched once all are new."""
    canary_weight: int | None = None
    """Per cent of the requests that a new version gets while it bakes; None = what its number of replicas brings."""


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
    """Services that it says it needs (Compose's depends_on): their new versions come first."""
    route: str | None = None
    """HTTP path prefix without a trailing slash ("/" = everything); None = not reachable over HTTP from outside."""
    strip_prefix: bool = False
    grpc_services: tuple[str, ...] = ()
    """Full names of the gRPC services that port 9000 routes to this service."""
    max_replicas_per_node: int | None = None
    """How many replicas may be on this machine at a time; None = as many as fit."""
    max_ongoing_requests: int = 100
    max_queued_requests: int = -1
    router_policy: str = DEFAULT_POLICY
    """How its callers choose among its replicas: a name of the runtime's, or an import path for them."""
    router_policy_kwargs: str = ""
    """What they make that policy with: a JSON object, "" = nothing."""
    backpressure: Backpressure = Backpressure()
    request_timeout_s: float = 60.0
    graceful_shutdown_wait_loop_s: float | None = None
    """How long a draining replica goes on serving at least, for callers that have not heard of it yet; None = as long
    as they need to hear of it."""
    graceful_shutdown_timeout_s: float = 20.0
    """How long a draining replica may finish what it has before it is told to stop regardless."""
    stop_grace_period_s: float = 30.0
    """Compose's stop_grace_period: time between SIGTERM and SIGKILL."""
    startup_deadline_s: float = 1800.0
    user_config: str = NO_USER_CONFIG
    """What `reconfigure` of its replicas gets, as canonical JSON; running ones are given another one as it changes."""
    metrics_port: int | None = None
    """Port of GET <metrics_path>; None = the replica exports no metrics."""
    metrics_path: str = "/metrics"
    gpu: GpuRequest | None = None
    managed: bool = True
    """True when the image is built on our runtime: its admin port tells in-flight counts and takes environment."""
    has_build: bool = False
    """True when Compose can build the image; it is then never pulled."""
    container: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the engine's create call, without name, GPU and Pierhead labels. Canonical: sorted, JSON types."""
    definition_hash: str = ""
    """Hash of everything above that needs a new container when it changes (not of replicas, route or policies)."""

    @property
    def is_routed(self) -> bool:
        """Whether anything from outside reaches the service; only then HAProxy has a backend for it."""
        return self.route is not None or bool(self.grpc_services)


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the user wrote; `project` is the Compose project name."""

    project: str
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """What Compose said while it read the files, such as a variable that is not set and became empty."""


@dataclass(frozen=True, slots=True)
class VersionGoal:
    """Which version of a service there shall be now; with `keep`, a trial: a first batch beside the one that works."""

    version: str | None
    """What new replicas are made as; None: the image is not on this machine, so nobody can tell."""
    spec: ServiceSpec | None = None
    """How that one is made; None when nobody remembers: what runs of it stays, none can be added."""
    keep: str | None = None
    """The version that goes on serving until `version` has proved itself."""
    keep_spec: ServiceSpec | None = None
    """How that one is made; None = not known, so none can be replaced."""
    weight: int | None = None
    """Per cent of the requests for `version` while `keep` serves, too; None = by number of replicas."""
    goes_back: bool = False
    """Replicas of other versions are not to stay: so many go as are in the way of `version`, whatever max_unavailable
    says; the last one only where that is not 0."""


@dataclass(frozen=True, slots=True)
class Desired:
    """Spec plus scale overrides plus rollouts: how many replicas of which version each service shall have now."""

    project: str
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    """As the compose files say, or as an earlier version was made where that one is to stay; its probe, its
    max_ongoing_requests and its request_timeout_s are what HAProxy is to use now (controller/edge.py).
    """
    targets: Mapping[str, int] = field(default_factory=dict)
    goals: Mapping[str, VersionGoal] = field(default_factory=dict)
    """By service; one that is not here goes straight to what its spec and image give."""
    switched_off: frozenset[str] = frozenset()
    """Services that shall have no replica until somebody says so: no request wakes them."""
    routing_hash: str = ""
    """Of the HAProxy configuration these services need; "" = not to be compared."""


# ------------------------------------------------------------------------------------------------------------ observed


class ContainerState(enum.StrEnum):
    """What the engine says of a container."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    REMOVING = "removing"
    EXITED = "exited"
    DEAD = "dead"

    @property
    def is_up(self) -> bool:
        """True while processes of the container may exist."""
        return self in (ContainerState.RUNNING, ContainerState.PAUSED, ContainerState.RESTARTING)


class Health(enum.StrEnum):
    """Verdict of the controller's own probe."""

    UNKNOWN = "unknown"  # not asked yet, or not ready yet since it started
    READY = "ready"
    FAILED = "failed"  # was ready, then failed `probe.failures` times in a row, or gave itself up


@dataclass(frozen=True, slots=True)
class UserConfigReport:
    """Which user_config a replica was last given, and which one is in force there, each by its digest."""

    wanted: str
    applied: str
    error: str = ""
    """Why the one that it was given is not in force; "" when it is, or is being applied."""


@dataclass(frozen=True, slots=True)
class PublishedStats:
    """Numbers that a replica tells callers, for their policies. The controller passes them on and reads none."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    version: int = 0
    """The replica's own: of two, the greater one is newer. 0 = it publishes nothing."""


NO_STATS = PublishedStats()


@dataclass(frozen=True, slots=True)
class ReplicaContainer:
    """One container that carries our labels, with what the probe knows of it."""

    id: str
    name: str
    service: str
    version: str
    number: int
    state: ContainerState
    ip: str | None = None
    port: int | None = None
    """Where it takes requests: a replica of an older version may listen elsewhere than the spec says now. None = the
    container does not say (an earlier controller made it): the spec's port."""
    probe: tuple[int, str] | None = None
    """Port and path that it is asked at whether it is ready; None = the container does not say: the spec's."""
    graceful_shutdown_timeout_s: float | None = None
    stop_grace_period_s: float | None = None
    """What it was made with, for when its service is no longer in the files; None = the container does not say."""
    node: str = ""
    """The machine that it was made on, by the engine's name for it; "" = the container does not say."""
    gpus: tuple[str, ...] = ()
    gpu_slot: GpuSlot | None = None
    """What it has of its GPU; None = all of each (also where the container does not say)."""
    created_at: float = 0.0
    started_at: float | None = None
    exit_code: int | None = None
    oom_killed: bool = False
    health: Health = Health.UNKNOWN
    health_detail: str = ""
    """The last probe's outcome in words: "503 from /readyz", "no answer within 2 s"."""
    reported_draining: bool = False
    ongoing: int | None = None
    """Calls in flight as the replica itself reports them; None where it does not (a foreign image)."""
    ongoing_at: float | None = None
    """When `ongoing` was read."""
    queued: int | None = None
    """Calls of this replica that wait for replicas of other services."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """The same by the service that they wait for."""
    answered: int | None = None
    """Requests that it has answered since its start, refusals left out; None where it does not say."""
    errors: int | None = None
    """How many of them with an error that is the service's own (HTTP 5xx, INTERNAL, UNKNOWN, ...)."""
    told: str = ""
    """What it says itself of why it is not ready: "loading weights, 37 %"."""
    broken: bool = False
    """Whether it says itself that it will not get well."""
    progressed_at: float | None = None
    """When its work, or its start, was last seen to move, or when this controller began to ask it; None where it does
    not say."""
    stalled_since: float | None = None
    """Since when it has had requests in flight at every look, and none of them moved; None when it works."""
    user_config: UserConfigReport | None = None
    """None where it does not say: a foreign image, an earlier runtime, a program that does not listen yet."""
    stats: PublishedStats = NO_STATS
    """What it publishes for its callers' policies."""
    gpu_fault: str = ""
    """Why it cannot stay on its GPUs; "" when it may."""


@dataclass(frozen=True, slots=True)
class StrayContainer:
    """A container of one of our services that we did not launch (`docker compose up --scale`, an old one-off)."""

    id: str
    name: str
    service: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU (or MIG device) the engine can hand out."""

    uuid: str
    driver: Literal["cdi", "nvidia"] = "cdi"
    name: str = ""
    memory_bytes: int | None = None
    """None where nothing tells it."""
    parent: str = ""
    """Of a MIG device: the UUID of the GPU that it is a part of, where that is known."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of a GPU. Software can use one such part at a time."""
        return self.uuid.startswith("MIG-") or ":" in self.uuid


@dataclass(frozen=True, slots=True)
class GpuReading:
    """How much of each GPU's memory was in use, by whomever, at one moment."""

    at: float
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    """By UUID. A GPU that does not tell (its memory is the host's) is not in it."""


class ServerState(enum.StrEnum):
    """HAProxy's administrative state of a server."""

    READY = "ready"
    DRAIN = "drain"
    MAINT = "maint"


@dataclass(frozen=True, slots=True)
class Server:
    """One HAProxy server; its name is the replica's name."""

    backend: str
    name: str
    address: str
    """ip:port"""
    state: ServerState
    up: bool
    sessions: int = 0
    queued: int = 0
    weight: int = 1
    answered: int = 0
    """HTTP responses since it was added."""
    errors: int = 0
    """How many of them were 5xx."""
    is_asked: bool = True
    """Whether `up` says that it is ready; False: only that it takes connections."""


@dataclass(frozen=True, slots=True)
class Held:
    """Requests that HAProxy holds for a service without a server; and how those before ended, since its last start."""

    now: int = 0
    served: int = 0
    """A server came, and they went on."""
    expired: int = 0
    """None came in time."""
    left: int = 0
    """Their clients went away."""
    refused: int = 0
    """As many as may wait did already; or nobody may wait for it any more."""


@dataclass(frozen=True, slots=True)
class RoutingState:
    """What HAProxy is doing now. `pid` and `started_at` tell a restart; `routing_hash` the configuration it runs."""

    pid: int
    started_at: float
    version: str
    routing_hash: str
    servers: tuple[Server, ...] = ()
    backends: frozenset[str] = frozenset()
    """Names of the backends that the running configuration has."""
    queued: Mapping[str, int] = field(default_factory=dict)
    """By backend: requests that wait for any of its servers; those that wait for a certain one are the server's."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """By backend, those of which any was ever held."""
    closed: frozenset[str] = frozenset()
    """Backends whose waiting room is closed: without a server their requests are refused at once."""
    _by_place: Mapping[tuple[str, str], Server] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the servers: with hundreds of replicas each is looked up several times a tick."""
        places = {(server.backend, server.name): server for server in reversed(self.servers)}
        object.__setattr__(self, "_by_place", places)

    def server_of(self, service: str, replica: str) -> Server | None:
        """The server of a replica; None where HAProxy has none."""
        return self._by_place.get((backend_name(service), replica))


@dataclass(frozen=True, slots=True)
class Retirement:
    """A replica on its way out. Kept in the store: a label cannot be added to a running container."""

    replica: str
    container_id: str
    draining_since: float
    stopping_since: float | None
    cause: str
    failed: bool = False
    """True when it goes because it failed: its end then counts as a failure of the service."""


FailureKey = tuple[str, str]
"""Service and version."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """How often in a row a version of a service was tried and failed; gives the next start its backoff.

    Replicas that were there together are one try, however many of them fail: of what ends them all nobody knows whether
    it is theirs.
    """

    count: int
    last_at: float
    """When the last try failed: the first of its replicas."""
    detail: str


def is_another_try(before: FailureRecord | None, began_at: float | None) -> bool:
    """Whether a replica that has failed and began then (None = not known) counts, after those that have before."""
    return before is None or began_at is None or began_at >= before.last_at


@dataclass(frozen=True, slots=True)
class Revision:
    """How a version of a service is made: `spec` is JSON that controller/revisions.py writes and reads."""

    service: str
    version: str
    first_at: float
    image: str
    image_id: str
    spec: str


@dataclass(frozen=True, slots=True)
class GpuFault:
    """Why no replica is placed on a GPU; see controller/gpu_faults.py."""

    uuid: str
    reason: str
    at: float
    kind: Literal["gone", "failing", "marked"]


class RolloutPhase(enum.StrEnum):
    """See the drawing in controller/rollout.py."""

    WAITING = "WAITING"
    STARTING = "STARTING"
    BAKING = "BAKING"
    ROLLING = "ROLLING"
    SETTLING = "SETTLING"
    ROLLING_BACK = "ROLLING_BACK"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A change of version that is going on."""

    source: str | None
    to: str
    phase: RolloutPhase
    since: float
    """When the phase began."""
    begun_at: float
    cause: str
    stuck_since: float | None = None
    """Since when there has been no place for the next replica, and nobody on the way who may leave one; or HAProxy has
    not sent to all replicas that are ready."""
    is_return: bool = False
    """To an earlier version that somebody asked for: it has proved itself, so nobody waits to watch it."""
    excused: int = 0
    """Failures in a row of `to` that are not held against it: they came together with those of others, or before its
    first replica was ready."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A version that the files give and that is not to run, until somebody asks for it or they give another one."""

    version: str
    reason: str
    at: float
    is_asked: bool = False
    """Somebody wanted it so: nothing has failed."""


@dataclass(frozen=True, slots=True)
class ServiceRollout:
    """Where a service stands between its versions. Kept in the store: it cannot be read back from the world."""

    stable: str | None = None
    """The version that has proved itself; None before the first one has."""
    rollout: Rollout | None = None
    rejected: Rejection | None = None
    previous: tuple[str, ...] = ()
    """Versions that were stable before, the newest first."""
    approved: str | None = None
    """The version that `pierhead deploy` asked for, where new versions wait for it."""
    is_unproven: bool = False
    """`stable` was taken while no replica was there, so none of it has ever been ready."""
    tried_since: float | None = None
    """Of one that is unproven: since when replicas of it are wanted; None while none are."""

    def rejection_of(self, version: str | None) -> Rejection | None:
        """Why a version is not tried again by itself; None where nothing speaks against it."""
        return self.rejected if self.rejected is not None and self.rejected.version == version else None


@dataclass(frozen=True, slots=True)
class Observed:
    """One immutable snapshot of the real world, everything the planner may know."""

    containers: tuple[ReplicaContainer, ...] = ()
    strays: tuple[StrayContainer, ...] = ()
    images: Mapping[str, str | None] = field(default_factory=dict)
    """Image reference of a service -> image id; None = not on this machine."""
    gpus: tuple[Gpu, ...] = ()
    foreign_gpu_holders: Mapping[str, str] = field(default_factory=dict)
    """GPU UUID -> name of a container that is not ours and holds it."""
    gpu_reading: GpuReading | None = None
    """None = memory in use cannot be read: what containers hold is all that is known of a GPU."""
    routing: RoutingState | None = None
    """None = HAProxy does not answer."""
    retirements: Mapping[str, Retirement] = field(default_factory=dict)
    """By container id."""
    failures: Mapping[FailureKey, FailureRecord] = field(default_factory=dict)
    gpu_faults: Mapping[str, str] = field(default_factory=dict)
    """GPU UUID -> why no replica is to be placed on it."""
    in_progress: tuple[Action, ...] = ()
    """Actions of earlier plans that have not ended; the planner plans nothing for their targets."""
    _by_service: Mapping[str, tuple[ReplicaContainer, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the containers: every part of the controller asks for those of one service, several times a tick."""
        found: dict[str, list[ReplicaContainer]] = {}
        for container in sorted(self.containers, key=lambda container: (container.number, container.name)):
            found.setdefault(container.service, []).append(container)
        object.__setattr__(self, "_by_service", {name: tuple(listed) for name, listed in found.items()})

    @property
    def services(self) -> AbstractSet[str]:
        """Names of the services that have containers."""
        return self._by_service.keys()

    def containers_of(self, service: str) -> tuple[ReplicaContainer, ...]:
        """The containers of one service, in the order of their numbers."""
        return self._by_service.get(service, ())


# ---------------------------------------------------------------------------------------------------- plan and actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One API call. `target` is the replica, service or "routing" it is about; `cause` says why it is needed."""

    target: str
    service: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullImage(Action):
    """Bring a foreign image to this machine; target = service."""

    image: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContainer(Action):
    """Create (not start) a replica's container; target = replica name."""

    version: str
    number: int
    gpus: tuple[Gpu, ...] = ()
    spec: ServiceSpec | None = field(default=None, repr=False)
    """How this version is made; None = as the compose files say."""
    gpu_slot: GpuSlot | None = None
    """What it gets of its GPU; None = all of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartContainer(Action):
    """Start a created container; target = replica name (known by name: its id may not exist when planned)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRetirement(Action):
    """Mark a replica as draining: Discovery stops offering it, the mark survives the controller."""

    container_id: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalContainer(Action):
    """Send SIGTERM (recorded as the start of STOPPING; the container's own stop signal in its place) or SIGKILL."""

    container_id: str
    signal: Literal["SIGTERM", "SIGKILL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveContainer(Action):
    """Remove a container (force: one that still runs); the retirement mark goes with it.

    `failed` is true when the replica ended by itself: its last log lines are then kept in the event and the service's
    failure record grows.
    """

    container_id: str
    force: bool = False
    failed: bool = False
    version: str = ""
    """Of the replica; what a failure is counted for."""
    began_at: float | None = None
    """When the replica was started, or made where it never was; None = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUserConfig(Action):
    """Tell a replica which user_config it shall have; it goes on meanwhile. Target = replica name."""

    container_id: str
    address: str
    """Of its admin port."""
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddServer(Action):
    """Give HAProxy a ready replica: add server, enable health, enable server."""

    backend: str
    address: str
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerState(Action):
    """Put a server into ready, drain or maint."""

    backend: str
    state: ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerWeight(Action):
    """Give a server its share of the backend's requests: its weight (1 to 256) of the sum of all."""

    backend: str
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownSessions(Action):
    """End what a server still has past its deadline."""

    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteServer(Action):
    """Wait until the server is removable and delete it."""

    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWaitingRoom(Action):
    """Say whether requests of a backend without servers are held for a first one, or refused; target = service."""

    backend: str
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRouting(Action):
    """Write the configuration for these services and reload; only for a new or changed route or service."""

    services: tuple[ServiceSpec, ...]
    routing_hash: str


@dataclass(frozen=True, slots=True)
class Step:
    """An action with its place in the plan: `after` holds the numbers of the steps that must succeed first."""

    number: int
    action: Action
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingReplica:
    """A replica that should exist and cannot be started yet; `reason` is one sentence with its numbers."""

    service: str
    reason: str
    blocked: bool = False
    """True when waiting alone will not help: no GPU is free, the image has to be built."""
    has_no_place: bool = False
    """True when this machine has no room for it: no GPU is free, or it may hold no more replicas of the service."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The ordered difference of desired and observed; `str(plan)` is the dry run and what tests compare."""

    steps: tuple[Step, ...] = ()
    pending: tuple[PendingReplica, ...] = ()
    next_look_s: float | None = None
    """When something is waited for (a drain, a backoff): look again in this many seconds at the latest."""
    awaits_gpu_memory: bool = False
    """Whether a start waits for GPU memory that is in use, or for a reading of it."""

    def __str__(self) -> str:
        from controller.plan_text import render_plan

        return render_plan(self)


# ------------------------------------------------------------------------------------------------------------- outward


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One line of what Discovery tells callers."""

    replica: str
    address: str
    draining: bool
    max_ongoing_requests: int
    version: str
    node: str = ""
    weight: int = 1
    stats: PublishedStats = NO_STATS


@dataclass(frozen=True, slots=True)
class ServiceEndpoints:
    """All that Discovery tells callers of one service."""

    replicas: tuple[Endpoint, ...] = ()
    max_queued_requests: int = -1
    """How many calls may wait at each caller; -1 = no bound."""
    policy: str = DEFAULT_POLICY
    policy_kwargs: str = ""
    """What callers make that policy with: a JSON object, "" = nothing."""
    scaled_to_zero_by: str = ""
    """What has set it to no replica, in words, so that no call wakes it; "" = nothing has."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for `GET /api/v1/events` and `make events`."""

    at: float
    kind: str
    """Action class name in snake case, or a state change: replica_ready, replica_failed, spec_error, scale, ..."""
    service: str
    target: str
    message: str
    outcome: EventOutcome = "info"


def replica_name(project: str, service: str, version: str, number: int) -> str:
    """`<project>-<service>-<version>-<n>`: deterministic, so creating the same replica twice is "already exists"."""
    return f"{project}-{service}-{version}-{number}"


def version_of(definition_hash: str, image_id: str) -> str:
    """Eight hex digits over the definition and the image's content: what a replica was made from."""
    return hashlib.sha256(f"{definition_hash}\n{image_id}".encode()).hexdigest()[:8]


def current_version(spec: ServiceSpec, images: Mapping[str, str | None]) -> str | None:
    """The version that new replicas of a service would have; None while its image is not on this machine."""
    image_id = images.get(spec.image)
    return version_of(spec.definition_hash, image_id) if image_id else None


def goal_of(desired: Desired, observed: Observed, service: str) -> VersionGoal:
    """Which version of a service there shall be now."""
    goal = desired.goals.get(service)
    if goal is not None:
        return goal
    spec = desired.services.get(service)
    return VersionGoal(current_version(spec, observed.images) if spec else None, spec)


def socket_address(ip: str, port: int) -> str:
    """`ip:port`, an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def service_address(container: ReplicaContainer, spec: ServiceSpec) -> str | None:
    """Where a replica takes the service's requests; None while it has no address."""
    port = spec.port if container.port is None else container.port
    return None if container.ip is None else socket_address(container.ip, port)


def backend_name(service: str) -> str:
    """HAProxy's backend of a service."""
    return f"svc_{service}"


ReplicaState = Literal["PENDING", "STARTING", "RUNNING", "DRAINING", "STOPPING", "FAILED", "CRASH_LOOP"]
"""CRASH_LOOP is a PENDING replica whose predecessors failed again and again: it waits before it is tried once more."""

ServiceState = Literal["UPDATING", "HEALTHY", "UNHEALTHY", "DEPLOY_FAILED", "UPSCALING", "DOWNSCALING"]
"""Ray Serve's words for a deployment."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One row of the status table."""

    name: str
    wanted: int
    ready: int
    message: str
    state: ServiceState = "HEALTHY"
    replicas: tuple[ReplicaStatus, ...] = ()
    converged: bool = False
    """As many as wanted, all of them ready and of the current version, nothing on its way out."""
    blocked: str = ""
    """Why it will not converge by waiting; "" when it may."""
    override: int | None = None
    """What `make scale` set, when it did."""
    autoscale: AutoscaleStatus | None = None
    """None for a service whose number of replicas is fixed."""
    rollout: RolloutStatus | None = None
    """None for a service that the compose files do not have any more."""
    user_config: UserConfigStatus | None = None
    """None where nothing is set, and nothing is in force."""


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Which version of a service is wanted, and what is going on between versions."""

    version: str
    """What new replicas are made as; "" = not known."""
    offered: str
    """What the files and the image give; "" = the image is not on this machine."""
    state: ServiceRollout = ServiceRollout()
    ready: int = 0
    """Ready replicas of the version that is being rolled out, else of `version`."""
    message: str = ""
    changes: tuple[str, ...] = ()
    """What makes `offered` another version than the stable one."""


@dataclass(frozen=True, slots=True)
class UserConfigStatus:
    """How far a service's user_config has come. Replicas are those that serve and have the wanted version."""

    wanted: str
    """Its digest."""
    applied: int
    """Replicas in which it is in force."""
    replicas: int
    refused: tuple[str, ...] = ()
    """One sentence for each replica that does not take it, those that start included."""
    changes: tuple[str, ...] = ()
    """What is another value in it than in the one that a replica has now; empty when all have it."""

    @property
    def everywhere(self) -> bool:
        """Whether every replica has it."""
        return self.applied == self.replicas and not self.refused


@dataclass(frozen=True, slots=True)
class AutoscaleStatus:
    """What the autoscaler sees of a service, and wants."""

    min: int
    max: int
    target: int
    load: float
    """Requests in work and waiting, over the service's look_back_period_s."""
    wanted: int
    """Replicas that this load asks for; it becomes the target when it has lasted."""
    paused: bool = False
    """`make scale` has set a number."""
    basis: str = ""
    """What a policy of the user's goes by, in words; "" = the load."""
    problem: str = ""
    """Why the policy gives no number, so that the target is held; "" when it gives one."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as people see it."""

    name: str
    state: ReplicaState
    version: str
    address: str
    gpus: tuple[str, ...]
    ongoing: int | None
    message: str
