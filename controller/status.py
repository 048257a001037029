"""What people and machines are told: status rows, Discovery's endpoints, Prometheus's targets. Pure.

Everything here is derived from one snapshot, so that no two of these ever disagree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from controller.apply import Refusal
from controller.errors import ImageNotFound
from controller.loads import held_at_edge
from controller.model import (
    AutoscaleStatus,
    CreateContainer,
    Desired,
    Endpoint,
    FailureRecord,
    Gpu,
    GpuReading,
    Health,
    Observed,
    PendingReplica,
    Plan,
    PullImage,
    ReplicaContainer,
    ReplicaState,
    ReplicaStatus,
    RolloutPhase,
    RolloutStatus,
    ServerState,
    ServiceEndpoints,
    ServiceRollout,
    ServiceSpec,
    ServiceState,
    ServiceStatus,
    UserConfigStatus,
    VersionGoal,
    goal_of,
    service_address,
    socket_address,
)
from controller.phases import Phase, gets_traffic, phase_of
from controller.placement import GpuLedger, slot_words
from controller.plan_text import describe
from controller.shares import weights
from controller.user_config import progress_words, user_config_status

CRASH_LOOP_FAILURES = 3

SHOWN_AS: Mapping[Phase, ReplicaState] = {
    Phase.CREATED: "STARTING",
    Phase.STARTING: "STARTING",
    Phase.RUNNING: "RUNNING",
    Phase.DRAINING: "DRAINING",
    Phase.STOPPING: "STOPPING",
    Phase.STOPPED: "STOPPING",
    Phase.FAILED: "FAILED",
}


@dataclass(frozen=True, slots=True)
class GpuSlotUse:
    """One replica's slot of a GPU."""

    replica: str
    amount: str
    """In words: "16 GiB", "0.5"."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU (or MIG device) and who holds it ("" = nobody). Sizes are None where they are not known."""

    uuid: str
    name: str
    holder: str
    """Who holds all of it, or all who have slots of it."""
    slots: tuple[GpuSlotUse, ...] = ()
    memory_bytes: int | None = None
    used_bytes: int | None = None
    """Memory in use by anybody, as last read."""
    free_bytes: int | None = None
    """What a new slot could have."""
    fault: str = ""
    """Why no replica is placed on it; "" when one may be."""


@dataclass(frozen=True, slots=True)
class View:
    """What the loop publishes after each tick; the API answers from it alone. `desired` is None before a first spec.

    All times in it are the controller's clock's; what people are told goes through `wall_time`.
    """

    at: float
    project: str
    desired: Desired | None = None
    observed: Observed | None = None
    plan: Plan = field(default_factory=Plan)
    services: tuple[ServiceStatus, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    gpu_memory_problem: str = ""
    """Why the memory in use is not known, in words."""
    endpoints: Mapping[str, ServiceEndpoints] = field(default_factory=dict)
    targets: tuple[Mapping[str, Any], ...] = ()
    spec_problems: tuple[str, ...] = ()
    files: Hashable = None
    """The fingerprint of the compose files that it is made from."""
    notices: tuple[str, ...] = ()
    """What is wrong beyond a single service, one sentence each."""
    refusals: tuple[Refusal, ...] = ()
    """Actions that failed and are not to be tried again yet."""
    engine_reachable: bool | None = None
    """None = not asked yet."""
    haproxy_reachable: bool | None = None
    ahead_s: float = 0.0
    """By how much the wall clock was ahead of the controller's at `at`; behind it, where negative."""

    def wall_time(self, at: float) -> float:
        """What the wall clock would have said at a time of the controller's clock, as it is set now.

        Ages are then right whenever somebody set it; and what events carry is of the same clock.
        """
        return at + self.ahead_s


def service_rows(
    desired: Desired,
    observed: Observed,
    plan: Plan,
    refusals: Iterable[Refusal],
    overrides: Mapping[str, int],
    now: float,
    autoscaled: Mapping[str, AutoscaleStatus] | None = None,
    rollouts: Mapping[str, RolloutStatus] | None = None,
    user_configs: Mapping[str, str] | None = None,
) -> tuple[ServiceStatus, ...]:
    """Return one row a service, by name; services that were removed and still have replicas are among them.

    `user_configs`: those that were seen, by digest; a change is told as the difference from them.
    """
    refusals = tuple(refusals)
    names = sorted({*desired.services, *observed.services})
    return tuple(
        _row(
            _Material(
                name=name,
                spec=desired.services.get(name),
                goal=goal_of(desired, observed, name),
                wanted=desired.targets.get(name, 0),
                observed=observed,
                containers=observed.containers_of(name),
                pending=tuple(pending for pending in plan.pending if pending.service == name),
                creating=_creations(name, observed, plan),
                refusals=tuple(refusal for refusal in refusals if refusal.action.service == name),
                override=overrides.get(name) if name in desired.services else None,
                autoscale=(autoscaled or {}).get(name),
                rollout=(rollouts or {}).get(name),
                user_config=_user_config(name, desired, observed, user_configs or {}, now),
                now=now,
            )
        )
        for name in names
    )


def _user_config(
    name: str, desired: Desired, observed: Observed, texts: Mapping[str, str], now: float
) -> UserConfigStatus | None:
    spec = desired.services.get(name)
    if spec is None:
        return None
    goal, mine = goal_of(desired, observed, name), observed.containers_of(name)
    return user_config_status(mine, spec, goal, observed.retirements, texts, now)


def notices(observed: Observed | None, refusals: Iterable[Refusal], engine_error: str, now: float) -> tuple[str, ...]:
    """Return what is wrong beyond a single service."""
    found = []
    if engine_error:
        found.append(f"the Docker Engine does not answer, what is shown is old: {engine_error}")
    if observed is not None and observed.routing is None:
        found.append("HAProxy does not answer: nothing can be added to it or taken from it until it is back")
    for uuid, reason in sorted(observed.gpu_faults.items()) if observed else ():
        found.append(f"GPU {uuid} is not used: {reason}; `pierhead unmark {uuid}` when it is well again")
    found += [_refusal_words(refusal, now) for refusal in refusals if not refusal.action.service]
    return tuple(found)


def gpu_uses(observed: Observed) -> tuple[GpuUse, ...]:
    """Return every GPU with its holders, in the engine's order."""
    reading = observed.gpu_reading or GpuReading(0.0)
    # However old the reading is: it is what there is to show.
    ledger = GpuLedger.of(observed, now=reading.at)
    holders = dict(observed.foreign_gpu_holders)
    slots: dict[str, list[GpuSlotUse]] = {}
    for container in sorted(observed.containers, key=lambda container: container.name):
        for uuid in container.gpus:
            if container.gpu_slot is None:
                holders[uuid] = container.name
            else:
                slots.setdefault(uuid, []).append(GpuSlotUse(container.name, slot_words(container.gpu_slot)))
    uses = []
    listed = {gpu.uuid for gpu in observed.gpus}
    vanished = [Gpu(uuid) for uuid in sorted(observed.gpu_faults) if uuid not in listed]
    for gpu in (*observed.gpus, *vanished):
        shares = tuple(slots.get(gpu.uuid, ()))
        # Who holds a GPU that was divided since holds its parts.
        whole = holders.get(gpu.uuid) or holders.get(gpu.parent, "")
        holder = whole or ", ".join(share.replica for share in shares)
        used_bytes, free_bytes = reading.used_bytes.get(gpu.uuid), ledger.free_bytes(gpu.uuid)
        fault = observed.gpu_faults.get(gpu.uuid, "")
        uses.append(GpuUse(gpu.uuid, gpu.name, holder, shares, gpu.memory_bytes, used_bytes, free_bytes, fault))
    return tuple(uses)


def endpoints(
    desired: Desired, observed: Observed, overrides: Mapping[str, int] = MappingProxyType({})
) -> Mapping[str, ServiceEndpoints]:
    """Return, for every service of the spec, who may be called (and who is finishing), by replica name.

    `overrides`: how many replicas `make scale` has set, by service.
    """
    found: dict[str, list[Endpoint]] = {name: [] for name in desired.services}
    for container in sorted(observed.containers, key=lambda container: container.name):
        spec = desired.services.get(container.service)
        if spec is None:
            continue
        spec = _made(container, goal_of(desired, observed, container.service)) or spec
        endpoint = _endpoint(container, spec, retiring=container.id in observed.retirements)
        if endpoint is not None:
            found[container.service].append(endpoint)
    return {
        name: ServiceEndpoints(
            tuple(_weighed(listed, goal_of(desired, observed, name))),
            desired.services[name].max_queued_requests,
            desired.services[name].router_policy,
            desired.services[name].router_policy_kwargs,
            _set_to_zero_by(name, overrides) if name in desired.switched_off else "",
        )
        for name, listed in found.items()
    }


def _set_to_zero_by(service: str, overrides: Mapping[str, int]) -> str:
    return "`make scale`" if service in overrides else "`replicas: 0` in the compose files"


def _made(container: ReplicaContainer, goal: VersionGoal) -> ServiceSpec | None:
    """How the replica is made, where its version is one of those that there shall be."""
    if container.version == goal.version:
        return goal.spec
    return goal.keep_spec if container.version == goal.keep else None


def _weighed(listed: list[Endpoint], goal: VersionGoal) -> list[Endpoint]:
    """Give each endpoint its share of the calls while a version is tried with a part of them."""
    if goal.keep is None or goal.weight is None:
        return listed
    serving = [endpoint.version == goal.version for endpoint in listed if not endpoint.draining]
    of_new, of_old = weights(goal.weight, serving.count(True), serving.count(False))
    return [replace(one, weight=of_new if one.version == goal.version else of_old) for one in listed]


def scrape_targets(desired: Desired, observed: Observed) -> tuple[Mapping[str, Any], ...]:
    """Return Prometheus http_sd groups: every replica that is up and exports metrics, from its start on.

    Prometheus needs a moment to take up a new target; one that is listed while it loads is scraped once it is ready.
    """
    groups = []
    for container in sorted(observed.containers, key=lambda container: container.name):
        spec = desired.services.get(container.service)
        if spec is None or spec.metrics_port is None:
            continue
        if container.state.is_up and container.ip:
            labels = {
                "job": "replicas",
                "service": container.service,
                "replica": container.name,
                "version": container.version,
                "gpu": ",".join(container.gpus),
                "__metrics_path__": spec.metrics_path,
            }
            groups.append({"targets": [socket_address(container.ip, spec.metrics_port)], "labels": labels})
    return tuple(groups)


# ------------------------------------------------------------------------------------------------------------ one row


@dataclass(frozen=True, slots=True)
class _Material:
    name: str
    spec: ServiceSpec | None
    goal: VersionGoal
    wanted: int
    observed: Observed
    containers: tuple[ReplicaContainer, ...]
    pending: tuple[PendingReplica, ...]
    creating: tuple[CreateContainer, ...]
    refusals: tuple[Refusal, ...]
    override: int | None
    autoscale: AutoscaleStatus | None
    rollout: RolloutStatus | None
    user_config: UserConfigStatus | None
    now: float


def _row(material: _Material) -> ServiceStatus:
    replicas = [_replica(material, container) for container in material.containers]
    replicas += [
        ReplicaStatus(action.target, "PENDING", action.version, "", tuple(gpu.uuid for gpu in action.gpus), None, why)
        for action in material.creating
        for why in [f"is being created: {action.cause}"]
    ]
    waiting: ReplicaState = "CRASH_LOOP" if _is_crash_loop(material) else "PENDING"
    replicas += [ReplicaStatus("", waiting, "", "", (), None, pending.reason) for pending in material.pending]
    ready = sum(replica.state == "RUNNING" for replica in replicas)
    settled = ready == material.wanted == len(replicas)
    return ServiceStatus(
        name=material.name,
        wanted=material.wanted,
        ready=ready,
        message=_message(material, replicas, ready),
        state=_state(material, replicas, ready),
        replicas=tuple(replicas),
        converged=settled and not any(_is_outdated(material, container) for container in material.containers),
        blocked=_blocked(material),
        override=material.override,
        autoscale=material.autoscale,
        rollout=material.rollout,
        user_config=material.user_config,
    )


def _replica(material: _Material, container: ReplicaContainer) -> ReplicaStatus:
    phase, detail = phase_of(container, material.spec, material.observed.retirements.get(container.id), material.now)
    state, message = SHOWN_AS[phase], detail
    match phase:
        case Phase.CREATED:
            message = "is being started"
        case Phase.STARTING:
            message = f"not ready yet: {container.health_detail}" if container.health_detail else "not ready yet"
        case Phase.RUNNING if container.reported_draining:
            state, message = "DRAINING", "somebody told it to stop: it finishes what it has"
        case Phase.RUNNING if not gets_traffic(container, material.spec, material.observed.routing):
            state, message = "STARTING", _unreached_words(material, container)
        case Phase.RUNNING if container.user_config is not None and container.user_config.error:
            message = f"goes on with its former user_config: {container.user_config.error}"
        case Phase.DRAINING | Phase.STOPPING | Phase.STOPPED:
            message = material.observed.retirements[container.id].cause
        case _:
            pass
    address = service_address(container, material.spec) if material.spec else container.ip
    return ReplicaStatus(
        container.name, state, container.version, address or "", container.gpus, container.ongoing, message
    )


def _state(material: _Material, replicas: list[ReplicaStatus], ready: int) -> ServiceState:
    """Say in Ray Serve's words how a service is."""
    rollout = material.rollout.state if material.rollout else ServiceRollout()
    offered = material.rollout.offered if material.rollout else ""
    if rollout.rollout is not None and rollout.rollout.phase is not RolloutPhase.WAITING:
        return "UPDATING"
    rejection = rollout.rejection_of(offered)
    if rejection is not None and not rejection.is_asked:
        return "DEPLOY_FAILED"
    if ready < material.wanted:
        if material.rollout is not None and rollout.stable is None:
            return "DEPLOY_FAILED" if _is_crash_loop(material) else "UPDATING"
        failing = _failure(material) is not None or any(replica.state == "FAILED" for replica in replicas)
        return "UNHEALTHY" if failing or material.refusals or _blocked(material) else "UPSCALING"
    if len(replicas) > material.wanted:
        return "DOWNSCALING"
    config = material.user_config
    if config is None or config.everywhere:
        return "HEALTHY"
    return "DEPLOY_FAILED" if config.refused else "UPDATING"


def _failure(material: _Material) -> FailureRecord | None:
    return material.observed.failures.get((material.name, material.goal.version or ""))


def _is_crash_loop(material: _Material) -> bool:
    failure = _failure(material)
    return failure is not None and failure.count >= CRASH_LOOP_FAILURES


def _unreached_words(material: _Material, container: ReplicaContainer) -> str:
    routing = material.observed.routing
    server = routing.server_of(material.name, container.name) if routing else None
    if server is not None and server.state is ServerState.READY:
        return "ready, but HAProxy's own check of it fails, so HAProxy does not send to it"
    return "ready, HAProxy does not send to it yet"


def _is_outdated(material: _Material, container: ReplicaContainer) -> bool:
    if material.spec is None:
        return True
    version = material.goal.version
    return version is not None and version != container.version


def _creations(name: str, observed: Observed, plan: Plan) -> tuple[CreateContainer, ...]:
    """Return replicas of a service that have no container yet and get one now."""
    present = {container.name for container in observed.containers}
    actions = [*observed.in_progress, *(step.action for step in plan.steps)]
    found = {
        action.target: action
        for action in actions
        if isinstance(action, CreateContainer) and action.service == name and action.target not in present
    }
    return tuple(found[target] for target in sorted(found))


# ------------------------------------------------------------------------------------------------------------- in words


def _message(material: _Material, replicas: list[ReplicaStatus], ready: int) -> str:
    """Say the one thing that matters most: what is in the way, else what is going on, else where the number is from."""
    if material.spec is None:
        return "the compose files have it no more: its replicas finish and go"
    obstacles = [*_obstacles(material, ready), *(material.user_config.refused if material.user_config else ())]
    rollout = material.rollout
    if rollout is not None and rollout.state.rollout is not None:
        return "; ".join([rollout.message, *obstacles])
    going_on = ", ".join([*_going_on(replicas), *_held_words(material), *_config_words(material)])
    said = "; ".join(obstacles) or going_on or (rollout.message if rollout else "")
    return said or _rest_words(material, material.spec)


def _obstacles(material: _Material, ready: int) -> list[str]:
    found = [*_pending_words(material.pending), *(_refusal_words(r, material.now) for r in material.refusals)]
    failure = _failure(material)
    if failure is None or ready >= material.wanted:
        return found
    if _is_crash_loop(material):
        detail = found or [f"failed {failure.count} times in a row; last: {failure.detail}"]
        return ["CRASH_LOOP: " + "; ".join(detail)]
    return found or [f"failed, is being replaced: {failure.detail}"]


def _rest_words(material: _Material, spec: ServiceSpec) -> str:
    """Say where the number of replicas is from, unless it is simply what the files say."""
    if material.wanted and spec.image in material.observed.images and material.observed.images[spec.image] is None:
        remedy = "build it (`make build`)" if spec.has_build else "check the name, or pull it"
        version = material.goal.version
        missing = f"version {version} goes on" if version else "what runs stays as it is, nothing new can be started"
        return f"image {spec.image} is not on this machine: {missing}; {remedy}"
    if material.autoscale is not None:
        return _autoscale_words(material.name, material.autoscale)
    if material.override is not None and material.override != spec.replicas:
        return f"set by scale; the compose files say {spec.replicas}"
    return ""


def _autoscale_words(name: str, autoscale: AutoscaleStatus) -> str:
    bounds = f"{autoscale.min} to {autoscale.max}"
    if autoscale.paused:
        return f"set by scale; the autoscaler ({bounds}) pauses until `make scale SERVICE={name} N=auto`"
    if autoscale.problem:
        return f"autoscaled, {bounds}: its policy gives no number, so {autoscale.target} are held: {autoscale.problem}"
    found = f"autoscaled, {bounds}: {autoscale.basis or f'{autoscale.load:.1f} requests'}"
    if autoscale.wanted == autoscale.target:
        return found
    if autoscale.basis:
        return f"{found}; {autoscale.wanted} replicas if that lasts"
    return f"{found}, which are for {autoscale.wanted} replicas if they last"


def _pending_words(pending: Iterable[PendingReplica]) -> list[str]:
    counts: dict[str, int] = {}
    for replica in pending:
        counts[replica.reason] = counts.get(replica.reason, 0) + 1
    return [f"{count} pending: {reason}" for reason, count in counts.items()]


def _refusal_words(refusal: Refusal, now: float) -> str:
    wait_s = max(refusal.until - now, 0.0)
    retry = f"next try in {wait_s:.0f} s" if wait_s >= 1 else "trying again"
    times = f" {refusal.failures} times" if refusal.failures > 1 else ""
    return f"could not {describe(refusal.action)}{times}, {retry}: {refusal.error}"


def _held_words(material: _Material) -> Iterable[str]:
    held = held_at_edge(material.name, material.observed)
    if not held:
        return
    requests, wait = ("1 held request", "waits") if held == 1 else (f"{held} held requests", "wait")
    scaled = material.autoscale
    if material.override == 0:  # nothing wakes it; HAProxy lets go of them when it is told, at once as a rule
        yield f"{requests} {wait}; set to 0 by scale"
    elif scaled and scaled.min == 0 and not scaled.paused:
        yield f"woken by {requests}"
    else:
        yield f"{requests} {wait} for it"


def _config_words(material: _Material) -> Iterable[str]:
    if material.user_config is not None and not material.user_config.everywhere:
        yield progress_words(material.user_config)


def _going_on(replicas: Iterable[ReplicaStatus]) -> Iterable[str]:
    words = {
        "PENDING": "being created",
        "STARTING": "starting",
        "DRAINING": "draining",
        "STOPPING": "stopping",
        "FAILED": "failed",
    }
    counts = {state: sum(replica.state == state for replica in replicas) for state in words}
    return [f"{count} {words[state]}" for state, count in counts.items() if count]


def _blocked(material: _Material) -> str:
    """Return why waiting will not help. While anything is on its way out, what it holds may yet become free."""
    missing = [r for r in material.refusals if isinstance(r.action, PullImage) and isinstance(r.error, ImageNotFound)]
    if missing:
        return str(missing[0].error)
    if material.observed.retirements or material.observed.in_progress:
        return ""
    return next((pending.reason for pending in material.pending if pending.blocked), "")


# ------------------------------------------------------------------------------------------------------------ addresses


def _endpoint(container: ReplicaContainer, spec: ServiceSpec, *, retiring: bool) -> Endpoint | None:
    address = service_address(container, spec)
    if address is None or not container.state.is_up:
        return None
    serving = container.health is Health.READY
    finishing = container.reported_draining or (retiring and container.health is not Health.UNKNOWN)
    if not serving and not finishing:
        return None
    return Endpoint(
        replica=container.name,
        address=address,
        draining=retiring or container.reported_draining,
        max_ongoing_requests=max(spec.max_ongoing_requests, 0),
        version=container.version,
        node=container.node,
        stats=container.stats,
    )
