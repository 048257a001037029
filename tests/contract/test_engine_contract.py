"""What every ClusterEngine does, asked of the fakes, of the real Docker Engine, and of a Swarm of one node."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import secrets
import tarfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
import pytest_asyncio
import yaml
from docker import APIClient

from controller.engines.base import CONNECTED, MOST_FILE_BYTES, ClusterEngine, EngineEvent
from controller.engines.docker import DockerEngine, open_client
from controller.engines.docker_images import HELPER_LABEL
from controller.engines.gpu_discovery import GpuSources
from controller.errors import EngineError, EngineUnreachable, ImageNotFound
from controller.model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    SignalContainer,
    StartContainer,
    UpdateNode,
    replica_name,
)
from controller.model.machine import Machine
from controller.model.nodes import LEAVING_LABEL, Node
from controller.model.observed import EngineState
from controller.model.spec import GpuRequest, GpuSlot, ProbeSpec, ServiceSpec
from controller.model.world import ContainerState, Gpu, ReplicaContainer
from controller.swarm.engine.engine import SwarmEngine
from tests.debian_image import debian_image
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness import swarm_rig
from tests.harness.swarm_rig import Node as RigNode
from tests.harness.swarm_rig import SwarmRig

CDI_KIND = "pierhead.test/gpu"
MISSING_IMAGE = "pierhead-test/never-built:1"
PATIENCE_S = 20.0

# What a service of that name does, told to the fake, and as a shell command to the real engine.
BEHAVIOURS = {
    "runs": (Behaviour(output="one\ntwo\nthree\n"), "echo one; echo two; echo three; sleep infinity & wait"),
    "drains": (Behaviour(), "trap 'exit 0' TERM; echo ready; while :; do sleep infinity & wait; done"),
    "quits": (Behaviour(), "trap '' TERM; trap 'exit 0' QUIT; echo ready; while :; do sleep infinity & wait; done"),
    "stubborn": (Behaviour(ignores_sigterm=True), "trap '' TERM; while :; do sleep infinity; done"),
    "fails": (Behaviour(exits_after_s=0.0, exit_code=3), "exit 3"),
    "greedy": (Behaviour(), "trap 'exec tail /dev/zero' USR1; echo ready; while :; do sleep infinity & wait; done"),
    "broken": (Behaviour(start_error='exec: "nowhere": executable file not found in $PATH'), ""),
    "pinned": (Behaviour(), "sleep infinity & wait"),
}


class World(Protocol):
    """One engine and the means to do to it what the interface does not offer."""

    engine: ClusterEngine
    project: str
    image: str
    gpus: tuple[str, str]
    starts_at_once: bool
    """A start has succeeded, or failed, when its call ends: no node has to be found first."""
    sees_containers: bool
    """It reads the containers themselves, and not a manager's list of tasks: their networks, whether memory ran out,
    and the exit code of one that was stopped."""

    def spec(self, service: str, image: str | None = None, *, has_build: bool = False) -> ServiceSpec: ...
    def compose_container(self, service: str, *, one_off: bool = False, project: str | None = None) -> str: ...
    def connect(self, name: str, on: bool) -> None: ...
    def remove_project(self, project: str) -> None: ...
    def lose_daemon(self) -> None: ...
    async def ready(self, name: str) -> None: ...
    def build(self, path: str, content: bytes) -> str: ...
    def helpers(self) -> list[str]: ...
    def run_out_of_memory(self, name: str) -> None: ...


class FakeWorld:
    gpus = ("GPU-0", "GPU-1")
    starts_at_once = sees_containers = True

    def __init__(self, kind: type[FakeEngine] = FakeEngine) -> None:
        self.project = "shop"
        self.image = "debian:trixie-slim"
        behaviours = {service: behaviour for service, (behaviour, _) in BEHAVIOURS.items()}
        self.fake = kind(clock=time.time, gpus=tuple(map(Gpu, self.gpus)), behaviours=behaviours)
        self.fake.add_image(self.image)
        if self.fake.places == "ours":
            self.fake.machine = Machine(2, 24 * 1024**3, 23 * 1024**3, most_processes=32768, processes=500, load=1.0)
        self.engine: ClusterEngine = self.fake

    def spec(self, service: str, image: str | None = None, *, has_build: bool = False) -> ServiceSpec:
        return service_spec(service, image or self.image, {}, has_build=has_build)

    def compose_container(self, service: str, *, one_off: bool = False, project: str | None = None) -> str:
        name = compose_name(project or self.project, service, one_off=one_off)
        self.fake.add_container(name, project=project or self.project, service=service, one_off=one_off)
        return name

    def connect(self, name: str, on: bool) -> None:
        (self.fake.regain_network if on else self.fake.lose_network)(name)

    def remove_project(self, project: str) -> None:
        pass

    def lose_daemon(self) -> None:
        self.fake.go_away()

    async def ready(self, name: str) -> None:
        assert self.fake.readiness(name) == "ready"

    def build(self, path: str, content: bytes) -> str:
        built = self.fake.add_image("built")
        self.fake.files[built] = {path: content}
        return built

    def helpers(self) -> list[str]:
        return []

    def run_out_of_memory(self, name: str) -> None:
        self.fake.run_out_of_memory(name)


class FakeSwarmWorld(FakeWorld):
    gpus = ("GPU-n1-1", "GPU-n1-2")
    starts_at_once = False

    def __init__(self) -> None:
        super().__init__(FakeSwarmEngine)
        self.fake.gpus = ()
        cast(FakeSwarmEngine, self.fake).add_node("n1")


def container_of(service: str, image: str, network: str, labels: dict[str, str]) -> dict[str, Any]:
    """The part of the create body that the replicas of a service share."""
    host: dict[str, Any] = {"NetworkMode": network, "Init": False}
    if service == "greedy":
        host["Memory"] = 16 * 1024 * 1024
    return {
        "Image": image,
        "Cmd": ["sh", "-c", BEHAVIOURS[service][1]] if service != "broken" else ["nowhere"],
        "Labels": labels,
        "StopSignal": "SIGQUIT" if service == "quits" else "SIGTERM",
        "HostConfig": host,
        "NetworkingConfig": {"EndpointsConfig": {network: {"Aliases": [service]}}},
    }


def built(client: APIClient, image: str, path: str, content: bytes) -> str:
    """The id of an image with another file, and, next to it, files that an earlier controller's helper has left."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as entries:
        entry = tarfile.TarInfo(path.removeprefix("/"))
        entry.size = len(content)
        entries.addfile(entry, io.BytesIO(content))
    made = client.create_container_from_config({"Image": image})["Id"]  # type: ignore[no-untyped-call]
    try:
        assert client.put_archive(made, "/", archive.getvalue())
        return str(client.commit(made)["Id"])
    finally:
        client.remove_container(made)


def helpers_of(client: APIClient, project: str) -> list[str]:
    """Containers that were made to read images."""
    return [one["Id"] for one in client.containers(all=True, filters={"label": f"{HELPER_LABEL}={project}"})]


def turn_to_nobody(client: APIClient) -> None:
    client.close()
    nowhere = APIClient(base_url="unix:///nonexistent/docker.sock", version=client.api_version)
    client.adapters.clear()
    client.adapters.update(nowhere.adapters)


class DockerWorld:
    """A project of its own on the real engine, with its own network, CDI directory and connection."""

    gpus = ("GPU-0", "GPU-1")
    starts_at_once = sees_containers = True

    def __init__(self, client: APIClient, cdi_directory: Path) -> None:
        self.client = client
        self.project = f"pierhead-test-{secrets.token_hex(4)}"
        self.network = f"{self.project}_default"
        self.image = debian_image(client)
        self.images: list[str] = []
        self.labels = {"pierhead.test": "engine-contract", "com.docker.compose.project": self.project}
        client.create_network(self.network, labels=self.labels)
        devices = [{"name": name, "containerEdits": {"env": [f"GPU={name}"]}} for name in self.gpus]
        document = {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": devices}
        (cdi_directory / "gpus.yaml").write_text(yaml.safe_dump(document))
        self.own_client = open_client()
        sources = GpuSources(CDI_KIND, (cdi_directory,), probe_image=self.image)
        self.engine: ClusterEngine = DockerEngine(self.own_client, sources)

    def spec(self, service: str, image: str | None = None, *, has_build: bool = False) -> ServiceSpec:
        container = container_of(service, image or self.image, self.network, self.labels)
        if service == "greedy":
            container["HostConfig"]["MemorySwap"] = container["HostConfig"]["Memory"]
        return service_spec(service, image or self.image, container, has_build=has_build)

    def compose_container(self, service: str, *, one_off: bool = False, project: str | None = None) -> str:
        name = compose_name(project or self.project, service, one_off=one_off)
        labels = {
            "com.docker.compose.project": project or self.project,
            "com.docker.compose.service": service,
            "com.docker.compose.container-number": "1",
            "com.docker.compose.oneoff": str(one_off),
        }
        body = {
            "Image": self.image,
            "Cmd": ["sleep", "infinity"],
            "Labels": self.labels | labels,
            "HostConfig": {"Init": True},
        }
        self.client.create_container_from_config(body, name=name)  # type: ignore[no-untyped-call]
        self.client.start(name)
        return name

    def connect(self, name: str, on: bool) -> None:
        change = self.client.connect_container_to_network if on else self.client.disconnect_container_from_network
        change(name, self.network)

    def lose_daemon(self) -> None:
        turn_to_nobody(self.own_client)

    async def ready(self, name: str) -> None:
        """Wait until the shell has set its traps: it says so."""

        async def says_so() -> bool:
            return b"ready" in await asyncio.to_thread(self.client.logs, name)

        await eventually(says_so)

    def build(self, path: str, content: bytes) -> str:
        self.images.append(built(self.client, self.image, path, content))
        return self.images[-1]

    def helpers(self) -> list[str]:
        return helpers_of(self.client, self.project)

    def run_out_of_memory(self, name: str) -> None:
        """Tell a "greedy" one to begin."""
        self.client.kill(name, signal="SIGUSR1")

    def remove(self) -> None:
        for image in self.images:
            self.client.remove_image(image, force=True)
        for left in self.client.containers(all=True, filters={"label": "pierhead.test=engine-contract"}):
            if left["Labels"].get("com.docker.compose.project") == self.project:
                self.client.remove_container(left["Id"], force=True, v=True)
        self.client.remove_network(self.network)

    def remove_project(self, project: str) -> None:
        for left in self.client.containers(all=True, filters={"label": f"com.docker.compose.project={project}"}):
            self.client.remove_container(left["Id"], force=True, v=True)


class SwarmWorld:
    """A project of its own on a Swarm of one node. What Compose makes on one machine is a service of the stack."""

    network = "main"
    starts_at_once = sees_containers = False

    def __init__(self, node: RigNode, client: APIClient, image: str) -> None:
        self.client = client
        self.project = f"pierhead-test-{secrets.token_hex(4)}"
        self.image = image
        self.gpus = (node.gpus[0], node.gpus[1])
        self.own_client = open_client(node.url)
        self.engine: ClusterEngine = SwarmEngine(self.own_client)

    def spec(self, service: str, image: str | None = None, *, has_build: bool = False) -> ServiceSpec:
        container = container_of(service, image or self.image, self.network, {}) | {"StopTimeout": 2}
        return service_spec(service, image or self.image, container, has_build=has_build)

    def compose_container(self, service: str, *, one_off: bool = False, project: str | None = None) -> str:
        labels = {"com.docker.stack.namespace": project or self.project}
        command = ["sleep", "infinity"]
        if one_off:
            body = {"Image": self.image, "Cmd": command, "Labels": labels, "HostConfig": {"Init": True}}
            self.client.start(self.client.create_container_from_config(body))  # type: ignore[no-untyped-call]
            return ""
        name = f"{project or self.project}_{service}"
        template = {"ContainerSpec": {"Image": self.image, "Command": command, "Init": True}}
        self.client.create_service(template, name=name, labels=labels)  # type: ignore[no-untyped-call]
        return name

    def remove_project(self, project: str) -> None:
        for label in ("com.docker.stack.namespace", "pierhead.project"):
            for left in self.client.services({"label": f"{label}={project}"}):  # type: ignore[no-untyped-call]
                self.client.remove_service(left["ID"])  # type: ignore[no-untyped-call]

    def connect(self, name: str, on: bool) -> None:
        raise AssertionError("a Swarm's manager does not see it")

    def lose_daemon(self) -> None:
        turn_to_nobody(self.own_client)

    async def ready(self, name: str) -> None:
        one = await get(self, name)

        async def says_so() -> bool:
            return "ready" in await self.engine.logs(one.id, 10)

        await eventually(says_so)

    def build(self, path: str, content: bytes) -> str:
        return built(self.client, self.image, path, content)

    def helpers(self) -> list[str]:
        return helpers_of(self.client, self.project)

    def run_out_of_memory(self, name: str) -> None:
        (container,) = self.client.containers(filters={"label": f"pierhead.replica={name}"})
        self.client.kill(container["Id"], signal="SIGUSR1")


def compose_name(project: str, service: str, *, one_off: bool) -> str:
    return f"{project}-{service}-" + (f"run-{secrets.token_hex(6)}" if one_off else "1")


def service_spec(service: str, image: str, container: dict[str, Any], *, has_build: bool) -> ServiceSpec:
    gpu = GpuRequest(1) if service == "pinned" else None
    probe = ProbeSpec(9100, "/readyz")
    return ServiceSpec(service, image, "http", 8080, 1, probe, gpu=gpu, has_build=has_build, container=container)


@pytest.fixture(scope="module")
def swarm_node(docker_client: APIClient) -> Iterator[tuple[RigNode, APIClient, str]]:
    """The one node of a Swarm, a client of its engine, and an image that it has."""
    image = debian_image(docker_client)
    swarm_rig.build_or_skip()
    with SwarmRig().running([image]) as rig, rig.nodes[0].client() as client:
        client.create_network(SwarmWorld.network, driver="overlay", attachable=True)
        yield rig.nodes[0], client, image


@pytest_asyncio.fixture(
    params=["fake", "fake swarm", *(pytest.param(name, marks=pytest.mark.engine) for name in ("docker", "swarm"))]
)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param.startswith("fake"):
        yield FakeWorld() if request.param == "fake" else FakeSwarmWorld()
    elif request.param == "docker":
        real = DockerWorld(request.getfixturevalue("docker_client"), tmp_path)
        try:
            yield real
        finally:
            await real.engine.close()
            real.remove()
    else:
        swarm = SwarmWorld(*request.getfixturevalue("swarm_node"))
        try:
            yield swarm
        finally:
            await swarm.engine.close()
            swarm.remove_project(swarm.project)


# ---------------------------------------------------------------------------------------------------------------- steps


async def eventually(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """The first true answer of an async condition; fails when there is none in time."""
    deadline = time.monotonic() + patience_s
    while not (answer := await condition()):
        assert time.monotonic() < deadline, f"never came true within {patience_s} s: {condition}"
        await asyncio.sleep(0.02)
    return answer


async def observe(world: World, *images: str) -> EngineState:
    return await world.engine.observe(world.project, set(BEHAVIOURS), images)


def create_action(
    world: World,
    service: str,
    *,
    number: int = 1,
    version: str = "0a1b2c3d",
    gpus: tuple[Gpu, ...] = (),
    gpu_slot: GpuSlot | None = None,
    spec: ServiceSpec | None = None,
) -> CreateContainer:
    name = replica_name(world.project, service, version, number)
    spec = spec or replace(world.spec(service), gpu=GpuRequest(len(gpus), slot=gpu_slot) if gpus else None)
    return CreateContainer(target=name, service=service, version=version, number=number, gpus=gpus, spec=spec)


async def create(world: World, service: str, **changes: Any) -> str:
    action = create_action(world, service, **changes)
    await world.engine.perform(action, world.project)
    return action.target


async def start(world: World, service: str, **changes: Any) -> str:
    name = await create(world, service, **changes)
    await world.engine.perform(StartContainer(target=name, service=service), world.project)
    await placed(world, name)
    return name


async def find(world: World, name: str) -> ReplicaContainer | None:
    return next((one for one in (await observe(world)).containers if one.name == name), None)


async def get(world: World, name: str) -> ReplicaContainer:
    found = await find(world, name)
    assert found is not None
    return found


async def placed(world: World, name: str) -> ReplicaContainer:
    """It, once its start has ended one way or the other."""

    async def look() -> ReplicaContainer | None:
        one = await get(world, name)
        return one if world.starts_at_once or one.state is not ContainerState.PENDING else None

    return cast(ReplicaContainer, await eventually(look))


async def ended(world: World, name: str) -> ReplicaContainer:
    async def look() -> ReplicaContainer | None:
        one = await get(world, name)
        return one if one.state is ContainerState.EXITED else None

    return cast(ReplicaContainer, await eventually(look))


async def send(world: World, name: str, container_id: str, signal: Any) -> None:
    await world.engine.perform(SignalContainer(target=name, container_id=container_id, signal=signal), world.project)


async def remove(world: World, name: str, container_id: str, *, force: bool = False) -> None:
    await world.engine.perform(RemoveContainer(target=name, container_id=container_id, force=force), world.project)


# ---------------------------------------------------------------------------------------------------- create and start


async def test_a_replica_is_created_and_started_once(world: World) -> None:
    before = time.time()
    name = await create(world, "runs", number=7)
    made = await get(world, name)
    assert (made.service, made.version, made.number, made.state) == ("runs", "0a1b2c3d", 7, ContainerState.CREATED)
    assert (made.ip, made.started_at, made.exit_code, made.oom_killed, made.gpus) == (None, None, None, False, ())
    assert before - 2 <= made.created_at <= time.time() + 2
    assert made.node or not world.starts_at_once, "it knows the machine that it was made on"
    assert (made.graceful_shutdown_timeout_s, made.stop_grace_period_s) == (20.0, 30.0)

    await world.engine.perform(StartContainer(target=name), world.project)
    started = await placed(world, name)
    assert (started.state, started.exit_code) == (ContainerState.RUNNING, None)
    assert started.node
    assert started.ip is not None
    assert started.ip.count(".") == 3
    assert started.started_at is not None
    assert started.started_at >= started.created_at

    assert await start(world, "runs", number=7) == name
    assert await get(world, name) == started, "again is done"


async def test_one_machine_says_what_it_has_left_and_what_a_replica_takes(world: World) -> None:
    await placed(world, await start(world, "runs"))
    machine = (await observe(world)).machine
    if world.engine.places == "the engine's":
        assert machine is None, "its nodes tell nothing of that"
        return
    assert machine is not None
    assert 0 < machine.free_bytes <= machine.memory_bytes
    assert 0 < machine.processes < machine.most_processes
    takes = machine.footprints["runs"]
    assert 0 < takes.memory_bytes < machine.memory_bytes // 10
    assert 0 < takes.processes < 100


async def test_replicas_have_addresses_of_their_own_and_belong_to_their_project(world: World) -> None:
    names = await asyncio.gather(*(start(world, "runs", number=number) for number in (1, 2, 3)))
    for services in (set(BEHAVIOURS), set[str]()):
        state = await world.engine.observe(world.project, services, [])
        assert [one.name for one in state.containers] == sorted(names), "also when their service is gone"
        assert len({one.ip for one in state.containers}) == 3
    assert (await world.engine.observe(f"{world.project}-other", set(BEHAVIOURS), [])).containers == ()


async def test_starting_a_replica_that_is_gone_is_an_error(world: World) -> None:
    with pytest.raises(EngineError, match=r"start of replica shop-x-1 failed: .*(No such container|not found)"):
        await world.engine.perform(StartContainer(target="shop-x-1"), world.project)


async def test_a_failed_start_is_reported(world: World) -> None:
    name = await create(world, "broken")
    if not world.starts_at_once:
        await world.engine.perform(StartContainer(target=name), world.project)
        assert "executable file not found" in (await ended(world, name)).engine_detail
        return
    with pytest.raises(EngineError, match="executable file not found"):
        await world.engine.perform(StartContainer(target=name), world.project)
    one = await get(world, name)
    assert one.state is ContainerState.CREATED
    assert one.exit_code not in (None, 0)


@pytest.mark.parametrize(
    ("has_build", "todo"), [(True, "`docker compose build "), (False, "`docker pull pierhead-test/never")]
)
async def test_a_missing_image_says_what_to_do(world: World, has_build: bool, todo: str) -> None:
    spec = world.spec("runs", MISSING_IMAGE, has_build=has_build)
    with pytest.raises(ImageNotFound) as raised:
        await world.engine.perform(create_action(world, "runs", spec=spec), world.project)
    assert f"service runs: image {MISSING_IMAGE} is not on this machine" in str(raised.value)
    assert todo in str(raised.value)
    assert (await observe(world)).containers == ()
    if has_build:
        with pytest.raises(ImageNotFound, match="docker compose build"):  # what Compose builds is never pulled
            await world.engine.perform(PullImage(target="runs", image=MISSING_IMAGE, spec=spec), world.project)


# --------------------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("service", "signals", "exit_code"),
    [("drains", ["SIGTERM"], 0), ("quits", ["SIGTERM"], 0), ("stubborn", ["SIGTERM", "SIGKILL"], 137)],
    ids=["it finishes", "its stop signal is another one", "only SIGKILL ends it"],
)
async def test_signals_end_it(world: World, service: str, signals: list[str], exit_code: int) -> None:
    name = await start(world, service)
    if service != "stubborn":
        await world.ready(name)
    one = await get(world, name)
    for signal in signals:
        await send(world, name, one.id, signal)
    gone = await ended(world, name)
    assert (gone.id, gone.started_at) == (one.id, one.started_at)
    assert (gone.oom_killed, gone.ip) == (False, None)
    assert gone.exit_code == exit_code or not world.sees_containers


async def test_running_out_of_memory_is_seen(world: World) -> None:
    if isinstance(world, DockerWorld) and not (await asyncio.to_thread(world.client.info))["MemoryLimit"]:
        pytest.skip("this kernel has no memory limits")
    name = await start(world, "greedy")
    await world.ready(name)  # the engine watches a container's memory from just after its start (containerd#8180)
    await asyncio.to_thread(world.run_out_of_memory, name)

    async def out_of_memory() -> ReplicaContainer | None:
        one = await ended(world, name)
        return (
            one if one.oom_killed or not world.sees_containers else None
        )  # told by itself, a moment before or after the end

    assert (await eventually(out_of_memory)).exit_code == 137


async def test_a_replica_that_ends_by_itself_and_is_started_again(world: World) -> None:
    name = await start(world, "fails")
    first = await ended(world, name)
    await world.engine.perform(StartContainer(target=name), world.project)

    async def again() -> ReplicaContainer | None:
        one = await ended(world, name)
        assert one.started_at is not None
        assert first.started_at is not None
        return one if one.started_at > first.started_at else None

    second = await (eventually(again) if not world.starts_at_once else again())
    assert second is not None
    assert (first.exit_code, second.exit_code, second.id) == (3, 3, first.id)
    for signal in ("SIGTERM", "SIGKILL"):
        await send(world, name, first.id, signal)
    await ended(world, name)
    await remove(world, name, first.id)
    for signal in ("SIGTERM", "SIGKILL"):
        await send(world, name, first.id, signal)


async def test_removal(world: World) -> None:
    name = await start(world, "runs")
    one = await get(world, name)
    with pytest.raises(EngineError, match=f"removal of replica {name} failed: .*running"):
        await remove(world, name, one.id)
    assert (await get(world, name)).state is ContainerState.RUNNING
    await remove(world, name, one.id, force=True)
    assert await find(world, name) is None
    await remove(world, name, one.id)
    await remove(world, name, one.id, force=True)


async def test_a_replica_without_its_network_has_no_address(world: World) -> None:
    if not world.sees_containers:
        pytest.skip("a Swarm's manager lists the address that it gave, whatever becomes of it on the node")
    name = await start(world, "runs")
    assert (await get(world, name)).ip is not None
    await asyncio.to_thread(world.connect, name, False)
    one = await get(world, name)
    assert (one.state, one.ip) == (ContainerState.RUNNING, None)
    await asyncio.to_thread(world.connect, name, True)
    again = await get(world, name)
    assert again.ip is not None
    assert replace(again, ip=None) == one, "it is the same container"


# ----------------------------------------------------------------------------------------------------- what is observed


async def test_strays_are_composes_own_containers_of_our_services(world: World) -> None:
    def prepare() -> str:
        world.compose_container("runs", one_off=True)
        world.compose_container("haproxy")
        world.compose_container("runs", project=f"{world.project}-other")
        return world.compose_container("runs")

    try:
        name = await asyncio.to_thread(prepare)
        state = await observe(world)
        assert [(one.name, one.service) for one in state.strays] == [(name, "runs")]
        assert state.containers == ()
        stray = state.strays[0]
        await remove(world, stray.name, stray.id, force=True)
        assert (await observe(world)).strays == ()
    finally:
        await asyncio.to_thread(world.remove_project, f"{world.project}-other")


async def test_images_are_known_by_name_and_by_id(world: World) -> None:
    state = await observe(world, world.image, MISSING_IMAGE, "Not/A valid name")
    image_id = state.images[world.image]
    assert image_id is not None
    assert image_id.startswith("sha256:")
    assert state.images == {world.image: image_id, MISSING_IMAGE: None, "Not/A valid name": None}
    for there in (world.image, image_id):
        assert await world.engine.has_image(there)
    for not_there in (MISSING_IMAGE, f"sha256:{'0' * 64}", "No Such Name"):
        assert not await world.engine.has_image(not_there)


async def test_a_file_of_an_image_is_read_and_nothing_is_started(world: World) -> None:
    path, content = "/usr/local/share/pierhead/contract.binpb", bytes(range(256)) * 1000
    image = await asyncio.to_thread(world.build, path, content)
    for _ in range(2):
        assert await world.engine.file_of_image(image, path, world.project) == content
    for not_there in (f"{path}.other", "/usr/local/share/pierhead", "/nowhere/at/all"):
        assert await world.engine.file_of_image(image, not_there, world.project) is None
    for unknown in (MISSING_IMAGE, f"sha256:{'0' * 64}"):
        assert await world.engine.file_of_image(unknown, path, world.project) is None
    large = await asyncio.to_thread(world.build, path, bytes(MOST_FILE_BYTES + 1))
    assert await world.engine.file_of_image(large, path, world.project) is None
    assert (await observe(world)).containers == ()
    assert await asyncio.to_thread(world.helpers) == []


@pytest.mark.engine
async def test_what_was_made_to_read_an_image_before_is_removed(docker_client: APIClient, tmp_path: Path) -> None:
    world = DockerWorld(docker_client, tmp_path)
    try:
        body = {"Image": world.image, "Labels": {HELPER_LABEL: world.project}}
        docker_client.create_container_from_config(body)  # type: ignore[no-untyped-call]
        assert world.helpers()
        assert await world.engine.file_of_image(world.image, "/etc/os-release", world.project) is None, "it is a link"
        assert world.helpers() == []
    finally:
        await world.engine.close()
        world.remove()


async def test_gpus_are_listed_and_pinned(world: World) -> None:
    if isinstance(world, DockerWorld) and not (await asyncio.to_thread(world.client.info)).get("CDISpecDirs"):
        pytest.skip('CDI is off in this engine: {"features": {"cdi": true}} in /etc/docker/daemon.json')
    state = await observe(world)
    assert tuple(gpu.uuid for gpu in state.gpus) == world.gpus
    name = await create(world, "pinned", gpus=(state.gpus[1],))
    assert (await get(world, name)).gpus == (world.gpus[1],)
    assert (await observe(world)).foreign_gpu_holders == {}
    if world.engine.places == "the engine's":
        await world.engine.perform(StartContainer(target=name), world.project)
        (uuid,) = (await placed(world, name)).gpus
        assert uuid in world.gpus, "it is one of them, whichever was named"


@pytest.mark.parametrize("slot", [GpuSlot(memory_bytes=16 * 1024**3), GpuSlot(fraction=0.25)])
async def test_the_slot_is_read_back_and_another_slot_is_another_replica(world: World, slot: GpuSlot) -> None:
    name = await create(world, "pinned", gpus=(Gpu("GPU-0"),), gpu_slot=slot)
    found = await get(world, name)
    assert (found.gpus, found.gpu_slot) == (("GPU-0",), slot)
    for other in (create_action(world, "pinned", gpus=(Gpu(uuid),)) for uuid in ("GPU-0", "GPU-1")):
        with pytest.raises(EngineError, match=rf"create of replica {name}: another .* `docker .*rm .*{name}`"):
            await world.engine.perform(other, world.project)


async def test_a_node_is_changed_unless_it_has_changed_since(world: World) -> None:
    nodes = (await observe(world)).nodes
    if world.engine.places == "ours":
        assert nodes == ()
        with pytest.raises(EngineError, match="this engine is one machine and has no nodes"):
            await world.engine.perform(UpdateNode(target="n1", node_id="n1"), world.project)
        return
    (node,) = nodes
    assert (node.name, node.is_manager, node.is_leader, node.state, node.availability, node.labels) == (
        *("n1", True, True, "ready", "active", {}),
    )
    assert {gpu.node for gpu in (await observe(world)).gpus} == {"n1"}

    async def change(**changes: Any) -> Node:
        action = UpdateNode(target=node.name, node_id=node.id, **changes)
        await world.engine.perform(action, world.project)
        (changed,) = (await observe(world)).nodes
        return changed

    name = await start(world, "runs")
    leaving = await change(availability="pause", labels=((LEAVING_LABEL, "1"), ("zone", "a")))
    assert (leaving.availability, leaving.labels) == ("pause", {LEAVING_LABEL: "1", "zone": "a"})
    assert leaving.version != node.version
    assert (await get(world, name)).state is ContainerState.RUNNING, "running containers are not affected"
    assert set((await observe(world)).foreign_gpu_holders.values()) == {"n1 (leaving)"}
    waits = await create(world, "runs", number=2)
    await world.engine.perform(StartContainer(target=waits, service="runs"), world.project)
    assert (await get(world, waits)).state is ContainerState.PENDING, "nothing new is placed there"

    with pytest.raises(EngineError, match="node n1 has changed since this was decided"):
        await change(labels=(("zone", "b"),), version=node.version)
    with pytest.raises(EngineError, match=f"drain of node n1: it still has {name}"):
        await change(availability="drain", version=leaving.version)
    active = await change(availability="active", labels=((LEAVING_LABEL, None), ("zone", None)))
    assert (active.availability, active.labels) == ("active", {})

    async def runs() -> bool:
        return (await get(world, waits)).state is ContainerState.RUNNING

    await eventually(runs)


async def test_logs_have_a_tail(world: World) -> None:
    name = await start(world, "runs")
    one = await get(world, name)

    async def said() -> str:
        text = await world.engine.logs(one.id, 10)
        return text if "three" in text else ""

    assert (await eventually(said)).split() == ["one", "two", "three"]
    assert (await world.engine.logs(one.id, 2)).split() == ["two", "three"]
    timed = [line.split(" ") for line in (await world.engine.logs(one.id, 10, timed=True)).splitlines()]
    assert [line for _, line in timed] == ["one", "two", "three"]
    assert [time for time, _ in timed] == sorted({time for time, _ in timed}), "each line has a time of its own"
    assert all(datetime.fromisoformat(time) for time, _ in timed)
    assert one.started_at is not None
    assert (await world.engine.logs(one.id, 10, one.started_at - 60)).split() == ["one", "two", "three"]
    assert await world.engine.logs(one.id, 10, one.started_at + 3600) == ""
    await remove(world, name, one.id, force=True)
    assert await world.engine.logs(one.id, 10) == ""


async def test_exists_means_a_container_of_composes_own(world: World) -> None:
    await asyncio.to_thread(lambda: world.compose_container("haproxy", one_off=True))
    assert not await world.engine.exists(world.project, "haproxy")
    await asyncio.to_thread(world.compose_container, "haproxy")
    assert await world.engine.exists(world.project, "haproxy")
    assert not await world.engine.exists(f"{world.project}-other", "haproxy")
    await start(world, "runs")
    assert not await world.engine.exists(world.project, "runs"), "a replica is not a container of Compose's"


# --------------------------------------------------------------------------------------------------------------- events


@contextlib.asynccontextmanager
async def listening(world: World) -> AsyncIterator[list[EngineEvent]]:
    """Events since the stream opened, growing."""
    events: list[EngineEvent] = []
    opened = asyncio.Event()

    async def listen() -> None:
        async for event in world.engine.events(world.project):
            events.append(event)
            opened.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(listen())
        async with asyncio.timeout(PATIENCE_S):
            await opened.wait()
        yield events
        task.cancel()


async def test_events_wake_and_name_the_container(world: World) -> None:
    async with listening(world) as events:
        assert events == [CONNECTED]
        name = await start(world, "drains")
        one = await get(world, name)

        async def heard(*wanted: object) -> bool:
            return any((event.kind, event.container_id, event.name) == wanted for event in events)

        await eventually(lambda: heard("start", one.id, name))
        await world.ready(name)
        await send(world, name, one.id, "SIGTERM")
        await eventually(lambda: heard("die", one.id, name))
        await remove(world, name, one.id, force=True)
        await eventually(lambda: heard("destroy", one.id, name))
        await asyncio.to_thread(world.compose_container, "runs", project=f"{world.project}-other")
        await asyncio.to_thread(world.remove_project, f"{world.project}-other")
        again = await get(world, await create(world, "runs"))
        await eventually(lambda: heard("create", again.id, again.name))
        assert all("-other-" not in event.name for event in events), "another project's events do not wake"


@pytest.fixture
def unreachable() -> Iterator[None]:
    """docker-py leaves a socket that did not connect to the garbage collector: collected here, where it is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.mark.usefixtures("unreachable")
async def test_an_engine_that_is_away_is_said_so(world: World) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await observe(world)
        await asyncio.to_thread(world.lose_daemon)
        with pytest.raises(EngineUnreachable, match="does not answer"):
            await observe(world)
        with pytest.raises(EngineUnreachable):
            await world.engine.perform(StartContainer(target="any"), world.project)
        with pytest.raises(EngineUnreachable):
            await anext(aiter(world.engine.events(world.project)))


async def test_closing_ends_the_streams(world: World) -> None:
    stream = aiter(world.engine.events(world.project))
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(stream) == CONNECTED
        await world.engine.close()
        with pytest.raises(EngineUnreachable):
            await anext(stream)


@pytest.mark.engine
@pytest.mark.usefixtures("unreachable")
def test_no_engine_at_an_address() -> None:
    with pytest.raises(EngineUnreachable, match=r"connecting: the Docker Engine does not answer \(No such file"):
        open_client("unix:///nonexistent/docker.sock")
