"""The two benchmark applications as their users see them: through HAProxy, over HTTP and over gRPC."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docker.models.containers import Container
from pierhead.classes.proto_text import proto_text

from services.recsys.app import Ranker
from tests.harness.other_clients import (
    RANKER,
    NodeClient,
    rank,
    rank_request,
    rank_request_for_node,
    reflecting,
    scores_of,
)
from tests.harness.stack import Answer, Stack, request
from tests.harness.waiting import eventually

pytestmark = pytest.mark.stack

DENSE_ROW = [0.5] * 13
SPARSE_ROW = list(range(26))


def test_echo(stack: Stack) -> None:
    answer = stack.get("/echo?message=hi")
    assert (answer.status, answer.json) == (200, {"response": "Echo: hi"})


def test_echo_streams_fifty_events_and_done(stack: Stack) -> None:
    answer = stack.get("/echo/stream?message=hi&num_tokens=50")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert len(events) == 51
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion.chunk" for event in events[:-1])


def test_recommendations_are_the_same_for_the_same_user(stack: Stack) -> None:
    first, second, other = (stack.get(f"/recsys/?user_id={user}").json["scores"] for user in (7, 7, 8))
    assert len(first) == 32
    assert first == second
    assert first != other
    assert all(0.0 <= score <= 1.0 for score in first)
    assert max(first) - min(first) > 0.01, "a model that scores everything alike is not a model"


def test_a_request_in_the_sample_has_one_trace_with_its_batch(stack: Stack) -> None:
    """HTTP, the ingress replica, its call over a lane, the callee, and the batch there."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    assert request(stack.url("/recsys/?user_id=7"), headers=headers).status == 200
    found = eventually(lambda: trace_of(stack, trace, {"recsys", "ranker"}), "both replicas keep it")
    above, below = found["parts"]
    assert (above["service"], above["name"]) == ("recsys", "GET /recsys/")
    proxy, call = above["spans"]
    assert (proxy["name"], proxy["parent"], above["parent"]) == ("HAProxy", "b7ad6b7169203331", proxy["span"])
    assert 0 <= float(proxy["attributes"]["waited_s"]) < proxy["seconds"]
    assert (call["parent"], below["parent"]) == (above["span"], call["span"])
    assert call["attributes"] == {"service": "ranker", "replica": below["replica"]}
    assert [span["kind"] for span in below["spans"]] == ["batch"]
    assert proxy["seconds"] >= above["seconds"] >= call["seconds"] >= below["seconds"] >= below["spans"][0]["seconds"]


def trace_of(stack: Stack, trace: str, services: set[str]) -> Any:
    """What the API has of it, once each of the services has a part in it."""
    for found in stack.api(f"/api/v1/traces?trace={trace}").json["traces"]:
        if {part["service"] for part in found["parts"]} == services:
            return found
    return None


def test_own_rows_are_scored_alike_over_http_and_grpc(stack: Stack) -> None:
    answer = stack.post("/recsys/rank", {"dense": [DENSE_ROW], "sparse": [SPARSE_ROW]})
    assert answer.status == 200, answer.body
    scores = rank(stack.grpc_address, np.array([DENSE_ROW], np.float32), np.array([SPARSE_ROW]))
    assert scores == pytest.approx(answer.json["scores"], rel=1e-5)


def test_a_client_without_our_code_calls_the_ranker_through_haproxy(stack: Stack) -> None:
    """HAProxy knows services by name and describes none: the description comes from a replica, the call does not."""
    replica = f"unix:{stack.sockets_of('ranker')[0]}"
    assert RANKER in reflecting(replica)
    request = json.dumps(rank_request())
    [direct] = reflecting(replica, f"{RANKER}/rank", request)
    [through] = reflecting(replica, f"{RANKER}/rank", request, "--through", stack.grpc_address)
    assert scores_of(json.loads(through)["value"]["data"]) == scores_of(json.loads(direct)["value"]["data"])


def test_a_client_in_another_language_calls_the_ranker_through_haproxy(stack: Stack, tmp_path: Path) -> None:
    node = NodeClient(tmp_path)
    (node.directory / "ranker.proto").write_text(proto_text(Ranker.__contract__.file.proto))
    [reply] = node.call(stack.grpc_address, "ranker.proto", f"{RANKER}/rank", json.dumps(rank_request_for_node()))
    scores_of(reply["value"]["data"]["base64"])


def test_routes_and_health(stack: Stack) -> None:
    assert stack.get("/-/healthz").status == 200
    routes = stack.get("/-/routes").json
    assert routes == {"/echo": "echo", "/recsys": "recsys"}


def test_no_replica_is_a_503_that_says_when_to_come_back(stack: Stack) -> None:
    stack.scale("echo", 0)
    answer = stack.get("/echo?message=hi")
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "echo" in answer.json["error"]["message"]
    stack.scale("echo", 1)
    eventually(lambda: stack.get("/echo?message=hi").status == 200, "echo is back")


def test_a_service_behind_another_that_is_set_to_zero_is_not_waited_for(stack: Stack) -> None:
    stack.scale("ranker", 0)
    answer = stack.get("/recsys/?user_id=7")
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (503, "scaled_to_zero")
    assert "`pierhead scale ranker 1` does" in error["message"]
    stack.scale("ranker", 1)
    eventually(lambda: stack.get("/recsys/?user_id=7").status == 200, "ranker is back")


def test_a_request_is_followed_by_its_id(stack: Stack) -> None:
    """A request of the sample has a line in each part; one that failed and one that was slow have lines in HAProxy."""
    sampled = "id-69"  # crc32 is below 1 % of 2**32
    assert ask_as(stack, sampled, "/echo?message=hi").headers["x-request-id"] == sampled
    assert ask_as(stack, "unknown-route", "/nowhere").status == 404
    assert len(stack.get("/echo?message=hi").headers["x-request-id"]) >= 16
    (ingress,), (child,) = stack.replicas("echo").values(), stack.replicas("echo-child").values()
    with ThreadPoolExecutor(1) as pool:
        stack.kill_process(child, "STOP")
        began = time.monotonic()
        slow = pool.submit(ask_as, stack, "slow-callee", "/echo?message=hi")
        eventually(lambda: time.monotonic() > began + 1.5, "a request that waits for the callee is slow")
        stack.kill_process(child, "CONT")
        assert slow.result().status == 200
    haproxy = stack.container("haproxy")
    for part, request_id, expected in (
        (haproxy, sampled, {"service": "echo", "replica": ingress.name, "status": 200}),
        (ingress, sampled, {"service": "echo", "method": "GET /echo", "status": "200"}),
        (child, sampled, {"service": "echo-child", "method": "services.echo.app.EchoChild/echo", "status": "OK"}),
        (haproxy, "unknown-route", {"service": "", "path": "/nowhere", "status": 404}),
        (haproxy, "slow-callee", {"service": "echo", "replica": ingress.name, "status": 200}),
        (ingress, "slow-callee", {"service": "echo", "method": "GET /echo", "status": "200"}),
    ):
        eventually(lambda part=part, of=request_id: line_of(part, of), f"{part.name} has logged {request_id}")  # type: ignore[misc]
        line = line_of(part, request_id)
        assert line | expected == line
    assert line_of(haproxy, "slow-callee")["response_ms"] >= 1000


def ask_as(stack: Stack, request_id: str, path: str) -> Answer:
    return request(stack.url(path), headers={"x-request-id": request_id})


def line_of(part: Container, request_id: str) -> dict[str, Any]:
    """The one line of a container's log that has the id; empty while there is none."""
    lines = [json.loads(line) for line in part.logs().decode().splitlines() if f'"{request_id}"' in line]
    assert len(lines) <= 1, lines
    return dict(lines[0]) if lines else {}


def test_what_a_service_says_of_bad_input_reaches_the_client(stack: Stack) -> None:
    narrow, large = {"dense": [DENSE_ROW[:-1]], "sparse": [SPARSE_ROW]}, b'{"dense": "' + b"x" * 2_000_000 + b'"}'
    for answer, status, words in (
        (stack.post("/recsys/rank", narrow), 400, "found dense [1, 12] and sparse [1, 26]"),
        (stack.post("/recsys/rank", large), 413, ""),
        (stack.get("/recsys/?user_id=abc"), 400, "user_id: expected an integer"),
    ):
        assert answer.status == status, answer.body
        assert answer.headers["content-type"].startswith("application/json")
        assert words in answer.json["error"]["message"]
