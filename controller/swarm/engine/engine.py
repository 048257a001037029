"""A manager of a Docker Swarm as a ClusterEngine. Each replica is a Swarm service of its own, with at most one task.

So the planner chooses which replica goes (of one service with many tasks Swarm chooses itself). Swarm chooses the node
and the GPUs, restarts what ends, and moves what a lost node had. Nothing but what a manager lists is known: it has no
events of other nodes' tasks, so the list is read twice a second and compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import docker.errors
from docker import APIClient
from pierhead.tasks import is_set_within

from ... import docker_http
from ...engines.base import CONNECTED, EngineAction, EngineEvent, Places
from ...engines.docker_calls import EngineCalls, end_of
from ...engines.docker_errors import explanation, image_missing, refusal
from ...engines.docker_images import ImageFiles, Images
from ...engines.labels import check_same, create_body
from ...errors import EngineError, EngineUnreachable
from ...model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
    UpdateNode,
)
from ...model.nodes import Node
from ...model.observed import EngineState
from ...model.text import whole_number
from ...model.world import EdgePlace, ReplicaContainer
from ..names import STACK_LABEL
from .errors import OF_MANAGERS
from .lists import Lists
from .nodes import change_node, holds_replicas, node_changes, nodes
from .placing import EVERY_NODE, has_node, is_undecided, narrowing
from .reader import SwarmListing, changes, edges, gpus, has_forgotten, left_alone, replicas, start_of, strays
from .service_spec import LIMIT_LABEL, NARROWED_LABEL, STOPPED_LABEL, service_spec

EDGE_SERVICE, EDGE_NETWORK = "haproxy", "edges"
"""Of compose/swarm.yaml: the HAProxys, and the network that replicas are not on."""
_POLL_S = 0.5
_PLACED_WITHIN_S, _PLACED_LOOK_S = 5.0, 0.05
"""How long Swarm may take to choose a node. It takes 0.1 s; while it elects a leader, any time."""
_NO_ROOM = "no node that it may be on has room for it and fewer than {} replicas of the service (max_replicas_per_node)"
_UPDATE_TRIES = 5
"""An update of a service that has changed since it was read is refused, and repeated with what it is now."""

Spec = dict[str, Any]
Seen = tuple[tuple[ReplicaContainer, ...], tuple[Node, ...]]
T = TypeVar("T")


class SwarmEngine:
    """See `ClusterEngine`. The id of a replica is that of its service."""

    places: Places = "the engine's"

    def __init__(self, client: APIClient, lists: Lists | None = None) -> None:
        self._client = client
        self._lists = lists or Lists(client)
        self._seen: tuple[SwarmListing, Seen] | None = None
        """The last listing, and what it says."""
        self._images = Images(client)
        self._files = ImageFiles(client)
        self._calls = EngineCalls(OF_MANAGERS)
        self._closed = asyncio.Event()
        self._placing: dict[str, asyncio.Lock] = {}
        """By service."""
        self._edges_seen: frozenset[str] = frozenset()
        """The nodes that had one at the last look."""

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        """See `ClusterEngine.observe`. The id of an image that is named by its digest is that name."""

        def read() -> EngineState:
            listing, (ours, known) = self._read(project)
            listed, holders = gpus(listing, ours)
            found = self._images.ids([image for image in images if not _has_digest(image)])
            found |= {image: image for image in images if _has_digest(image)}
            others = strays(self._stack(project), project, service_names)
            return EngineState(ours, others, found, listed, holders, known, left_alone(listing, project))

        return await self._calls.look("reading services and tasks", read)

    async def perform(self, action: EngineAction, project: str) -> None:
        """See `ClusterEngine.perform`."""
        match action:
            case PullImage():
                await self._images.pull(action, self._calls)
            case CreateContainer():
                await self._calls.call(f"create of replica {action.target}", partial(self._create, action, project))
            case StartContainer():
                # One replica of a service after the other: where one goes counts for the next.
                async with self._placing.setdefault(action.service, asyncio.Lock()):
                    start = partial(self._start, action, project)
                    await self._calls.call(f"start of replica {action.target}", start)
            case SignalContainer():
                await self._calls.stop(f"{action.signal} to replica {action.target}", partial(self._signal, action))
            case RemoveContainer():
                await self._calls.stop(f"removal of replica {action.target}", partial(self._remove, action, project))
            case RestartRouter():
                restart = partial(self._update, f"{project}_{action.target}", _replace_tasks)
                await self._calls.call(f"restart of {action.target}", restart)
            case UpdateNode():
                await self._calls.call(f"change of node {action.target}", partial(self._update_node, action))

    async def used_gpu_memory(self) -> Mapping[str, int]:
        """See `ClusterEngine.used_gpu_memory`."""
        raise EngineError("a Swarm does not tell the memory in use of its nodes' GPUs: replicas have whole GPUs")

    async def logs(self, container_id: str, tail: int, after: float | None = None, *, timed: bool = False) -> str:
        """See `ClusterEngine.logs`; whole lines of the newest task, at most the last 64 KiB of them."""
        return await self._calls.read_log(container_id, partial(self._logs, container_id, tail, after, timed))

    async def has_image(self, image: str) -> bool:
        """See `ClusterEngine.has_image`. An image that is named by its digest is pulled by the node that needs it."""
        if _has_digest(image):
            return True
        return await self._calls.look(f"looking for image {image}", partial(self._images.has, image))

    async def file_of_image(self, image: str, path: str, project: str) -> bytes | None:
        """See `ClusterEngine.file_of_image`."""
        return await self._calls.call(
            f"reading {path} of image {image}", partial(self._files.read, image, path, project)
        )

    async def exists(self, project: str, compose_service: str) -> bool:
        """Whether the stack has that service."""
        services = await self._calls.call(f"looking for {compose_service}", partial(self._stack, project))
        return any(service["Spec"]["Name"] == f"{project}_{compose_service}" for service in services)

    async def events(self, project: str) -> AsyncIterator[EngineEvent]:
        """See `ClusterEngine.events`: what has changed between two readings."""
        before = await self._look(project)
        yield CONNECTED
        while not await is_set_within(self._closed, _POLL_S):
            after = await self._look(project)
            for event in (*changes(before[0], after[0]), *node_changes(before[1], after[1])):
                yield event
            before = after
        raise EngineUnreachable("event stream: the connection was closed")

    async def edges(self, project: str) -> Mapping[str, EdgePlace]:
        """Where the stack's HAProxys are in the controller's own network with them, each by its node's name.

        Raises EngineUnreachable, EngineError.
        """
        return await self._calls.look("looking for the edges", partial(self._edges, project))

    async def close(self) -> None:
        """Close connections and end threads; calls in progress are not waited for."""
        self._closed.set()
        self._calls.close()
        self._client.close()

    # ------------------------------------------------------------------------------------- calls (in worker threads)

    async def _look(self, project: str) -> Seen:
        return (await self._calls.look("event stream", partial(self._read, project)))[1]

    def _read(self, project: str) -> tuple[SwarmListing, Seen]:
        """The lists and what they say, which is computed again only when they have changed."""
        listing, last = self._list(project), self._seen
        if last is None or not last[0].is_same(listing):
            last = self._seen = listing, (replicas(listing, project), nodes(listing.nodes))
        return last

    def _list(self, project: str) -> SwarmListing:
        nodes = self._lists.get("nodes")
        has_gpus = any((node["Description"].get("Resources") or {}).get("GenericResources") for node in nodes)
        ours = {"label": f"pierhead.project={project}"}
        # Tasks of others matter only for the GPUs that they hold. Tasks before services: a service that is removed in
        # between would look as if it had lost its task.
        tasks = self._lists.get("tasks", **({} if has_gpus else ours))
        return SwarmListing(self._lists.get("services", **ours), tasks, nodes)

    def _stack(self, project: str) -> list[Any]:
        return self._lists.get("services", label=f"{STACK_LABEL}={project}")

    def _edges(self, project: str) -> Mapping[str, EdgePlace]:
        """The tasks that are to end are among many that have ended, so they are read only where an edge is missed."""
        service, network = f"{project}_{EDGE_SERVICE}", f"{project}_{EDGE_NETWORK}"
        try:
            nodes = self._lists.get("nodes")
            found = edges(self._lists.get("tasks", service=service, desired_state="running"), nodes, network)
            if self._edges_seen - found.keys():
                found = edges(self._lists.get("tasks", service=service), nodes, network)
        except docker.errors.NotFound:
            found = {}
        self._edges_seen = frozenset(found)
        return found

    def _create(self, action: CreateContainer, project: str) -> None:
        body = create_body(action.spec, action.target, action.version, action.number, action.gpus, project)
        image = self._image_for_nodes(action)
        spec = service_spec(action.target, body, len(action.gpus), image, self._file_ids(action.spec.name, body))
        if action.spec.max_replicas_per_node is not None:
            spec["Labels"][LIMIT_LABEL] = str(action.spec.max_replicas_per_node)
        try:
            docker_http.post(self._client, "/services/create", spec, self._images.credentials(image))
        except docker.errors.APIError as error:
            if error.response is None or error.response.status_code != 409:
                raise
            message = explanation(error)
            try:
                existing = self._inspect(action.target)["Spec"]["Labels"] or {}
            except docker.errors.NotFound as gone:  # it was just being removed; the next plan creates it again
                raise EngineError(refusal(f"create of replica {action.target}", message)) from gone
            check_same(action.target, spec["Labels"], existing, "service", "docker service rm")

    def _file_ids(self, service: str, body: Mapping[str, Any]) -> dict[tuple[str, str], str]:
        """The ids of the secrets and configs that a replica is given, by kind and name."""
        found: dict[tuple[str, str], str] = {}
        for kind, listed in (("Secrets", self._client.secrets), ("Configs", self._client.configs)):
            wanted = {file["Name"] for file in body.get(kind) or ()}
            if wanted:
                there = listed({"name": sorted(wanted)})  # and those whose names begin so
                found |= {(kind, one["Spec"]["Name"]): str(one["ID"]) for one in there}
            if missing := sorted(name for name in wanted if (kind, name) not in found):
                what = kind.lower()
                raise EngineError(
                    f"create of a replica of {service}: Swarm has no {what} {', '.join(missing)}: `pierhead deploy` "
                    f"makes those of the compose files, `docker {what.removesuffix('s')} create` makes one of your own"
                )
        return found

    def _image_for_nodes(self, action: CreateContainer) -> str:
        """The name by which every node gets this very image: with its digest, where a registry has given it one.

        The API keeps a tag unchanged, and each node would pull the tag's image of the moment when it starts a task.
        """
        image = str(action.spec.container.get("Image", action.spec.image))
        if _has_digest(image):
            return image
        found = self._images.inspect(image)
        if found is None:
            self._images.forget()
            raise image_missing(action.spec)
        digests = found.get("RepoDigests") or []
        repository = action.spec.image.partition("@")[0].rpartition(":")[0] or action.spec.image
        of_its_repository = [digest for digest in digests if digest.partition("@")[0] == repository]
        return str([*of_its_repository, *digests, image][0])

    def _start(self, action: StartContainer, project: str) -> None:
        """Give the service its task, on one of the nodes that `narrowing` leaves.

        A start that was interrupted has left its constraints: `NARROWED_LABEL` counts them. A task that has its node
        loses them, one that has none is placed again.
        """
        name = action.target
        listing = self._until(lambda: self._list(project), lambda seen: not is_undecided(_spec_of(name, seen), seen))
        spec = copy.deepcopy(_spec_of(name, listing))
        was_narrowed = bool(spec) and _narrow(spec, ())
        is_started = bool(spec) and bool(spec["Mode"]["Replicated"].get("Replicas"))
        is_placed = is_started and (not was_narrowed or has_node(self._tasks(name)))
        left = narrowing(spec, listing) if spec and not is_placed else EVERY_NODE
        if left == EVERY_NODE:
            self._update(name, _start)
            return
        for added in dict.fromkeys(((*left.bound, *left.preference), left.bound)):
            self._update(name, partial(_start, added=added))
            if not added:
                return
            if has_node(self._until(partial(self._tasks, name), lambda tasks: has_node(tasks) is not None)):
                self._update(name, _start)
                return
        self._update(name, partial(_start, tasks=0))
        raise EngineError(f"start of replica {name}: {_NO_ROOM.format(spec['Labels'][LIMIT_LABEL])}")

    def _until(self, look: Callable[[], T], is_settled: Callable[[T], bool]) -> T:
        """Look until Swarm has carried out the order, or for as long as that may take."""
        until = time.monotonic() + _PLACED_WITHIN_S
        while not is_settled(seen := look()) and time.monotonic() < until:
            time.sleep(_PLACED_LOOK_S)
        return seen

    def _tasks(self, service: str) -> list[Any]:
        """Of one service, and so not by `Lists`, which keeps an answer to each question."""
        return list(self._client.tasks({"service": service}))  # type: ignore[no-untyped-call]

    def _signal(self, action: SignalContainer) -> None:
        """End its task: Swarm sends the stop signal, and kills what is left after the grace period.

        So SIGKILL is nothing to do: a manager cannot send it to another node's container.
        """
        if action.signal == "SIGTERM":
            with contextlib.suppress(docker.errors.NotFound):
                self._update(action.container_id, partial(_stop, start_of(self._tasks(action.container_id))))

    def _remove(self, action: RemoveContainer, project: str) -> None:
        """Remove a service. Swarm ends a task that still runs, as `_signal` does."""
        if not action.force:
            found = next((one for one in replicas(self._list(project), project) if one.id == action.container_id), None)
            if found is not None and found.state.is_up:
                raise EngineError(f"removal of replica {action.target} failed: its task is still running")
        with contextlib.suppress(docker.errors.NotFound):
            self._until(partial(self._tasks, action.container_id), has_forgotten)
            self._client.remove_service(action.container_id)  # type: ignore[no-untyped-call]

    def _logs(self, service_id: str, tail: int, after: float | None, timed: bool) -> str:
        options = {"stdout": True, "stderr": True, "tail": tail, "timestamps": timed, "since": after or 0}
        try:
            tasks = sorted(self._tasks(service_id), key=lambda task: str(task["CreatedAt"]))
            ran = [one for one in tasks if (one["Status"].get("ContainerStatus") or {}).get("ContainerID")]
            if not ran:
                return ""
            output = docker_http.get(self._client, f"/tasks/{ran[-1]['ID']}/logs", **options).content
        except docker.errors.NotFound:
            return ""
        has_terminal = ran[-1]["Spec"]["ContainerSpec"].get("TTY", False)
        return end_of(output if has_terminal else _output(output)).decode(errors="replace")

    def _update(self, service: str, change: Callable[[Spec], bool]) -> None:
        """Change a service by compare-and-swap. `change` returns whether it has changed the spec."""
        self._swap(f"service {service}", "services", partial(self._inspect, service), change)

    def _update_node(self, action: UpdateNode) -> None:
        """Change a node by compare-and-swap. Swarm's drain ends everything there, so no replica may be left."""
        if action.availability == "drain":
            there = self._client.tasks({"node": action.node_id, "desired-state": "running"})  # type: ignore[no-untyped-call]
            if names := holds_replicas(there):
                raise EngineError(f"drain of node {action.target}: it still has {', '.join(names)}")
        inspect = partial(self._client.inspect_node, action.node_id)
        self._swap(f"node {action.target}", "nodes", inspect, partial(change_node, action), action.version)

    def _swap(
        self,
        what: str,
        kind: str,
        inspect: Callable[[], dict[str, Any]],
        change: Callable[[Spec], bool],
        version: int | None = None,
    ) -> None:
        """Replace a spec, unless it was changed after it was read: then again. `version`: the only one to replace."""
        for _ in range(_UPDATE_TRIES):
            found = inspect()
            spec: Spec = found["Spec"]
            if version not in (None, found["Version"]["Index"]):
                raise EngineError(f"{what} has changed since this was decided")
            if not change(spec):
                return
            try:
                docker_http.post(self._client, f"/{kind}/{found['ID']}/update", spec, version=found["Version"]["Index"])
            except docker.errors.APIError as error:
                if "out of sequence" not in explanation(error):
                    raise
            else:
                return
        raise EngineError(f"{what} was changed {_UPDATE_TRIES} times while it was to be changed once")

    def _inspect(self, service: str) -> dict[str, Any]:
        return self._client.inspect_service(service)  # type: ignore[no-untyped-call, no-any-return]


def _spec_of(name: str, listing: SwarmListing) -> Spec:
    """Of a replica's service; {} = it is gone."""
    return next((one["Spec"] for one in listing.services if one["Spec"]["Name"] == name), {})


def _has_digest(image: str) -> bool:
    return "@sha256:" in image


def _output(stream: bytes) -> bytes:
    """The text of a log in frames: one byte for the stream, three of nothing, four for the length."""
    parts, start = [], 0
    while start + 8 <= len(stream):
        end = start + 8 + int.from_bytes(stream[start + 4 : start + 8], "big")
        parts.append(stream[start + 8 : end])
        start = end
    return b"".join(parts)


# ---------------------------------------------------------------------------------------------------- changes of a spec


def _start(spec: Spec, added: Collection[str] = (), tasks: int = 1) -> bool:
    """One task; Swarm starts another one by itself where the last has ended. `added`: see `_narrow`.

    A task that is on a node which fulfils its constraints does not change.
    """
    spec["Labels"].pop(STOPPED_LABEL, None)
    has_other_constraints = _narrow(spec, added)
    return _set_tasks(spec, tasks) or has_other_constraints


def _narrow(spec: Spec, added: Collection[str]) -> bool:
    """Add these constraints to those of the compose file, in place of those that were added before."""
    before = whole_number(spec["Labels"].pop(NARROWED_LABEL, "")) or 0
    if not before and not added:
        return False
    placement = spec["TaskTemplate"].setdefault("Placement", {})
    listed = list(placement.get("Constraints") or ())
    placement["Constraints"] = [*listed[: len(listed) - before], *added]
    if added:
        spec["Labels"][NARROWED_LABEL] = str(len(added))
    return True


def _stop(started_at: str, spec: Spec) -> bool:
    spec["Labels"][STOPPED_LABEL] = started_at
    return _set_tasks(spec, 0)


def _set_tasks(spec: Spec, count: int) -> bool:
    mode = spec["Mode"]["Replicated"]
    has_changed = bool(mode.get("Replicas") != count)
    mode["Replicas"] = count
    return has_changed


def _replace_tasks(spec: Spec) -> bool:
    template = spec["TaskTemplate"]
    template["ForceUpdate"] = template.get("ForceUpdate", 0) + 1
    return True
