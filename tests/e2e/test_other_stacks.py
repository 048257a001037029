"""Stacks of their own: GPU pinning, an image that is not ours, compose files that change or are wrong, `down`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.load import Load
from tests.harness.stack import ROOT, Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

CDI_KIND = "pierhead.test/gpu"
CDI_FILE = Path("/etc/cdi/pierhead-e2e.yaml")
GPUS = 4
APPS = Path(__file__).parent / "apps"


@pytest.fixture
def fake_gpus() -> Iterator[None]:
    """Four devices that CDI hands out: a device node and a variable each, as a real one has."""
    if os.geteuid() != 0:
        pytest.fail(f"this test writes {CDI_FILE}, which takes root")
    CDI_FILE.parent.mkdir(exist_ok=True)
    write_gpus(range(GPUS))
    yield
    CDI_FILE.unlink()


def write_gpus(indices: Iterable[int]) -> None:
    """Say which GPUs there are, in one step: somebody may be reading."""
    devices = "".join(
        f"- name: GPU-000{index}\n  containerEdits:\n    env: [PINNED_GPU=GPU-000{index}]\n"
        f"    deviceNodes: [{{path: /dev/pinned{index}, hostPath: /dev/null}}]\n"
        for index in indices
    )
    new = CDI_FILE.with_suffix(".new")
    new.write_text(f"cdiVersion: 0.5.0\nkind: {CDI_KIND}\ndevices:\n{devices}")
    new.rename(CDI_FILE)


@pytest.fixture
def gpu_stack(fake_gpus: None) -> Iterator[Stack]:
    environment = {"PIERHEAD_GPU_CDI_KIND": CDI_KIND}
    with Stack("pierhead-test-gpu", ["tests/e2e/apps/gpus.yaml"], environment).running() as stack:
        yield stack


@pytest.fixture
def echo_stack() -> Iterator[Stack]:
    with Stack("pierhead-test-echo", ["compose/apps/echo.yaml"]).running() as stack:
        stack.wait_settled(echo=1, **{"echo-child": 1})
        eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo answers")
        yield stack


@pytest.fixture
def full_disk_stack() -> Iterator[Stack]:
    with Stack("pierhead-test-full", ["compose/apps/echo.yaml", "tests/e2e/apps/full_disk.yaml"]).running() as stack:
        stack.wait_settled(echo=1, **{"echo-child": 1})
        eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo answers")
        yield stack


def test_four_gpus_four_replicas_and_the_fifth_waits_with_a_reason(
    gpu_stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_slots_share_gpus_and_whole_ones_wait_for_them_to_be_empty(
    gpu_stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_stack.scale("shared", 3)
    held = {name: c.labels["pierhead.gpus"] for name, c in gpu_stack.replicas("shared").items()}
    assert sorted(held.values()) == ["GPU-0000=fraction:0.5", "GPU-0000=fraction:0.5", "GPU-0001=fraction:0.5"]
    for container in gpu_stack.replicas("shared").values():
        code, output = container.exec_run(["printenv", "PIERHEAD_GPU_FRACTION"])
        assert (code, output) == (0, b"0.5\n")

    done = gpu_stack.pierhead("scale", "pinned", "3")
    assert done.returncode == 1
    why = "it asks for 1 GPU and 0 of 4 are free: 2 held by pinned, 2 shared by shared"
    eventually(lambda: why in gpu_stack.service("pinned")["message"], "the shortage is told with numbers")
    status = gpu_stack.pierhead("status").stdout
    with capsys.disabled():
        print(f"\n{status}")
    assert "nvidia-smi cannot be asked for the memory of the GPUs" in " ".join(status.split())
    gpu_stack.scale("shared", 2)
    gpu_stack.wait_settled(pinned=3, shared=2)
    again = sorted(c.labels["pierhead.gpus"] for c in gpu_stack.replicas("pinned").values())
    assert len(set(again)) == 3


@dataclass(frozen=True)
class Smi:
    """An `nvidia-smi` that CDI mounts into whoever gets a device, as NVIDIA's files do."""

    directory: Path

    def say(self, *used_mib: int) -> None:
        """How much of each GPU's 24 GiB is in use."""
        names = [f"GPU-000{index}" for index in range(len(used_mib))]
        listing = "".join(f"GPU {index}: Card (UUID: {name})\n" for index, name in enumerate(names))
        gpus = "".join(
            f"<gpu><uuid>{name}</uuid><fb_memory_usage><total>24576 MiB</total><used>{used} MiB</used>"
            "</fb_memory_usage></gpu>"
            for name, used in zip(names, used_mib, strict=True)
        )
        xml = f'<?xml version="1.0" ?>\n<nvidia_smi_log>{gpus}</nvidia_smi_log>\n'
        # One file for both of its forms, so that no reading finds one of them old.
        fresh = self.directory / "fresh"
        fresh.write_text(f"{listing}{xml}")
        fresh.replace(self.directory / "said")


@pytest.fixture
def smi(fake_gpus: None, tmp_path: Path) -> Smi:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] || exec cat /pierhead-smi/said\n')
    program.chmod(0o755)
    mounts = {tmp_path: "/pierhead-smi", program: "/usr/bin/nvidia-smi"}
    edits = "".join(
        f"  - {{hostPath: {outside}, containerPath: {inside}, options: [ro, bind]}}\n"
        for outside, inside in mounts.items()
    )
    with CDI_FILE.open("a") as file:
        file.write(f"containerEdits:\n  mounts:\n{edits}")
    said = Smi(tmp_path)
    said.say(*[0] * GPUS)
    return said


@pytest.fixture
def memory_stack(smi: Smi) -> Iterator[Stack]:
    smi.say(20_000, 23_000, 24_000, 24_000)
    environment = {"PIERHEAD_GPU_CDI_KIND": CDI_KIND}
    with Stack("pierhead-test-memory", ["tests/e2e/apps/gpu_memory.yaml"], environment).running() as stack:
        yield stack


def test_a_replica_waits_for_memory_that_somebody_else_uses(
    memory_stack: Stack, smi: Smi, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "it asks for 8 GiB of a GPU and 0 of 4 GPUs fit: 4 have at most 4.4 GiB free (other processes use 19.5 GiB)"
    eventually(lambda: why in memory_stack.service("llm")["message"], "it waits with numbers")
    assert memory_stack.replicas("llm") == {}
    smi.say(20_000, 500, 24_000, 24_000)
    memory_stack.wait_settled(llm=2)
    held = {container.labels["pierhead.gpus"] for container in memory_stack.replicas("llm").values()}
    assert held == {f"GPU-0001=memory:{8 * 1024**3}"}
    with capsys.disabled():
        print(f"\n{memory_stack.pierhead('status').stdout}")


def test_killed_replica_comes_back_on_its_gpu(gpu_stack: Stack) -> None:
    gpu_stack.scale("pinned", 2)
    before = {name: c.labels["pierhead.gpus"] for name, c in gpu_stack.replicas("pinned").items()}
    gpu_stack.kill_process(next(iter(gpu_stack.replicas("pinned").values())))
    gpu_stack.wait_settled(pinned=2)
    assert {name: c.labels["pierhead.gpus"] for name, c in gpu_stack.replicas("pinned").items()} == before


def build_nginx(stack: Stack) -> None:
    stack.docker.images.build(
        path=str(APPS / "nginx"), tag="pierhead-test/nginx", network_mode="host", rm=True, forcerm=True
    )


def test_an_image_that_is_not_ours(echo_stack: Stack) -> None:
    build_nginx(echo_stack)
    echo_stack.env["COMPOSE_FILE"] += ":tests/e2e/apps/static.yaml"
    with Load([echo_stack.url("/echo?message=x")], connections=8) as load:
        echo_stack.up()
        eventually(lambda: echo_stack.get("/static/").body == b"a page\n", "nginx answers", within_s=60)
    with Load([echo_stack.url("/static/"), echo_stack.url("/echo?message=x")], connections=16) as more:
        echo_stack.scale("static", 3)
        echo_stack.scale("static", 1)
    load.assert_no_failure()
    more.assert_no_failure()


def test_replicas_survive_a_second_up_and_not_a_plain_down(echo_stack: Stack) -> None:
    replicas = echo_stack.replica_ids()
    echo_stack.up()
    assert echo_stack.replica_ids() == replicas
    done = echo_stack.compose("down")
    assert done.returncode == 0, done.stderr
    assert echo_stack.replica_ids() == set()
    assert not echo_stack.docker.networks.list(names=[f"{echo_stack.project}_default"])


def test_containers_that_compose_scales_are_refused(echo_stack: Stack) -> None:
    replicas = echo_stack.replica_ids()
    echo_stack.compose("up", "--detach", "--no-build", "--scale", "echo-child=2")
    eventually(
        lambda: any("make scale SERVICE=echo-child" in event["message"] for event in echo_stack.events()),
        "an event says what to do instead",
    )
    labels = [f"com.docker.compose.project={echo_stack.project}", "com.docker.compose.service=echo-child"]
    eventually(
        lambda: (
            not echo_stack.docker.containers.list(
                all=True, filters={"label": [*labels, "com.docker.compose.oneoff=False"]}, ignore_removed=True
            )
        ),
        "what Compose started is gone",
    )
    assert echo_stack.replica_ids() == replicas


# ------------------------------------------------------------------------------------------- compose files that change


@pytest.fixture
def edited_stack() -> Iterator[tuple[Stack, Path]]:
    """A stack whose app file lies in the clone and may be edited."""
    app = ROOT / ".state" / "edited.yaml"
    app.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "compose/apps/echo.yaml", app)
    try:
        with Stack("pierhead-test-edit", [".state/edited.yaml"]).running() as stack:
            stack.wait_settled(echo=1, **{"echo-child": 1})
            eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo answers")
            yield stack, app
    finally:
        app.unlink()


@pytest.mark.parametrize(
    ("old", "new", "needles"),
    [
        ("x-serve:", "x-serve: [", ["edited.yaml"]),
        ("route: /echo", "rout: /echo", ["services.echo.x-serve.rout", "unknown key", "route"]),
        ("route: /echo", "route: 7", ["services.echo.x-serve.route", "expected"]),
        ("replicas: 1", 'replicas: "two"', ["services.echo.x-serve.replicas", '"two"']),
    ],
    ids=["malformed", "unknown-key", "wrong-type", "not-a-number"],
)
def test_wrong_compose_files_touch_nothing_and_say_where(
    edited_stack: tuple[Stack, Path], old: str, new: str, needles: list[str]
) -> None:
    stack, app = edited_stack
    replicas, written = stack.replica_ids(), app.read_text()
    assert old in written
    with Load([stack.url("/echo?message=x")], connections=4) as load:
        app.write_text(written.replace(old, new, 1))
        eventually(
            lambda: all(needle in " ".join(stack.api("/api/v1/services").json["spec_problems"]) for needle in needles),
            "the status names path and expectation",
        )
        app.write_text(written)
        eventually(lambda: stack.api("/api/v1/services").json["spec_problems"] == [], "the mistake is forgotten")
    load.assert_no_failure()
    assert stack.replica_ids() == replicas


def test_a_changed_service_rolls_without_losing_a_request(edited_stack: tuple[Stack, Path]) -> None:
    stack, app = edited_stack
    stack.scale("echo", 2)
    stack.scale("echo-child", 2)
    before, written = stack.replica_ids(), app.read_text()
    worker = stack.haproxy_worker()
    with Load([stack.url("/echo?message=x")], connections=16) as load:
        app.write_text(written.replace("x-serve:", "environment: {A_CHANGE: anything}\n    x-serve:"))
        eventually(lambda: not stack.replica_ids() & before, "every replica is a new one", within_s=120)
        stack.wait_settled(echo=2, **{"echo-child": 2})
    load.assert_no_failure()
    assert stack.haproxy_worker() == worker


def test_a_replica_that_is_to_leave_serves_for_as_long_as_its_service_says(edited_stack: tuple[Stack, Path]) -> None:
    stack, app = edited_stack
    stay_s, containers = 4.0, stack.replica_ids()
    keys = f"replicas: 2\n      graceful_shutdown_wait_loop_s: {stay_s}"
    app.write_text(app.read_text().replace("replicas: 1", keys, 1))
    stack.wait_settled(echo=2)
    assert containers <= stack.replica_ids(), "nobody was replaced for it"
    addresses = [replica["address"] for replica in stack.service("echo")["replicas"]]
    began = time.monotonic()
    assert stack.api("/api/v1/services/echo/scale", "PUT", {"replicas": 1}).status == 202
    eventually(lambda: not all(serves(address) for address in addresses), "one is told to stop", every_s=0.01)
    took = time.monotonic() - began
    assert stay_s <= took <= stay_s + 5.0, "not before, and long before its graceful_shutdown_timeout_s of 35 s"
    stack.wait_settled(echo=1)


def serves(address: str) -> bool:
    """Whether a replica that is asked by its address answers, and has no SIGTERM yet."""
    admin = f"{address.partition(':')[0]}:9100"
    try:
        told = request(f"http://{admin}/readyz").status != 200
        return not told and request(f"http://{address}/echo?message=x").status == 200
    except OSError:
        return False


def test_an_image_that_does_not_exist_is_told_and_displaces_nobody(edited_stack: tuple[Stack, Path]) -> None:
    stack, app = edited_stack
    before, written = stack.replica_ids(), app.read_text()
    with Load([stack.url("/echo?message=x")], connections=4) as load:
        app.write_text(written.replace("image: pierhead/echo:", "image: pierhead-test/no-such-image:", 1))
        eventually(lambda: "pierhead-test/no-such-image" in stack.service("echo")["message"], "the status says why")
        stack.scale("echo", 2)  # of the version that works
        eventually(lambda: "goes on" in stack.service("echo")["message"], "and that is said")
        there = stack.replica_ids()
        assert before < there, "nobody has left"
        stack.scale("echo", 1)
        app.write_text(written)
        eventually(lambda: stack.service("echo")["message"] == "", "the mistake is forgotten")
    load.assert_no_failure()
    after = stack.replica_ids()
    assert after < there, "nobody has come"
    assert len(after) == len(before), "one of the two has left: the one with less to finish"


def test_a_port_that_nothing_listens_on_is_told_and_displaces_nobody(echo_stack: Stack) -> None:
    app, without = ROOT / ".state" / "static.yaml", echo_stack.env["COMPOSE_FILE"]
    app.parent.mkdir(exist_ok=True)
    written = (APPS / "static.yaml").read_text()
    app.write_text(written)
    try:
        build_nginx(echo_stack)
        echo_stack.env["COMPOSE_FILE"] += ":.state/static.yaml"
        echo_stack.up()
        eventually(lambda: echo_stack.get("/static/").status == 200, "nginx answers", within_s=60)
        before = echo_stack.replica_ids("static")
        for right, wrong in (("port: 80", "port: 81"), ("{path: /}", "{path: /, port: 82}")):
            with Load([echo_stack.url("/static/")], connections=4) as load:
                app.write_text(written.replace(right, wrong))
                needle = f":{wrong.rstrip('}')[-2:]}/"
                eventually(lambda: needle in json.dumps(echo_stack.service("static")), "the status names the port")  # noqa: B023
                assert before <= echo_stack.replica_ids("static")
                app.write_text(written)
                eventually(lambda: echo_stack.replica_ids("static") == before, "what never worked is gone")
            load.assert_no_failure()
    finally:
        echo_stack.env["COMPOSE_FILE"] = without
        app.unlink()


# --------------------------------------------------------------------------------------------------------- what breaks


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
            within_s=60,
        )
        gpu_stack.wait_settled(pinned=2)
    load.assert_no_failure()
    assert {"gpu_marked", "replica_failed"} <= {event["kind"] for event in gpu_stack.events()}
    write_gpus(range(GPUS))
    eventually(
        lambda: any(event["kind"] == "gpu_unmarked" for event in gpu_stack.events()), "it is used again", within_s=60
    )


def test_a_full_state_volume_stops_no_healing(full_disk_stack: Stack) -> None:
    stack, state = full_disk_stack, "/var/lib/pierhead"
    stack.scale("echo-child", 2)
    controller = stack.container("controller")
    with Load([stack.url("/echo?message=x")], connections=8) as load:
        code, output = controller.exec_run(["dd", "if=/dev/zero", f"of={state}/filler", "bs=1k"])
        assert code == 1, output
        victim = next(iter(stack.replicas("echo-child").values()))
        killed_at = stack.kill_process(victim)
        eventually(lambda: "state volume" in _notices(stack), "the status says what is wrong")
        eventually(lambda: victim.id not in stack.replica_ids(), "the dead replica's container is gone")
        stack.wait_settled(echo=1, **{"echo-child": 2})
        refused = stack.pierhead("scale", "echo", "2")
        assert refused.returncode == 1
        assert "state volume" in refused.stdout + refused.stderr
        assert stack.service("echo")["wanted"] == 1, "who was told that it is not kept does not get it"
        controller.exec_run(["rm", f"{state}/filler"])
        eventually(lambda: "state volume" not in _notices(stack), "there is room again")
        stack.scale("echo", 2)
    assert load.result.last_failure_at <= killed_at + 1.0
    assert load.result.failed <= 8, "only what the killed replica had begun"
    assert {"store_failing", "store_works", "replica_failed"} <= {event["kind"] for event in stack.events()}
    assert stack.container("controller").attrs["RestartCount"] == 0


def _notices(stack: Stack) -> str:
    return " ".join(stack.api("/api/v1/services").json["notices"])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([], "controller.lock is held by the controller of project pierhead-test-echo"),
        (["-e", "PIERHEAD_STATE_DIR=/tmp/another"], "is controlled by container pierhead-test-echo-controller-1"),
    ],
    ids=["the same state", "a state of its own"],
)
def test_a_second_controller_refuses_and_disturbs_nobody(echo_stack: Stack, own: list[str], words: str) -> None:
    replicas, seen = echo_stack.replica_ids(), len(echo_stack.events())
    with Load([echo_stack.url("/echo?message=x")], connections=8) as load:
        done = echo_stack.compose("run", "--rm", "--no-deps", "-T", *own, "controller", timeout_s=60)
    load.assert_no_failure()
    assert done.returncode == 3, done.stdout + done.stderr
    assert words in done.stdout + done.stderr
    assert echo_stack.replica_ids() == replicas
    assert echo_stack.plan_text() == "nothing to do"
    assert len(echo_stack.events()) == seen


def test_a_service_that_crashes_again_and_again_touches_no_other(edited_stack: tuple[Stack, Path]) -> None:
    stack, app = edited_stack
    replicas = stack.replica_ids()
    bad = "  bad:\n    <<: *echo\n    image: pierhead/echo:${PIERHEAD_TAG:-latest}\n"
    bad += (
        "    command: [python, -c, 'raise SystemExit(\"no such model\")']\n    x-serve: {protocol: grpc, port: 50051}\n"
    )
    with Load([stack.url("/echo?message=x")], connections=8) as load:
        app.write_text(app.read_text() + bad)
        eventually(lambda: _crash_loop(stack), "it is named, with what it said last", within_s=90)
    load.assert_no_failure()
    assert replicas <= stack.replica_ids()
    assert stack.is_settled("echo", 1)


def _crash_loop(stack: Stack) -> bool:
    rows = [row for row in stack.api("/api/v1/services").json["services"] if row["name"] == "bad"]
    return any(
        "CRASH_LOOP" in row["message"] and "next try in" in row["message"] and "no such model" in row["message"]
        for row in rows
    )
