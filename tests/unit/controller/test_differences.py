"""What a version's difference looks like to people."""

from __future__ import annotations

from dataclasses import replace

from controller.differences import differences
from controller.model import GpuRequest
from tests.unit.controller.worlds import service

THEN = service(
    container={
        "Image": "image/web",
        "Env": ["A=1", "B=2", "TOKEN=old"],
        "Cmd": ["serve", "--fast"],
        "HostConfig": {"Memory": 1073741824, "NetworkMode": "x"},
    }
)


def test_every_kind_of_change_is_one_line() -> None:
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
        "image: image/web was made anew, aaaaaaaaaaaa -> bbbbbbbbbbbb",
        "environment.B: removed",
        "environment.C: added",
        "environment.TOKEN: changed",
        "port: 8080 -> 9090",
        "health.probe: :9100/readyz -> :9100/healthz",
        "gpu: nothing -> 2",
        "command: serve --fast -> serve",
        "deploy.resources.limits.memory: 1073741824 -> 2147483648",
    )


def test_no_secret_is_told() -> None:
    now = replace(THEN, container={**THEN.container, "Env": ["TOKEN=s3cret"]})
    assert "s3cret" not in " ".join(differences(THEN, now, "i", "i"))
    assert "old" not in " ".join(differences(THEN, now, "i", "i"))


def test_another_image_and_nothing_at_all() -> None:
    assert differences(THEN, replace(THEN, image="image/new"), "i", "j") == ("image: image/web -> image/new",)
    assert differences(THEN, replace(THEN, replicas=7, route="/other"), "i", "i") == ()
