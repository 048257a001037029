"""The command on a running stack. What it says of other worlds, and of bad input, is in tests/unit/controller."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.harness.commands import Ended, run
from tests.harness.stack import ROOT, Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

COMMAND_S = 180.0
"""Against a command that never ends."""


def test_status_shows_every_service_with_state_and_version(stack: Stack) -> None:
    assert {row["name"] for row in data(stack, "status")["services"]} == {"echo", "echo-child", "recsys", "ranker"}
    lines = stack.pierhead("status").stdout.splitlines()
    assert lines[0].split()[:4] == ["SERVICE", "STATE", "VERSION", "READY"]
    ranker = next(line.split() for line in lines if line.startswith("ranker "))
    version = next(iter(stack.replicas("ranker"))).rsplit("-", 2)[1]
    assert ranker[:4] == ["ranker", "HEALTHY", version, "2/2"]
    assert all(len(line) == len(line.rstrip()) for line in lines)
    assert "\x1b" not in "".join(lines), "no colours off a terminal"


def data(stack: Stack, *arguments: str) -> Any:
    """What a command prints as JSON."""
    done = stack.pierhead(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_said_of_a_scale(stack: Stack) -> None:
    stack.scale("echo", 2)
    events = [event for event in stack.events() if event["service"] == "echo"]
    assert any(event["kind"] == "create_container" and "1 of 2 replicas exist" in event["message"] for event in events)
    done = stack.pierhead("events", "--kind", "scale", "--service", "echo", "--since", "5m", "-o", "json")
    listed = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(event["kind"], event["service"]) for event in listed} == {("scale", "echo")}
    done = stack.pierhead("why", "echo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("echo is HEALTHY: 2 of 2 replicas ready\n")
    assert "2 wanted: set by scale; the compose files say 1" in done.stdout
    assert all(name in done.stdout for name in stack.replicas("echo"))
    assert "echo: 1 -> 2 replicas" in done.stdout


def test_prometheus_gives_rates_and_quantiles(stack: Stack) -> None:
    def measured() -> bool:
        for _ in range(20):
            assert stack.get("/recsys/?user_id=7").status == 200
        rows = {row["name"]: row for row in data(stack, "status")["services"]}
        return bool(rows["ranker"]["rate"] and rows["ranker"]["p99_s"] and rows["recsys"]["p50_s"])

    def told() -> bool:
        """A status leaves quantiles out where Prometheus takes its time."""
        shown = next(line for line in stack.pierhead("status").stdout.splitlines() if line.startswith("ranker "))
        return " ms" in shown

    eventually(measured, "status has the rate and the quantiles of what is asked for", within_s=60)
    eventually(told, "its table shows them")


def test_the_console_is_there_with_its_libraries(stack: Stack) -> None:
    assert b"<title>Pierhead</title>" in stack.api("/").body
    for name in ("preact.js", "uplot.js", "uplot.css"):
        assert stack.api(f"/console/lib/{name}").status == 200, name
    assert stack.api("/api/v1/caller").json == {"name": "this machine", "role": "deploy"}


def test_why_of_a_replica_that_was_killed_has_its_end(stack: Stack) -> None:
    victim = next(iter(stack.replicas("echo-child").values()))
    stack.kill_process(victim)
    told = eventually(lambda: last_failure(stack, "echo-child", str(victim.name)), "the failure is reported")
    assert "signal 9" in told["message"]
    stack.wait_settled(**{"echo-child": 1})


def last_failure(stack: Stack, service: str, replica: str) -> Any:
    """The report of the service's last failure, if it is this replica's."""
    told = data(stack, "why", service)["last_failure"]
    return told if told and told["target"] == replica else None


def test_routes_are_those_that_requests_take(stack: Stack) -> None:
    routes = {route["match"]: route for route in data(stack, "routes")["routes"]}
    assert {"/echo", "/recsys", "services.recsys.app.Ranker"} <= set(routes)
    servers = routes["services.recsys.app.Ranker"]["servers"]
    assert {server["name"] for server in servers} == set(stack.replicas("ranker"))
    assert all(server["up"] and server["state"] == "ready" for server in servers)
    assert "gRPC services.recsys.app.Ranker" in stack.pierhead("routes").stdout


def test_files_are_checked_where_they_lie(stack: Stack) -> None:
    done = stack.pierhead("validate")
    assert done.returncode == 0, done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["echo", "echo-child", "ranker", "recsys"]
    done = stack.pierhead("validate", "tests/e2e/apps/broken.yaml")
    assert done.returncode == 2
    assert 'services.web.x-serve.replicas: expected an integer >= 0, found "two"' in done.stdout
    assert stack.pierhead("schema").stdout == (ROOT / "compose" / "x-serve.schema.json").read_text()


# --------------------------------------------------------------------------------------------------- from the machine


def on_the_machine(stack: Stack, *arguments: str, **environment: str) -> Ended:
    """Run the clone's own `./pierhead`, from another directory."""
    return run([ROOT / "pierhead", *arguments], COMMAND_S, ROOT / "tests", {**stack.env, **environment})


def test_the_clones_command_finds_its_stack(stack: Stack) -> None:
    done = on_the_machine(stack, "scale", "echo", "2")
    assert (done.returncode, done.stdout) == (0, "echo: 2 of 2 ready\n"), done.stderr
    assert len(stack.replicas("echo")) == 2
    done = on_the_machine(stack, "validate", "e2e/apps/broken.yaml")
    assert done.returncode == 2, done.stderr
    assert "services.web.x-serve.replicas" in done.stdout


def test_files_that_run_and_files_that_are_named_are_both_checked(stack: Stack) -> None:
    named = "compose/compose.yaml:compose/apps/echo.yaml:tests/e2e/apps/broken.yaml"
    done = on_the_machine(stack, "validate", COMPOSE_FILE=named)
    assert done.returncode == 2, done.stderr
    assert "services.web.x-serve.replicas" in done.stdout
    assert "Only in the running stack: compose/apps/recsys.yaml, tests/e2e/apps/two_rankers.yaml;" in done.stderr
    assert "Only in COMPOSE_FILE: tests/e2e/apps/broken.yaml;" in done.stderr
    assert "\nranker: " in done.stderr


def test_a_shell_is_offered_the_services_that_run(stack: Stack) -> None:
    asked = {"_PIERHEAD_COMPLETE": "complete_bash", "COMP_WORDS": "pierhead why r", "COMP_CWORD": "2"}
    assert on_the_machine(stack, **asked).stdout.split() == ["ranker", "recsys"]


def test_another_machines_controller_is_reached_by_its_address(stack: Stack) -> None:
    environment = {**stack.env, "PIERHEAD_API_URL": f"http://127.0.0.1:{stack.ports['PIERHEAD_API_PORT']}"}

    def command(*arguments: str) -> Ended:
        return run([sys.executable, "-m", "controller.tool.command", *arguments], COMMAND_S, ROOT, environment)

    def status() -> str:
        done = command("status")
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Prometheus may take longer for an answer than the controller waits for one.
    eventually(lambda: "no rates and quantiles" not in status(), "its Prometheus is reached, too")
    done = command("scale", "echo", "2")
    assert (done.returncode, done.stdout) == (0, "echo: 2 of 2 ready\n"), done.stderr
