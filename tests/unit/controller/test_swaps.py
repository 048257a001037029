"""Which replicas leave for others on a full machine: examples, properties, and whole rollouts in a simulated world."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.model.desired import VersionGoal
from controller.model.observed import Observed
from controller.model.phases import Phase
from controller.model.spec import GpuRequest, GpuSlot, RolloutSpec, ServiceSpec
from controller.model.world import ContainerState, FailureRecord, Gpu, ReplicaContainer
from controller.plan import plan
from controller.plan.placement import GpuBudget
from controller.plan.swaps import Places, Swap, swap
from tests.unit.controller.test_plan_properties import World
from tests.unit.controller.worlds import NOW, desired, gpu_service, gpus, observed, replica, retirement, version

GIB = 1024**3
RANKER = gpu_service(replicas=3)
NEW = replace(RANKER, definition_hash="d2")
BATCH = gpu_service("batch", replicas=3)


def on_gpus(spec: ServiceSpec, count: int, each: int = 1) -> list[ReplicaContainer]:
    """`count` replicas, on the first GPUs of the machine."""
    return [
        replica(spec, number + 1, gpus=tuple(f"GPU-{number * each + part}" for part in range(each)))
        for number in range(count)
    ]


def tried(there: list[ReplicaContainer], size: int, request: GpuRequest, most: int, count: int = 1) -> Swap:
    """Which replicas go for `count` others on a machine of `size` GPUs."""
    places = Places.after(GpuBudget.of(Observed(containers=tuple(there), gpus=gpus(size)), NOW), "ranker", ())
    return swap(places, there, (count, request), (0, None), most)


def test_the_fewest_slots_go_and_they_are_on_one_gpu() -> None:
    def slots(request_gib: int, most: int, *there: ReplicaContainer) -> list[int]:
        """The numbers of the replicas that go for one with so much memory, on two GPUs of 80 GiB."""
        machine = tuple(Gpu(f"GPU-{index}", memory_bytes=80 * GIB) for index in range(2))
        budget = GpuBudget.of(Observed(containers=there, gpus=machine), NOW)
        larger = GpuRequest(1, slot=GpuSlot(memory_bytes=request_gib * GIB))
        found = swap(Places.after(budget, "ranker", ()), there, (1, larger), (0, None), most)
        assert found.has_place is bool(found.victims)
        return [one.number for one in found.victims]

    small, large = GpuSlot(memory_bytes=24 * GIB), GpuSlot(memory_bytes=40 * GIB)
    six = [replica(RANKER, n, gpus=(f"GPU-{n % 2}",), gpu_slot=small) for n in range(6)]
    assert [slots(40, most, *six) for most in (1, 2, 3)] == [[], [0, 2], [0, 2]]
    alone = replica(RANKER, 9, gpus=("GPU-1",), gpu_slot=large)
    assert slots(64, 3, six[0], six[2], alone) == [9]


def test_the_replica_on_the_gpu_that_is_asked_for_goes() -> None:
    found = tried(on_gpus(RANKER, 3), 3, GpuRequest(1, device_ids=("GPU-2",)), 1)
    assert [one.number for one in found.victims] == [3]


@example(3, 1, 0, 2, 1, 1)  # one leaves too little, so none goes
@example(3, 1, 1, 2, 1, 1)  # one is free already
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 4), st.integers(1, 5), st.integers(0, 6), st.integers(1, 3))
def test_replicas_go_only_where_that_makes_room_and_no_more_than_allowed(
    count: int, each: int, free: int, asked: int, most: int, wanted: int
) -> None:
    there = on_gpus(RANKER, count, each)
    size, request = count * each + free, GpuRequest(asked)
    found = tried(there, size, request, most, wanted)
    assert len(found.victims) <= most
    left = tuple(one for one in there if one not in found.victims)
    room = GpuBudget.of(Observed(containers=left, gpus=gpus(size)), NOW).room("ranker", request, wanted)
    assert found.has_place is (room > 0)
    assert found.has_place or not found.victims, "none goes in vain"
    if wanted == 1 and found.has_place:
        fewest = -(-(asked - free) // each)
        assert len(found.victims) == (fewest if fewest > 0 else min(most, count)), "where it takes some, the fewest"


# ------------------------------------------------------------------------------------------------------------ in plans


def test_no_replica_goes_for_a_version_that_would_still_not_fit() -> None:
    larger = replace(NEW, gpu=GpuRequest(count=4), replicas=4)
    world = observed(*on_gpus(RANKER, 4), specs=(larger,), gpus=gpus(4))
    for unavailable in (0, 1, 3):
        spec = replace(larger, rollout=RolloutSpec(max_surge=1, max_unavailable=unavailable))
        made = plan(desired(spec), world, NOW)
        assert not made.steps
        assert made.pending[0].has_no_place
        assert made.pending[0].reason.startswith(
            "it asks for 4 GPUs and 0 of 4 are free: 4 held by ranker; the 4 that serve stay, as "
            f"{unavailable or 1} less would not make room: raise x-serve.rollout.max_unavailable"
        )


def test_on_a_full_machine_replicas_are_replaced_one_by_one_and_a_single_one_stays() -> None:
    text = str(plan(desired(NEW), observed(*on_gpus(RANKER, 3), specs=(NEW,), gpus=gpus(3)), NOW))
    assert text.count(" drain p-ranker") == 1
    assert "no GPU is free for one more, so they are replaced one by one" in text
    alone = plan(desired(NEW, ranker=1), observed(*on_gpus(RANKER, 1), specs=(NEW,), gpus=gpus(1)), NOW)
    assert not alone.steps
    assert "the only replica stays until then, unless x-serve.rollout.max_unavailable is 1" in alone.pending[0].reason


def test_a_gpu_that_becomes_free_goes_to_the_successor() -> None:
    gone = replica(RANKER, 1, gpus=("GPU-0",), state=ContainerState.EXITED, exit_code=137)
    there = [gone, *on_gpus(RANKER, 3)[1:]]
    text = str(plan(desired(RANKER, BATCH), observed(*there, specs=(RANKER, BATCH), gpus=gpus(3)), NOW))
    assert f"create p-ranker-{version(RANKER)}-1 on GPU-0" in text
    assert "create p-batch" not in text


def test_a_gpu_is_kept_while_a_failed_replica_waits_for_its_next_try() -> None:
    failed = {("ranker", version(RANKER)): FailureRecord(4, NOW, "exited by itself with code 1")}
    world = observed(*on_gpus(RANKER, 2), specs=(RANKER, BATCH), gpus=gpus(4), failures=failed)
    text = str(plan(desired(RANKER, BATCH), world, NOW))
    assert text.count(" create p-batch") == 1, "the fourth GPU is free for any service, the third one is not"
    assert text.count("pending ranker: failed 4 times") == 1
    later = str(plan(desired(RANKER, BATCH), world, NOW + 60))
    assert f"create p-ranker-{version(RANKER)}-3" in later


def test_a_free_gpu_is_kept_for_a_successor_that_needs_more_than_its_predecessor() -> None:
    larger = replace(NEW, gpu=GpuRequest(count=2))
    there = on_gpus(RANKER, 3)
    goal = VersionGoal(version(larger), larger, keep=version(RANKER), keep_spec=RANKER)
    wanted = replace(desired(larger, BATCH), goals={"ranker": goal})
    for marks in ({}, retirement(there[2])):
        world = observed(*there, specs=(larger, BATCH), gpus=gpus(4), retirements=marks)
        made = plan(wanted, world, NOW)
        assert "create" not in str(made), "GPU-3 is kept for the successor on GPU-2"
        assert "pending batch" in str(made)


def test_a_surge_replica_comes_after_replicas_that_other_services_lack() -> None:
    world = observed(*on_gpus(RANKER, 3), specs=(NEW, BATCH), gpus=gpus(4))
    text = str(plan(desired(NEW, BATCH, batch=1), world, NOW))
    assert "create p-batch" in text
    assert "create p-ranker" not in text


def test_a_rollback_removes_the_replicas_in_its_way() -> None:
    larger = replace(RANKER, gpu=GpuRequest(count=2), replicas=2)
    there = on_gpus(NEW, 3)
    goal = VersionGoal(version(larger), larger, goes_back=True)
    wanted = replace(desired(larger, ranker=3), goals={"ranker": goal})
    made = plan(wanted, observed(*there, specs=(larger,), gpus=gpus(3)), NOW)
    assert str(made).count(" drain ") == 2
    forward = replace(wanted, goals={"ranker": replace(goal, goes_back=False)})
    assert " drain " not in str(plan(forward, observed(*there, specs=(larger,), gpus=gpus(3)), NOW))


# ------------------------------------------------------------------------------------------------------ whole rollouts

paces = st.sampled_from([(1, 0), (2, 0), (0, 1), (1, 1), (2, 2), (0, 3)])


def serving(world: World, name: str) -> int:
    return sum(c.service == name and world.phase(c) is Phase.RUNNING for c in world.containers.values())


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    paces,
    st.booleans(),
    st.lists(st.integers(0, 5), max_size=2),
)
@example(4, (1, 2), (0, 0), (2, 2), False, [])  # two go for one, and then as many again may not
def test_a_rollout_takes_no_more_than_it_may_and_comes_to_rest(
    target: int,
    sizes: tuple[int, int],
    others: tuple[int, int],
    pace: tuple[int, int],
    on_trial: bool,
    crashes: list[int],
) -> None:
    """Another service waits for every GPU that gets free; the world is smaller than both want."""
    rollout = RolloutSpec(*pace)
    old = gpu_service(replicas=target, gpu=GpuRequest(sizes[0]), rollout=rollout)
    new = replace(old, definition_hash="d2", gpu=GpuRequest(sizes[1]))
    world = World({"ranker": old}, {"ranker": target})
    settle(world)
    before = serving(world, "ranker")
    world.specs["batch"] = gpu_service("batch", gpu=GpuRequest(max(1, others[0])))
    world.targets["batch"] = others[1]
    settle(world)
    assert serving(world, "ranker") == before, "a service that waits takes nothing from running replicas"

    world.specs["ranker"] = new
    if on_trial:
        world.kept["ranker"] = old
    least = min(target, before) - max(pace[1], int(before > 1))
    ended = settle(world, least)
    if not on_trial:
        versions = {c.version for c in world.containers.values() if c.service == "ranker"}
        assert len(versions) <= 1 or "pending ranker: it asks for" in ended, ended
    for number in crashes:
        up = sorted(name for name, c in world.containers.items() if c.service == "ranker")
        if up:
            there = serving(world, "ranker")
            name = up[number % len(up)]
            size = len(world.containers[name].gpus)
            world.disturb("crash", sorted(world.containers).index(name))
            settle(world)
            fewer = there - serving(world, "ranker")
            assert fewer <= 0 or size < sizes[1], "a replica that failed is replaced"


def settle(world: World, least: int = 0) -> str:
    """Carry plans out until there is nothing to do; never fewer serving than `least`. Returns the last plan."""
    for _ in range(300):
        made = world.plan()
        world.apply(made, set())
        assert serving(world, "ranker") >= least, f"{serving(world, 'ranker')} of {least} serve\n{made}"
        still = all(world.phase(container) is Phase.RUNNING for container in world.containers.values())
        if still and not made.steps and made.next_look_s is None:
            return str(made)
        world.let_time_pass()
    raise AssertionError(f"it does not come to rest\n{world.plan()}")
