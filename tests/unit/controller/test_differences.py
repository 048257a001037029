"""What a version's difference looks like to people."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.desired.revisions import differences
from controller.model.spec import GpuRequest, GpuSlot
from tests.unit.controller.worlds import service

THEN = service(
    container={
        "Image": "image/web",
        "Env": ["A=1", "B=2", "TOKEN=old"],
        "Cmd": ["serve", "--fast"],
        "HostConfig": {"Memory": 1073741824, "NetworkMode": "x"},
    }
)


def test_every_kind_of_change_is_one_line_without_values_of_the_environment() -> None:
    now = replace(
        THEN,
        port=9090,
        probe=replace(THEN.probe, path="/healthz"),
        gpu=GpuRequest(count=2),
        container={
            "Image": "image/web",
            "Env": ["A=1", "C=3", "TOKEN=new"],
            "Cmd": ["serve"],
            "HostConfig": {"Memory": 2147483648, "NetworkMode": "x"},
        },
    )
    assert differences(THEN, now, "sha256:" + "a" * 64, "sha256:" + "b" * 64) == (
        "image: image/web changed, aaaaaaaaaaaa -> bbbbbbbbbbbb",
        "environment.B: removed",
        "environment.C: added",
        "environment.TOKEN: changed",
        "port: 8080 -> 9090",
        "health.probe: :9100/readyz -> :9100/healthz",
        "gpu: nothing -> 2",
        "command: serve --fast -> serve",
        "deploy.resources.limits.memory: 1073741824 -> 2147483648",
    )


HALF = GpuRequest(1, slot=GpuSlot(fraction=0.5))


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (HALF, replace(HALF, slot=GpuSlot(fraction=0.25)), ("gpu: fraction 0.5 -> fraction 0.25",)),
        (HALF, GpuRequest(1), ("gpu: fraction 0.5 -> 1",)),
        (GpuRequest(1), GpuRequest(1, kind="H100"), ("gpu: 1 -> 1 (H100)",)),
        (GpuRequest(1, ("GPU-a",)), GpuRequest(1, ("GPU-b",)), ("gpu: 1 (GPU-a) -> 1 (GPU-b)",)),
        (HALF, replace(HALF, placement="spread"), ()),
    ],
)
def test_a_change_of_gpus(then: GpuRequest, now: GpuRequest, words: tuple[str, ...]) -> None:
    assert differences(replace(THEN, gpu=then), replace(THEN, gpu=now), "i", "i") == words


def test_another_image_is_a_difference_and_another_route_is_none() -> None:
    assert differences(THEN, replace(THEN, image="image/new"), "i", "j") == ("image: image/web -> image/new",)
    assert differences(THEN, replace(THEN, replicas=7, route="/other"), "i", "i") == ()
