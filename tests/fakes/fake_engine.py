"""A container engine in memory, for tests of the planner and the loop, and for large worlds.

It passes tests/contract/test_engine_contract.py, as the real engine does. Containers get ready, drain and end by the
caller's clock, at the next call. A `Behaviour` is what a service's containers do; `kill`, `crash`, `run_out_of_memory`,
`hang`, `lose_network`, ... do something to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Literal

from controller.engines.base import CONNECTED, MOST_FILE_BYTES, EngineAction, EngineEvent, Places
from controller.engines.docker_errors import image_missing
from controller.errors import EngineError, EngineUnreachable, ImageNotFound
from controller.model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
    UpdateNode,
)
from controller.model.machine import Footprint, Machine
from controller.model.nodes import Node
from controller.model.observed import EngineState
from controller.model.spec import NO_USER_CONFIG, GpuSlot, ServiceSpec
from controller.model.world import ContainerState, Gpu, ReplicaContainer, StrayContainer

Readiness = Literal["absent", "starting", "ready", "draining", "silent"]

TOKEN = "PIERHEAD_ADMIN_TOKEN"
_EVENT_LIMIT = 256

A_REPLICA = Footprint(memory_bytes=100 * 1024**2, processes=20)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the containers of a service do once started; times in seconds of the engine's clock."""

    ready_after_s: float = 0.0
    exits_after_s: float | None = None
    exit_code: int = 0
    oom: bool = False
    """It ends (by `exits_after_s`) because its memory ran out: code 137, OOM flag."""
    drain_s: float = 0.0
    """From SIGTERM to its end."""
    ignores_sigterm: bool = False
    start_error: str | None = None
    """What the engine says when it is started; it then stays "created" with exit code 128."""
    output: str = ""


@dataclass(slots=True)
class FakeContainer:
    """One container. `replica` is None for a container that is not ours."""

    id: str
    name: str
    project: str
    service: str
    behaviour: Behaviour
    created_at: float
    version: str = ""
    number: int = 0
    port: int | None = None
    probe: tuple[int, str] | None = None
    has_socket: bool = False
    graceful_shutdown_timeout_s: float | None = None
    stop_grace_period_s: float | None = None
    node: str = ""
    gpus: tuple[str, ...] = ()
    gpu_slot: GpuSlot | None = None
    user_config: str = NO_USER_CONFIG
    """What its environment says, or what it was given since."""
    admin_token: str = ""
    """What it asks for before it takes another one."""
    ours: bool = True
    one_off: bool = False
    state: ContainerState = ContainerState.CREATED
    ip: str | None = None
    started_at: float | None = None
    exit_code: int | None = None
    oom_killed: bool = False
    hanging: bool = False
    terminated_at: float | None = None
    said: list[tuple[float, str]] = field(default_factory=list)
    """Lines that it has logged since its start, and when."""
    network_lost: bool = False
    engine_detail: str = ""
    created_by_s: float = 0.0
    """By how much the wall clock was off when it was created, and when it was started."""
    started_by_s: float = 0.0

    @property
    def ends_at(self) -> float | None:
        """When it will end by itself, as far as is known now."""
        if self.started_at is None or self.hanging:
            return None
        ends = []
        if self.behaviour.exits_after_s is not None:
            ends.append(self.started_at + self.behaviour.exits_after_s)
        if self.terminated_at is not None and not self.behaviour.ignores_sigterm:
            ends.append(self.terminated_at + self.behaviour.drain_s)
        return min(ends, default=None)

    def end(self, code: int, *, oom: bool = False) -> None:
        """Stop running with that exit code."""
        self.state, self.exit_code, self.oom_killed, self.ip = ContainerState.EXITED, code, oom, None


_SEEN = {each.name for each in fields(ReplicaContainer)} & {each.name for each in fields(FakeContainer)} - {
    *("created_at", "started_at"),
    "user_config",
}
"""What is seen of a container as it is: the probe reports its user_config, and times are of the wall clock."""


@dataclass(slots=True)
class FakeEngine:
    """See `ClusterEngine`. Public fields may be set by tests; `done` is every action that was asked for."""

    clock: Callable[[], float]
    images: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By image id: its files, by path."""
    gpus: tuple[Gpu, ...] = ()
    gpu_memory: dict[str, int] | None = None
    """Bytes in use by UUID; None = there is no nvidia-smi."""
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    """By version, else by service; `Behaviour()` for the others."""
    bad_gpus: dict[str, Behaviour] = field(default_factory=dict)
    """GPU UUID -> what containers on it do, whatever they would do elsewhere."""
    node: str = "fake-node"
    clock_set_by_s: float = 0.0
    """By how much the machine's wall clock was set forward (or back); containers are not affected."""
    reachable: bool = True
    absence: type[EngineError] = EngineUnreachable
    """How it fails while it is not reachable."""
    done: list[EngineAction] = field(default_factory=list)
    restart_router: Callable[[], None] = lambda: None
    """What becomes of HAProxy when its container is killed and started."""
    containers: dict[str, FakeContainer] = field(default_factory=dict)
    """By id."""
    places: Places = "ours"
    nodes: dict[str, Node] = field(default_factory=dict)
    """By name, in the order of names; see fake_swarm_engine.py."""
    reading_s: float = 0.0
    """How long `observe` takes; it returns the world at the time of the call."""
    machine: Machine | None = None
    """The machine without replicas; None = it is not known. Each replica that is up takes `takes` of it."""
    takes: Footprint = A_REPLICA
    starting_s: float = 0.0
    """How long a start takes."""
    read: list[str] = field(default_factory=list)
    """The images of which a file was asked for, in order."""
    _ids: dict[str, str] = field(default_factory=dict)
    """Of all containers, by name."""
    _ending: set[str] = field(default_factory=set)
    """Ids of the containers that run and may end by themselves, sooner or later."""
    _image_ids: set[str] = field(default_factory=set)
    """Ids of all images that ever were: a name that stands for another one by now leaves the former one there."""
    _failures: list[tuple[type[EngineAction], EngineError]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _subscribers: list[tuple[str, asyncio.Queue[EngineEvent | EngineError]]] = field(default_factory=list)

    # -------------------------------------------------------------------------------------------------- the protocol

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        await self._turn()
        containers = sorted(self.containers.values(), key=lambda one: one.name)
        ours = tuple(_replica(one) for one in containers if one.ours and one.project == project)
        strays = tuple(
            StrayContainer(one.id, one.name, one.service)
            for one in containers
            if not one.ours and not one.one_off and one.project == project and one.service in service_names
        )
        holders = self._unusable() | {
            gpu: one.name
            for one in containers
            if one.state.is_up and not (one.ours and one.project == project)
            for gpu in one.gpus
        }
        found = {image: self.images.get(image) for image in images}
        state = EngineState(
            ours, strays, found, self.gpus, holders, tuple(self.nodes.values()), machine=self._machine()
        )
        await asyncio.sleep(self.reading_s)
        return state

    async def perform(self, action: EngineAction, project: str) -> None:
        await self._turn()
        self.done.append(action)
        self._fail_as_planned(action)
        match action:
            case PullImage() if action.spec.has_build:
                raise image_missing(action.spec)
            case PullImage():  # the registry has no image
                what = f"pull of image {action.image} for service {action.service}"
                raise ImageNotFound(f"{what} failed: manifest unknown")
            case CreateContainer():
                self._create(action, project)
            case StartContainer():
                await asyncio.sleep(self.starting_s)
                self._start(self._replica_named(action.target))
            case SignalContainer():
                self._signal(action)
            case RemoveContainer():
                self._remove(action)
            case RestartRouter():
                self.restart_router()
            case UpdateNode():
                self._update_node(action)

    async def used_gpu_memory(self) -> Mapping[str, int]:
        await self._turn()
        if self.gpu_memory is None:
            raise EngineError("nvidia-smi cannot be asked for the memory of the GPUs: there is none (fake)")
        return dict(self.gpu_memory)

    async def logs(self, container_id: str, tail: int, after: float | None = None, *, timed: bool = False) -> str:
        await self._turn()
        one = self.containers.get(container_id)
        if one is None or one.started_at is None:
            return ""
        at_start = [(one.started_at, line) for line in one.behaviour.output.splitlines()]
        lines = [
            f"{_log_time(at, number)} {line}\n" if timed else f"{line}\n"
            for number, (at, line) in enumerate([*at_start, *one.said])
            if after is None or at >= after
        ]
        return "".join(lines[-tail:])

    async def has_image(self, image: str) -> bool:
        await self._turn()
        return image in self.images or image in self._image_ids

    async def file_of_image(self, image: str, path: str, project: str) -> bytes | None:
        await self._turn()
        self.read.append(image)
        found = self.files.get(self.images.get(image, image), {}).get(path)
        return None if found is None or len(found) > MOST_FILE_BYTES else found

    async def exists(self, project: str, compose_service: str) -> bool:
        await self._turn()
        return any(
            not (one.ours or one.one_off) and (one.project, one.service) == (project, compose_service)
            for one in self.containers.values()
        )

    async def events(self, project: str) -> AsyncIterator[EngineEvent]:
        await self._turn()
        queue: asyncio.Queue[EngineEvent | EngineError] = asyncio.Queue(_EVENT_LIMIT)
        queue.put_nowait(CONNECTED)
        self._subscribers.append((project, queue))
        try:
            while True:
                event = await queue.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
        finally:
            self._subscribers.remove((project, queue))

    async def close(self) -> None:
        self._break_streams("closed")

    # ----------------------------------------------------------------------------------------- what tests do to it

    def add_image(self, reference: str, content: str = "1") -> str:
        """Have an image; another `content` is another build. Returns its id."""
        self.images[reference] = f"sha256:{hashlib.sha256(f'{reference} {content}'.encode()).hexdigest()}"
        self._image_ids.add(self.images[reference])
        for _, queue in self._subscribers:
            _put(queue, EngineEvent("image tag", "", reference))
        return self.images[reference]

    def remove_image(self, image_id: str) -> None:
        """`docker image prune`: an image that no name stands for any more is gone."""
        self._image_ids.discard(image_id)

    def add_container(
        self,
        name: str,
        *,
        project: str = "",
        service: str = "",
        gpus: tuple[str, ...] = (),
        one_off: bool = False,
        behaviour: Behaviour | None = None,
    ) -> FakeContainer:
        """Start a container that is not ours: a stray, one of Compose's own, a user's training run."""
        one = FakeContainer(
            id=self._next_id(),
            name=name,
            project=project,
            service=service,
            behaviour=behaviour or Behaviour(),
            created_at=self.clock(),
            created_by_s=self.clock_set_by_s,
            gpus=gpus,
            ours=False,
            one_off=one_off,
        )
        self._add(one)
        self._start(one)
        return one

    def fail_next(self, kind: type[EngineAction], error: EngineError) -> None:
        """Let the next action of that kind fail, before it changes anything. May be called several times."""
        self._failures.append((kind, error))

    def fail_no_more(self) -> None:
        """Forget the failures that `fail_next` has left."""
        self._failures.clear()

    def go_away(self, absence: type[EngineError] = EngineUnreachable) -> None:
        """The daemon stops answering, containers keep running."""
        self.reachable, self.absence = False, absence
        self._break_streams("the stream ended")

    def come_back(self) -> None:
        """The daemon answers again."""
        self.reachable = True

    def say(self, name: str, *lines: str) -> None:
        """It logs these lines now."""
        self.by_name(name).said += [(self.clock(), line) for line in lines]

    def kill(self, name: str) -> None:
        """`docker kill`: SIGKILL from outside."""
        self._end(self.by_name(name), 137)

    def crash(self, name: str, code: int = 1) -> None:
        """The process ends by itself."""
        self._end(self.by_name(name), code)

    def run_out_of_memory(self, name: str) -> None:
        """The kernel kills the process."""
        self._end(self.by_name(name), 137, oom=True)

    def lose_child(self, name: str) -> None:
        """The kernel kills a process of it that is not its first, because memory has run out; the container stays."""
        self._emit("oom", self.by_name(name))

    def hang(self, name: str) -> None:
        """SIGSTOP: it runs, answers nothing and ends only by SIGKILL."""
        self.by_name(name).hanging = True

    def lose_network(self, name: str) -> None:
        """`docker network disconnect`: it runs and has no address."""
        one = self.by_name(name)
        one.ip, one.network_lost = None, True

    def regain_network(self, name: str) -> None:
        """`docker network connect`: it has an address again, perhaps another one."""
        one = self.by_name(name)
        one.ip, one.network_lost = self._free_address(), False

    def delete(self, name: str) -> None:
        """`docker rm -f` from outside."""
        one = self.by_name(name)
        if one.state.is_up:
            self._end(one, 137)
        del self.containers[one.id], self._ids[one.name]
        self._ending.discard(one.id)
        self._emit("destroy", one)

    def by_name(self, name: str) -> FakeContainer:
        """The container of that name; KeyError when there is none."""
        self._advance()
        return self.containers[self._ids[name]]

    def names(self) -> list[str]:
        """Names of all containers, sorted."""
        return sorted(one.name for one in self.containers.values())

    def readiness(self, name: str) -> Readiness:
        """What a probe would be told: no container, no process or no address is "absent"; "silent" hangs."""
        try:
            one = self.by_name(name)
        except KeyError:
            return "absent"
        if not one.state.is_up or one.ip is None or one.started_at is None:
            return "absent"
        if one.hanging:
            return "silent"
        if one.terminated_at is not None and not one.behaviour.ignores_sigterm:
            return "draining"
        return "ready" if self.clock() >= one.started_at + one.behaviour.ready_after_s else "starting"

    # -------------------------------------------------------------------------------------------------------- inside

    async def _turn(self) -> None:
        """Every call yields to the event loop once, as a real one does, and fails while the daemon is away."""
        await asyncio.sleep(0)
        if not self.reachable:
            raise self.absence("the Docker Engine does not answer (fake)")
        self._advance()

    def _advance(self) -> None:
        """End the containers whose time has come."""
        now = self.clock()
        for one in [self.containers[container_id] for container_id in sorted(self._ending)]:  # in order of their ages
            if one.ends_at is None or one.ends_at > now or not self._is_heard(one):
                continue
            by_itself = one.behaviour.exits_after_s is not None and one.terminated_at is None
            if by_itself and one.behaviour.oom:
                self._end(one, 137, oom=True)
            else:
                self._end(one, one.behaviour.exit_code if by_itself else 0)

    def _fail_as_planned(self, action: EngineAction) -> None:
        for planned in self._failures:
            if isinstance(action, planned[0]):
                self._failures.remove(planned)
                raise planned[1]

    def _unusable(self) -> dict[str, str]:
        """The GPUs of nodes that take no replicas, and why."""
        return {}

    def _is_heard(self, one: FakeContainer) -> bool:
        """Whether its end would be noticed."""
        return True

    def _machine(self) -> Machine | None:
        if self.machine is None:
            return None
        up = Counter(one.service for one in self.containers.values() if one.ours and one.state.is_up)
        return replace(
            self.machine,
            free_bytes=self.machine.free_bytes - up.total() * self.takes.memory_bytes,
            processes=self.machine.processes + up.total() * self.takes.processes,
            footprints=dict.fromkeys(up, self.takes),
        )

    def _update_node(self, action: UpdateNode) -> None:
        raise EngineError(f"{action.words}: this engine is one machine and has no nodes")

    def _next_id(self) -> str:
        return f"{next(self._numbers):064x}"

    def _replica_named(self, name: str) -> FakeContainer:
        if name not in self._ids:
            raise EngineError(f"start of replica {name} failed: the Docker Engine says: No such container: {name}")
        return self.by_name(name)

    def _create(self, action: CreateContainer, project: str) -> None:
        spec = action.spec
        image = spec.container.get("Image", spec.image)
        if image not in self.images and image not in self._image_ids:
            raise image_missing(spec)
        new = FakeContainer(
            id="",
            name=action.target,
            project=project,
            service=spec.name,
            behaviour=self._behaviour(action, spec),
            created_at=self.clock(),
            created_by_s=self.clock_set_by_s,
            version=action.version,
            number=action.number,
            port=spec.port,
            probe=(spec.probe.port, spec.probe.path),
            has_socket=spec.has_socket,
            graceful_shutdown_timeout_s=spec.graceful_shutdown_timeout_s,
            stop_grace_period_s=spec.stop_grace_period_s,
            node=self.node,
            gpus=tuple(gpu.uuid for gpu in action.gpus),
            gpu_slot=action.gpu_slot,
            user_config=spec.user_config,
            admin_token=dict(each.partition("=")[::2] for each in spec.container.get("Env", ())).get(TOKEN, ""),
        )
        with contextlib.suppress(KeyError):  # the name is free: the usual case
            _refuse_unless_same(self.by_name(action.target), new)
            return
        new.id = self._next_id()
        self._add(new)
        self._emit("create", new)

    def _add(self, one: FakeContainer) -> None:
        self.containers[one.id] = one
        self._ids[one.name] = one.id

    def _behaviour(self, action: CreateContainer, spec: ServiceSpec) -> Behaviour:
        bad = [self.bad_gpus[gpu.uuid] for gpu in action.gpus if gpu.uuid in self.bad_gpus]
        return bad[0] if bad else self.behaviours.get(action.version) or self.behaviours.get(spec.name, Behaviour())

    def _start(self, one: FakeContainer) -> None:
        if one.state.is_up:
            return
        if one.behaviour.start_error is not None:
            one.exit_code = 128
            raise EngineError(
                f"start of replica {one.name} failed: the Docker Engine says: {one.behaviour.start_error}"
            )
        one.state, one.started_at, one.exit_code, one.oom_killed = ContainerState.RUNNING, self.clock(), None, False
        one.hanging, one.terminated_at, one.started_by_s = False, None, self.clock_set_by_s
        one.ip = None if one.network_lost else self._free_address()
        if one.behaviour.exits_after_s is not None:
            self._ending.add(one.id)
        self._emit("start", one)
        self._advance()

    def _free_address(self) -> str:
        """The lowest free one: a new replica may get the address of a replica that was just removed."""
        taken = {one.ip for one in self.containers.values()}
        addresses = (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}" for number in itertools.count(2))
        return next(address for address in addresses if address not in taken)

    def _signal(self, action: SignalContainer) -> None:
        one = self.containers.get(action.container_id)
        if one is None or not one.state.is_up:
            return
        if action.signal == "SIGKILL":
            self._end(one, 137)
        elif one.terminated_at is None:
            one.terminated_at = self.clock()
            self._ending.add(one.id)
            self._advance()

    def _remove(self, action: RemoveContainer) -> None:
        one = self.containers.get(action.container_id)
        if one is None:
            return
        if one.state.is_up and not action.force:
            raise EngineError(
                f"removal of replica {one.name} failed: the Docker Engine says: container is running: stop the "
                "container before removing or force remove"
            )
        self.delete(one.name)

    def _end(self, one: FakeContainer, code: int, *, oom: bool = False) -> None:
        if oom:
            self._emit("oom", one)
        one.end(code, oom=oom)
        self._ending.discard(one.id)
        self._emit("die", one)

    def _emit(self, kind: str, one: FakeContainer) -> None:
        for project, queue in self._subscribers:
            if project == one.project or one.gpus:
                _put(queue, EngineEvent(kind, one.id, one.name))

    def _break_streams(self, why: str) -> None:
        for _, queue in self._subscribers:
            _empty(queue)
            queue.put_nowait(EngineUnreachable(f"event stream: the Docker Engine does not answer ({why})"))


def _log_time(at: float, number: int) -> str:
    """As Docker writes it; the line's number makes times distinct, which nanoseconds do for Docker."""
    second, rest = divmod(at, 1)
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{int(rest * 1e4):04}{number % 100_000:05}Z"


def _replica(one: FakeContainer) -> ReplicaContainer:
    return ReplicaContainer(
        **{name: getattr(one, name) for name in _SEEN},
        created_at=one.created_at + one.created_by_s,
        started_at=None if one.started_at is None else one.started_at + one.started_by_s,
    )


def _refuse_unless_same(existing: FakeContainer, new: FakeContainer) -> None:
    """Raise EngineError when a container of that name is there and is not this very replica."""
    labels = ("project", "service", "version", "number", "gpus", "gpu_slot", "ours")
    differing = [label for label in labels if getattr(existing, label) != getattr(new, label)]
    if differing:
        raise EngineError(
            f"create of replica {new.name}: another container has that name (its labels {', '.join(differing)} "
            f"differ); remove it with `docker rm -f {new.name}`"
        )


def _put(queue: asyncio.Queue[EngineEvent | EngineError], event: EngineEvent) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


def _empty(queue: asyncio.Queue[EngineEvent | EngineError]) -> None:
    while not queue.empty():
        queue.get_nowait()
