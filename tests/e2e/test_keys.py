"""Keys of clients on a whole stack: docs/how-to/keys.md."""

from __future__ import annotations

import pytest

from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Answer, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

ECHO = (ROOT / "compose/apps/echo.yaml").read_text()
KEYED = ECHO.replace("route: /echo,", "route: /echo, auth: key,")


@pytest.fixture
def echo(written: WrittenStack) -> WrittenStack:
    written.become(KEYED, echo=1, **{"echo-child": 1})
    return written


def asked(stack: WrittenStack, key: str = "") -> Answer:
    return request(stack.url("/echo?message=hi"), headers={"Authorization": f"Bearer {key}"} if key else {})


def made(stack: WrittenStack, name: str, *options: str) -> str:
    done = stack.pierhead("keys", "create", name, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_a_key_opens_its_service_until_it_is_revoked(echo: WrittenStack) -> None:
    assert asked(echo).json["error"]["code"] == "invalid_api_key"
    key = made(echo, "team", "--service", "echo", "--per-minute", "1000")
    eventually(lambda: asked(echo, key).status == 200, "the key opens the echo, which calls its child without one")
    assert (asked(echo).status, asked(echo, f"{key}x").status) == (401, 401)
    assert asked(echo, made(echo, "other", "--service", "echo-child")).status == 403
    [row] = [line.split() for line in echo.pierhead("keys", "list").stdout.splitlines() if line.startswith("team")]
    assert row[1:4] == ["echo", "all", "1000"]
    done = echo.pierhead("keys", "revoke", "team")
    assert (done.returncode, done.stdout) == (0, "team opens nothing any more.\n")
    assert asked(echo, key).status == 401, "the answer comes when the key opens nothing any more"


def test_keys_outlive_haproxy_and_the_controller_and_a_service_may_stop_asking(echo: WrittenStack) -> None:
    key = made(echo, "lasting")
    eventually(lambda: asked(echo, key).status == 200, "the key is in force")
    for container in ("haproxy", "controller"):
        echo.container(container).kill()
        echo.container(container).start()
        eventually(lambda: (asked(echo, key).status, asked(echo).status) == (200, 401), f"{container} is back", 60)
    echo.write(ECHO)
    eventually(lambda: asked(echo).status == 200, "nobody needs a key any more")
    echo.write(KEYED)
    eventually(lambda: (asked(echo, key).status, asked(echo).status) == (200, 401), "the key is needed, and opens")
