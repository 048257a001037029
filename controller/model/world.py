"""The parts of a snapshot: containers, GPUs, HAProxy's servers, and the store's notes about them."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from .spec import ADMIN_SUFFIX, RESTART, GpuSlot, ServiceSpec, Spec, backend_name, socket_address, unix_address


class ContainerState(enum.StrEnum):
    """A container's state, by the engine."""

    CREATED = "created"
    PENDING = "pending"  # started, but the engine has no node for it yet, or prepares it there
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

    @property
    def has_ended(self) -> bool:
        """True once it has run, or could not be, and its processes are gone."""
        return self in (ContainerState.REMOVING, ContainerState.EXITED, ContainerState.DEAD)


class ReplicaHealth(enum.StrEnum):
    """Verdict of the controller's own probe."""

    UNKNOWN = "unknown"  # not asked yet, or not ready yet since it started
    READY = "ready"
    FAILED = "failed"  # was ready, then failed `probe.failures` times in a row, or reported that it will not recover


@dataclass(frozen=True, slots=True)
class UserConfigReport:
    """The user_config that a replica received last, and the one in force there, each by its digest."""

    wanted: str
    applied: str
    error: str = ""
    """Why `wanted` is not in force; "" when it is, or is being applied."""


@dataclass(frozen=True, slots=True)
class SleepReport:
    """Whether a replica sleeps: its process stays, and its engine has given the memory of its GPUs back."""

    can: bool
    """Its program can sleep."""
    wanted: bool
    """What it was asked for last."""
    asleep: bool
    """What is so now: it differs from `wanted` while the engine is at it."""
    error: str = ""
    """Why `wanted` did not come about; "" while it has, or may."""

    @property
    def is_awake(self) -> bool:
        """Takes requests: it neither sleeps nor is to."""
        return not (self.wanted or self.asleep)


@dataclass(frozen=True, slots=True)
class PublishedStats:
    """Numbers of a replica for its callers' policies. The controller passes them on and does not read them."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    version: int = 0
    """The replica's version of the numbers: the greater one is newer. 0 = it publishes nothing."""


NO_STATS = PublishedStats()

Unreached = Mapping[str, Mapping[str, str]]
"""By called service: replicas to which no call of a caller goes, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica reports of itself with the answer to its probe; None = it does not report that."""

    reported_draining: bool = False
    ongoing: int | None = None
    """Calls in flight; None of an image without the runtime."""
    lasting: int = 0
    """How many of these only a drain ends: WebSockets, endless streams."""
    queued: int | None = None
    """Its calls that wait for replicas of other services."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """The same by the service that they wait for."""
    unreached: Unreached = field(default_factory=dict)
    """The replicas to which no call of this replica goes."""
    answered: int | None = None
    """Requests that it has answered since its start, without refusals."""
    used: int | None = None
    """Requests that have ended since its start, without those that only asked about the service."""
    errors: int | None = None
    """How many of them with an error that is the service's own (HTTP 5xx, INTERNAL, UNKNOWN, ...)."""
    stage: str = ""
    """What its start is doing: "loading weights"."""
    broken: bool = False
    """It is not ready, and will not become ready by itself."""
    user_config: UserConfigReport | None = None
    """None also of an earlier runtime, and of a program that does not listen yet."""
    sleep: SleepReport | None = None
    """None also of an earlier runtime, and of an image without it."""
    stats: PublishedStats = NO_STATS
    """What it publishes for its callers' policies."""

    @property
    def is_awake(self) -> bool:
        """It neither sleeps nor is to, or it cannot."""
        return self.sleep is None or self.sleep.is_awake


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaVerdict(ReplicaReport):
    """What a replica reported last, and the conclusion from all its answers so far."""

    health: ReplicaHealth = ReplicaHealth.UNKNOWN
    health_detail: str = ""
    """The last probe's outcome in words: "503 from /readyz", "no answer within 2 s"."""
    ongoing_at: float | None = None
    """When `ongoing` was read."""
    progressed_at: float | None = None
    """When its work, or its start, last made progress, or when this controller began to probe it; None if it does not
    report progress."""
    stalled_since: float | None = None
    """Since when it has had requests in flight without progress; None while it makes progress."""
    ready_since: float | None = None
    """Since when it is ready without a break; None when it is not."""
    contract: bytes | None = field(default=None, repr=False)
    """Its contract as it tells it, a `pierhead.contract.v1.Application`; b"" = it has none; None = not asked yet."""


@dataclass(frozen=True, slots=True)
class ReplicaContainer(ReplicaVerdict):
    """One container with Pierhead's labels, and the verdict of its probe."""

    id: str
    name: str
    service: str
    version: str
    number: int
    state: ContainerState
    ip: str | None = None
    port: int | None = None
    """The port of its requests, which may differ from the spec's if the replica is of an older version. None = it has
    no such label (an earlier controller created it), so the spec's port applies."""
    probe: tuple[int, str] | None = None
    """Port and path of its readiness probe; None = it has no such label, so the spec's apply."""
    has_socket: bool = False
    """Whether it was made to take requests at a Unix socket."""
    graceful_shutdown_timeout_s: float | None = None
    stop_grace_period_s: float | None = None
    """The limits that it was created with, for a service that is no longer in the files; None = no such label."""
    node: str = ""
    """The machine that it runs on, by the engine's name for it; "" = it has no such label."""
    gpus: tuple[str, ...] = ()
    gpu_slot: GpuSlot | None = None
    """Its slot of its GPU; None = its GPUs whole (also without a label)."""
    created_at: float = 0.0
    started_at: float | None = None
    """None = it has never run."""
    exit_code: int | None = None
    oom_killed: bool = False
    engine_detail: str = ""
    """Why it does not run, in the engine's words: it has no node for it, or could not start it. "" = nothing to add."""
    moved: str = ""
    """That the engine has moved or replaced it by itself, from where and why, in words; "" = it has not."""
    is_half_started: bool = False
    """Whether its start is under way, or was interrupted: a start that is repeated completes it."""
    gpu_fault: str = ""
    """Why it cannot stay on its GPUs; "" when it may."""

    @property
    def begun_at(self) -> float:
        """When it was started, or created if it never was."""
        return self.created_at if self.started_at is None else self.started_at


@dataclass(frozen=True, slots=True)
class EdgePlace:
    """Where one of several nodes' HAProxys is reached."""

    address: str
    is_leaving: bool = False
    """Whether it was stopped. It serves some seconds longer; when it does not answer any more, it is not missed."""


@dataclass(frozen=True, slots=True)
class StrayContainer:
    """A container of one of our services that Compose started (`docker compose up --scale`)."""

    id: str
    name: str
    service: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU (or MIG device) that the engine can assign."""

    uuid: str
    driver: Literal["cdi", "nvidia"] = "cdi"
    name: str = ""
    memory_bytes: int | None = None
    """None = not known."""
    parent: str = ""
    """The UUID of the GPU that a MIG device is a part of, if that is known."""
    node: str = ""
    """The machine that it is in, by the engine's name for it; "" = there is only one."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of a GPU. Software can use one such part at a time."""
        return self.uuid.startswith("MIG-") or ":" in self.uuid


@dataclass(frozen=True, slots=True)
class GpuReading:
    """How much of each GPU's memory was in use, by all processes, at one moment."""

    at: float
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    """By UUID. A GPU that does not report it (because it shares the host's memory) is missing."""


class ServerState(enum.StrEnum):
    """HAProxy's administrative state of a server."""

    READY = "ready"
    DRAIN = "drain"
    MAINT = "maint"
    PARTLY = "partly"  # of several edges, some send requests to it and others do not

    @property
    def takes_requests(self) -> bool:
        """True while new requests may reach the server."""
        return self in (ServerState.READY, ServerState.PARTLY)


@dataclass(frozen=True, slots=True)
class Server:
    """One HAProxy server; its name is the replica's name."""

    backend: str
    name: str
    address: str
    """ip:port or unix:path"""
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
    """Whether `up` means that it is ready; False: only that it accepts connections."""
    limit: int = 0
    """Requests that HAProxy sends it at a time; 0 = not known."""


@dataclass(frozen=True, slots=True)
class HeldRequests:
    """Requests that HAProxy holds for a service without a server, and how earlier ones ended, since its last start."""

    now: int = 0
    served: int = 0
    """A server came, and HAProxy sent them to it."""
    expired: int = 0
    """None came in time."""
    left: int = 0
    """Their clients disconnected."""
    refused: int = 0
    """The waiting room was full, or closed."""


@dataclass(frozen=True, slots=True)
class RoutingState:
    """HAProxy's state. `pid` and `started_at` identify its process, `routing_hash` its configuration."""

    pid: int
    started_at: float
    version: str
    routing_hash: str
    servers: tuple[Server, ...] = ()
    backends: frozenset[str] = frozenset()
    """Names of the backends that the running configuration has."""
    queued: Mapping[str, int] = field(default_factory=dict)
    """By backend: requests that wait for any of its servers; `Server.queued` counts those for one server."""
    held: Mapping[str, HeldRequests] = field(default_factory=dict)
    """By backend, for backends that have ever held a request."""
    closed: frozenset[str] = frozenset()
    """Backends whose waiting room is closed: without a server their requests are refused at once."""
    keys: str = ""
    """Digest of the clients' keys that it has (`KeySet.digest`); "" = they must be written."""
    edges: Mapping[str, str] = field(default_factory=dict)
    """Where there are several HAProxys, by the node of each: why it differs from the others; "" = it is."""
    away: frozenset[str] = frozenset()
    """Of several HAProxies: the nodes of those that do not answer."""
    edge_addresses: Mapping[str, str] = field(default_factory=dict)
    """The address of each of them."""
    by_place: Mapping[tuple[str, str], Server] = field(init=False, repr=False, compare=False)
    """The servers by backend and name."""

    def __post_init__(self) -> None:
        """Index the servers: with hundreds of replicas each is looked up several times a tick."""
        places = {(server.backend, server.name): server for server in reversed(self.servers)}
        object.__setattr__(self, "by_place", places)

    def server_of(self, service: str, replica: str) -> Server | None:
        """The server of a replica; None where HAProxy has none."""
        return self.by_place.get((backend_name(service), replica))


@dataclass(frozen=True, slots=True)
class RouterSilence:
    """HAProxy hangs: neither its runtime API nor its HTTP port answers."""

    since: float
    """Since when both have been silent, or since the controller's last restart of it."""
    restarts: int = 0
    """How often the controller has restarted it since it last went a minute without hanging."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """A replica that is retired. Kept in the store, because a label cannot be added to a running container."""

    replica: str
    container_id: str
    draining_since: float
    stopping_since: float | None
    cause: str
    failed: bool = False
    """True if it is retired because it failed: its end then counts as a failure of the service."""
    sleeping_since: float | None = None
    """When it was first told to sleep, in the place of SIGTERM; None = it was not."""


def is_asleep(container: ReplicaContainer, retirement: Retirement | None) -> bool:
    """Whether a retired replica sleeps: its process stays, and it does not hold what its label says of its GPUs."""
    told = retirement is not None and retirement.sleeping_since is not None and retirement.stopping_since is None
    report = container.sleep
    return told and container.state.is_up and report is not None and report.wanted and report.asleep


FailureKey = tuple[str, str]
"""Service and version."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Consecutive failed tries of a service's version, which determine the backoff of the next start.

    Replicas that run at the same time are one try, however many of them fail: the cause may be outside of them.
    """

    count: int
    last_at: float
    """When the last try failed: the first of its replicas."""
    detail: str


def is_another_try(before: FailureRecord | None, began_at: float | None) -> bool:
    """Whether the failure of a replica that began then (None = not known) counts, after the failures before it."""
    return before is None or began_at is None or began_at >= before.last_at


@dataclass(frozen=True, slots=True)
class GpuFault:
    """Why no replica is placed on a GPU; see controller/observe/gpu_faults.py."""

    uuid: str
    reason: str
    at: float
    kind: Literal["gone", "failing", "marked"]


def version_of(definition_hash: str, image_id: str, files: Mapping[str, str] = MappingProxyType({})) -> str:
    """Eight hex digits over the definition, the image's content and the files'."""
    parts = [definition_hash, image_id, *(f"{digest} {target}" for target, digest in sorted(files.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def current_version(spec: ServiceSpec, images: Mapping[str, str | None]) -> str | None:
    """The version that new replicas of a service would have; None while its image is not on this machine."""
    image_id = images.get(spec.image)
    return version_of(spec.definition_hash, image_id, spec.files) if image_id else None


def restarted(spec: Spec, restarts: Mapping[str, str]) -> Spec:
    """The spec, in which services that an operator has restarted have another version than without that."""
    again = {
        name: replace(service, files={**service.files, RESTART: restarts[name]})
        for name, service in spec.services.items()
        if name in restarts
    }
    return replace(spec, services={**spec.services, **again}) if again else spec


def adopting(spec: Spec, containers: Iterable[ReplicaContainer], images: Mapping[str, str | None]) -> Spec:
    """The spec, in which a service keeps the version of replicas that an earlier build made, which counts no files.

    It keeps that until one of its files changes after the oldest of these replicas was created.
    """
    kept = {}
    for name, service in spec.services.items():
        if service.files and RESTART not in service.files:
            bare = replace(service, files={})
            version = current_version(bare, images)
            made = [one.created_at for one in containers if (one.service, one.version) == (name, version)]
            if made and service.files_changed_at <= min(made):
                kept[name] = bare
    return replace(spec, services={**spec.services, **kept}) if kept else spec


def probe_address(container: ReplicaContainer, spec: ServiceSpec) -> str | None:
    """Where a replica is asked whether it is ready; None while it has no address."""
    if container.has_socket:
        return unix_address(container.service, container.name) + ADMIN_SUFFIX
    port = spec.probe.port if container.probe is None else container.probe[0]
    return None if container.ip is None else socket_address(container.ip, port)


def service_address(container: ReplicaContainer, spec: ServiceSpec) -> str | None:
    """Where HAProxy reaches a replica; None while it has no address."""
    if container.has_socket:
        return unix_address(container.service, container.name)
    return tcp_address(container, spec)


def tcp_address(container: ReplicaContainer, spec: ServiceSpec) -> str | None:
    """The address of a replica's service port; None while it has none."""
    port = spec.port if container.port is None else container.port
    return None if container.ip is None else socket_address(container.ip, port)
