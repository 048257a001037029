"""GPUs are given out by the device, whole and in parts, and one that is gone is not used. One stack for all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.fake_gpus import CDI_KIND, GPUS, fake_gpus, write_gpus
from tests.harness.load import Load
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

APPS = ("tests/e2e/apps/gpus.yaml", "tests/e2e/apps/quick_gpus.yaml")


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    with fake_gpus(), Stack("pierhead-test-gpu", APPS, {"PIERHEAD_GPU_CDI_KIND": CDI_KIND}).running() as stack:
        yield stack


@pytest.fixture
def gpu_stack(running: Stack) -> Stack:
    """All GPUs are there and free."""
    for name in ("pinned", "shared"):
        running.api(f"/api/v1/services/{name}/scale", "PUT", {"replicas": 0})
    running.wait_settled(pinned=0, shared=0)
    return running


def test_the_fifth_replica_on_four_gpus_says_why_it_waits(gpu_stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    done = gpu_stack.pierhead("scale", "pinned", "5")
    assert done.returncode == 1
    eventually(lambda: gpu_stack.service("pinned")["ready"] == GPUS, "four replicas are ready")

    seen = {}
    for name, container in sorted(gpu_stack.replicas("pinned").items()):
        # A process started later does not get CDI's variables: the replica's own has them.
        look = "tr '\\0' '\\n' </proc/1/environ | sed -n s/^PINNED_GPU=//p; ls /dev | grep pinned"
        code, output = container.exec_run(["/bin/sh", "-c", look])
        assert code == 0
        assert isinstance(output, bytes)
        variable, *nodes = output.decode().split()
        assert nodes == [f"pinned{variable[-1]}"], "exactly its own device"
        seen[name] = variable
    assert sorted(seen.values()) == [f"GPU-000{index}" for index in range(GPUS)]

    pending = [replica for replica in gpu_stack.service("pinned")["replicas"] if replica["state"] == "PENDING"]
    assert [replica["message"] for replica in pending] == ["it asks for 1 GPU and 0 of 4 are free: 4 held by pinned"]
    with capsys.disabled():
        print("".join(f"\n  {name} {gpu}" for name, gpu in seen.items()), f"\n  PENDING {pending[0]['message']}")


@pytest.mark.long
def test_slots_share_gpus_and_whole_ones_wait_for_them(gpu_stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_stack.scale("shared", 3)
    held = {name: c.labels["pierhead.gpus"] for name, c in gpu_stack.replicas("shared").items()}
    assert sorted(held.values()) == ["GPU-0000=fraction:0.5", "GPU-0000=fraction:0.5", "GPU-0001=fraction:0.5"]
    for container in gpu_stack.replicas("shared").values():
        code, output = container.exec_run(["printenv", "PIERHEAD_GPU_FRACTION"])
        assert (code, output) == (0, b"0.5\n")

    done = gpu_stack.pierhead("scale", "pinned", "3")
    assert done.returncode == 1
    why = "it asks for 1 GPU and 0 of 4 are free: 2 held by pinned, 2 shared by shared"
    eventually(lambda: why in gpu_stack.service("pinned")["message"], "the shortage is reported with numbers")
    status = eventually(lambda: _status_with_a_notice(gpu_stack), "it is told that their memory is not known")
    with capsys.disabled():
        print(f"\n{status}")
    gpu_stack.scale("shared", 2)
    gpu_stack.wait_settled(pinned=3, shared=2)
    again = sorted(c.labels["pierhead.gpus"] for c in gpu_stack.replicas("pinned").values())
    assert len(set(again)) == 3


def test_killed_replica_comes_back_on_its_gpu(gpu_stack: Stack) -> None:
    gpu_stack.scale("pinned", 2)
    before = {name: c.labels["pierhead.gpus"] for name, c in gpu_stack.replicas("pinned").items()}
    victim = next(iter(gpu_stack.replicas("pinned").values()))
    gpu_stack.kill_process(victim)
    eventually(lambda: victim.id not in gpu_stack.replica_ids("pinned"), "the dead replica's container is gone")
    gpu_stack.wait_settled(pinned=2)
    assert {name: c.labels["pierhead.gpus"] for name, c in gpu_stack.replicas("pinned").items()} == before


def test_a_gpu_that_is_gone_is_marked_and_its_replica_moves(gpu_stack: Stack) -> None:
    gpu_stack.scale("pinned", 2)
    held = {c.labels["pierhead.gpus"] for c in gpu_stack.replicas("pinned").values()}
    lost = min(held)
    left = [index for index in range(GPUS) if f"GPU-000{index}" != lost]
    with Load([gpu_stack.url("/faulty")], connections=4) as load:
        write_gpus(left)
        eventually(
            lambda: f"GPU {lost} is not used" in _notices(gpu_stack),
            "the status says which GPU is not used",
            within_s=180,
        )
        eventually(
            lambda: lost not in {c.labels["pierhead.gpus"] for c in gpu_stack.replicas("pinned").values()},
            "no replica is on it",
        )
        gpu_stack.wait_settled(pinned=2)
    load.assert_no_failure()
    assert {"gpu_marked", "replica_failed"} <= {event["kind"] for event in gpu_stack.events()}
    write_gpus(range(GPUS))
    eventually(lambda: any(event["kind"] == "gpu_unmarked" for event in gpu_stack.events()), "it is used again")


def _status_with_a_notice(stack: Stack) -> str:
    """Which comes when a container has been tried that asks `nvidia-smi`."""
    status = stack.pierhead("status").stdout
    return status if "nvidia-smi cannot be asked for the memory of the GPUs" in " ".join(status.split()) else ""


def _notices(stack: Stack) -> str:
    return " ".join(stack.api("/api/v1/services").json["notices"])
