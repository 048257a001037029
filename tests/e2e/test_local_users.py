"""Users of the machine and the controller's API: docs/explanation/threat-model.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import docker.errors
import pytest

from tests.harness.commands import run
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

SOCKETS, DOCKER = "/run/pierhead", Path("/var/run/docker.sock")
STRANGER = 54321
COMMAND_S = 60.0


@pytest.fixture
def stack(written: WrittenStack) -> WrittenStack:
    written.become("services: {}\n")
    return written


def socket_of(stack: WrittenStack) -> Path:
    return Path(f"{SOCKETS}/{stack.project}.sock")


def types(stack: WrittenStack, *words: str, group: int) -> str:
    """What the command prints for a user of this uid and group, who has the machine's files and no network."""
    image = stack.container("controller").attrs["Image"]
    labels = {"pierhead.test": "local-users", "com.docker.compose.project": stack.project}
    said = stack.docker.containers.run(
        image, list(words), entrypoint=["pierhead"], user=f"{STRANGER}:{STRANGER}", group_add=[group], remove=True,
        labels=labels, network_mode="none", tmpfs={"/var/lib/pierhead": ""}, stderr=True,
        volumes={SOCKETS: {"bind": SOCKETS, "mode": "rw"}},
        environment={"PIERHEAD_API_URL": f"unix://{socket_of(stack)}"},
    )  # fmt: skip
    assert isinstance(said, bytes)
    return said.decode()


def test_a_member_of_dockers_group_is_an_admin_and_the_audit_has_the_uid(stack: WrittenStack) -> None:
    types(stack, "keys", "create", "of-a-member", group=DOCKER.stat().st_gid)
    said = types(stack, "audit", group=DOCKER.stat().st_gid)
    assert f"uid {STRANGER} at the socket: POST keys" in said


def test_another_user_is_not_let_in_at_the_socket_and_is_no_admin_at_the_port(stack: WrittenStack) -> None:
    with pytest.raises(docker.errors.ContainerError) as refused:
        types(stack, "status", group=STRANGER)
    assert refused.value.exit_status == 3
    assert "lets in root, the owner of the project's directory and members of Docker's group" in str(refused.value)
    for path, method, body in (("backup", "GET", None), ("keys", "POST", {"name": "mine"}), ("restore", "POST", {})):
        answer = stack.api(f"/api/v1/{path}", method, body)
        assert answer.status == 403, path
        assert "this needs the role admin" in answer.json["error"]["message"]
    assert stack.api("/api/v1/deploy", "POST", {}).status == 202


def test_the_owner_of_the_directory_is_let_in(stack: WrittenStack) -> None:
    assert socket_of(stack).stat().st_uid == ROOT.stat().st_uid
    words = [sys.executable, "-P", "-m", "controller.tool", "keys", "create", "of-the-owner"]
    clone = {"PYTHONPATH": f"{ROOT}/services/runtime:{ROOT}", "PIERHEAD_CLONE": str(ROOT)}
    done = run(words, COMMAND_S, ROOT, {**stack.env, **clone})
    assert done.returncode == 0, done.stderr
    asked = [event["message"] for event in stack.events() if event["kind"] == "asked"]
    assert any(said.startswith(f"uid {os.getuid()} at the socket: POST keys") for said in asked), asked


def test_the_socket_of_a_killed_controller_is_replaced(stack: WrittenStack) -> None:
    controller = stack.container("controller")
    controller.kill()
    assert socket_of(stack).exists()
    controller.start()
    eventually(lambda: stack.api("/healthz").status == 200, "the controller is back")
    types(stack, "keys", "list", group=DOCKER.stat().st_gid)
    controller.stop()
    assert not socket_of(stack).exists()
    controller.start()
    eventually(lambda: stack.api("/healthz").status == 200, "the controller is back")
