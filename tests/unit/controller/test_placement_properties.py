"""What holds for every machine and every mix of requests: nothing over its size, nothing refused that fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.model.actions import CreateContainer, RemoveContainer
from controller.model.desired import Desired
from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import GPU_PARTS, GpuRequest, GpuSlot, Placement
from controller.model.world import ContainerState, Gpu, GpuReading, ReplicaContainer
from controller.plan import plan
from controller.plan.placement import IDLE_BYTES, GpuBudget, Grant
from tests.bench.plan_time import NOW as BENCH_NOW
from tests.bench.plan_time import Scene, scenes
from tests.unit.controller.worlds import NOW, desired, gpu_service, observed, replica

GIB = 1024**3

slots = st.one_of(
    st.integers(1, 90).map(lambda gib: GpuSlot(memory_bytes=gib * GIB)),
    st.integers(1, GPU_PARTS).map(lambda parts: GpuSlot(fraction=parts / GPU_PARTS)),
)
placements: st.SearchStrategy[Placement] = st.sampled_from(["pack", "spread"])
requests = st.one_of(
    st.integers(1, 3).map(GpuRequest), st.builds(GpuRequest, st.just(1), slot=slots, placement=placements)
)


@st.composite
def machines(draw: st.DrawFn) -> tuple[Gpu, ...]:
    """Up to eight GPUs and MIG devices, of several sizes, some unknown."""
    sizes = draw(st.lists(st.sampled_from([None, 8, 24, 80, 80]), max_size=8))
    parts = draw(st.integers(0, 3))
    return (
        *(Gpu(f"GPU-{n}", memory_bytes=None if size is None else size * GIB) for n, size in enumerate(sizes)),
        *(Gpu(f"MIG-{n}", memory_bytes=10 * GIB, parent="GPU-m") for n in range(parts)),
    )


@dataclass(frozen=True)
class Holding:
    """What one replica has, for the checks: an amount in parts of the GPU, or all of it."""

    uuid: str
    slot: GpuSlot | None

    def share(self, gpu: Gpu) -> float:
        if self.slot is None:
            return 1.0
        if self.slot.fraction is not None:
            return self.slot.fraction
        # Of a GPU whose memory is not known, a slot of memory is all there is.
        return 1.0 if gpu.memory_bytes is None else (self.slot.memory_bytes or 0) / gpu.memory_bytes


def creations(result: Plan) -> list[CreateContainer]:
    return [step.action for step in result.steps if isinstance(step.action, CreateContainer)]


def staying(world: Observed, result: Plan) -> list[ReplicaContainer]:
    gone = {step.action.target for step in result.steps if isinstance(step.action, RemoveContainer)}
    return [container for container in world.containers if container.name not in gone]


def holdings_after(world: Observed, result: Plan) -> list[Holding]:
    """Which GPUs are held when the plan has been carried out."""
    holders = [*staying(world, result), *run(result)]
    return [Holding(uuid, container.gpu_slot) for container in holders for uuid in container.gpus]


def check(machine: Sequence[Gpu], holdings: Sequence[Holding]) -> None:
    by_gpu: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_gpu[holding.uuid].append(holding)
    for gpu in machine:
        mine = by_gpu[gpu.uuid]
        assert sum(one.share(gpu) for one in mine) <= 1 + 1e-9, f"{gpu.uuid} is given out more than once: {mine}"
        if any(one.slot is None for one in mine):
            assert len(mine) == 1, f"{gpu.uuid} is held whole and shared"


wishes = st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=4)


def world_of(machine: tuple[Gpu, ...], wanted: list[tuple[GpuRequest, int]]) -> tuple[Desired, Observed]:
    specs = [gpu_service(f"s{number}", gpu=request) for number, (request, _) in enumerate(wanted)]
    targets = {f"s{number}": count for number, (_, count) in enumerate(wanted)}
    return desired(*specs, **targets), observed(specs=tuple(specs), gpus=machine)


def run(result: Plan) -> list[ReplicaContainer]:
    """The containers that a plan creates."""
    return [
        replica(
            gpu_service(create.service),
            create.number,
            name=create.target,
            version=create.version,
            gpus=tuple(gpu.uuid for gpu in create.gpus),
            gpu_slot=create.gpu_slot,
        )
        for create in creations(result)
    ]


@settings(max_examples=300, deadline=None)
@example(  # the successor that is being made asks for more than its predecessor of the same name
    machine=(Gpu("GPU-0", memory_bytes=24 * GIB),),
    first=[(GpuRequest(1, slot=GpuSlot(memory_bytes=1 * GIB)), 1)],
    crashed={0},
    second=[(GpuRequest(1, slot=GpuSlot(memory_bytes=13 * GIB)), 2)],
)
@given(machines(), wishes, st.sets(st.integers(0, 30)), wishes)
def test_no_gpu_is_given_out_more_than_once_and_whole_and_shared_never_mix(
    machine: tuple[Gpu, ...],
    first: list[tuple[GpuRequest, int]],
    crashed: set[int],
    second: list[tuple[GpuRequest, int]],
) -> None:
    wanted, world = world_of(machine, first)
    result = plan(wanted, world, NOW)
    check(machine, holdings_after(world, result))
    # Some crash, and the files say something else by now: replacements, surplus and shortage in one plan.
    containers = tuple(
        replace(one, state=ContainerState.EXITED, exit_code=1) if index in crashed else one
        for index, one in enumerate([*staying(world, result), *run(result)])
    )
    wanted, empty = world_of(machine, second)
    world = replace(empty, containers=containers)
    result = plan(wanted, world, NOW)
    check(machine, holdings_after(world, result))
    assert str(result) == str(plan(wanted, replace(world, containers=containers[::-1]), NOW)), "deterministic"
    underway = tuple(step.action for step in result.steps)
    again = plan(wanted, replace(world, in_progress=underway), NOW)
    late = holdings_after(Observed(), again)
    check(machine, [*holdings_after(world, result), *late])


@settings(max_examples=300, deadline=None)
@given(machines(), st.lists(st.tuples(slots, placements), max_size=12), st.lists(st.integers(0, 80), max_size=11))
def test_a_slot_that_fits_somewhere_is_never_refused(
    machine: tuple[Gpu, ...], asked: list[tuple[GpuSlot, Placement]], used_gib: list[int]
) -> None:
    used = {gpu.uuid: gib * GIB for gpu, gib in zip(machine, used_gib, strict=False)}
    budget = GpuBudget.of(Observed(gpus=machine, gpu_reading=GpuReading(NOW, used)), NOW)
    free = {}
    for gpu in machine:
        size = GPU_PARTS if gpu.memory_bytes is None else gpu.memory_bytes
        strangers = used.get(gpu.uuid, 0) if gpu.memory_bytes is not None else 0
        free[gpu.uuid] = size - (strangers if strangers > IDLE_BYTES else 0)
    for slot, placement in asked:
        needs = {gpu.uuid: amount for gpu in machine if (amount := amount_of(slot, gpu)) is not None}
        fits = {uuid for uuid, amount in needs.items() if amount <= free[uuid]}
        granted = budget.take("s", GpuRequest(1, slot=slot, placement=placement), ())
        assert isinstance(granted, Grant) == bool(fits), granted
        if isinstance(granted, Grant):
            (gpu,) = granted.gpus
            assert gpu.uuid in fits
            free[gpu.uuid] -= needs[gpu.uuid]


def amount_of(slot: GpuSlot, gpu: Gpu) -> int | None:
    if slot.fraction is not None:
        return (gpu.memory_bytes or GPU_PARTS) * round(slot.fraction * GPU_PARTS) // GPU_PARTS
    return slot.memory_bytes if gpu.memory_bytes is not None else None


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.lists(slots, max_size=16), st.lists(slots, max_size=4))
def test_packing_uses_no_more_gpus_than_spreading(count: int, asked: list[GpuSlot], there: list[GpuSlot]) -> None:
    """Of equal GPUs. Of unequal ones no rule that places one slot after the other can promise it."""
    machine = tuple(Gpu(f"GPU-{index}", memory_bytes=80 * GIB) for index in range(count))
    spec = gpu_service("there")
    held: list[ReplicaContainer] = []
    for number, slot in enumerate(there):
        granted = GpuBudget.of(Observed(gpus=machine, containers=tuple(held)), NOW).take(
            "there", GpuRequest(1, slot=slot), ()
        )
        if isinstance(granted, Grant):
            held.append(replica(spec, number, gpus=(granted.gpus[0].uuid,), gpu_slot=slot))
    used = {}
    for placement in ("pack", "spread"):
        budget = GpuBudget.of(Observed(gpus=machine, containers=tuple(held)), NOW)
        grants = [budget.take("s", GpuRequest(1, slot=slot, placement=placement), ()) for slot in asked]
        used[placement] = {c.gpus[0] for c in held} | {g.gpus[0].uuid for g in grants if isinstance(g, Grant)}
    assert len(used["pack"]) <= len(used["spread"])


@settings(max_examples=200, deadline=None)
@given(machines(), st.lists(requests, max_size=6), requests, st.integers(0, 9))
def test_room_is_what_would_be_granted_and_takes_nothing(
    machine: tuple[Gpu, ...], before: list[GpuRequest], request: GpuRequest, most: int
) -> None:
    budget = GpuBudget.of(Observed(gpus=machine), NOW)
    for earlier in before:
        budget.take("other", earlier, ())
    before_it = [budget.free_bytes(gpu.uuid) for gpu in machine]
    room = budget.room("s", request, most)
    assert [budget.free_bytes(gpu.uuid) for gpu in machine] == before_it
    granted = [isinstance(budget.take("s", request, ()), Grant) for _ in range(most)]
    assert granted == [True] * room + [False] * (most - room)
    awaiting = GpuBudget.of(Observed(gpus=machine, gpu_reading=GpuReading(0.0)), NOW)
    assert awaiting.room("s", request, most) == GpuBudget.of(Observed(gpus=machine), NOW).room("s", request, most)


@pytest.mark.parametrize("scene", list(scenes(64, 500)), ids=lambda scene: scene.name)
def test_a_large_machine_is_shared_out_like_a_small_one(scene: Scene) -> None:
    result = plan(scene.desired, scene.observed, BENCH_NOW)
    check(scene.observed.gpus, holdings_after(scene.observed, result))
    assert str(plan(scene.desired, scene.observed, BENCH_NOW)) == str(result)
    if scene.name == "first start":
        assert len(creations(result)) == 500
    if scene.name == "at rest":
        assert str(result) == "nothing to do"
    if scene.name == "all crashed":
        held = {c.name: (c.gpus, c.gpu_slot) for c in scene.observed.containers}
        assert {one.name: (one.gpus, one.gpu_slot) for one in run(result)} == held
