"""The controller's commands and API with good and bad input; nothing running is touched by the bad."""

from __future__ import annotations

import json

import pytest

from tests.harness.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (("scale", "ranker", "-1"), ["-1", "0"]),
        (("scale", "ranker", "abc"), ["abc"]),
        (("scale", "ranker", "1.5"), ["1.5"]),
        (("scale", "rankr", "2"), ["rankr", "ranker"]),
        (("scale", "haproxy", "2"), ["haproxy"]),
        (("logs", "nothing"), ["nothing", "ranker"]),
    ],
)
def test_bad_arguments_exit_with_two_and_one_message(
    stack: Stack, arguments: tuple[str, ...], needles: list[str]
) -> None:
    replicas = stack.replica_ids()
    done = stack.pierhead(*arguments)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert all(needle in said for needle in needles), said
    assert "Traceback" not in said
    assert stack.replica_ids() == replicas


@pytest.mark.parametrize(
    ("service", "body", "status"),
    [
        ("ranker", {"replicas": -1}, 400),
        ("ranker", {"replicas": "4"}, 400),
        ("ranker", {"replicas": True}, 400),
        ("ranker", {"replicas": 10**9}, 400),
        ("ranker", {}, 400),
        ("ranker", [], 400),
        ("nobody", {"replicas": 1}, 404),
    ],
)
def test_bad_scale_requests(stack: Stack, service: str, body: object, status: int) -> None:
    answer = stack.api(f"/api/v1/services/{service}/scale", "PUT", body)
    assert answer.status == status, answer.body
    assert answer.json["error"]["message"]


def test_status_shows_every_service(stack: Stack) -> None:
    done = stack.pierhead("status")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("echo", "echo-child", "recsys", "ranker"))
    as_json = json.loads(stack.pierhead("status", "-o", "json").stdout)
    assert {row["name"] for row in as_json["services"]} == {"echo", "echo-child", "recsys", "ranker"}


def test_plan_of_a_converged_world(stack: Stack) -> None:
    done = stack.pierhead("plan")
    assert done.returncode == 0
    assert "nothing to do" in done.stdout


def test_every_change_is_an_event_with_its_cause(stack: Stack) -> None:
    stack.scale("echo", 2)
    events = [event for event in stack.events() if event["service"] == "echo"]
    assert any(event["kind"] == "create_container" and "1 of 2 replicas exist" in event["message"] for event in events)
    done = stack.pierhead("events")
    assert done.returncode == 0
    assert "echo" in done.stdout


def test_scaling_to_the_same_number_does_nothing(stack: Stack) -> None:
    replicas = stack.replica_ids()
    stack.scale("ranker", 2)
    assert stack.replica_ids() == replicas


def test_replicas_are_scrape_targets(stack: Stack) -> None:
    groups = stack.api("/api/v1/targets").json
    assert {group["labels"]["replica"] for group in groups} == set(stack.replicas())
