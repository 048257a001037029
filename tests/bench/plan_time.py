"""How long one plan takes: `python -m tests.bench.plan_time --gpus 64 --replicas 500 --rounds 20`.

Worlds in memory, nothing else: a machine whose GPUs are a mix of whole ones and of ones divided into MIG devices, and
services that ask for whole GPUs, for memory, for fractions and for none. Prints one line a world: how many steps the
plan has, and the median and the longest CPU time of the rounds in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from controller.model.actions import CreateContainer
from controller.model.desired import Desired
from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import GpuRequest, GpuSlot, Placement, ProbeSpec, ServiceSpec, backend_name
from controller.model.world import (
    ContainerState,
    Gpu,
    GpuReading,
    ReplicaContainer,
    ReplicaHealth,
    RoutingState,
    Server,
    ServerState,
)
from controller.plan import plan

NOW = 1_000_000.0
GIB = 1024**3
GPU_BYTES = 80 * GIB
SERVICES = 20
"""A fifth asks for whole GPUs, one for memory, one for a fraction, one for a part of a MIG device, one for nothing."""


@dataclass(frozen=True)
class Scene:
    """A world to plan for."""

    name: str
    desired: Desired
    observed: Observed


def machine(count: int) -> tuple[Gpu, ...]:
    """GPUs of 80 GiB; each eighth is divided into seven MIG devices of 10 GiB."""
    found: list[Gpu] = []
    for index in range(count):
        uuid = f"GPU-{index:04d}"
        if index % 8 == 7:
            found += [Gpu(f"MIG-{index:04d}-{part}", memory_bytes=10 * GIB, parent=uuid) for part in range(7)]
        else:
            found.append(Gpu(uuid, memory_bytes=GPU_BYTES))
    return tuple(found)


def services(gpus: tuple[Gpu, ...]) -> Mapping[str, ServiceSpec]:
    """Services of the five kinds."""
    whole, parts = (tuple(gpu.uuid for gpu in gpus if gpu.is_mig is part) for part in (False, True))
    specs = {}
    for number in range(SERVICES):
        placement: Placement = "pack" if number % 2 else "spread"
        gpu = (
            GpuRequest(1, whole),
            GpuRequest(1, whole, slot=GpuSlot(memory_bytes=6 * GIB), placement=placement),
            GpuRequest(1, whole, slot=GpuSlot(fraction=0.08), placement=placement),
            GpuRequest(1, parts, slot=GpuSlot(fraction=0.25), placement=placement),
            None,
        )[number * 5 // SERVICES]
        name = f"service-{number:02d}"
        probe = ProbeSpec(9100, "/readyz")
        route = f"/{name}" if gpu is None else None
        specs[name] = ServiceSpec(name, name, "http", 8080, 1, probe, route=route, gpu=gpu, definition_hash="d")
    return specs


def shares(replicas: int, gpu_count: int) -> dict[str, int]:
    """Replicas of each service: whole GPUs for an eighth of the machine, the rest in equal parts."""
    names = [f"service-{number:02d}" for number in range(SERVICES)]
    greedy, others = names[: SERVICES // 5], names[SERVICES // 5 :]
    targets = dict.fromkeys(greedy, max(gpu_count // 8 // len(greedy), 1))
    base, more = divmod(replicas - sum(targets.values()), len(others))
    return {**targets, **{name: base + (number < more) for number, name in enumerate(others)}}


def scenes(gpu_count: int, replicas: int) -> Iterator[Scene]:
    """The first start, at rest, everything outdated, everything crashed, and twice as much as there is room for."""
    gpus = machine(gpu_count)
    specs = services(gpus)
    targets = shares(replicas, gpu_count)
    images = dict.fromkeys(specs, "sha256:1")
    reading = GpuReading(NOW, {gpu.uuid: 100 * 1024**2 for gpu in gpus})
    empty = Observed(images=images, gpus=gpus, gpu_reading=reading, routing=RoutingState(1, 0.0, "3.0", ""))
    wanted = Desired("p", specs, targets)
    yield Scene("first start", wanted, empty)
    running = started(empty, plan(wanted, empty, NOW))
    at_rest = Desired("p", specs, {name: sum(c.service == name for c in running.containers) for name in specs})
    yield Scene("at rest", at_rest, running)
    newer = {name: replace(spec, definition_hash="e") for name, spec in specs.items()}
    yield Scene("all outdated", replace(at_rest, services=newer), running)
    crashed = tuple(replace(c, state=ContainerState.EXITED, exit_code=1) for c in running.containers)
    yield Scene("all crashed", at_rest, replace(running, containers=crashed))
    yield Scene("scaled to nothing", replace(at_rest, targets=dict.fromkeys(specs, 0)), running)
    yield Scene("twice as many", Desired("p", specs, {name: 2 * count for name, count in targets.items()}), running)


def started(world: Observed, made: Plan) -> Observed:
    """The world in which what was planned runs and is ready."""
    creates = [step.action for step in made.steps if isinstance(step.action, CreateContainer)]
    containers = tuple(
        ReplicaContainer(
            id=f"id-{create.target}",
            name=create.target,
            service=create.service,
            version=create.version,
            number=create.number,
            state=ContainerState.RUNNING,
            ip=f"10.0.{index // 250}.{index % 250}",
            gpus=tuple(gpu.uuid for gpu in create.gpus),
            gpu_slot=create.gpu_slot,
            started_at=NOW - 100,
            health=ReplicaHealth.READY,
            ongoing=0,
            ongoing_at=NOW,
        )
        for index, create in enumerate(creates)
    )
    servers = tuple(
        Server(backend_name(c.service), c.name, f"{c.ip}:8080", ServerState.READY, up=True)
        for c in containers
        if not c.gpus
    )
    return replace(world, containers=containers, routing=RoutingState(1, 0.0, "3.0", "", servers))


def times_ms(make: Callable[[], Plan], rounds: int) -> list[float]:
    """Milliseconds of CPU time of each round: it waits for nothing but for a processor that others use."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        make()
        found.append(1000 * (time.process_time() - begun))
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{'world':<20}{'replicas':>10}{'steps':>8}{'pending':>9}{'median ms':>11}{'longest ms':>12}")
    for scene in scenes(arguments.gpus, arguments.replicas):
        made = plan(scene.desired, scene.observed, NOW)
        found = times_ms(lambda scene=scene: plan(scene.desired, scene.observed, NOW), arguments.rounds)  # type: ignore[misc]
        there = len(scene.observed.containers)
        print(
            f"{scene.name:<20}{there:>10}{len(made.steps):>8}{len(made.pending):>9}"
            f"{statistics.median(found):>11.1f}{max(found):>12.1f}"
        )


if __name__ == "__main__":
    main()
