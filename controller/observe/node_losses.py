"""Detects that half of the nodes or more seem to be lost at once: more likely the controller is cut off then.

A node seems to be lost when the engine says that it is down, or when none of its replicas answers any more: the engine
takes some seconds to find out. After a while this counts no more, however few nodes are left. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..model.nodes import Node
from ..model.world import ReplicaContainer, ReplicaHealth, RoutingState

DOWN_S = 300.0
"""For how long it counts that a node went down."""
FOUND_OUT_S = 15.0
"""From the first answer of a node's replicas until all of them have been asked again."""
FORGOTTEN_S = 90.0
"""For how long a node whose HAProxy does not answer is doubted, though some of its replicas answer: after a fault of
Docker's gossip, well engines learn of each other's containers one by one, from another engine every 30 s
(moby/moby#53141)."""
SILENT_S = 20.0
"""For how long it counts that a node's replicas stopped answering: the engine has found out by then."""


class NodeLosses:
    """Since when nodes are down, or silent."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._failing_since: dict[str, float] = {}
        """By node whose HAProxy does not answer: since when a replica there has failed."""
        self._kept_until: dict[str, float] = {}
        """By node with failed replicas: until when these are left as they are."""

    def unreached(
        self,
        nodes: Iterable[Node],
        staying: Sequence[ReplicaContainer],
        routing: RoutingState | None,
        now: float,
        brake: str = "",
    ) -> frozenset[str]:
        """The nodes that the engine hears of, and whose replicas and HAProxy both do not answer.

        Then the network between nodes is what does not work. Callers and other HAProxies do without these replicas, and
        their own node's need not. `routing` is None while no HAProxy answers. When packets arrive again, some answers
        come sooner than others, so a node counts as unreached for a moment longer; so it does after a `brake`.
        """
        away = {node.name for node in nodes if node.state == "ready" and (routing is None or node.name in routing.away)}
        failing = {one.node for one in staying if _has_failed(one)}
        self._failing_since = {name: self._failing_since.get(name, now) for name in failing & away}
        new = {name for name, since in self._failing_since.items() if now - since < FORGOTTEN_S}
        doubtful = failing if brake else new | (failing & away & _silent(staying))
        until = self._kept_until | dict.fromkeys(doubtful, now + FOUND_OUT_S)
        self._kept_until = {name: end for name, end in until.items() if name in failing and now < end}
        return frozenset(self._kept_until)

    def look(self, nodes: Iterable[Node], staying: Iterable[ReplicaContainer], now: float) -> str:
        """Return why no replica may be removed or moved now; "" = it may be.

        `staying`: the replicas that were not stopped.
        """
        counted = {node.name: node for node in nodes if node.availability != "drain"}
        if len(counted) < 2:
            return ""
        down = {name for name, node in counted.items() if node.state == "down"}
        silent = _silent(staying) & counted.keys() - down
        lost = {("down", name) for name in down} | {("silent", name) for name in silent}
        self._since = {key: self._since.get(key, now) for key in lost}
        limits = {"down": DOWN_S, "silent": SILENT_S}
        going = sorted({name for (kind, name), since in self._since.items() if now - since < limits[kind]})
        if 2 * len(going) < len(counted):
            return ""
        return (
            f"{len(going)} of {len(counted)} nodes seem to be lost at once ({', '.join(going)}): no replica is "
            f"removed or moved, for {DOWN_S / 60:.0f} minutes at most"
        )


def _silent(replicas: Iterable[ReplicaContainer]) -> set[str]:
    """The nodes on which replicas were ready, and none answers now. One that starts may have nothing to answer yet."""
    up = [
        one
        for one in replicas
        if one.state.is_up and (one.health is not ReplicaHealth.UNKNOWN or one.ongoing is not None)
    ]
    return {one.node for one in up if _has_failed(one)} - {one.node for one in up if not _has_failed(one)}


def _has_failed(replica: ReplicaContainer) -> bool:
    """Whether it runs, was ready and does not answer any more."""
    return replica.state.is_up and replica.health is ReplicaHealth.FAILED and not replica.broken
