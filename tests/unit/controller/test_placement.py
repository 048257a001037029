"""Which replica gets which GPU, example by example: a picture of the world, then the plan as `make plan` prints it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.model.actions import CreateContainer
from controller.model.nodes import Node
from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import GpuRequest, GpuSlot, ServiceSpec
from controller.model.world import ContainerState, Gpu, GpuReading, ReplicaContainer
from controller.plan import plan
from controller.plan.placement import FRESH_S
from tests.unit.controller.worlds import NOW, desired, gpu_service, gpus, observed, replica, version

GIB = 1024**3
KILLED = "ended by signal 9: killed by a user, or by the kernel because memory ran out (`dmesg` shows which)"


def cards(*sizes_gib: int) -> tuple[Gpu, ...]:
    """GPU-0, GPU-1, ... with that much memory."""
    return tuple(Gpu(f"GPU-{index}", memory_bytes=size * GIB) for index, size in enumerate(sizes_gib))


def memory(gib: float) -> GpuSlot:
    return GpuSlot(memory_bytes=int(gib * GIB))


def slot_service(slot: GpuSlot, name: str = "llm", **changes: Any) -> ServiceSpec:
    """A gRPC service whose replicas take a slot of one GPU each."""
    asked = {key: changes.pop(key) for key in ("device_ids", "placement") if key in changes}
    return gpu_service(name, gpu=GpuRequest(1, slot=slot, **asked), **changes)


def holding(spec: ServiceSpec, number: int, uuid: str, **changes: Any) -> ReplicaContainer:
    """A running replica with what its service asks for on that GPU."""
    slot = spec.gpu.slot if spec.gpu else None
    return replica(spec, number, gpus=(uuid,), gpu_slot=slot, **changes)


def reading(at: float = NOW, **used_gib: float) -> GpuReading:
    """Memory in use, by GPU ("GPU_0" = GPU-0)."""
    return GpuReading(at, {name.replace("_", "-"): int(used * GIB) for name, used in used_gib.items()})


def made(world: Observed, *specs: ServiceSpec, **targets: int) -> Plan:
    return plan(desired(*specs, **targets), world, NOW)


def places(result: Plan) -> list[str]:
    """The GPUs of the replicas that are created, in order."""
    creates = [step.action for step in result.steps if isinstance(step.action, CreateContainer)]
    return ["+".join(gpu.uuid for gpu in create.gpus) for create in creates]


def reasons(result: Plan) -> list[str]:
    return [pending.reason for pending in result.pending]


HALF = slot_service(GpuSlot(fraction=0.5))
RANKER = gpu_service()


# ----------------------------------------------------------------------------------------------------- several machines


def test_whole_gpus_of_one_replica_are_of_one_machine() -> None:
    nodes = tuple(Gpu(f"GPU-{node}{index}", node=f"n{node}") for node in (1, 2) for index in (0, 1))
    pair = gpu_service("pair", gpu=GpuRequest(2))
    rankers = [replica(RANKER, number, gpus=(uuid,)) for number, uuid in ((1, "GPU-10"), (2, "GPU-20"))]
    one_taken = observed(*rankers[:1], specs=(RANKER, pair), gpus=nodes)
    assert places(made(one_taken, RANKER, pair, ranker=1, pair=1)) == ["GPU-20+GPU-21"]
    one_of_each = observed(*rankers, specs=(RANKER, pair), gpus=nodes)
    assert reasons(made(one_of_each, RANKER, pair, ranker=2, pair=1)) == [
        "it asks for 2 GPUs of one machine, and the most that one has free is 1 of 4"
    ]
    three = gpu_service("three", gpu=GpuRequest(3))
    (pending,) = made(observed(specs=(three,), gpus=nodes), three, three=1).pending
    assert (pending.reason, pending.blocked) == (
        "it asks for 3 GPUs of one machine, and none has more than 2: ask for fewer",
        True,
    )
    nowhere = replace(observed(specs=(RANKER,), gpus=()), nodes=(Node("n1"),))
    assert reasons(made(nowhere, RANKER, ranker=1)) == [
        "it asks for 1 GPU and no node lists any: repeat `pierhead node join` where there are some"
    ]


def test_what_no_node_can_ever_have_says_so() -> None:
    gpus = tuple(Gpu(f"GPU-{node}{index}", node=f"n{node}") for node in (1, 2) for index in range(2 * node))
    nodes = (Node("n1", labels={"zone": "a"}), Node("n2"))

    def reason(count: int, *constraints: str) -> str:
        big = gpu_service("big", gpu=GpuRequest(count, constraints=constraints))
        world = replace(observed(specs=(big,), gpus=gpus), nodes=nodes)
        plan = made(world, big, big=1)
        assert places(plan) or plan.pending[0].blocked
        return "; ".join(reasons(plan))

    assert reason(4) == reason(2, "node.labels.zone==a") == ""
    assert reason(8) == (
        "it asks for 8 GPUs of one machine, and the most that a node has is 4: ask for fewer, or add a node that has "
        "more"
    )
    assert reason(4, "node.labels.zone==a").startswith(
        "it asks for 4 GPUs of one machine, and the most that a node that fulfils node.labels.zone==a has is 2: "
    )
    assert reason(1, "node.hostname==n9") == (
        "it asks for 1 GPU and no node that fulfils node.hostname==n9 has any: change deploy.placement.constraints, or "
        "the nodes' labels"
    )


# --------------------------------------------------------------------------------------------------------------- slots


def test_slots_share_a_gpu_while_they_fit() -> None:
    llm = slot_service(memory(16))
    result = made(observed(specs=(llm,), gpus=cards(40, 40)), llm, llm=5)
    assert places(result) == ["GPU-0", "GPU-0", "GPU-1", "GPU-1"]
    assert str(result).splitlines()[0] == (
        f"#1 create p-llm-{version(llm)}-1 on 16 GiB of GPU-0: 0 of 5 replicas exist"
    )
    assert reasons(result) == ["it asks for 16 GiB of a GPU and 0 of 2 GPUs fit: 2 have at most 8 GiB free"]
    assert result.pending[0].blocked


def test_a_whole_gpu_is_not_shared() -> None:
    world = observed(holding(RANKER, 1, "GPU-0"), holding(HALF, 1, "GPU-1"), specs=(RANKER, HALF), gpus=gpus(3))
    result = made(world, RANKER, HALF, ranker=3, llm=4)
    assert places(result) == ["GPU-1", "GPU-2", "GPU-2"], "llm's; the ranker's come later in the alphabet"
    assert reasons(result) == ["it asks for 1 GPU and 0 of 3 are free: 1 held by ranker, 2 shared by llm"] * 2


def test_a_shortage_names_the_holders_and_what_is_left() -> None:
    llm = slot_service(memory(16))
    held = [holding(RANKER, number, f"GPU-{number}") for number in (1, 2, 3)]
    world = observed(*held, holding(slot_service(memory(21.9), "big"), 1, "GPU-0"), specs=(llm,), gpus=cards(*[24] * 4))
    assert reasons(made(world, llm, llm=1)) == [
        "it asks for 16 GiB of a GPU and 0 of 4 GPUs fit: 3 held by ranker, 1 has 2.1 GiB free"
    ]


def test_a_gpu_whose_memory_is_not_known_is_not_shared_by_memory() -> None:
    llm = slot_service(memory(16))
    assert reasons(made(observed(specs=(llm,), gpus=gpus(2)), llm, llm=1)) == [
        (
            "it asks for 16 GiB of a GPU and 0 of 2 GPUs fit: the memory of 2 is not known, as nvidia-smi cannot be "
            "asked: write x-serve.gpu.fraction"
        )
    ]
    kept = holding(llm, 1, "GPU-0")
    half_there = made(observed(kept, specs=(HALF,), gpus=gpus(1)), HALF, llm=2)
    assert places(half_there) == [], "no replica shares a GPU with a slot that cannot be measured"


def test_a_slot_next_to_the_one_that_is_being_freed_does_not_wait_for_it() -> None:
    third = slot_service(GpuSlot(fraction=0.3), "third")
    dead = holding(third, 1, "GPU-0", state=ContainerState.EXITED, exit_code=1)
    full = slot_service(GpuSlot(fraction=0.7), "zoo")
    world = observed(dead, specs=(third, full), gpus=gpus(1))
    assert "#2 after #1 create" in str(made(world, third, third=1)), "it takes its predecessor's name"
    assert "#2 create p-zoo" in str(made(world, third, full, third=0, zoo=1))
    assert "#2 after #1 create p-zoo" in str(made(world, third, replace(full, gpu=GpuRequest(1)), third=0, zoo=1))


# ----------------------------------------------------------------------------------------------------------- placement


def test_packing_fills_the_fullest_gpu_in_use_and_then_begins_the_smallest_that_fits() -> None:
    tenth = slot_service(GpuSlot(fraction=0.1), "tenth")
    held = [holding(HALF, 1, "GPU-1"), holding(HALF, 2, "GPU-2"), holding(tenth, 1, "GPU-2")]
    world = observed(*held, specs=(tenth, HALF), gpus=gpus(4))
    assert places(made(world, tenth, HALF, llm=2, tenth=7)) == ["GPU-2"] * 4 + ["GPU-1"] * 2
    llm = slot_service(memory(10))
    assert places(made(observed(specs=(llm,), gpus=cards(80, 24)), llm, llm=3)) == ["GPU-1", "GPU-1", "GPU-0"]
    world = observed(holding(llm, 1, "GPU-0"), specs=(llm,), gpus=cards(80, 12))
    assert places(made(world, llm, llm=2)) == ["GPU-0"], "a GPU in use comes before a tighter one"


def test_spreading_takes_the_gpu_with_the_fewest_of_the_service_then_the_emptiest() -> None:
    spread = slot_service(GpuSlot(fraction=0.2), "spread", placement="spread")
    world = observed(holding(HALF, 1, "GPU-0"), specs=(spread, HALF), gpus=gpus(3))
    assert places(made(world, spread, HALF, llm=1, spread=5)) == ["GPU-1", "GPU-2", "GPU-0", "GPU-1", "GPU-2"]


def test_a_free_gpu_comes_before_one_that_is_about_to_be_free() -> None:
    dead = holding(HALF, 1, "GPU-0", state=ContainerState.EXITED, exit_code=1)
    others = slot_service(GpuSlot(fraction=0.6), "other")
    world = observed(dead, specs=(HALF, others), gpus=gpus(2))
    text = str(made(world, HALF, others, llm=0, other=2))
    assert "#2 create p-other-" in text
    assert "#4 after #1 create p-other-" in text
    assert places(made(world, HALF, others, llm=0, other=2)) == ["GPU-1", "GPU-0"]


def test_no_more_replicas_than_are_allowed_on_one_machine() -> None:
    few = replace(RANKER, max_replicas_per_node=2)
    result = made(observed(specs=(few,), gpus=gpus(4)), few, ranker=4)
    assert places(result) == ["GPU-0", "GPU-1"]
    assert (
        reasons(result)
        == ["2 replicas are on this machine and max_replicas_per_node is 2: raise it, or ask for fewer"] * 2
    )
    assert result.pending[0].blocked


# ----------------------------------------------------------------------------------------------------------------- MIG


def test_mig_devices_are_gpus_and_the_one_they_are_parts_of_is_held_with_them() -> None:
    parts = tuple(Gpu(f"MIG-{index}", memory_bytes=10 * GIB, parent="GPU-9") for index in range(2))
    world = observed(specs=(RANKER,), gpus=(*parts, Gpu("GPU-0")), foreign_gpu_holders={"GPU-9": "train"})
    assert places(made(world, RANKER, ranker=2)) == ["GPU-0"]
    former = replica(RANKER, 1, gpus=("GPU-9",))
    world = observed(former, specs=(RANKER,), gpus=parts)
    assert reasons(made(world, RANKER, ranker=2)) == ["it asks for 1 GPU and 0 of 2 are free: 2 held by ranker"]


def test_one_replica_never_gets_several_mig_devices() -> None:
    two = gpu_service(gpu=GpuRequest(2))
    parts = tuple(Gpu(f"MIG-{index}") for index in range(4))
    assert places(made(observed(specs=(two,), gpus=(*parts, *gpus(2))), two, ranker=1)) == ["GPU-0+GPU-1"]
    assert reasons(made(observed(specs=(two,), gpus=parts), two, ranker=1)) == [
        "it asks for 2 GPUs and all here are MIG devices, of which software can use one at a time"
    ]


# ----------------------------------------------------------------------------------------- memory of other processes


def test_a_whole_gpu_is_given_out_when_its_memory_is_free() -> None:
    world = observed(specs=(RANKER,), gpus=cards(80, 80), gpu_reading=reading(GPU_0=2.25, GPU_1=1.0))
    result = made(world, RANKER, ranker=2)
    assert places(result) == ["GPU-1"], "an idle driver uses a little memory"
    assert reasons(result) == [
        "it asks for 1 GPU and 0 of 2 are free: 1 held by ranker, 1 with 2.2 GiB in use by other processes"
    ]
    assert (result.pending[0].blocked, result.awaits_gpu_memory) == (False, True), "processes end"


def test_a_slot_fits_next_to_what_others_use() -> None:
    llm = slot_service(memory(16))
    world = observed(specs=(llm,), gpus=cards(80), gpu_reading=reading(GPU_0=60))
    result = made(world, llm, llm=2)
    assert places(result) == ["GPU-0"]
    assert reasons(result) == [
        "it asks for 16 GiB of a GPU and 0 of 1 GPUs fit: 1 has 4 GiB free (other processes use 60 GiB)"
    ]
    assert not result.pending[0].blocked


def test_replicas_may_use_a_little_more_than_they_asked_for() -> None:
    llm = slot_service(memory(40))
    running = holding(llm, 1, "GPU-0")
    for used, expected in ((40.9, ["GPU-0"]), (41.1, [])):
        world = observed(running, specs=(llm,), gpus=cards(80), gpu_reading=reading(GPU_0=used))
        assert places(made(world, llm, llm=2)) == expected


def test_a_former_owner_whose_memory_is_not_free_yet_is_waited_for() -> None:
    dead = holding(RANKER, 1, "GPU-0", state=ContainerState.EXITED, exit_code=137)
    world = observed(dead, specs=(RANKER,), gpus=cards(80), gpu_reading=reading(GPU_0=70))
    result = made(world, RANKER, ranker=1)
    assert str(result) == (
        f"#1 remove {dead.name}: {KILLED}\n"
        "pending ranker: it asks for 1 GPU and 0 of 1 are free: 1 with 70 GiB in use by other processes"
    )
    free = replace(world, gpu_reading=reading(GPU_0=0.5))
    assert places(made(free, RANKER, ranker=1)) == ["GPU-0"]


@pytest.mark.parametrize("seen", [reading(NOW - FRESH_S - 1, GPU_0=70), GpuReading(at=float("-inf"))])
def test_no_replica_starts_on_an_old_reading_of_the_memory(seen: GpuReading) -> None:
    llm = slot_service(memory(16))
    for machine, spec in ((cards(80), RANKER), (cards(80), llm), (gpus(1), llm)):
        result = made(observed(specs=(spec,), gpus=machine, gpu_reading=seen), spec, **{spec.name: 1})
        assert places(result) == []
        assert reasons(result)[0].endswith("of a GPU: the memory in use is being read") or spec is RANKER
        assert (result.pending[0].blocked, result.awaits_gpu_memory) == (False, True)
    full = observed(holding(RANKER, 1, "GPU-0"), specs=(RANKER,), gpus=cards(80), gpu_reading=seen)
    result = made(full, RANKER, ranker=2)
    assert (result.pending[0].blocked, result.awaits_gpu_memory) == (True, False), "a reading would not help"


def test_where_memory_cannot_be_read_labels_alone_count() -> None:
    world = observed(specs=(RANKER,), gpus=gpus(1), gpu_reading=None)
    assert places(made(world, RANKER, ranker=1)) == ["GPU-0"]
    silent = observed(specs=(RANKER,), gpus=gpus(1), gpu_reading=reading())
    assert places(made(silent, RANKER, ranker=1)) == ["GPU-0"], "a GPU without a reading"
