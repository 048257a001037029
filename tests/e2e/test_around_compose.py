"""What else is done to a stack from outside: images that are not ours, `up` and `down`, a second controller."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.models.containers import Container

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

APPS = Path(__file__).parent / "apps"
ECHO = (ROOT / "compose" / "apps" / "echo.yaml").read_text()
NGINX = (APPS / "static.yaml").read_text()


@pytest.fixture
def echo_stack(written: WrittenStack) -> WrittenStack:
    written.become(ECHO, echo=1, **{"echo-child": 1})
    eventually(lambda: written.get("/echo?message=hi").status == 200, "echo answers")
    return written


@pytest.fixture
def with_nginx(echo_stack: WrittenStack) -> Iterator[WrittenStack]:
    """The image of tests/e2e/apps/static.yaml is built, and the stack's environment is restored afterwards."""
    echo_stack.docker.images.build(
        path=str(APPS / "nginx"), tag="pierhead-test/nginx", network_mode="host", rm=True, forcerm=True
    )
    files = echo_stack.env["COMPOSE_FILE"]
    yield echo_stack
    if echo_stack.env["COMPOSE_FILE"] != files:
        echo_stack.env["COMPOSE_FILE"] = files
        echo_stack.up()
        eventually(lambda: echo_stack.api("/healthz").status == 200, "the controller is up")


def test_an_image_that_is_not_ours(with_nginx: WrittenStack) -> None:
    stack = with_nginx
    stack.env["COMPOSE_FILE"] += ":tests/e2e/apps/static.yaml"
    with Load([stack.url("/echo?message=x")], connections=8) as load:
        stack.up()
        eventually(lambda: stack.get("/static/").body == b"a page\n", "nginx answers", within_s=120)
    with Load([stack.url("/static/"), stack.url("/echo?message=x")], connections=16) as more:
        stack.scale("static", 3)
        stack.scale("static", 1)
    load.assert_no_failure()
    more.assert_no_failure()


@pytest.mark.long
def test_a_port_that_nothing_listens_on_is_reported_and_displaces_nobody(with_nginx: WrittenStack) -> None:
    stack = with_nginx
    stack.become(NGINX, static=1)
    eventually(lambda: stack.get("/static/").status == 200, "nginx answers")
    before = stack.replica_ids("static")
    for right, wrong in (("port: 80", "port: 81"), ("{path: /}", "{path: /, port: 82}")):
        with Load([stack.url("/static/")], connections=4) as load:
            stack.write(NGINX.replace(right, wrong))
            needle = f":{wrong.rstrip('}')[-2:]}/"
            eventually(lambda: needle in json.dumps(stack.service("static")), "the status names the port")  # noqa: B023
            assert before <= stack.replica_ids("static")
            stack.write(NGINX)
            eventually(lambda: stack.replica_ids("static") == before, "what never worked is gone")
        load.assert_no_failure()


def test_containers_that_compose_scales_are_refused(echo_stack: WrittenStack) -> None:
    replicas = echo_stack.replica_ids()
    echo_stack.compose("up", "--detach", "--no-build", "--scale", "echo-child=2")
    eventually(
        lambda: any("pierhead scale echo-child" in event["message"] for event in echo_stack.events()),
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


@contextlib.contextmanager
def foreign_container(stack: Stack, image: str, labels: dict[str, str]) -> Iterator[Container]:
    """A container that a user has started with `docker run`; the labels are its image's."""
    container = stack.docker.containers.run(image, ["infinity"], entrypoint="sleep", labels=labels, detach=True)
    try:
        yield container
    finally:
        container.remove(force=True)


def test_a_container_that_somebody_runs_of_a_services_image_lives_on(echo_stack: WrittenStack) -> None:
    (replica,) = echo_stack.replicas("echo").values()
    image = str(replica.attrs["Config"]["Image"])
    built = {"com.docker.compose.project": echo_stack.project, "com.docker.compose.service": "echo"}
    hostile = dict(replica.labels)
    with (
        foreign_container(echo_stack, image, built) as first,
        foreign_container(echo_stack, image, hostile) as second,
    ):
        echo_stack.scale("echo", 2)  # the controller reads the engine, acts, and has nothing left to do
        echo_stack.settle(**{"echo": 2, "echo-child": 1})
        for container in (first, second):
            container.reload()
            assert container.status == "running"


def told(stack: Stack) -> list[str]:
    """What has happened in the stack. A machine that keeps others waiting is nobody's doing."""
    of_the_machine = {f"{whose}_{what}" for whose in ("engine", "haproxy") for what in ("silent", "answers")}
    return [event["message"] for event in stack.events() if event["kind"] not in of_the_machine]


def test_a_second_controller_refuses_and_disturbs_nobody(echo_stack: WrittenStack) -> None:
    replicas, seen = echo_stack.replica_ids(), told(echo_stack)
    with Load([echo_stack.url("/echo?message=x")], connections=8) as load:
        done = echo_stack.compose("run", "--rm", "--no-deps", "-T", "controller")
    load.assert_no_failure()
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"controller.lock is held by the controller of project {echo_stack.project}" in done.stdout + done.stderr
    assert echo_stack.replica_ids() == replicas
    assert echo_stack.plan_text() == "nothing to do"
    assert told(echo_stack) == seen


def test_replicas_survive_a_second_up_and_not_a_plain_down(echo_stack: WrittenStack) -> None:
    replicas = echo_stack.replica_ids()
    echo_stack.up()
    assert echo_stack.replica_ids() == replicas
    try:
        done = echo_stack.compose("down")
        assert done.returncode == 0, done.stderr
        assert echo_stack.replica_ids() == set()
        assert not echo_stack.docker.networks.list(names=[f"{echo_stack.project}_default"])
    finally:
        echo_stack.renew()
