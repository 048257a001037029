"""Derives the phase of a replica from the snapshot, for the planner, the status and Discovery. Pure."""

from __future__ import annotations

import enum

from .observed import Observed
from .spec import ServiceSpec
from .world import ContainerState, ReplicaContainer, ReplicaHealth, Retirement, RoutingState, ServerState, is_asleep

DEFAULT_STARTUP_DEADLINE_S = 1800.0


class Phase(enum.StrEnum):
    """See the drawing in controller/model/__init__.py; CREATED and STOPPED are not shown to users."""

    CREATED = "CREATED"  # no start has been tried yet
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    ASLEEP = "ASLEEP"  # its process stays for its service's next turn on the GPUs
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"  # exited after SIGTERM or SIGKILL of the controller
    FAILED = "FAILED"

    @property
    def serves_or_will(self) -> bool:
        """Counts towards the target."""
        return self in (Phase.CREATED, Phase.STARTING, Phase.RUNNING)


def phase_of(
    container: ReplicaContainer, spec: ServiceSpec | None, retirement: Retirement | None, now: float
) -> tuple[Phase, str]:
    """Return the phase and, for FAILED, why in words ("" otherwise). `spec` is None for a service that was removed."""
    if container.state is ContainerState.CREATED:
        if retirement:
            return Phase.STOPPED, ""
        if container.exit_code is not None:
            # The engine failed to start it. The cause may be specific to this container (a GPU that is gone, a network
            # that was recreated under the same name), so another container is created.
            return Phase.FAILED, f"the engine could not start it (code {container.exit_code})"
        return Phase.CREATED, ""
    if container.state is ContainerState.PENDING:
        return (Phase.STOPPED if retirement else Phase.STARTING), ""
    if not container.state.is_up:
        return (Phase.STOPPED, "") if retirement else (Phase.FAILED, _exit_words(container))
    if is_asleep(container, retirement):
        return Phase.ASLEEP, ""
    if retirement:
        return (Phase.DRAINING if retirement.stopping_since is None else Phase.STOPPING), ""
    why = container.gpu_fault or _failure_words(container, spec, now)
    if why:
        return Phase.FAILED, why
    return (Phase.RUNNING if container.health is ReplicaHealth.READY else Phase.STARTING), ""


def is_ready(container: ReplicaContainer, phase: Phase) -> bool:
    """Whether a replica takes requests: not while it drains, also after a SIGTERM that the controller did not send."""
    return phase is Phase.RUNNING and not container.reported_draining


def gets_traffic(container: ReplicaContainer, spec: ServiceSpec | None, routing: RoutingState | None) -> bool:
    """Whether requests from outside reach a replica that is ready: HAProxy has its server, and it is up.

    True for a service without requests from outside, and while HAProxy does not answer: it keeps the servers it has.
    """
    if spec is None or routing is None or not spec.is_routed:
        return True
    server = routing.server_of(container.service, container.name)
    return server is not None and server.state is ServerState.READY and server.up


def staying(spec: ServiceSpec, observed: Observed, now: float) -> list[tuple[ReplicaContainer, Phase]]:
    """Replicas of a service that count towards its target."""
    phases = [
        (container, phase_of(container, spec, observed.retirements.get(container.id), now)[0])
        for container in observed.containers_of(spec.name)
    ]
    return [(container, phase) for container, phase in phases if phase.serves_or_will]


def _failure_words(container: ReplicaContainer, spec: ServiceSpec | None, now: float) -> str:
    """Why a replica that is up has failed; "" when it has not."""
    match container.health:
        case ReplicaHealth.READY:
            return _stalled_words(container, spec, now)
        case ReplicaHealth.FAILED:
            return f"its readiness probe failed: {container.health_detail}"
        case ReplicaHealth.UNKNOWN:
            return _late_words(container, spec, now)


def _late_words(container: ReplicaContainer, spec: ServiceSpec | None, now: float) -> str:
    """Why a replica that starts takes too long; "" while it does not."""
    limit_s = spec.startup_deadline_s if spec else DEFAULT_STARTUP_DEADLINE_S
    started_at = container.begun_at
    moved_at = started_at if container.progressed_at is None else max(started_at, container.progressed_at)
    if now - moved_at <= limit_s:
        return ""
    waited = f"{limit_s:g} s after its start"
    if moved_at - started_at >= 1.0:
        waited = f"{now - started_at:.0f} s after its start and {limit_s:g} s after its last progress"
    return f"not ready {waited} (startup.deadline_s): {_silence_words(container)}"


def _silence_words(container: ReplicaContainer) -> str:
    """What its readiness probe met. Packets that get lost on the way to another node are not told by anything else."""
    met = container.health_detail or "it never answered"
    if container.node and (met.startswith("no answer") or "No route to host" in met):
        met += f" (if no replica on {container.node} answers: open 4789/udp, 7946/tcp and 7946/udp between all nodes)"
    return met


def _stalled_words(container: ReplicaContainer, spec: ServiceSpec | None, now: float) -> str:
    """Why a replica that reports that it is ready has failed nevertheless; "" when it has not."""
    limit_s = spec.probe.progress_timeout_s if spec else None
    if limit_s is None or container.stalled_since is None or now - container.stalled_since < limit_s:
        return ""
    return (
        f"it hangs: {container.ongoing} requests in flight, and none was answered or sent a message for {limit_s:g} s "
        "(health.progress_timeout_s)"
    )


def _exit_words(container: ReplicaContainer) -> str:
    if container.oom_killed:
        return "out of memory: the kernel killed it (raise deploy.resources.limits.memory)"
    if container.engine_detail:
        return container.engine_detail
    if container.exit_code is None:
        return "its container is gone"
    if container.exit_code == 137:
        # The engine does not always report that memory ran out, least of all just after a start (containerd#8180).
        return "ended by signal 9: killed by a user, or by the kernel because memory ran out (`dmesg` shows which)"
    if container.exit_code > 128:
        return f"ended by signal {container.exit_code - 128}"
    return f"exited by itself with code {container.exit_code}"
