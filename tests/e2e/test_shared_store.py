"""The shared store of a stack: what one replica writes decides where others' calls go, while the controller runs."""

from __future__ import annotations

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Stack, address_of, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(600)]

APP = (
    (ROOT / "compose" / "apps" / "echo.yaml")
    .read_text()
    .replace("route: /echo,", "route: /echo, router: {policy: round_robin},")
    .replace("    scale: 0", '    volumes: ["../tests/e2e/apps/home.py:/app/home.py:ro"]\n    scale: 0')
    .replace("x-serve: {replicas: 1, max", 'x-serve: {replicas: 3, router: {policy: "home:Home"}, max')
    .replace("x-serve: {replicas: 1, route", "x-serve: {replicas: 2, route")
)
WRITE = """
import asyncio, sys
from pierhead import close_handles, shared_store
async def main():
    await shared_store.set("home", sys.argv[1], ttl_s=600)
    await close_handles()
asyncio.run(main())
"""


def test_what_one_replica_wrote_outlives_it_and_reaches_those_that_come_later(written: WrittenStack) -> None:
    stack = written
    stack.become(APP, echo=2, **{"echo-child": 3})
    homes = sorted(stack.replicas("echo-child"))
    writer = sorted(stack.replicas("echo"))[0]
    for home in homes[1], homes[2]:
        _write(stack, writer, home)
        eventually(lambda home=home: _all_at(stack, home), f"the calls of all callers go to {home}")  # type: ignore[misc]
    ids = stack.replica_ids("echo")
    stack.replicas("echo")[writer].kill()
    eventually(lambda: ids - stack.replica_ids("echo"), "the writer is gone")
    stack.scale("echo", 3)
    eventually(lambda: _all_at(stack, homes[2]), "callers that came later read it")

    with Load([stack.url("/echo?message=hi")], connections=4) as load:
        stack.container("controller").restart()
    load.assert_no_failure()
    eventually(lambda: len(_spread(stack)) > 1, "the store begins empty")


def _write(stack: Stack, caller: str, home: str) -> None:
    done = stack.replicas("echo")[caller].exec_run(["python", "-c", WRITE, home])
    assert done.exit_code == 0, done.output


def _all_at(stack: Stack, child: str) -> bool:
    return _spread(stack) == {child}


def _spread(stack: Stack) -> set[str]:
    """The children that answer thirty requests, which all callers get some of."""
    before, callers = _calls(stack, "echo-child"), _calls(stack, "echo")
    for _ in range(30):
        assert stack.get("/echo?message=hi").status == 200
    assert all(count > callers.get(name, 0) for name, count in _calls(stack, "echo").items()), "each caller had some"
    return {name for name, count in _calls(stack, "echo-child").items() if count > before.get(name, 0)}


def _calls(stack: Stack, service: str) -> dict[str, float]:
    """By replica, how many requests it has answered."""
    found = {}
    for name, container in stack.replicas(service).items():
        text = request(f"http://{address_of(container)}:9100/metrics").body.decode()
        lines = [line for line in text.splitlines() if line.startswith("pierhead_requests_total{")]
        found[name] = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return found
