"""GPU pinning on a real Docker Engine without a GPU: CDI devices whose nodes are /dev/null under other names.

Needs root (a file in /etc/cdi), and CDI switched on in the engine: {"features": {"cdi": true}} in daemon.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from docker import APIClient
from docker.errors import NotFound

from controller.engines.base import CONNECTED
from controller.engines.docker import DockerEngine, open_client
from controller.engines.gpu_discovery import GpuSources
from controller.errors import EngineError
from controller.model.actions import CreateContainer, StartContainer, replica_name
from controller.model.observed import EngineState
from controller.model.spec import GpuRequest, ProbeSpec, ServiceSpec
from controller.model.world import Gpu
from tests.debian_image import debian_image
from tests.harness.waiting import eventually

pytestmark = pytest.mark.engine

CDI_DIRECTORY = Path("/etc/cdi")
SMI = """#!/bin/sh
[ "$1" = -L ] && exec cat /pierhead-smi/list
exec cat /pierhead-smi/xml
"""
PATIENCE_S = 60.0
MIB = 1024 * 1024
# What a container tells of itself: the nodes it sees, and the variable it was given.
CONFESS = "ls /dev | grep ^pierhead-gpu; echo $PIERHEAD_TEST_GPU; sleep infinity & wait"


@dataclass(slots=True)
class Machine:
    """A project on the real engine, with four devices of a kind that nobody else knows."""

    client: APIClient
    engine: DockerEngine
    project: str
    kind: str
    image: str

    async def observe(self) -> EngineState:
        return await self.engine.observe(self.project, ["ranker"], [])

    async def gpus(self) -> tuple[Gpu, ...]:
        return (await self.observe()).gpus

    def spec(self) -> ServiceSpec:
        container = {
            "Image": self.image,
            "Cmd": ["sh", "-c", CONFESS],
            "HostConfig": {"NetworkMode": "none"},
            "Labels": {"pierhead.test": self.project},
        }
        probe = ProbeSpec(9100, "/readyz")
        return ServiceSpec(
            "ranker", self.image, "http", 8080, 1, probe, gpu=GpuRequest(1), managed=False, container=container
        )

    async def run(self, number: int, *gpus: Gpu) -> str:
        """Create and start a replica on these GPUs."""
        name = replica_name(self.project, "ranker", "0a1b2c3d", number)
        action = CreateContainer(
            target=name, service="ranker", version="0a1b2c3d", number=number, gpus=gpus, spec=self.spec()
        )
        await self.engine.perform(action, self.project)
        await self.engine.perform(StartContainer(target=name), self.project)
        return name

    def run_foreign(self, gpu: str) -> str:
        """Somebody's own `docker run --device <kind>=<gpu>`."""
        body = {
            "Image": self.image,
            "Cmd": ["sleep", "infinity"],
            "Labels": {"pierhead.test": self.project},
            "HostConfig": {
                "NetworkMode": "none",
                "Init": True,
                "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [f"{self.kind}={gpu}"]}],
            },
        }
        name = f"{self.project}-training"
        self.client.create_container_from_config(body, name=name)  # type: ignore[no-untyped-call]
        self.client.start(name)
        return name

    def probes(self) -> list[str]:
        """The containers that were started to ask for the memory of these devices, and are there."""
        found = self.client.containers(all=True, filters={"label": "pierhead.probe", "ancestor": self.image})
        looks = [self._look(one["Id"]) for one in found]
        return [str(look["Name"]) for look in looks if look and self.kind in str(look["HostConfig"]["DeviceRequests"])]

    def _look(self, container: str) -> Any:
        """What the engine reports of it; None for one that is already gone: another test's."""
        with contextlib.suppress(NotFound):
            return self.client.inspect_container(container)
        return None

    async def confession(self, name: str) -> list[str]:
        """The lines a container printed, once it has printed all."""

        def printed() -> list[str]:
            lines = self.client.logs(name).decode().split()
            return lines if len(lines) >= 2 else []

        return await asyncio.to_thread(eventually, printed, f"{name} has printed two lines")


@dataclass(frozen=True)
class Smi:
    """What an `nvidia-smi` says that every container with a device finds in its path."""

    directory: Path

    def say(self, *cards: tuple[str, int, int]) -> None:
        """UUID, memory in MiB, and how much of it is in use."""
        lines = [f"GPU {index}: Card (UUID: {uuid})\n" for index, (uuid, _, _) in enumerate(cards)]
        gpus = [
            f"<gpu><uuid>{uuid}</uuid><fb_memory_usage><total>{size} MiB</total><used>{used} MiB</used>"
            "</fb_memory_usage></gpu>"
            for uuid, size, used in cards
        ]
        (self.directory / "list").write_text("".join(lines))
        (self.directory / "xml").write_text(f'<?xml version="1.0" ?>\n<nvidia_smi_log>{"".join(gpus)}</nvidia_smi_log>')


@pytest.fixture
def smi(tmp_path: Path) -> Smi:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    return Smi(tmp_path)


@pytest.fixture
def cdi_kind(docker_client: APIClient, smi: Smi) -> Iterator[str]:
    """Four devices GPU-0 to GPU-3, their indices, and "all", as NVIDIA's toolkit describes them."""
    if not docker_client.info().get("CDISpecDirs"):
        pytest.skip('CDI is off in this engine: {"features": {"cdi": true}} in /etc/docker/daemon.json')
    if os.geteuid() != 0:
        pytest.skip(f"only root can write to {CDI_DIRECTORY}")
    run = secrets.token_hex(4)
    nodes = [{"path": f"/dev/pierhead-gpu{index}", "hostPath": "/dev/null"} for index in range(4)]
    devices = [{"name": "all", "containerEdits": {"deviceNodes": nodes, "env": ["PIERHEAD_TEST_GPU=all"]}}]
    for index, node in enumerate(nodes):
        for name in (str(index), f"GPU-{run}-{index}"):
            edits = {"deviceNodes": [node], "env": [f"PIERHEAD_TEST_GPU={name}"]}
            devices.append({"name": name, "containerEdits": edits})
    kind = f"pierhead.test/gpu-{run}"
    path = CDI_DIRECTORY / f"pierhead-test-{run}.yaml"
    CDI_DIRECTORY.mkdir(exist_ok=True)
    mounts = [
        {"hostPath": str(smi.directory), "containerPath": "/pierhead-smi", "options": ["ro", "bind"]},
        {"hostPath": f"{smi.directory}/nvidia-smi", "containerPath": "/usr/bin/nvidia-smi", "options": ["ro", "bind"]},
    ]
    document = {"cdiVersion": "0.5.0", "kind": kind, "devices": devices, "containerEdits": {"mounts": mounts}}
    path.write_text(yaml.safe_dump(document))
    yield kind
    path.unlink()


def takes_up(client: APIClient, image: str, kind: str) -> bool:
    """Whether the engine knows the devices by now: of files that change it hears a moment later. An error says no."""
    requests = [{"Driver": "cdi", "DeviceIDs": [f"{kind}=all"]}]
    host = {"NetworkMode": "none", "DeviceRequests": requests}
    body = {"Image": image, "Cmd": ["true"], "Labels": {"pierhead.test": kind}, "HostConfig": host}
    container = client.create_container_from_config(body)["Id"]  # type: ignore[no-untyped-call]
    try:
        client.start(container)
    finally:
        client.remove_container(container, force=True)
    return True


@pytest_asyncio.fixture
async def machine(docker_client: APIClient, cdi_kind: str) -> AsyncIterator[Machine]:
    project = f"pierhead-test-{secrets.token_hex(4)}"
    image = debian_image(docker_client)
    eventually(partial(takes_up, docker_client, image, cdi_kind), "the engine has read what was just written")
    engine = DockerEngine(open_client(), GpuSources(cdi_kind, (CDI_DIRECTORY,), probe_image=image))
    yield Machine(docker_client, engine, project, cdi_kind, image)
    await engine.close()
    for left in docker_client.containers(all=True, filters={"label": f"pierhead.test={project}"}):
        docker_client.remove_container(left["Id"], force=True, v=True)


async def test_a_replica_sees_its_two_devices_and_another_stack_sees_that_it_holds_them(machine: Machine) -> None:
    gpus = await machine.gpus()
    name = await machine.run(1, gpus[1], gpus[3])
    assert (await machine.confession(name))[:2] == ["pierhead-gpu1", "pierhead-gpu3"]
    seen = await machine.engine.observe(f"{machine.project}-other", ["ranker"], [])
    assert (seen.containers, seen.foreign_gpu_holders) == ((), {gpus[1].uuid: name, gpus[3].uuid: name})


@pytest.mark.parametrize("asked", ["uuid", "index"])
async def test_a_foreign_holder_is_seen_and_its_end_wakes(machine: Machine, asked: str) -> None:
    gpus = await machine.gpus()
    foreign = await asyncio.to_thread(machine.run_foreign, gpus[2].uuid if asked == "uuid" else "2")
    state = await machine.observe()
    assert (state.containers, state.foreign_gpu_holders) == ((), {gpus[2].uuid: foreign})

    stream = aiter(machine.engine.events(machine.project))
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(stream) == CONNECTED
        await asyncio.to_thread(machine.client.kill, foreign)
        event = await anext(stream)
        while event.kind.startswith("image "):  # anybody's on this machine, who builds one
            event = await anext(stream)
    assert (event.kind, event.name) == ("die", foreign)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await machine.observe()).foreign_gpu_holders == {}


async def test_memory_is_read_by_the_nvidia_smi_that_cdi_brings_along(machine: Machine, smi: Smi) -> None:
    gpus = await machine.gpus()
    assert {gpu.memory_bytes for gpu in gpus} == {None}
    smi.say(*((gpu.uuid, 1000 * (index + 1), 10 * index) for index, gpu in enumerate(gpus)))
    used = await machine.engine.used_gpu_memory()
    assert used == {gpu.uuid: 10 * index * MIB for index, gpu in enumerate(gpus)}
    assert [(gpu.uuid, gpu.name, gpu.memory_bytes) for gpu in await machine.gpus()] == [
        (gpu.uuid, "Card", 1000 * (index + 1) * MIB) for index, gpu in enumerate(gpus)
    ]
    assert await asyncio.to_thread(machine.probes) == []


async def test_memory_that_nothing_tells_is_an_error_that_says_so(machine: Machine) -> None:
    await machine.gpus()
    with pytest.raises(EngineError, match=r"nvidia-smi ended with exit code 1.*cat: /pierhead-smi/list"):
        await machine.engine.used_gpu_memory()


async def test_a_device_that_is_gone_is_named_with_what_to_do(machine: Machine) -> None:
    with pytest.raises(EngineError, match=r"GPU-gone.*nvidia-ctk cdi generate"):
        await machine.run(1, Gpu("GPU-gone"))
