"""A project of one's own on three machines: the tool's commands, typed in its directory on a manager.

The tool is installed outside the clone. The stack's images were built before, and the project's own is built on the
manager; what `pierhead up` does about images otherwise is in test_own_project.py.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.harness.commands import Ended
from tests.harness.place import TAG
from tests.harness.receivers import Receivers, receiving
from tests.harness.stack import EVIDENCE, request
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.swarm_stack import NAMES, SwarmStack
from tests.harness.waiting import eventually
from tests.harness.wheel import build_wheel, environment

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]

TOKEN = "0123456789abcdef0123456789abcdef"
IMAGES = [f"pierhead/{name}:{TAG}" for name in (*NAMES[:4], "alertmanager", "python")]
SETTINGS = (
    "COMPOSE_PROJECT_NAME=shop\nPIERHEAD_ENGINE=swarm\nPIERHEAD_REGISTRY=here\nPIERHEAD_BUILD=0\n"
    f"PIERHEAD_API_TOKEN={TOKEN}\n"
)
DIRECTORY = "/rig/shop"


CONSOLE = """
set -e
setsid pierhead console > console.said 2>&1 &
until port=$(grep -o '127.0.0.1:[0-9]*/' console.said); do kill -0 $! || { cat console.said; exit 1; }; sleep 0.1; done
port=${port#*:}
ask() {
  printf 'GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n%s\r\n' "$1" "$TOKEN" "$2"
}
exec 3<> "/dev/tcp/127.0.0.1/${port%/}" 4<> "/dev/tcp/127.0.0.1/${port%/}"
ask / "Connection: close\r\n" >&3
cat <&3
ask /api/v1/live "" >&4
head -n 1 <&4
docker kill --signal INT $(docker ps --quiet --filter publish=${port%/}) > /dev/null
wait || true
"""
"""Types `pierhead console`, opens the page and its stream at the address that it says, and ends it as Ctrl-C does."""


class Manager:
    """A user of the tool in the project's directory on a manager."""

    def __init__(self, rig: SwarmRig, programs: Path, receivers: Receivers) -> None:
        self.rig, self.node, self._programs, self.receivers = rig, rig.nodes[0], programs, receivers

    def type(self, words: str, directory: str = DIRECTORY) -> Ended:
        path = f"{self._programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return self.node.run("bash", "-c", f"cd {directory} && {words}", PATH=path, PIERHEAD_TAG=TAG)

    def does(self, words: str, directory: str = DIRECTORY) -> str:
        began = time.monotonic()
        done = self.type(words, directory)
        print(f"{words}: {time.monotonic() - began:.1f} s")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def containers(self) -> set[str]:
        """Of all nodes: what is replaced has another id."""
        return {line for node in self.rig.nodes for line in node.cli("ps", "--quiet", "--no-trunc").split()}

    def greetings(self) -> set[str]:
        """What each node says."""
        return {greeting(node) for node in self.rig.nodes}


def greeting(node: Node) -> str:
    answer = request(f"http://{node.ip}:8000/?name=Ada")
    return str(answer.json["greeting"]) if answer.status == 200 else f"{answer.status}"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """The project is up."""
    SwarmStack.build()
    EVIDENCE.mkdir(exist_ok=True)
    wheel = build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel"))
    with (
        TemporaryDirectory(dir=EVIDENCE) as tool,  # the nodes have the clone at its own path
        SwarmRig(nodes=3, managers=3).running([], only_first=IMAGES) as rig,
        receiving(f"{rig.subnet}.1") as receivers,
    ):
        user = Manager(rig, environment(Path(tool) / "venv", wheel), receivers)
        user.does("pierhead new shop", "/rig")
        webhook = f"PIERHEAD_ALERT_WEBHOOK=http://{receivers.address}:{receivers.webhook_port}/"
        user.does(f"printf '{SETTINGS}{webhook}' > .env")
        user.does("docker compose build --quiet web greeter")
        print(user.does("pierhead up"))
        yield user


def test_every_machine_answers_and_another_up_changes_nothing(user: Manager) -> None:
    eventually(lambda: user.greetings() == {"Hello, Ada!"}, "each node answers")
    before = user.containers()
    user.does("pierhead up")
    assert user.containers() == before


def test_what_is_typed_on_one_machine_is_typed_here(user: Manager) -> None:
    assert "web: 3 of 3 ready" in user.does("pierhead scale web 3")
    rows = {row["name"]: row for row in json.loads(user.does("pierhead status -o json"))["services"]}
    assert {one["node"] for one in rows["web"]["replicas"]} == {node.name for node in user.rig.nodes}
    assert "web is HEALTHY: 3 of 3" in user.does("pierhead why web")


def test_a_browser_on_the_manager_finds_the_console(user: Manager) -> None:
    shown = user.type(f"TOKEN={TOKEN} timeout 60 bash -c {shlex.quote(CONSOLE)}")
    assert "<title>Pierhead</title>" in shown.stdout, shown.stdout + shown.stderr
    assert shown.stdout.splitlines()[-1].startswith("HTTP/1.1 200"), shown.stdout[-500:]
    assert shown.returncode == 0, "it ends, although a page is open"
    eventually(lambda: not user.does("docker ps --quiet --filter publish=8100"), "its port is closed")


def test_a_version_that_works_and_one_that_does_not(user: Manager) -> None:
    user.does("sed -i 's/Hello/Welcome/' app.py && docker compose build --quiet web greeter && pierhead deploy")
    eventually(lambda: user.greetings() == {"Welcome, Ada!"}, "each node has the new version")
    user.does("sed -i 's/self.greeter = greeter/raise ValueError/' app.py && docker compose build --quiet web greeter")
    broken = user.type("pierhead deploy")
    assert broken.returncode == 1
    assert "was rolled back" in broken.stderr, broken.stdout + broken.stderr
    assert user.greetings() == {"Welcome, Ada!"}
    eventually(lambda: user.receivers.told("VersionRolledBack"), "an alert says so")
    user.does("pierhead silence web --for 1h --why 'the fault is known'")
    assert "the fault is known" in user.does("pierhead silence")


def test_down_leaves_nothing(user: Manager) -> None:
    user.does("pierhead down --volumes")
    own = "--quiet --filter name=shop"
    listed = "; ".join(f"docker {kind} ls {own}" for kind in ("service", "config", "secret", "network", "volume"))
    eventually(lambda: not user.does(listed), "nothing is left")
    assert "Nothing is left of shop" in user.does("pierhead down")
