"""Ends replicas: drained -> asleep (sleep.py), or SIGTERM; past the grace period -> SIGKILL; exited -> removed."""

from __future__ import annotations

from typing import Literal

from ..model.actions import RemoveContainer, SignalContainer
from ..model.phases import Phase
from ..model.spec import ServiceSpec
from ..model.world import ContainerState, ReplicaContainer, ReplicaHealth, Retirement, Server, ServerState
from .draft import Draft
from .outlook import ReplicaOutlook, ServiceOutlook
from .sleep import may_sleep, put_to_sleep, stay_asleep, why_not_kept

PROPAGATION_S = 0.25
"""An in-flight count of zero counts as drained if it was read this long after callers received the drain."""
BLIND_DRAIN_S = 2.0
"""Drain time of a replica that reports nothing, once HAProxy has nothing for it."""
FAILED_GRACE_S = 5.0
"""SIGTERM to SIGKILL for a replica that has failed or was never ready: it may ignore SIGTERM, as a container's first
process does before it has a handler, and it has no requests."""
USUAL_DRAIN_S = 20.0
USUAL_GRACE_S = 30.0
"""The drain time of a replica whose service was removed and that has no label for it."""
DRAIN_LOOK_S = 0.1


def finish(draft: Draft, outlook: ServiceOutlook) -> None:
    """Plan the next step for each replica that is retired, or has failed and exited."""
    for replica in outlook.replicas:
        retirement = replica.retirement
        if not replica.may_change:
            continue
        match replica.phase:
            case Phase.ASLEEP:
                stay_asleep(draft, outlook, replica)
            case Phase.DRAINING if retirement:
                _drain(draft, outlook, replica, retirement)
            case Phase.STOPPING if retirement and retirement.stopping_since is not None:
                _await_exit(draft, outlook, replica, retirement, retirement.stopping_since)
            case Phase.STOPPED:
                cause = retirement.cause if retirement else "it was sent a signal to stop"
                failed = bool(retirement and retirement.failed) and not _is_lost(draft, replica)
                remove(draft, outlook, replica, cause, failed=failed)
            case Phase.FAILED if not replica.container.state.is_up:
                if replica.container.state is not ContainerState.REMOVING:
                    remove(draft, outlook, replica, replica.detail, failed=True)
            case _:
                pass


def _is_lost(draft: Draft, replica: ReplicaOutlook) -> bool:
    """Whether its node was lost: it failed with the node then, which says nothing of its version.

    The engine finds that out seconds after the probes have failed: it has moved the replica since, or its node is down.
    """
    down = {node.name for node in draft.observed.nodes if node.state == "down"}
    return replica.container.state is ContainerState.PENDING or replica.container.node in down


def _drain(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, retirement: Retirement) -> None:
    if retirement.sleeping_since is not None:
        _await_sleep(draft, outlook, replica, retirement, retirement.sleeping_since)
        return
    server = draft.server_of(outlook.name, replica.name)
    if server and server.state.takes_requests:
        draft.set_server(outlook.name, replica.name, ServerState.DRAIN, retirement.cause)
    why = _drained(draft, outlook, replica, retirement, server)
    if why is None:
        draft.look_again_in(DRAIN_LOOK_S)
        return
    cause = f"{retirement.cause}; {why}"
    if may_sleep(draft, outlook, replica, retirement):
        put_to_sleep(draft, outlook, replica, cause)
    else:
        _signal(draft, outlook, replica, "SIGTERM", cause)


def _await_sleep(
    draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, retirement: Retirement, told_at: float
) -> None:
    report, why = replica.container.sleep, why_not_kept(draft, outlook, replica)
    grace_s = _grace_s(replica.container, outlook.spec, outlook.version)
    if report is not None and not why:
        late = f"not asleep {grace_s:g} s after it was told to" if draft.now >= told_at + grace_s else ""
        why = report.error or late
    if why:
        _signal(draft, outlook, replica, "SIGTERM", f"{retirement.cause}; {why}")
    elif report is not None and not report.wanted:
        put_to_sleep(draft, outlook, replica, f"{retirement.cause}; it was not told to sleep yet")
    else:
        draft.look_again_in(max(told_at + grace_s - draft.now, 1.0))


def _drained(
    draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, retirement: Retirement, server: Server | None
) -> str | None:
    """Return why the replica may be stopped now, or None while it must be waited for."""
    container = replica.container
    waited_s = draft.now - retirement.draining_since
    limit_s = _drain_s(outlook, container)
    if waited_s >= limit_s:
        return f"still busy after {limit_s:g} s (graceful_shutdown_timeout_s)"
    if container.health is not ReplicaHealth.READY and (
        retirement.failed or not _may_be_at_work(draft, outlook, replica)
    ):
        return "it is not ready, so it has no requests"
    if retirement.failed and container.stalled_since is not None:
        return "it makes no progress"
    routed = outlook.spec is not None and outlook.spec.is_routed
    if routed and not draft.routing_usable:
        return None  # HAProxy is being restarted or reloaded: whether it still sends requests here cannot be known
    if server and (server.state.takes_requests or server.sessions > container.lasting or server.queued):
        return None
    stay_s = outlook.spec.graceful_shutdown_wait_loop_s if outlook.spec else None
    if container.ongoing is not None and container.ongoing_at is not None:
        # The count must be fresh: callers that had not received the drain yet may have begun requests since.
        fresh = container.ongoing_at >= retirement.draining_since + (PROPAGATION_S if stay_s is None else stay_s)
        if not fresh or container.ongoing > container.lasting:
            return None
        # At SIGTERM the runtime closes them: clients connect again, to another replica.
        lasting = f" but {container.lasting} WebSockets or endless streams, which it ends" if container.lasting else ""
        return f"nothing in flight{lasting}"
    if outlook.spec is None:
        return (
            None  # its backend is gone: a replaced worker of HAProxy finishes its requests and cannot be asked for them
        )
    least_s = BLIND_DRAIN_S if stay_s is None else stay_s
    if waited_s < least_s:
        return None
    return "HAProxy counts nothing in flight" if routed else f"it has drained for {least_s:g} s"


def _may_be_at_work(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook) -> bool:
    """Whether a replica that is not ready may have requests in flight, by its own count or by HAProxy's.

    A replica that was never ready has none. A replica that was ready and does not answer now may only be slow; a dead
    one exits by itself, or its clients time out.
    """
    container = replica.container
    if container.ongoing:
        return True
    if container.health is ReplicaHealth.UNKNOWN or outlook.spec is None or not outlook.spec.is_routed:
        return False
    server = draft.server_of(outlook.name, replica.name)
    return not draft.routing_usable or (server is not None and bool(server.sessions or server.queued))


def _drain_s(outlook: ServiceOutlook, container: ReplicaContainer) -> float:
    """How long the replica may continue with its requests."""
    now_s = outlook.spec.graceful_shutdown_timeout_s if outlook.spec else None
    is_wanted = container.version == outlook.version
    return _patience_s(is_wanted, now_s, container.graceful_shutdown_timeout_s, USUAL_DRAIN_S)


def grace_of(
    container: ReplicaContainer, retirement: Retirement, spec: ServiceSpec | None, wanted_version: str | None
) -> float:
    """The seconds from SIGTERM to SIGKILL."""
    grace_s = _grace_s(container, spec, wanted_version)
    has_slept = retirement.sleeping_since is not None or not container.is_awake
    never_served = container.health is ReplicaHealth.UNKNOWN and not container.reported_draining and not has_slept
    return min(grace_s, FAILED_GRACE_S) if retirement.failed or never_served else grace_s


def _grace_s(container: ReplicaContainer, spec: ServiceSpec | None, wanted_version: str | None) -> float:
    now_s = spec.stop_grace_period_s if spec else None
    return _patience_s(container.version == wanted_version, now_s, container.stop_grace_period_s, USUAL_GRACE_S)


def _patience_s(is_wanted: bool, now_s: float | None, made_with_s: float | None, usual_s: float) -> float:
    """The limit of the wanted version if the replica is of that version. Otherwise the longer of that limit and the
    replica's own, as its requests began under its own limits.
    """
    if now_s is not None and is_wanted:
        return now_s
    limits_s = [seconds for seconds in (now_s, made_with_s) if seconds is not None]
    return max(limits_s, default=usual_s)


def _await_exit(
    draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, retirement: Retirement, told_at: float
) -> None:
    grace_s = grace_of(replica.container, retirement, outlook.spec, outlook.version)
    left_s = told_at + grace_s - draft.now
    if left_s > 0 and _missed_its_signal(draft, outlook, replica, told_at):
        _signal(draft, outlook, replica, "SIGTERM", f"{retirement.cause}; it had no handler yet for the first SIGTERM")
    elif left_s > 0:
        draft.look_again_in(left_s)
    else:
        _signal(draft, outlook, replica, "SIGKILL", f"{retirement.cause}; still running {grace_s:g} s after SIGTERM")
        draft.look_again_in(1.0)


def _missed_its_signal(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, told_at: float) -> bool:
    """Whether a replica has ignored SIGTERM.

    A container's first process ignores SIGTERM until it has a handler, which is after its imports. A replica that has
    received the signal reports that it drains. The signal is repeated for a limited time.
    """
    container = replica.container
    has_stopped_serving = container.health is not ReplicaHealth.READY or container.reported_draining
    managed = outlook.spec is not None and outlook.spec.managed
    return managed and not has_stopped_serving and FAILED_GRACE_S <= draft.now - told_at < 2 * FAILED_GRACE_S


def _signal(
    draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, signal: Literal["SIGTERM", "SIGKILL"], cause: str
) -> None:
    draft.add(
        SignalContainer(
            target=replica.name,
            service=outlook.name,
            container_id=replica.container.id,
            signal=signal,
            cause=cause,
        )
    )


def remove(draft: Draft, outlook: ServiceOutlook, replica: ReplicaOutlook, cause: str, *, failed: bool) -> None:
    """Remove a replica's server, then its container; its GPUs are free after that step."""
    server = draft.server_of(outlook.name, replica.name)
    server_step = draft.delete_server(server, outlook.name, cause) if server else None
    container = replica.container
    action = RemoveContainer(
        target=replica.name,
        service=outlook.name,
        container_id=container.id,
        failed=failed,
        version=container.version,
        began_at=container.begun_at,
        gpus=container.gpus,
        cause=cause,
    )
    step = draft.add(action, server_step)
    if failed:
        draft.failed.append(action)
    outlook.leaving.add(replica.container.id)
    outlook.removal_steps[replica.name] = step
    outlook.numbers = None
    draft.gpus.free_after(replica.container, step)
