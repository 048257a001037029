"""Compose files that change under load: right, wrong, and with versions that never work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Stack, get_at
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

# The echo, whose new versions are watched for a second each time.
WRITTEN = (ROOT / "compose/apps/echo.yaml").read_text().replace("x-serve: {", "x-serve: {rollout: {bake_s: 1}, ")


@pytest.fixture
def echo(written: WrittenStack) -> WrittenStack:
    written.become(WRITTEN, echo=1, **{"echo-child": 1})
    eventually(lambda: written.get("/echo?message=hi").status == 200, "echo answers")
    return written


def problems(stack: Stack) -> list[str]:
    return list(stack.api("/api/v1/services").json["spec_problems"])


@pytest.mark.parametrize(
    ("old", "new", "needles"),
    [
        ("x-serve:", "x-serve: [", ["pierhead-test-written-"]),
        ("route: /echo", "rout: /echo", ["services.echo.x-serve.rout", "unknown key", "route"]),
        ("route: /echo", "route: 7", ["services.echo.x-serve.route", "expected"]),
        ("replicas: 1", 'replicas: "two"', ["services.echo.x-serve.replicas", '"two"']),
    ],
    ids=["malformed", "unknown-key", "wrong-type", "not-a-number"],
)
def test_wrong_files_touch_nothing_and_say_where(echo: WrittenStack, old: str, new: str, needles: list[str]) -> None:
    replicas = echo.replica_ids()
    assert old in WRITTEN
    with Load([echo.url("/echo?message=x")], connections=4) as load:
        echo.write(WRITTEN.replace(old, new, 1))
        eventually(
            lambda: all(needle in " ".join(problems(echo)) for needle in needles),
            "the status names path and expectation",
        )
        echo.write(WRITTEN)
        eventually(lambda: not problems(echo), "the mistake is forgotten")
    load.assert_no_failure()
    assert echo.replica_ids() == replicas


def test_a_changed_service_rolls_without_losing_a_request(echo: WrittenStack) -> None:
    echo.scale("echo", 2)
    echo.scale("echo-child", 2)
    before, worker = echo.replica_ids(), echo.haproxy_worker()
    with Load([echo.url("/echo?message=x")], connections=16) as load:
        echo.write(WRITTEN.replace("x-serve:", "environment: {A_CHANGE: anything}\n    x-serve:"))
        eventually(lambda: not echo.replica_ids() & before, "every replica is a new one", within_s=120)
        echo.wait_settled(echo=2, **{"echo-child": 2})
    load.assert_no_failure()
    assert echo.haproxy_worker() == worker


@pytest.mark.long
def test_a_replica_that_is_to_leave_serves_for_as_long_as_its_service_says(echo: WrittenStack) -> None:
    stay_s, containers = 4.0, echo.replica_ids()
    keys = f"replicas: 2, graceful_shutdown_wait_loop_s: {stay_s}"
    echo.write(WRITTEN.replace("replicas: 1", keys, 1))
    echo.wait_settled(echo=2)
    assert containers <= echo.replica_ids(), "nothing was replaced for it"
    sockets = echo.sockets_of("echo")
    began = time.monotonic()
    assert echo.api("/api/v1/services/echo/scale", "PUT", {"replicas": 1}).status == 202
    eventually(lambda: not all(map(serves, sockets)), "one is stopped", every_s=0.01)
    assert time.monotonic() - began >= stay_s, "not before"
    echo.wait_settled(echo=1)
    [why] = echo.messages("signal_container")
    assert "nothing in flight" in why, "as its time is over, long before its deadline"


def serves(replica: Path) -> bool:
    """Whether a replica that is asked at its socket answers, and has no SIGTERM yet."""
    try:
        told = get_at(replica.with_name(f"{replica.name}.admin"), "/readyz").status != 200
        return not told and get_at(replica, "/echo?message=x").status == 200
    except OSError:
        return False


def test_an_image_that_does_not_exist_is_reported_and_displaces_nobody(echo: WrittenStack) -> None:
    before = echo.replica_ids()
    with Load([echo.url("/echo?message=x")], connections=4) as load:
        echo.write(WRITTEN.replace("image: pierhead/echo:", "image: pierhead-test/no-such-image:", 1))
        eventually(lambda: "pierhead-test/no-such-image" in echo.service("echo")["message"], "the status says why")
        echo.scale("echo", 2)  # of the version that works
        eventually(lambda: "stays" in echo.service("echo")["message"], "and that is said")
        there = echo.replica_ids()
        assert before < there, "none has left"
        echo.scale("echo", 1)
        echo.write(WRITTEN)
        eventually(lambda: echo.service("echo")["message"] == "", "the mistake is forgotten")
    load.assert_no_failure()
    after = echo.replica_ids()
    assert after < there, "none has come"
    assert len(after) == len(before), "one of the two has left: the one with less to finish"


BAD = """
  bad:
    scale: 0
    image: pierhead/echo:${PIERHEAD_TAG:-latest}
    command: [python, -c, 'raise SystemExit("no such model")']
    x-serve: {protocol: grpc, port: 50051}
"""


def test_a_service_that_crashes_again_and_again_touches_no_other(echo: WrittenStack) -> None:
    replicas = echo.replica_ids()
    with Load([echo.url("/echo?message=x")], connections=8) as load:
        echo.write(WRITTEN + BAD)
        eventually(lambda: is_in_crash_loop(echo, "bad"), "it is named, with what it said last", within_s=120)
    load.assert_no_failure()
    assert replicas <= echo.replica_ids()
    assert echo.is_settled("echo", 1)


def is_in_crash_loop(stack: Stack, service: str) -> bool:
    message = stack.service(service)["message"]
    return all(words in message for words in ("CRASH_LOOP", "next try in", "no such model"))


# A page and the model that it asks; the page's new versions are watched for two seconds each time.
BEFORE = """
x-all: &all
  image: pierhead/echo:${PIERHEAD_TAG:-latest}
  command: [python, /renamed/before.py]
  volumes: ["../tests/e2e/apps/renamed:/renamed:ro"]
  scale: 0
services:
  model:
    <<: *all
    x-serve: {replicas: 1, protocol: grpc}
  web:
    <<: *all
    depends_on: [model]
    x-serve: {replicas: 2, route: /renamed, rollout: {bake_s: 2}}
"""
AFTER = BEFORE.replace("before.py", "after.py").replace("  model:", "  scorer:").replace("[model]", "[scorer]")


def test_a_callee_that_is_renamed_loses_no_request(written: WrittenStack) -> None:
    written.become(BEFORE, model=1, web=2)
    eventually(lambda: written.get("/renamed?number=21").status == 200, "the page answers")
    before = written.replica_ids("web")
    with Load([written.url("/renamed?number=21")], connections=16) as load:
        written.write(AFTER)
        eventually(lambda: {"scorer"} & _services(written), "the new name is there", within_s=120)
        eventually(lambda: not written.replica_ids("web") & before, "every page is a new one", within_s=120)
        eventually(lambda: not written.replica_ids("model"), "the former name is gone", within_s=120)
        written.wait_settled(web=2, scorer=1)
    load.assert_no_failure()
    events = written.events()
    gone = [one["at"] for one in events if one["kind"] == "begin_retirement" and one["service"] == "model"]
    pages = [
        one["at"] for one in events if one["kind"] == "remove_container" and one["target"] and one["service"] == "web"
    ]
    assert min(gone) > max(pages), "it was there until its last caller was gone"


def _services(stack: Stack) -> set[str]:
    return {row["name"] for row in stack.api("/api/v1/services").json["services"]}


def test_a_version_for_which_the_machine_has_no_memory_waits_and_says_so(written: WrittenStack) -> None:
    written.become(BEFORE, model=1, web=2)
    eventually(lambda: written.get("/renamed?number=21").status == 200, "the page answers")
    there = written.replica_ids()
    with Load([written.url("/renamed?number=21")], connections=4) as load:
        written.write(BEFORE.replace("  web:\n", "  web:\n    mem_reservation: 900g\n"))
        pending = "one replica takes 900 GiB and "
        eventually(lambda: pending in str(written.service("web")), "it waits, with the numbers")
        written.write(BEFORE)
        eventually(lambda: written.service("web")["state"] == "HEALTHY", "it is as before")
    load.assert_no_failure()
    assert written.replica_ids() == there
