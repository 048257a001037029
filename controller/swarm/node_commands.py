"""The operations on nodes behind the REST API: draining, using again, labels. Each is one change of the engine's node.

What follows of it (replicas that go elsewhere) is the planner's, and is read back from the node.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace

from ..daemon.nodes import NodeParts
from ..errors import ControllerError, InvalidRequest, NotYet
from ..model.actions import UpdateNode
from ..model.nodes import LEAVING, LEAVING_AT_ONCE, LEAVING_LABEL, Availability, Node, unmet
from ..model.observed import NOT_LOOKED_YET
from ..model.plan import Outcome
from ..model.text import did_you_mean
from ..plan.drain import without_room

Labels = tuple[tuple[str, str | None], ...]

OWN_LABELS = "pierhead."
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{1,127}")
_VALUE = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""What a placement constraint can name."""


class SwarmNodeCommands:
    """See `NodeCommands`."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts

    async def drain(self, name: str, *, at_once: bool = False) -> str:
        """Move a node's replicas elsewhere, and then everything else. `at_once`: also those for which no other node
        has room. Returns what will happen. Raises InvalidRequest, EngineError, ControllerError.
        """
        node = self.known(name)
        name = node.name
        if node.availability == "drain":
            return f"{name} is drained already; `pierhead node activate {name}` uses it again"
        self._refuse_last_manager(node)
        words = self._outlook(name, at_once=at_once)
        label = LEAVING_AT_ONCE if at_once else LEAVING
        await self._change(node, "asked for by `node drain`", ((LEAVING_LABEL, label),), "pause")
        return words

    async def activate(self, name: str) -> str:
        """Use a node again. Raises as `drain` does."""
        node = self.known(name)
        name = node.name
        if node.availability == "active" and LEAVING_LABEL not in node.labels:
            return f"{name} is used already"
        await self._change(node, "asked for by `node activate`", ((LEAVING_LABEL, None),), "active")
        return f"{name} is used again: new replicas may be placed there, and nothing is moved back automatically"

    async def label(self, name: str, labels: Mapping[str, str | None]) -> str:
        """Set a node's labels; None takes one away. Raises as `drain` does."""
        node = self.known(name)
        name = node.name
        for key, value in labels.items():
            if key.startswith(OWN_LABELS):
                told = "`pierhead node drain` and `node activate` set it"
                raise InvalidRequest(f"labels: {key} is Pierhead's own: {told}")
            if not _KEY.fullmatch(key):
                raise InvalidRequest(f"labels: expected a key of letters, digits, '.', '_' and '-', found {key!r}")
            if value is not None and not _VALUE.fullmatch(value):
                raise InvalidRequest(f"labels: expected a value of letters, digits and . _ : / -, found {value!r}")
        after = {key: value for key, value in {**node.labels, **labels}.items() if value is not None}
        self._refuse_broken_constraint(node, after)
        await self._change(node, "asked for by `node label`", tuple(sorted(labels.items())))
        shown = ", ".join(f"{key}={value}" for key, value in sorted(after.items()) if not key.startswith(OWN_LABELS))
        return f"{name} has {f'the labels {shown}' if shown else 'no labels'}"

    async def _change(self, node: Node, cause: str, labels: Labels, availability: Availability | None = None) -> None:
        action = UpdateNode(target=node.name, node_id=node.id, availability=availability, labels=labels, cause=cause)
        began = time.monotonic()
        try:
            await self._parts.perform(action)
        except ControllerError as error:
            self._parts.report(Outcome(action, time.monotonic() - began, error))
            raise
        self._parts.report(Outcome(action, time.monotonic() - began))
        await self._parts.look_again()

    def known(self, name: str) -> Node:
        """The node of that name, or id. Raises InvalidRequest, NotYet."""
        seen = self._parts.seen()
        if seen is NOT_LOOKED_YET:
            raise NotYet("the controller has just been started and has not looked yet; repeat in a second")
        nodes = seen.nodes
        found = [node for node in nodes if name in (node.name, node.id)]
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(node.id for node in found)
            raise InvalidRequest(f"{len(found)} nodes are called {name}: name one by its id ({ids})")
        names = [node.name for node in nodes]
        raise InvalidRequest(f"there is no node {name!r}; {did_you_mean(name, names)}Nodes: {', '.join(names)}")

    def _refuse_last_manager(self, node: Node) -> None:
        """The controller runs on managers only: without one that takes tasks it would end for good."""
        others = [
            one for one in self._parts.seen().nodes if one.is_manager and one.takes_replicas and one.id != node.id
        ]
        if node.is_manager and not others:
            raise InvalidRequest(
                f"{node.name} is the only manager that takes tasks, and the controller runs on managers only: "
                "`pierhead node activate`, `docker node promote` or `pierhead node token --manager` gives another one"
            )

    def _outlook(self, name: str, *, at_once: bool) -> str:
        """What becomes of the replicas on a node."""
        seen, services = self._parts.seen(), self._parts.services()
        there = [one.service for one in seen.containers if one.node == name and not one.state.has_ended]
        if not there:
            return f"{name} leaves: no replica is there"
        counted = ", ".join(f"{there.count(service)} of {service}" for service in sorted(set(there)))
        words = f"{name} leaves: {counted} {'goes' if len(there) == 1 else 'go'} elsewhere, new ones first"
        stuck = without_room(seen, services, name, self._parts.clock())
        if not stuck:
            return words
        short = ", ".join(f"{count} of {service}" for service, count in sorted(stuck.items()))
        if at_once:
            return f"{words}; no other node has room for {short}: PENDING from then on until one has"
        return (
            f"{words}; no other node has room for {short}: they serve on {name} until one has. Add a node, ask for "
            f"fewer replicas, or end them with `pierhead node drain {name} --force`: they are PENDING then"
        )

    def _refuse_broken_constraint(self, node: Node, labels: Mapping[str, str]) -> None:
        """Swarm ends at once what runs on a node whose labels do not meet its constraints any more."""
        services, changed = self._parts.services(), replace(node, labels=labels)
        for one in self._parts.seen().containers:
            spec = services.get(one.service)
            if spec is None or one.node != node.name or not one.state.is_up:
                continue
            wanted = unmet(changed, spec.constraints)
            if wanted and not unmet(node, spec.constraints):
                raise InvalidRequest(
                    f"{one.name} runs on {node.name} and has the constraint {wanted}: Swarm would end it at once. "
                    f"`pierhead node drain {node.name}` moves it first"
                )
