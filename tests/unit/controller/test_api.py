"""The REST API in front of a whole controller on fakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from controller.api import Gatekeeper, fault_in, replicas_in
from controller.cli.wait import judge_all
from controller.errors import InvalidRequest, RoutingError, SpecError
from controller.model.actions import AddServer
from controller.model.spec import MOST_REPLICAS, Spec
from controller.status.documents import explanation, routes_json
from tests.fakes.fake_engine import Behaviour
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpu_service, gpus, service

Client = TestClient[Any, Any]


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web", metrics_port=9100), service("api", replicas=1))


@contextlib.asynccontextmanager
async def serving(control: Control, gatekeeper: Gatekeeper | None = None) -> AsyncIterator[Client]:
    async with control.running() as controller:
        application = controller.api(gatekeeper or Gatekeeper(None, frozenset)).application()
        async with TestClient(TestServer(application)) as client:
            yield client


async def error_of(response: ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    assert set(error) == {"code", "message"}
    return response.status, error["code"], error["message"]


async def test_services_as_status_shows_them(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        await control.settled("api", 1)
        document = await (await client.get("/api/v1/services")).json()
        assert document["project"] == "p"
        assert document["settled"]
        assert [(row["name"], row["wanted"], row["ready"]) for row in document["services"]] == [
            ("api", 1, 1),
            ("web", 2, 2),
        ]
        row = await (await client.get("/api/v1/services/web")).json()
        assert (row["route"], row["image"], row["converged"]) == ("/web", "image/web", True)
        assert {replica["state"] for replica in row["replicas"]} == {"RUNNING"}


async def test_what_is_told_while_the_engine_is_away_says_so(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        await control.settled("api", 1)
        seen = await (await client.get("/api/v1/services")).json()
        assert (seen["engine_reachable"], judge_all(seen).done) == (True, True)
        control.engine.go_away()
        await until(lambda: control.view.engine_reachable is False)
        document = await (await client.get("/api/v1/services")).json()
        row = await (await client.get("/api/v1/services/web")).json()
        assert row["converged"], "of what was seen last"
        assert [document["engine_reachable"], row["engine_reachable"]] == [False, False]
        verdict = judge_all(document)
        assert not verdict.done
        assert verdict.message.startswith("the Docker Engine does not answer, ")


async def test_what_is_told_of_files_that_have_changed_since_says_so(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)

        async def told() -> tuple[bool, list[str]]:
            document = await (await client.get("/api/v1/services")).json()
            return document["files_current"], [row["name"] for row in document["services"]]

        assert await told() == (True, ["api", "web"])
        control.source.edit(service("web"), service("api", replicas=1), service("next", replicas=0))
        assert await told() == (False, ["api", "web"])
        async with asyncio.timeout(10):
            while (seen := await told())[0] is False:
                assert seen[1] == ["api", "web"], "new files are never told as if they were the old ones"
        assert seen == (True, ["api", "next", "web"])
        control.source.edit(error=SpecError(["services.web.x-serve.rout: unknown key"]))
        await until(lambda: control.view.spec_problems)
        await until(lambda: control.view.files == control.source.edits)


async def test_before_the_files_are_read_everything_is_to_be_repeated(control: Control) -> None:
    reading, load = asyncio.Event(), control.source.load

    async def wait_and_load() -> Spec:
        await reading.wait()
        return await load()

    control.source.load = wait_and_load  # type: ignore[method-assign]
    async with serving(control) as client:
        for path in ("/api/v1/services/web", "/api/v1/services/web/logs"):
            response = await client.get(path)
            assert response.headers["Retry-After"] == "1"
            status, code, message = await error_of(response)
            assert (status, code) == (503, "not_yet")
            assert message.startswith("the controller has just been started and reads the compose files")
        reading.set()
        await control.settled("web", 2)
        assert (await client.get("/api/v1/services/web")).status == 200


@pytest.mark.parametrize("set_by_s", [-8 * 3600.0, 8 * 3600.0])
async def test_all_times_are_of_one_clock_however_it_is_set(control: Control, set_by_s: float) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        control.set_clock(set_by_s)
        control.engine.behaviours["web"] = Behaviour(ready_after_s=1e9)
        control.engine.crash(control.engine.names()[-1])
        await until(lambda: "replica_failed" in control.kinds())
        await until(lambda: explanation("web", control.view)["failure"])
        row = await (await client.get("/api/v1/services/web")).json()
        told = (await (await client.get("/api/v1/events")).json())["events"]
        revisions = await (await client.get("/api/v1/services/web/revisions")).json()
        everything = await (await client.get("/api/v1/services")).json()
        routes = await (await client.get("/api/v1/routes")).json()
        times = {
            "event": next(event["at"] for event in told if event["kind"] == "replica_failed"),
            "row": row["at"],
            "failure": row["failure"]["last_at"],
            "revisions": revisions["at"],
            "first": revisions["revisions"][0]["first_at"],
            "services": everything["at"],
            "routes": routes["at"],
        }
        assert {name: at for name, at in times.items() if abs(at - control.wall()) > 60} == {}


async def test_scaling(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        response = await client.put("/api/v1/services/web/scale", json={"replicas": 4})
        assert (response.status, await response.json()) == (202, {"service": "web", "replicas": 4})
        await control.settled("web", 4)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"[" * 50_000, "expected JSON"),
        (b"[]", "found []"),
        (b"{}", "found {}"),
        (b'{"replicas": 2, "force": true}', "and nothing else"),
        (b'{"replicas": -1}', "found -1"),
        (b'{"replicas": "two"}', 'found "two"'),
        (b'{"replicas": 2.0}', "found 2.0"),
        (b'{"replicas": true}', "found true"),
        (b'{"replicas": null}', "found null"),
        (b'{"replicas": 1001}', "found 1001"),
        (b'{"replicas": NaN}', "found NaN"),
    ],
)
def test_bad_bodies(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replicas_in(body)
    assert words in str(caught.value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_only_integers_in_range_are_targets(value: object) -> None:
    body = json.dumps({"replicas": value}).encode()
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_REPLICAS:
        assert replicas_in(body) == value
    else:
        with pytest.raises(InvalidRequest):
            replicas_in(body)


async def test_a_body_that_is_not_what_its_encoding_says_is_the_caller_s_fault(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        response = await client.put("/api/v1/services/web/scale", data=b"not gzip at all", headers=headers)
        status, code, message = await error_of(response)
        assert (status, code) == (400, "bad_request")
        assert message.startswith("body: expected one that its Content-Encoding describes, found: ")
        assert control.row("web")[0] == 2


async def test_refused_scales_change_nothing(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        path = "/api/v1/services/web/scale"
        assert (await error_of(await client.put(path, data=b"x")))[:2] == (400, "invalid_request")
        assert (await error_of(await client.put(path, data=b"x" * 100_000)))[0] == 413
        status, code, message = await error_of(await client.put("/api/v1/services/wep/scale", json={"replicas": 1}))
        assert (status, code) == (404, "unknown_service")
        assert "did you mean 'web'? Services: api, web" in message
        assert control.store.overrides == {}
        await control.settled("web", 2)


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        (None, {}, 403),
        ("secret", {}, 403),
        ("secret", {"Authorization": "Bearer wrong"}, 403),
        ("secret", {"Authorization": "Bearer secret"}, 202),
    ],
)
async def test_changes_from_elsewhere_need_the_token(
    control: Control, token: str | None, headers: Mapping[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gatekeeper, "_is_this_machine", lambda self, peer: False)
    async with serving(control, Gatekeeper(token, frozenset)) as client:
        await control.settled("web", 2)
        response = await client.put("/api/v1/services/web/scale", json={"replicas": 1}, headers=headers)
        assert response.status == status
        assert (await client.get("/api/v1/services")).status == 200, "looking is free"
        assert bool(control.store.overrides) is (status == 202)


async def test_unknown_paths_and_methods(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        assert (await error_of(await client.get("/api/v2")))[:2] == (404, "not_found")
        assert (await error_of(await client.post("/api/v1/plan")))[:2] == (405, "method_not_allowed")
        assert (await error_of(await client.get("/api/v1/services/nobody")))[:2] == (404, "unknown_service")
        assert (await error_of(await client.get("/api/v1/plan?format=xml")))[:2] == (400, "invalid_request")
        wrong = ("limit=0", "limit=x", "since=-1", "wait=61", "limit=1001", "kind=nope", "kind=", f"since={'9' * 30}")
        for query in wrong:
            assert (await error_of(await client.get(f"/api/v1/events?{query}")))[0] == 400, query


async def test_a_defect_is_a_500_without_its_inside(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        monkeypatch.setattr("controller.api.service_json", lambda row, view: 1 / 0)
        status, code, message = await error_of(await client.get("/api/v1/services"))
        assert (status, code) == (500, "internal")
        assert "ZeroDivisionError" in message


async def test_the_plan_as_text_and_data(control: Control) -> None:
    control.source.services["web"] = replace(control.source.services["web"], replicas=3, gpu=gpu_service().gpu)
    control.engine.gpus = gpus(1)
    async with serving(control) as client:
        await until(lambda: control.row("web")[1] == 1)
        await until(lambda: not control.controller.executor.in_progress and not control.view.plan.steps)
        text = await (await client.get("/api/v1/plan?format=text")).text()
        assert text.startswith("pending web: it asks for 1 GPU and 0 of 1 are free")
        document = await (await client.get("/api/v1/plan")).json()
        assert document["steps"] == []
        assert [pending["service"] for pending in document["pending"]] == ["web", "web"]


async def test_a_row_says_why(control: Control) -> None:
    control.router.failing[AddServer] = RoutingError("HAProxy refused `add server`: no room")
    async with serving(control) as client:
        await until(lambda: any(refusal.action.service == "web" for refusal in control.view.refusals), 10)
        row = await (await client.get("/api/v1/services/web")).json()
        assert row["spec_replicas"] == 2
        (refusal, *_) = row["refusals"]
        assert refusal["does"].startswith("add server svc_web/")
        assert refusal["error"] == "HAProxy refused `add server`: no room"
        assert refusal["failures"] >= 1
        assert 0 <= refusal["retry_in_s"] <= 30
        assert row["failure"] is None


async def test_a_row_tells_the_load_and_what_failed(control: Control) -> None:
    control.work["web"] = 5
    control.waiting["api"] = {"web": 2}
    async with serving(control) as client:
        await control.settled("web", 2)
        await control.settled("api", 1)

        def told(service: str, field: str) -> Any:
            return explanation(service, control.view)[field]

        await until(lambda: (told("web", "in_flight"), told("web", "waiting")) == (5, 2), 10)
        row = await (await client.get("/api/v1/services/web")).json()
        assert (row["in_flight"], row["waiting"], row["failure"]) == (5, 2, None)
        control.engine.crash(next(c.name for c in control.engine.containers.values() if c.service == "api"))
        await until(lambda: told("api", "failure"), 10)
        row = await (await client.get("/api/v1/services/api")).json()
        assert row["failure"]["count"] == 1
        assert "exited by itself with code 1" in row["failure"]["detail"]


async def test_routes_are_what_haproxy_has(control: Control) -> None:
    control.source.edit(
        service("web", grpc_services=("p.v1.Web",)), service("api", replicas=1, route="/web/api", strip_prefix=True)
    )
    async with serving(control) as client:
        await control.settled("web", 2)
        await control.settled("api", 1)
        await until(lambda: len(control.router.ready("web")) == 2, 10)
        await until(lambda: routes_json(control.view)["routes"][-1]["servers"], 10)
        document = await (await client.get("/api/v1/routes")).json()
        assert document["haproxy"]["version"] == "3.0.11"
        listed = [(route["protocol"], route["match"], route["service"]) for route in document["routes"]]
        assert listed == [("http", "/web/api", "api"), ("http", "/web", "web"), ("grpc", "p.v1.Web", "web")]
        assert [route["strip_prefix"] for route in document["routes"]] == [True, False, False]
        by_match = {route["match"]: route for route in document["routes"]}
        assert [server["name"] for server in by_match["/web"]["servers"]] == control.router.ready("web")
        assert by_match["/web"]["servers"] == by_match["p.v1.Web"]["servers"]
        assert all(route["in_haproxy"] for route in document["routes"])
        control.router.up = False
        await until(lambda: not control.view.haproxy_reachable, 10)
        document = await (await client.get("/api/v1/routes")).json()
        assert document["haproxy"] is None
        assert [route["in_haproxy"] for route in document["routes"]] == [False] * 3


async def test_events_are_followed(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        await control.settled("api", 1)
        page = await (await client.get("/api/v1/events?limit=1000")).json()
        kinds = [event["kind"] for event in page["events"]]
        assert {"spec_read", "create_container", "start_container", "add_server", "replica_ready"} <= set(kinds)
        assert all(event["message"] for event in page["events"])
        following = asyncio.ensure_future(client.get(f"/api/v1/events?since={page['next']}&wait=30&service=web"))
        await client.put("/api/v1/services/web/scale", json={"replicas": 0})
        news = await (await following).json()
        assert news["events"][0]["kind"] == "scale"
        assert news["events"][0]["message"] == "web: 2 -> 0 replicas"
        some = await (await client.get("/api/v1/events?kind=scale,spec_read&service=web")).json()
        assert {event["kind"] for event in some["events"]} == {"scale"}
        first = await (await client.get("/api/v1/events?since=0&limit=2")).json()
        assert first["next"] == first["events"][-1]["seq"]


async def test_waiting_for_events_ends_with_the_server(control: Control) -> None:
    async with control.running() as controller:
        client = TestClient(TestServer(controller.api(Gatekeeper(None, frozenset)).application()))
        await client.start_server()
        await control.settled("api", 1)
        await control.settled("web", 2)
        waiting = asyncio.ensure_future(client.get(f"/api/v1/events?since={controller.events.last_seq}&wait=60"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_S):
            await client.server.close()
        with contextlib.suppress(Exception):  # an answer or a closed connection, but no waiting
            async with asyncio.timeout(PATIENCE_S):
                await waiting
        await client.close()


async def test_logs(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(output="one\ntwo\nthree\n")
    async with serving(control) as client:
        await control.settled("web", 2)
        document = await (await client.get("/api/v1/services/web/logs?tail=2")).json()
        assert [replica["lines"] for replica in document["replicas"]] == [["two", "three"]] * 2
        for replica in document["replicas"]:
            assert replica["times"] == sorted(set(replica["times"])), "each line has a time of its own"
            assert len(replica["times"]) == 2
        assert (await error_of(await client.get("/api/v1/services/nobody/logs")))[0] == 404
        assert (await error_of(await client.get("/api/v1/services/web/logs?tail=0")))[0] == 400


async def test_targets_health_and_metrics(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        groups = await (await client.get("/api/v1/targets")).json()
        assert {group["labels"]["replica"] for group in groups} == set(control.router.ready("web"))
        health = await (await client.get("/healthz")).json()
        assert (health["status"], health["engine_reachable"], health["haproxy_reachable"]) == ("ok", True, True)
        metrics = await (await client.get("/metrics")).text()
        assert 'pierhead_service_ready_replicas{service="web"} 2.0' in metrics
        assert "pierhead_controller_spec_error 0.0" in metrics
        assert 'pierhead_edge_held_requests{service="web"} 0.0' in metrics
        assert 'pierhead_edge_ended_holds_total{ending="expired",service="web"} 0.0' in metrics
        assert 'pierhead_controller_actions_total{action="create_container",outcome="ok"}' in metrics
        control.source.edit(service("api", replicas=1))
        await until(lambda: [row.name for row in control.view.services] == ["api"])
        assert 'service="web"' not in await (await client.get("/metrics")).text(), "its series went with it"


async def test_files_that_cannot_be_used_are_told(control: Control) -> None:
    control.source.error = SpecError(["services.web.x-serve.rout: unknown key", "services.api: no image"])
    async with serving(control) as client:
        await until(lambda: control.view.spec_problems)
        document = await (await client.get("/api/v1/services")).json()
        assert document["spec_problems"] == ["services.web.x-serve.rout: unknown key", "services.api: no image"]
        assert not document["settled"]
        status, _, message = await error_of(await client.put("/api/v1/services/web/scale", json={"replicas": 1}))
        assert (status, "unknown key" in message) == (400, True)
        assert "unknown key" in await (await client.get("/api/v1/plan?format=text")).text()
        assert "pierhead_controller_spec_error 1.0" in await (await client.get("/metrics")).text()


async def test_a_loop_that_stopped_turning_is_not_healthy(control: Control) -> None:
    async with control.running() as controller:
        await control.settled("web", 2)
        late = controller.api(Gatekeeper(None, frozenset), lambda: (controller.publisher.last_tick_at or 0) + 500)
        async with TestClient(TestServer(late.application())) as client:
            response = await client.get("/healthz")
            assert (response.status, (await response.json())["status"]) == (503, "stuck")


async def test_a_loop_whose_ticks_fail_is_not_healthy(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        loop = control.controller.loop
        planner, loop.planner = loop.planner, lambda *_: 1 / 0  # type: ignore[assignment]
        await until(lambda: control.controller.publisher.defect)
        response = await client.get("/healthz")
        health = await response.json()
        assert (response.status, health["status"]) == (503, "failing")
        assert health["defect"].startswith("internal: a tick raised ZeroDivisionError")
        notices = (await (await client.get("/api/v1/services")).json())["notices"]
        assert notices == [health["defect"]]
        loop.planner = planner
        await until(lambda: not control.controller.publisher.defect)
        assert (await client.get("/healthz")).status == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", 'found ""'),
        (b'{"fault": ""}', 'found ""'),
        (b'{"fault": "\\n"}', "found"),
        (b'{"fault": 7}', "found 7"),
        (b"x", "expected JSON"),
    ],
)
def test_bad_marks(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fault_in(body)
    assert words in str(caught.value)


async def test_marks_on_gpus_are_for_those_who_may_change_things(control: Control) -> None:
    control.engine.gpus = gpus(1)
    async with serving(control, Gatekeeper("secret", frozenset)) as client:
        await control.settled("web", 2)
        path, fault = "/api/v1/gpus/GPU-0", {"fault": "loud fan"}
        allowed = {"Authorization": "Bearer secret"}
        assert (await client.put(path, json=fault, headers={"Authorization": "Bearer no"})).status in (401, 403)
        assert dict(control.store.gpu_faults) == {}
        assert (await client.put(path, json=fault, headers=allowed)).status == 202
        assert control.store.gpu_faults["GPU-0"].reason == "loud fan"
        assert (await client.put(path, json={"fault": "\ud800\nfan"}, headers=allowed)).status == 202
        assert control.store.gpu_faults["GPU-0"].reason == "\\ud800 fan"
        assert (await client.put(path, json={"fault": None}, headers=allowed)).status == 202
        assert dict(control.store.gpu_faults) == {}
