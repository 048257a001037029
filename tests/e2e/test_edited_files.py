"""Compose files that change under load: right, wrong, and with versions that never work. One stack for all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.load import Load
from tests.harness.machine import Pace, judge
from tests.harness.stack import ROOT, Stack, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

APP = ROOT / ".state" / "edited.yaml"
# The echo, whose new versions are watched for a second each time.
WRITTEN = (ROOT / "compose/apps/echo.yaml").read_text().replace("x-serve:", "x-serve:\n      rollout: {bake_s: 1}")


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    APP.parent.mkdir(exist_ok=True)
    APP.write_text(WRITTEN)
    try:
        with Stack("pierhead-test-edit", [".state/edited.yaml"]).running() as stack:
            yield stack
    finally:
        APP.unlink()


@pytest.fixture(scope="module")
def as_written(running: Stack) -> dict[str, Any]:
    """What the controller tells of the files before anybody has edited them."""
    running.wait_settled(echo=1, **{"echo-child": 1})
    return _definitions(running)


@pytest.fixture
def edited_stack(running: Stack, as_written: dict[str, Any]) -> tuple[Stack, Path]:
    """The stack as it is written, and its app file, which lies in the clone and may be edited."""
    APP.write_text(WRITTEN)
    eventually(lambda: _definitions(running) == as_written, "the controller has read the file")
    for name in ("echo", "echo-child"):
        running.api(f"/api/v1/services/{name}/scale", "PUT", {"replicas": "auto"})
    running.wait_settled(echo=1, **{"echo-child": 1})
    eventually(lambda: len(running.replicas()) == 2 and running.plan_text() == "nothing to do", "there is nothing else")
    eventually(lambda: running.get("/echo?message=hi").status == 200, "echo answers")
    return running, APP


def _definitions(stack: Stack) -> dict[str, Any]:
    told = ("offered", "image", "route", "spec_replicas")
    return {name: [row[key] for key in told] for name, row in _rows(stack).items()}


def _rows(stack: Stack) -> dict[str, Any]:
    return {row["name"]: row for row in stack.api("/api/v1/services").json["services"]}


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
    stay_s, containers, since = 4.0, stack.replica_ids(), max(int(event["seq"]) for event in stack.events())
    keys = f"replicas: 2\n      graceful_shutdown_wait_loop_s: {stay_s}"
    app.write_text(app.read_text().replace("replicas: 1", keys, 1))
    stack.wait_settled(echo=2)
    assert containers <= stack.replica_ids(), "nobody was replaced for it"
    addresses = [replica["address"] for replica in stack.service("echo")["replicas"]]
    with Pace() as pace:
        began = time.monotonic()
        assert stack.api("/api/v1/services/echo/scale", "PUT", {"replicas": 1}).status == 202
        eventually(lambda: not all(serves(address) for address in addresses), "one is told to stop", every_s=0.01)
        took = time.monotonic() - began
    assert stay_s <= took, "not before"
    stack.wait_settled(echo=1)
    [why] = [
        event["message"]
        for event in stack.events()
        if event["seq"] > since and event["kind"] == "signal_container" and event["service"] == "echo"
    ]
    assert "nothing in flight" in why, "as its time is over, long before its deadline"
    judge(took <= stay_s + 5.0, f"it stays for {stay_s:g} s and no longer, and it was {took:.1f} s", pace)


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


def test_a_service_that_crashes_again_and_again_touches_no_other(edited_stack: tuple[Stack, Path]) -> None:
    stack, app = edited_stack
    replicas = stack.replica_ids()
    bad = "  bad:\n    <<: *echo\n    image: pierhead/echo:${PIERHEAD_TAG:-latest}\n"
    bad += (
        "    command: [python, -c, 'raise SystemExit(\"no such model\")']\n    x-serve: {protocol: grpc, port: 50051}\n"
    )
    with Load([stack.url("/echo?message=x")], connections=8) as load:
        app.write_text(app.read_text() + bad)
        eventually(lambda: _crash_loop(stack), "it is named, with what it said last", within_s=120)
    load.assert_no_failure()
    assert replicas <= stack.replica_ids()
    assert stack.is_settled("echo", 1)


def _crash_loop(stack: Stack) -> bool:
    rows = [row for row in stack.api("/api/v1/services").json["services"] if row["name"] == "bad"]
    return any(
        "CRASH_LOOP" in row["message"] and "next try in" in row["message"] and "no such model" in row["message"]
        for row in rows
    )
