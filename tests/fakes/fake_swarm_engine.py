"""A Swarm in memory: a fake engine that has nodes, places replicas on them itself, and moves what a lost node had.

`add_node`, `power_off`, `cut_off`, `power_on` and `forget` do something to a node. Times are by the engine's clock, at
the next call. What a node that is not heard of runs is shown as it last was, until the node is down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from controller.engines.base import EngineEvent, Places
from controller.errors import EngineError
from controller.model.actions import SignalContainer, UpdateNode
from controller.model.nodes import Availability, Node, NodeState
from controller.model.world import ContainerState, Gpu
from controller.swarm.engine.nodes import change_node
from controller.swarm.engine.service_spec import RESTART_DELAY_S
from tests.fakes.fake_engine import FakeContainer, FakeEngine, Readiness, _put

NOTICED_AFTER_S = 14.0
"""From the loss of a node until it is down, as Swarm takes it."""
RESTARTED_AFTER_S = RESTART_DELAY_S + 0.5
"""From the end of a replica that was not told to end until Swarm has started it again."""
GRACE_S = 10.0
"""From the stop signal until a node kills what ignores it: what it is where a compose file does not say."""
_WHY = {"drain": "drained", "pause": "paused"}


@dataclass
class FakeSwarmEngine(FakeEngine):
    """See the module. A container has a node and its GPUs only from its start on."""

    places: Places = "the engine's"
    _off_since: dict[str, float] = field(default_factory=dict)
    """By node: when it was powered off, or cut off."""
    _cut: set[str] = field(default_factory=set)
    """The nodes that keep running their tasks."""
    _restarts: dict[str, float] = field(default_factory=dict)
    """By container that has ended by itself: when it is started again."""

    def add_node(self, name: str, gpus: int = 2, *, is_manager: bool = True, **changes: Any) -> None:
        leads = is_manager and not any(node.is_leader for node in self.nodes.values())
        node = Node(name, f"id-{name}", is_manager, leads, address=f"10.77.0.{len(self.nodes) + 1}", version=1)
        self.nodes = dict(sorted({**self.nodes, name: replace(node, **changes)}.items()))
        self.gpus += tuple(Gpu(f"GPU-{name}-{number}", "nvidia", node=name) for number in range(1, gpus + 1))
        self._advance()

    def power_off(self, name: str) -> None:
        """What runs there answers no more; some seconds later it is down, and what was there goes elsewhere."""
        self._off_since.setdefault(name, self.clock())
        self._cut.discard(name)

    def cut_off(self, name: str) -> None:
        """No manager hears of it any more. Its replicas run and answer until it is back."""
        if name not in self._off_since:
            self._off_since[name] = self.clock()
            self._cut.add(name)

    def power_on(self, name: str) -> None:
        """It is back, without the replicas that were moved."""
        self._advance()
        if self._off_since.pop(name, None) is None:
            return
        if name not in self._cut:
            for one in self._on(name):  # it was back before its loss was noticed
                self._end(one, 255)
        self._cut.discard(name)
        self.set_state(name, "ready")
        self._advance()

    def set_state(self, name: str, state: NodeState) -> None:
        """It is seen so from now on."""
        self._change(name, state=state)

    def set_availability(self, name: str, availability: Availability) -> None:
        """`docker node update --availability`: draining ends what is there at once. An active one leaves no more."""
        self._advance()
        self._change(name, availability=availability, **({"labels": {}} if availability == "active" else {}))
        self._advance()

    def forget(self, name: str) -> None:
        """`docker node rm` of a node that is down."""
        del self.nodes[name]
        self.gpus = tuple(gpu for gpu in self.gpus if gpu.node != name)

    def readiness(self, name: str) -> Readiness:
        is_off = name in self._ids and self.by_name(name).node in self._off_since.keys() - self._cut
        return "absent" if is_off else super().readiness(name)

    # -------------------------------------------------------------------------------------------------------- inside

    def _advance(self) -> None:
        super()._advance()
        for name, since in self._off_since.items():
            if self.clock() >= since + NOTICED_AFTER_S and name in self.nodes and self.nodes[name].state != "down":
                self._change(name, state="down")
        for node in list(self.nodes.values()):
            if node.state == "down" or node.availability == "drain":
                for one in self._on(node.name):
                    self._unplace(one, f"{node.name} is {node.state}; pending task scheduling")
        for one in list(self.containers.values()):
            if one.terminated_at is not None and one.state.is_up and self._is_heard(one):
                if self.clock() >= one.terminated_at + GRACE_S:
                    self._end(one, 137)
            elif one.state is ContainerState.PENDING or self.clock() >= self._restarts.get(one.id, inf):
                self._place(one)

    def _is_heard(self, one: FakeContainer) -> bool:
        return one.node not in self._off_since

    def _end(self, one: FakeContainer, code: int, *, oom: bool = False) -> None:
        """Swarm starts again what was not told to end. Of a node that is not heard of nobody learns of an end."""
        if not self._is_heard(one):
            return
        super()._end(one, code, oom=oom)
        if one.ours and one.terminated_at is None:
            self._restarts[one.id] = self.clock() + RESTARTED_AFTER_S

    def _signal(self, action: SignalContainer) -> None:
        """A manager cannot send SIGKILL: the node does, after the grace period."""
        one = self.containers.get(action.container_id)
        if one is None or action.signal == "SIGKILL":
            return
        self._restarts.pop(one.id, None)
        if one.state is ContainerState.PENDING:
            one.state, one.engine_detail = ContainerState.EXITED, ""
        super()._signal(action)

    def _start(self, one: FakeContainer) -> None:
        if not one.ours:
            super()._start(one)
        elif not one.state.is_up:
            one.state = ContainerState.PENDING
            self._advance()

    def _on(self, name: str) -> list[FakeContainer]:
        return [one for one in self.containers.values() if one.node == name and one.state.is_up]

    def _unplace(self, one: FakeContainer, why: str) -> None:
        if one.terminated_at is not None:  # it is to end, and has, for all that will be known
            super()._end(one, 0)
            return
        one.state, one.node, one.ip, one.engine_detail = ContainerState.PENDING, "", None, why
        one.started_at = one.terminated_at = None
        self._emit("die", one)

    def _place(self, one: FakeContainer) -> None:
        """Start it on the node with the fewest replicas that has GPUs for it."""
        fitting = []
        for node in self.nodes.values():
            here = self._on(node.name)
            taken = {uuid for other in here for uuid in other.gpus}
            free = [gpu.uuid for gpu in self.gpus if gpu.node == node.name and gpu.uuid not in taken]
            if node.takes_replicas and node.name not in self._off_since and len(free) >= len(one.gpus):
                fitting.append((len(here), node.name, tuple(free[: len(one.gpus)])))
        if not fitting and one.state is ContainerState.PENDING:
            one.engine_detail = f"no suitable node (insufficient resources on {len(self.nodes)} nodes)"
        if not fitting:
            return
        self._restarts.pop(one.id, None)
        _, one.node, one.gpus = min(fitting)
        one.engine_detail = ""
        if one.behaviour.start_error is None:
            super()._start(one)
        else:
            one.engine_detail = f"could not be started on {one.node}: {one.behaviour.start_error}"
            self._end(one, 128)

    def _unusable(self) -> dict[str, str]:
        why = {
            node.name: "down" if node.state == "down" else "leaving" if node.is_leaving else _WHY[node.availability]
            for node in self.nodes.values()
            if node.state == "down" or node.availability != "active"
        }
        return {gpu.uuid: f"{gpu.node} ({why[gpu.node]})" for gpu in self.gpus if gpu.node in why}

    def _update_node(self, action: UpdateNode) -> None:
        node = self.nodes.get(action.target)
        if node is None or node.id != action.node_id:
            raise EngineError(f"{action.words} failed: node {action.node_id} not found")
        if action.version not in (None, node.version):
            raise EngineError(f"node {action.target} has changed since this was decided")
        if action.availability == "drain" and self._on(node.name):
            left = ", ".join(one.name for one in self._on(node.name))
            raise EngineError(f"drain of node {action.target}: it still has {left}")
        spec = {"Availability": node.availability, "Labels": dict(node.labels)}
        if change_node(action, spec):
            self._change(node.name, availability=spec["Availability"], labels=spec["Labels"])
            self._advance()

    def _change(self, name: str, **changes: Any) -> None:
        node = self.nodes[name]
        self.nodes[name] = replace(node, **changes, version=node.version + 1)
        for _, queue in self._subscribers:
            _put(queue, EngineEvent("node", node.id, name))
