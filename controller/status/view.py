"""The view that the loop publishes after each tick, from which the API, metrics and Discovery answer. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pierhead.discovery.v1.discovery_pb2 import ServiceEndpoints

from ..model.desired import Desired
from ..model.observed import NOT_LOOKED_YET, Observed
from ..model.plan import Plan, Refusal
from ..model.reports import RolloutStatus
from ..model.spec import slot_words
from ..model.world import Gpu, GpuReading
from ..plan.placement import GpuBudget
from .nodes import edge_differences, node_notices
from .reasons import refusal_words, refused_action
from .records.answers import Target
from .records.services import GpuSlotUse, GpuUse, NodeStatus, Service

NEAR_END_S = 30 * 86_400.0
"""How long before the certificates' end it is shown; `make up` renews them much earlier. An alert has it, too."""


@dataclass(frozen=True, slots=True)
class View:
    """What the loop publishes after each tick; the API answers from it alone. `desired` is None before a first spec.

    All times in it are by the controller's clock; `wall_time` converts them for users.
    """

    at: float
    project: str
    desired: Desired | None = None
    observed: Observed = NOT_LOOKED_YET
    plan: Plan = field(default_factory=Plan)
    services: tuple[Service, ...] = ()
    rollouts: Mapping[str, RolloutStatus] = field(default_factory=dict)
    """Of each service of the compose files."""
    gpus: tuple[GpuUse, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    """None where the engine is one machine."""
    gpu_memory_problem: str = ""
    """Why the memory in use is not known, in words."""
    endpoints: Mapping[str, ServiceEndpoints] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    spec_problems: tuple[str, ...] = ()
    files: Hashable = None
    """The fingerprint of the compose files that the view is made from."""
    notices: tuple[str, ...] = ()
    """What is wrong beyond a single service, one sentence each."""
    refusals: tuple[Refusal, ...] = ()
    """Actions that failed and are not to be tried again yet."""
    engine_reachable: bool | None = None
    """None = not asked yet."""
    haproxy_reachable: bool | None = None
    certificate_ends_at: float | None = None
    """Until when controller and edges reach each other over TLS (unix time); None = they do not use it."""
    client_certificates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """From when until when those that HAProxy has for clients are valid (unix times), by the names of their files."""
    ahead_s: float = 0.0
    """Seconds by which the wall clock was ahead of the controller's clock at `at`."""

    def wall_time(self, at: float) -> float:
        """Convert a time of the controller's clock to the present wall clock.

        Ages are right even if the wall clock was set in between. Events use the same clock.
        """
        return at + self.ahead_s


def notices(observed: Observed, refusals: Iterable[Refusal], unseen: str, now: float) -> tuple[str, ...]:
    """Return what is wrong beyond a single service."""
    found = []
    if unseen:
        found.append(f"the Docker Engine does not answer, what is shown is old: {unseen}")
    if observed.router_problem:
        found.append(f"{observed.router_problem}; nothing can be added to HAProxy or taken from it until this is over")
    elif observed.routing is None:
        found.append("HAProxy does not answer: nothing can be added to it or taken from it until it is back")
    found += [f"the HAProxy of {node}: {why}" for node, why in edge_differences(observed).items() if why]
    for uuid, reason in sorted(observed.gpu_faults.items()):
        found.append(f"GPU {uuid} is not used: {reason}; run `pierhead unmark {uuid}` when it works again")
    found += node_notices(observed)
    found += [refusal_words(refused_action(refusal, now)) for refusal in refusals if not refusal.action.service]
    return tuple(found)


def certificate_notices(ends_at: float | None, wall: float) -> tuple[str, ...]:
    """Return that the certificates between controller and edges end soon, or have ended."""
    if ends_at is None or ends_at - wall > NEAR_END_S:
        return ()
    date, days = datetime.fromtimestamp(ends_at, UTC).date(), int((ends_at - wall) / 86_400)
    when = f"end on {date}, in {days} days" if ends_at > wall else f"ended on {date}, so no HAProxy takes changes"
    return (f"the certificates between the controller and the HAProxys {when}: run `pierhead up`",)


def gpu_uses(observed: Observed) -> tuple[GpuUse, ...]:
    """Return every GPU with its holders, in the engine's order."""
    reading = observed.gpu_reading or GpuReading(0.0)
    # The reading is shown however old it is.
    budget = GpuBudget.of(observed, now=reading.at)
    holders = dict(observed.foreign_gpu_holders)
    slots: dict[str, list[GpuSlotUse]] = {}
    for container in sorted(observed.containers, key=lambda container: container.name):
        for uuid in container.gpus if container.id not in observed.asleep else ():
            if container.gpu_slot is None:
                holders[uuid] = container.name
            else:
                slots.setdefault(uuid, []).append(GpuSlotUse(container.name, slot_words(container.gpu_slot)))
    uses = []
    listed = {gpu.uuid for gpu in observed.gpus}
    vanished = [Gpu(uuid) for uuid in sorted(observed.gpu_faults) if uuid not in listed]
    for gpu in (*observed.gpus, *vanished):
        shares = tuple(slots.get(gpu.uuid, ()))
        # The holder of a GPU that was divided later holds all of its parts.
        whole = holders.get(gpu.uuid) or holders.get(gpu.parent, "")
        holder = whole or ", ".join(share.replica for share in shares)
        used_bytes, free_bytes = reading.used_bytes.get(gpu.uuid), budget.free_bytes(gpu.uuid)
        fault = observed.gpu_faults.get(gpu.uuid, "")
        uses.append(
            GpuUse(gpu.uuid, gpu.name, holder, shares, gpu.memory_bytes, used_bytes, free_bytes, fault, gpu.node)
        )
    return tuple(uses)
