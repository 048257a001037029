"""The changes between two published views that become events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..model.nodes import Quorum
from ..model.observed import NOT_LOOKED_YET
from ..model.reports import Note, UserConfigStatus
from ..plan.user_config import progress_words
from .nodes import quorum_words
from .records.services import ReplicaStatus
from .view import View


def transitions(before: View, after: View) -> tuple[Note, ...]:
    """Return the changes of state that become events, in a fixed order."""
    return (
        *_edges(before, after),
        *_nodes(before, after),
        *_brake(before, after),
        *_left_alone(before, after),
        *_replicas(before, after),
        *_moves(before, after),
        *_blocked(before, after),
        *_user_configs(before, after),
    )


def _edges(before: View, after: View) -> Iterator[Note]:
    if after.observed is NOT_LOOKED_YET:
        return
    # No event when they answer at the start.
    if bool(after.haproxy_reachable) != (before.haproxy_reachable is not False):
        yield _reachability("haproxy", "HAProxy", up=bool(after.haproxy_reachable))
    if bool(after.engine_reachable) != (before.engine_reachable is not False):
        yield _reachability("engine", "the Docker Engine", up=bool(after.engine_reachable))
    was, now = before.observed.routing, after.observed.routing
    if was and now and (was.pid, was.started_at) != (now.pid, now.started_at):
        message = f"HAProxy was restarted or reloaded: process {was.pid} -> {now.pid}"
        yield Note("haproxy_restarted", message, target="haproxy")
    yield from _differing_edges(was.edges if was else {}, now.edges if now else {})


def _differing_edges(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Note]:
    for node, why in now.items():
        if why and why != was.get(node):
            yield Note("edge_differs", f"the HAProxy of {node}: {why}", target=node, outcome="warning")
        elif not why and was and was.get(node) != "":
            yield Note("edge_back", f"the HAProxy of {node} is in sync again", target=node, outcome="ok")
    for node in (node for node, why in was.items() if not why and now and node not in now):
        yield Note("edge_differs", f"the HAProxy of {node}: it is gone", target=node, outcome="warning")


def _reachability(kind: str, name: str, *, up: bool) -> Note:
    if up:
        return Note(f"{kind}_answers", f"{name} answers", target=kind, outcome="ok")
    return Note(f"{kind}_silent", f"{name} does not answer", target=kind, outcome="warning")


def _nodes(before: View, after: View) -> Iterator[Note]:
    """Nodes that went down, came back, joined, were removed or are drained; and what is left of the managers."""
    if before.observed is NOT_LOOKED_YET or before.observed.nodes == after.observed.nodes:
        return
    then, now = ({node.id: node for node in seen.nodes} for seen in (before.observed, after.observed))
    for key, node in now.items():
        was = then.get(key)
        if was is None:
            yield Note("node_joined", f"node {node.name} has joined", target=node.name)
        elif node.state == "down" and was.state != "down":
            words = f"node {node.name} is down: its replicas go where there is room"
            yield Note("node_lost", words, target=node.name, outcome="warning")
        elif was.state == "down" and node.state != "down":
            yield Note("node_back", f"node {node.name} is back", target=node.name, outcome="ok")
        if was and node.is_leaving and (node.availability, was.availability) == ("drain", "pause"):
            words = f"node {node.name} is drained: no replica is left there, and it may be switched off"
            yield Note("node_drained", words, target=node.name, outcome="ok")
    for key in then.keys() - now.keys():
        yield Note("node_removed", f"node {then[key].name} was removed", target=then[key].name)
    yield from _managers(Quorum.of(then.values()), Quorum.of(now.values()))


def _managers(then: Quorum, now: Quorum) -> Iterator[Note]:
    if now.at_risk and not then.at_risk:
        yield Note("quorum_at_risk", quorum_words(now), target="managers", outcome="warning")
    elif then.at_risk and not now.at_risk:
        words = f"{now.ready} of {now.managers} managers are up, and {now.needed} are needed"
        yield Note("quorum_safe", words, target="managers", outcome="ok")


def _brake(before: View, after: View) -> Iterator[Note]:
    then, now = before.observed.brake, after.observed.brake
    if now and not then:
        yield Note("nodes_doubted", now, target="nodes", outcome="warning")
    elif then and not now:
        yield Note("nodes_believed", "replicas are removed and moved again", target="nodes", outcome="ok")


def _left_alone(before: View, after: View) -> Iterator[Note]:
    then, now = before.observed.left_alone, after.observed.left_alone
    for name in sorted(now.keys() - then.keys()):
        yield Note("left_alone", now[name], target=name, outcome="warning")


def _replicas(before: View, after: View) -> Iterator[Note]:
    old = {replica.name: replica for service in before.services for replica in service.replicas if replica.name}
    fresh = before.observed is NOT_LOOKED_YET
    there = {container.name for container in after.observed.containers}
    adopted: list[str] = []
    for service in after.services:
        for replica in service.replicas:
            if fresh and replica.name in there:  # others are being created
                adopted.append(service.name)
            elif replica.name and not fresh:
                yield from _replica(service.name, old.get(replica.name), replica, before, after)
    if adopted:
        message = f"found {len(adopted)} replicas of {len(set(adopted))} services, adopted them"
        yield Note("adopted", message)


def _moves(before: View, after: View) -> Iterator[Note]:
    """Replicas that the engine has moved, once they run again."""
    if before.observed.containers is after.observed.containers:
        return
    old = {one.id: one for one in before.observed.containers}
    for one in after.observed.containers:
        was = old.get(one.id)
        if one.moved and was is not None and (was.started_at != one.started_at or not was.state.is_up):
            yield Note("replica_moved", f"{one.name}: {one.moved}", one.service, one.name, "warning")


def _stage(replica: ReplicaStatus, view: View) -> str:
    """The start-up stage that a replica reports; "" when it reports none."""
    return next((c.stage for c in view.observed.containers if c.name == replica.name), "")


def _replica(service: str, old: ReplicaStatus | None, new: ReplicaStatus, before: View, after: View) -> Iterator[Note]:
    state = old.state if old else None
    if new.state == state:
        if old is not None and state == "STARTING" and _stage(new, after) not in ("", _stage(old, before)):
            yield Note("replica_progress", f"{new.name}: {_stage(new, after)}", service, new.name)
        return
    if new.state == "RUNNING":
        where = f" on {new.node}" if new.node else ""
        took = _start_time(new.name, after)
        yield Note("replica_ready", f"{new.name} is ready{where}{took}", service, new.name, "ok")
    elif state == "RUNNING" and new.state in ("FAILED", "PENDING", "STARTING"):
        yield Note("replica_not_ready", f"{new.name}: {new.message}", service, new.name, "warning")


def _start_time(replica: str, view: View) -> str:
    started_at = next((c.started_at for c in view.observed.containers if c.name == replica), None)
    return "" if started_at is None else f", {max(view.at - started_at, 0.0):.1f} s after its start"


def _blocked(before: View, after: View) -> Iterator[Note]:
    old = {service.name: service.blocked for service in before.services}
    for service in after.services:
        if service.blocked and _without_numbers(service.blocked) != _without_numbers(old.get(service.name, "")):
            yield Note("replica_pending", service.blocked, service.name, outcome="warning")


def _without_numbers(words: str) -> str:
    """The memory that is free changes from one look to the next: that alone is no event."""
    return re.sub(r"[\d.]+", "", words)


def _user_configs(before: View, after: View) -> Iterator[Note]:
    """Changes of a user_config: its begin, its end in all replicas, and the replicas that refuse it."""
    if before.observed is NOT_LOOKED_YET:
        return  # the first view has no change
    old = {service.name: service.user_config for service in before.services}
    for service in after.services:
        name, then, now = service.name, old.get(service.name), service.user_config
        if now is not None and now != then:
            yield from _user_config(name, then, now)
        elif now is None and then is not None and not then.everywhere:
            yield Note("user_config_applied", f"{name}: no user_config is set any more", name, outcome="ok")


def _user_config(name: str, then: UserConfigStatus | None, now: UserConfigStatus) -> Iterator[Note]:
    is_new = then is None or then.wanted != now.wanted
    if is_new and now.changes:
        yield Note("user_config", f"{name}: user_config {now.wanted}: {'; '.join(now.changes)}; no restart", name)
    for replica, sentence in zip(now.refusing, now.refused, strict=True):
        if then is None or sentence not in then.refused:
            yield Note("user_config_refused", sentence, name, replica, "failed")
    if now.everywhere and now.replicas and (is_new or not (then and then.everywhere)):
        yield Note("user_config_applied", f"{name}: {progress_words(now)}", name, outcome="ok")
