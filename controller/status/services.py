"""Computes the API's document of each service: its state, its replicas and one message that explains them. Pure.

All rows are derived from one snapshot, so they never contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..desired.deployer import REFUSED_FOR_S, calls_of
from ..desired.loads import held_at_edge, loads
from ..errors import ImageNotFound
from ..model.actions import CreateContainer, PullImage
from ..model.desired import Desired, Rejection, RolloutPhase, ServiceRollout, VersionGoal, goal_of
from ..model.observed import Observed
from ..model.phases import Phase, gets_traffic, phase_of
from ..model.plan import PendingReplica, Plan, Refusal
from ..model.reports import AutoscaleStatus, RolloutStatus, UserConfigStatus
from ..model.spec import ServiceSpec
from ..model.text import age, did_you_mean
from ..model.world import ContainerState, FailureRecord, ReplicaContainer, ReplicaHealth, ServerState, service_address
from ..plan.leave import grace_of
from ..plan.user_config import progress_words, user_config_status
from .reasons import autoscale_words, explained, pending_words, refusal_words, refused_action
from .records.services import (
    Failure,
    RejectionDocument,
    ReplicaState,
    ReplicaStatus,
    RolloutDocument,
    Service,
    ServiceState,
)
from .view import View

CRASH_LOOP_FAILURES = 3

SHOWN_AS: Mapping[Phase, ReplicaState] = {
    Phase.CREATED: "STARTING",
    Phase.STARTING: "STARTING",
    Phase.RUNNING: "RUNNING",
    Phase.DRAINING: "DRAINING",
    Phase.ASLEEP: "ASLEEP",
    Phase.STOPPING: "STOPPING",
    Phase.STOPPED: "STOPPING",
    Phase.FAILED: "FAILED",
}


def service_rows(
    view: View,
    overrides: Mapping[str, int] = MappingProxyType({}),
    autoscaled: Mapping[str, AutoscaleStatus] = MappingProxyType({}),
    user_configs: Mapping[str, str] = MappingProxyType({}),
    callers: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> tuple[Service, ...]:
    """Return one row for each service of a view that has none yet, by name, including removed services that still have
    replicas.

    `user_configs`: the texts seen so far, by digest, to show a change as a difference. `callers`: the services that
    each replica watches in Discovery.
    """
    desired, observed = view.desired or Desired(view.project), view.observed
    leaving = frozenset(node.name for node in observed.nodes if node.is_leaving)
    names = sorted({*desired.services, *observed.services})
    return tuple(
        _row(
            _Material(
                view=view,
                name=name,
                spec=desired.services.get(name),
                goal=goal_of(desired, observed, name),
                wanted=desired.targets.get(name, 0),
                observed=observed,
                containers=observed.containers_of(name),
                pending=tuple(one for one in view.plan.pending if one.service == name and not one.replaces),
                staying=tuple(one for one in view.plan.pending if one.service == name and one.replaces),
                creating=_creations(name, observed, view.plan),
                refusals=tuple(
                    one for one in view.refusals if one.action.service == name and not _is_over(one, desired, observed)
                ),
                leaving=leaving,
                override=overrides.get(name) if name in desired.services else None,
                autoscale=autoscaled.get(name),
                rollout=view.rollouts.get(name),
                user_config=_user_config(name, desired, observed, user_configs, view.at),
                calls=calls,
                unknown_callees=_unknown_callees(calls, desired.services),
                unreached=tuple(_not_reached(name, observed)),
                called_by=desired.remaining.get(name),
            )
        )
        for name in names
        for calls in [_calls(name, desired, observed, callers)]
    )


def _user_config(
    name: str, desired: Desired, observed: Observed, texts: Mapping[str, str], now: float
) -> UserConfigStatus | None:
    spec = desired.services.get(name)
    if spec is None:
        return None
    goal, mine = goal_of(desired, observed, name), observed.containers_of(name)
    return user_config_status(mine, spec, goal, observed.retirements, texts, now)


def _calls(name: str, desired: Desired, observed: Observed, callers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    staying = (one for one in observed.containers_of(name) if one.id not in observed.retirements)
    spec = desired.services.get(name)
    needed = {callee for callee in spec.callees if callee in desired.services} if spec else set()
    return calls_of(staying, callers).get(name, frozenset()) | needed


def _unknown_callees(calls: frozenset[str], services: Mapping[str, ServiceSpec]) -> Mapping[str, str]:
    found = {}
    for callee in sorted(calls - services.keys()):
        guess = did_you_mean(callee, services, '; did you mean "{}"?')
        found[callee] = f'it calls the service "{callee}", which no compose file has{guess}'
    return found


def _not_reached(name: str, observed: Observed) -> Iterator[str]:
    """Yield which ready replica is not reached by which caller: where the service is one of both."""
    telling = [one for one in observed.containers if one.unreached and one.health is ReplicaHealth.READY]
    if not telling:
        return
    ready = [
        one for one in observed.containers if one.health is ReplicaHealth.READY and one.id not in observed.retirements
    ]
    serving = {(one.service, one.name) for one in ready}
    callers: dict[tuple[str, str, str], list[str]] = {}
    for caller in sorted(telling, key=lambda one: one.name):
        for callee, unreached in caller.unreached.items():
            for replica, why in unreached.items():
                if name in (caller.service, callee) and (callee, replica) in serving:
                    callers.setdefault((callee, replica, why), []).append(caller.name)
    for (callee, replica, why), (first, *more) in callers.items():
        others = f" and {len(more)} more do" if more else " does"
        yield f"{first}{others} not reach {replica} of {callee}, which is ready: {why}"


# ------------------------------------------------------------------------------------------------------------ one row


@dataclass(frozen=True, slots=True)
class _Material:
    view: View
    name: str
    spec: ServiceSpec | None
    goal: VersionGoal
    wanted: int
    observed: Observed
    containers: tuple[ReplicaContainer, ...]
    pending: tuple[PendingReplica, ...]
    staying: tuple[PendingReplica, ...]
    """Successors of replicas that serve until there is room elsewhere."""
    creating: tuple[CreateContainer, ...]
    refusals: tuple[Refusal, ...]
    leaving: frozenset[str]
    """Names of the nodes that leave."""
    override: int | None
    autoscale: AutoscaleStatus | None
    rollout: RolloutStatus | None
    user_config: UserConfigStatus | None
    calls: frozenset[str]
    unknown_callees: Mapping[str, str]
    unreached: tuple[str, ...]
    called_by: tuple[str, ...] | None
    """Of a service that the compose files no longer have, and that stays: the services that call it."""


def _row(material: _Material) -> Service:
    replicas = [_replica(material, container) for container in material.containers]
    replicas += [
        ReplicaStatus(action.target, "PENDING", action.version, "", gpus, None, f"is being created: {action.cause}", "")
        for action in material.creating
        for gpus in [tuple(gpu.uuid for gpu in action.gpus)]
    ]
    waiting: ReplicaState = "CRASH_LOOP" if _is_crash_loop(material) else "PENDING"
    replicas += [ReplicaStatus("", waiting, "", "", (), None, pending.reason, "") for pending in material.pending]
    ready = sum(replica.state == "RUNNING" for replica in replicas)
    awake = [replica for replica in replicas if replica.state != "ASLEEP"]
    settled = ready == material.wanted == len(awake)
    spec, load = material.spec, loads([material.name], material.observed)[material.name]
    rollout = material.rollout
    state = rollout.state if rollout else ServiceRollout()
    row = Service(
        name=material.name,
        wanted=material.wanted,
        ready=ready,
        message=_message(material, replicas, ready),
        state=_state(material, awake, ready),
        replicas=tuple(replicas),
        converged=settled and not any(_is_outdated(material, container) for container in material.containers),
        blocked=_blocked(material),
        override=material.override,
        autoscale=material.autoscale,
        rollout=_rollout(material),
        user_config=material.user_config,
        calls=tuple(sorted(material.calls - material.unknown_callees.keys())),
        unknown_callees=material.unknown_callees,
        unreached=material.unreached,
        at=material.view.wall_time(material.view.at),
        engine_reachable=material.view.engine_reachable is not False,
        image=spec.image if spec else None,
        protocol=spec.protocol if spec else None,
        port=spec.port if spec else None,
        route=(spec.matched or None) if spec else None,
        grpc_services=tuple(spec.grpc_services) if spec else (),
        models=spec.models if spec else (),
        version=rollout.version if rollout else None,
        offered=rollout.offered if rollout else None,
        stable=state.stable,
        changes=rollout.changes if rollout else (),
        untried=rollout is not None and state.is_unproven and not rollout.ready,
        rejected=_rejected(material, state.rejected),
        in_flight=load.running,
        waiting=load.waiting,
        spec_replicas=spec.replicas if spec else None,
        failure=_last_failure(material),
        refusals=tuple(refused_action(refusal, material.view.at) for refusal in material.refusals),
        obstacles=(),
        who_decides="",
        summary="",
        stuck=None,
        not_as_asked=None,
    )
    return explained(row)


def _rollout(material: _Material) -> RolloutDocument | None:
    status = material.rollout
    rollout = status.state.rollout if status else None
    if status is None or rollout is None:
        return None
    return RolloutDocument(
        from_=rollout.source,
        to=rollout.to,
        phase=rollout.phase,
        since=material.view.wall_time(rollout.since),
        begun_at=material.view.wall_time(rollout.begun_at),
        cause=rollout.cause,
        ready=status.ready,
        wanted=material.wanted,
        message=status.message,
        progress=f"{rollout.phase}, {status.ready} of {material.wanted} ready",
    )


def _rejected(material: _Material, found: Rejection | None) -> RejectionDocument | None:
    if found is None:
        return None
    at, number = material.view.wall_time(found.at), f"{found.version}@{found.at:.6f}"
    return RejectionDocument(found.version, found.reason, at, found.is_asked, found.is_refused, number)


def _last_failure(material: _Material) -> Failure | None:
    records = material.observed.lasting_failures(material.name).values()
    last = max(records, key=lambda record: record.last_at, default=None)
    return Failure(last.count, material.view.wall_time(last.last_at), last.detail) if last else None


def _replica(material: _Material, container: ReplicaContainer) -> ReplicaStatus:
    retirement = material.observed.retirements.get(container.id)
    phase, detail = phase_of(container, material.spec, retirement, material.view.at)
    state, message = SHOWN_AS[phase], detail
    match phase:
        case Phase.CREATED:
            message = "is being started"
        case Phase.STARTING if container.state is ContainerState.PENDING:
            state, message = "PENDING", container.engine_detail or "the engine looks for a node"
        case Phase.STARTING:
            message = f"not ready yet: {container.health_detail}" if container.health_detail else "not ready yet"
        case Phase.RUNNING if container.reported_draining:
            state, message = "DRAINING", "it was asked to stop: it finishes its requests in flight"
        case Phase.RUNNING if not gets_traffic(container, material.spec, material.observed.routing):
            state, message = _unreached(material, container)
        case Phase.RUNNING if container.user_config is not None and container.user_config.error:
            message = f"keeps its former user_config: {container.user_config.error}"
        case Phase.ASLEEP if retirement and retirement.sleeping_since is not None:
            message = f"for {age(retirement.sleeping_since, material.view.at)}: {retirement.cause}"
        case Phase.DRAINING | Phase.STOPPING | Phase.STOPPED:
            stopping = _stopping_words(material, container)
            message = material.observed.retirements[container.id].cause + (f"; {stopping}" if stopping else "")
        case _:
            pass
    address = service_address(container, material.spec) if material.spec else container.ip
    node = container.node if material.observed.nodes else ""
    if not message and node in material.leaving:
        message = f"node {node} leaves: another replica takes its place first"
    return ReplicaStatus(
        container.name, state, container.version, address or "", container.gpus, container.ongoing, message, node
    )


def _stopping_words(material: _Material, container: ReplicaContainer) -> str:
    """When a replica that has not ended yet got SIGTERM, and when SIGKILL follows; "" in its first second."""
    retirement = material.observed.retirements.get(container.id)
    if retirement is None or retirement.stopping_since is None:
        return ""
    stopping_s = material.view.at - retirement.stopping_since
    if stopping_s < 1.0 or not container.state.is_up:
        return ""
    grace_s = grace_of(container, retirement, material.spec, material.goal.version)
    return f"SIGTERM {stopping_s:.0f} s ago, SIGKILL after {grace_s:g} s"


def _state(material: _Material, replicas: list[ReplicaStatus], ready: int) -> ServiceState:
    """The state of a service, in Ray Serve's terms. `replicas`: those that do not sleep."""
    rollout = material.rollout.state if material.rollout else ServiceRollout()
    offered = material.rollout.offered if material.rollout else None
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
    if material.unknown_callees:
        return "UNHEALTHY"
    config = material.user_config
    if config is None or config.everywhere:
        return "HEALTHY"
    return "DEPLOY_FAILED" if config.refused else "UPDATING"


def _failure(material: _Material) -> FailureRecord | None:
    return material.observed.lasting_failures(material.name).get(material.goal.version or "")


def _is_crash_loop(material: _Material) -> bool:
    failure = _failure(material)
    return failure is not None and failure.count >= CRASH_LOOP_FAILURES


def _unreached(material: _Material, container: ReplicaContainer) -> tuple[ReplicaState, str]:
    """State and message of a ready replica that HAProxy does not send to, or not every HAProxy."""
    routing = material.observed.routing
    server = routing.server_of(material.name, container.name) if routing else None
    if server is not None and server.state is ServerState.READY:
        return "STARTING", "ready, but HAProxy's own check of it fails, so HAProxy does not send to it"
    if server is not None and server.state is ServerState.PARTLY:
        return "RUNNING", "ready; some nodes' HAProxys do not send to it yet"
    return "STARTING", "ready, HAProxy does not send to it yet"


def _is_outdated(material: _Material, container: ReplicaContainer) -> bool:
    if material.spec is None:
        return True
    version = material.goal.version
    return version is not None and version != container.version


def _creations(name: str, observed: Observed, plan: Plan) -> tuple[CreateContainer, ...]:
    """Return the creations of a service's replicas that have no container yet."""
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
    """The most important message: an obstacle, else a change in progress, else the origin of the target number."""
    if material.spec is None:
        return "the compose files no longer have it: its replicas drain and are removed"
    obstacles = [
        *_obstacles(material, ready),
        *(material.user_config.refused if material.user_config else ()),
        *material.unknown_callees.values(),
        *material.unreached,
    ]
    rollout = material.rollout
    if rollout is not None and rollout.state.rollout is not None:
        return "; ".join([rollout.message, *obstacles])
    config = material.user_config
    config_words = [progress_words(config)] if config is not None and not config.everywhere else []
    going_on = ", ".join([*_going_on(material, replicas), *_held_words(material), *config_words])
    message = "; ".join(obstacles) or going_on or (rollout.message if rollout else "")
    return message or _rest_words(material, material.spec)


def _obstacles(material: _Material, ready: int) -> list[str]:
    found = [
        *_pending_words(material),
        *dict.fromkeys(f"has no room elsewhere: {one.reason}" for one in material.staying),
        *(refusal_words(refused_action(one, material.view.at)) for one in material.refusals),
    ]
    failure = _failure(material)
    if failure is None or ready >= material.wanted:
        return found
    if _is_crash_loop(material):
        detail = found or [f"failed {failure.count} times in a row; last: {failure.detail}"]
        return ["CRASH_LOOP: " + "; ".join(detail)]
    return found or [f"failed, is being replaced: {failure.detail}"]


def _rest_words(material: _Material, spec: ServiceSpec) -> str:
    """The origin of the number of replicas; "" where it is the number in the files."""
    if material.called_by is not None:
        callers = " and ".join(material.called_by) or "its last caller"
        return f"the compose files no longer have it: it stays until {callers} no longer calls it"
    if material.wanted and spec.image in material.observed.images and material.observed.images[spec.image] is None:
        remedy = f"build it (`docker compose build {spec.name}`)" if spec.has_build else "check the name, or pull it"
        version = material.goal.version
        missing = (
            f"version {version} stays" if version else "running replicas are not affected, no new one can be started"
        )
        return f"image {spec.image} is not on this machine: {missing}; {remedy}"
    if material.autoscale is not None:
        return autoscale_words(material.name, material.autoscale)
    if material.override is not None and material.override != spec.replicas:
        return f"set by scale; the compose files say {spec.replicas}"
    return ""


def _pending_words(material: _Material) -> list[str]:
    reasons = [replica.reason for replica in material.pending]
    waiting = [container for container in material.containers if container.state is ContainerState.PENDING]
    reasons += [container.engine_detail for container in waiting if container.engine_detail]
    return list(pending_words(reasons).values())


def _is_over(refusal: Refusal, desired: Desired, observed: Observed) -> bool:
    """Whether an action is not needed any more: the image came otherwise, or another image or version is wanted."""
    action = refusal.action
    if isinstance(action, CreateContainer):
        goal = goal_of(desired, observed, action.service)
        return action.version not in (goal.version, goal.keep)
    spec = desired.services.get(action.service)
    if not isinstance(action, PullImage) or spec is None:
        return False
    return action.image != spec.image or observed.images.get(action.image) is not None


def _held_words(material: _Material) -> Iterable[str]:
    held = held_at_edge(material.name, material.observed)
    if not held:
        return
    requests, wait = ("1 held request", "waits") if held == 1 else (f"{held} held requests", "wait")
    scaled = material.autoscale
    if material.override == 0:  # no request wakes the service; HAProxy ends these once its configuration says so
        yield f"{requests} {wait}; set to 0 by scale"
    elif scaled and scaled.min == 0 and not scaled.paused:
        yield f"woken by {requests}"
    else:
        yield f"{requests} {wait} for it"


def _going_on(material: _Material, replicas: Iterable[ReplicaStatus]) -> Iterable[str]:
    stopping = list(filter(None, (_stopping_words(material, container) for container in material.containers)))
    words = {
        "PENDING": "being created",
        "STARTING": "starting",
        "DRAINING": "draining",
        "STOPPING": f"stopping ({stopping[0]})" if stopping else "stopping",
        "FAILED": "failed",
    }
    counts = {state: sum(replica.state == state for replica in replicas) for state in words}
    return [f"{count} {words[state]}" for state, count in counts.items() if count]


def _blocked(material: _Material) -> str:
    """Return why waiting will not help; "" while a replica is being removed, as what it holds may become free."""
    missing = [r for r in material.refusals if isinstance(r.action, PullImage) and isinstance(r.error, ImageNotFound)]
    if missing:
        return str(missing[0].error)
    rolls_out = material.rollout is not None and material.rollout.state.rollout is not None  # it is rolled back, then
    refused = [] if rolls_out else [r for r in material.refusals if isinstance(r.action, CreateContainer)]
    if refused and material.view.at - refused[0].since >= REFUSED_FOR_S:
        return str(refused[0].error)
    if material.observed.retirements.keys() - material.observed.asleep or material.observed.in_progress:
        return ""
    return next((pending.reason for pending in material.pending if pending.blocked), "")
