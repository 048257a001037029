"""The state while one plan is computed: the steps so far, the free GPUs, HAProxy's servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.actions import Action, DeleteServer, RemoveContainer, SetServerState, ShutdownSessions, WriteRouting
from ..model.desired import Desired
from ..model.nodes import Node
from ..model.observed import Observed
from ..model.plan import PendingReplica, Step
from ..model.spec import backend_name
from ..model.world import Server, ServerState
from .machine import MachineBudget
from .placement import GpuBudget


@dataclass(slots=True)
class Draft:
    """A plan in progress. The modules of this room add their steps to it, one after the other."""

    desired: Desired
    observed: Observed
    now: float
    gpus: GpuBudget
    machine: MachineBudget
    steps: list[Step] = field(default_factory=list)
    pending: list[PendingReplica] = field(default_factory=list)
    gives_way: dict[str, str] = field(default_factory=dict)
    let_go: set[str] = field(default_factory=set)
    """Ids of the replicas that sleep and that this plan stops."""
    next_look_s: float | None = None
    keys_step: int | None = None
    """The step that gives HAProxy other keys of clients."""
    routing_step: int | None = None
    """The step that gives HAProxy other routes."""
    busy: frozenset[str] = field(init=False)
    """Targets of actions still in progress."""
    failed: list[RemoveContainer] = field(init=False)
    """Removals of failed replicas that are in progress, or planned here: the store has not counted them yet."""
    leaving: dict[str, Node] = field(init=False)
    """By name: nodes whose replicas are to go elsewhere."""
    unknown: frozenset[str] = field(init=False)
    """Names of the nodes of which nothing is known for the moment."""
    routing_usable: bool = field(init=False)
    """Whether HAProxy answers, and is not being reloaded."""

    def __post_init__(self) -> None:
        in_progress = self.observed.in_progress
        self.busy = frozenset(action.target for action in in_progress)
        self.failed = [action for action in in_progress if isinstance(action, RemoveContainer) and action.failed]
        self.leaving = {node.name: node for node in self.observed.nodes if node.is_leaving}
        unknown = (node.name for node in self.observed.nodes if node.state == "unknown")
        self.unknown = self.observed.unreached.union(unknown)
        reloading = any(isinstance(action, WriteRouting) for action in in_progress)
        self.routing_usable = self.observed.routing is not None and not reloading

    def add(self, action: Action, *after: int | None) -> int:
        """Add a step that waits for the steps `after`; return its number."""
        number = len(self.steps) + 1
        self.steps.append(Step(number, action, tuple(sorted({step for step in after if step is not None}))))
        return number

    def look_again_in(self, seconds: float) -> None:
        """Request the next plan in at most this many seconds."""
        seconds = max(seconds, 0.01)
        self.next_look_s = seconds if self.next_look_s is None else min(self.next_look_s, seconds)

    def servers(self) -> tuple[Server, ...]:
        """HAProxy's servers; none while HAProxy does not answer."""
        return self.observed.routing.servers if self.observed.routing and self.routing_usable else ()

    def server_of(self, service: str, name: str) -> Server | None:
        """A replica's server; None also while HAProxy does not answer."""
        routing = self.observed.routing
        return routing.server_of(service, name) if routing and self.routing_usable else None

    def delete_server(self, server: Server, service: str, cause: str, *, force: bool = False) -> int:
        """Take a server out for good: maint, end its sessions, delete. Returns the last step's number."""
        last: int | None = None
        names = {"target": server.name, "service": service, "backend": server.backend, "cause": cause}
        if server.state is not ServerState.MAINT:
            last = self.add(SetServerState(**names, state=ServerState.MAINT))
        if force or server.sessions:
            last = self.add(ShutdownSessions(**names), last)
        return self.add(DeleteServer(**names), last)

    def set_server(self, service: str, name: str, state: ServerState, cause: str) -> None:
        """Plan another state of a replica's server."""
        self.add(SetServerState(target=name, service=service, backend=backend_name(service), state=state, cause=cause))
