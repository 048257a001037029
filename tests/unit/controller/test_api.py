"""The REST API in front of a whole controller on fakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from controller.api_tokens import ROLES, digest_of, read_tokens
from controller.daemon.bodies import deployment_in, mark_in, nothing_in, operation_in, rollback_in, scale_in
from controller.daemon.callers import Gatekeeper
from controller.errors import InvalidRequest, RoutingError, SpecError
from controller.model.actions import AddServer
from controller.model.spec import Spec
from controller.status.documents import routes
from controller.status.records.changes import Deploy, Operate
from tests.fakes.fake_engine import Behaviour
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import service

Client = TestClient[Any, Any]
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web", metrics_port=9100), service("api", replicas=1))


@contextlib.asynccontextmanager
async def serving(control: Control, gatekeeper: Gatekeeper | None = None, **replicas: int) -> AsyncIterator[Client]:
    async with control.running(**replicas) as controller:
        application = controller.api(gatekeeper or Gatekeeper((), frozenset)).application()
        async with TestClient(TestServer(application)) as client:
            yield client


async def error_of(response: ClientResponse) -> tuple[int, str, str]:
    error = (await response.json())["error"]
    assert set(error) == {"code", "message"}
    return response.status, error["code"], error["message"]


async def test_services_as_status_shows_them_and_that_the_engine_is_away(control: Control) -> None:
    async with serving(control, web=2, api=1) as client:
        document = await (await client.get("/api/v1/services")).json()
        assert [document[key] for key in ("project", "settled", "engine_reachable")] == ["p", True, True]
        rows = [(row["name"], row["wanted"], row["ready"]) for row in document["services"]]
        assert rows == [("api", 1, 1), ("web", 2, 2)]
        row = await (await client.get("/api/v1/services/web")).json()
        assert (row["route"], row["image"], row["converged"]) == ("/web", "image/web", True)
        assert {replica["state"] for replica in row["replicas"]} == {"RUNNING"}
        control.engine.go_away()
        await until(lambda: control.view.engine_reachable is False)
        document = await (await client.get("/api/v1/services")).json()
        row = await (await client.get("/api/v1/services/web")).json()
        assert row["converged"], "as the last reading saw it"
        assert [document["engine_reachable"], row["engine_reachable"]] == [False, False]


def hold_reading(control: Control) -> asyncio.Event:
    """Have the files read from now on when the event is set."""
    reading, load = asyncio.Event(), control.source.load

    async def wait_and_load() -> Spec:
        await reading.wait()
        return await load()

    control.source.load = wait_and_load  # type: ignore[method-assign]
    return reading


async def test_what_is_reported_of_files_that_have_changed_since_says_so(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)

        async def told() -> tuple[bool, list[str]]:
            document = await (await client.get("/api/v1/services")).json()
            return document["files_current"], [row["name"] for row in document["services"]]

        assert await told() == (True, ["api", "web"])
        reading = hold_reading(control)
        control.source.edit(service("web"), service("api", replicas=1), service("next", replicas=0))
        assert await told() == (False, ["api", "web"])
        reading.set()
        async with asyncio.timeout(10):
            while (seen := await told())[0] is False:
                assert seen[1] == ["api", "web"], "new files are never told as if they were the old ones"
        assert seen == (True, ["api", "next", "web"])
        control.source.edit(error=SpecError(["services.web.x-serve.rout: unknown key"]))
        await until(lambda: control.view.spec_problems)
        await until(lambda: control.view.files == control.source.edits)


async def test_before_the_files_are_read_everything_is_to_be_repeated(control: Control) -> None:
    reading = hold_reading(control)
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
    async with serving(control, web=2) as client:
        control.set_clock(set_by_s)
        control.engine.behaviours["web"] = Behaviour(ready_after_s=1e9)
        control.engine.crash(control.engine.names()[-1])
        await until(lambda: "replica_failed" in control.kinds())
        await until(lambda: next(row.failure for row in control.view.services if row.name == "web"))
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


DEPLOY = 'body: expected JSON such as {"services": ["ranker"], "now": true} or {}, found something else'


@pytest.mark.parametrize(
    ("read", "body", "words"),
    [
        (scale_in, b"", "expected JSON"),
        (scale_in, b"[" * 50_000, "expected JSON"),
        (scale_in, b'{"replicas": 2, "force": true}', "and nothing else"),
        (scale_in, b'{"replicas": "two"}', 'expected an integer from 0 to 1000, or "auto", found "two"'),
        (scale_in, b'{"replicas": 2.0}', "found 2.0"),
        (scale_in, b'{"replicas": true}', "found true"),
        (scale_in, b'{"replicas": 1001}', "found 1001"),
        (deployment_in, b"x", DEPLOY),
        (deployment_in, b"[]", 'body: expected {"services": ["ranker"], "now": true} or {} and nothing else, found []'),
        (deployment_in, b'{"now": 1}', "now: expected true or false, found 1"),
        (deployment_in, b'{"services": "web"}', 'services: expected a list of names of services, found "web"'),
        (rollback_in, b'{"to": 7}', "to: expected a version such as 1a2b3c4d, found 7"),
        (nothing_in, b'{"to": "0"}', 'body: expected {} and nothing else, found {"to": "0"}'),
        (mark_in, b"{}", 'fault: expected null or 1 to 500 characters, found ""'),
        (mark_in, b'{"fault": "\\n"}', "found"),
        (operation_in, b"", "body: expected JSON such as"),
        (operation_in, b"[]", 'expected {"operation": "sleep", "level": 1, "timeout_s": 300} and nothing else, found'),
        (operation_in, b'{"level": 1}', "operation: expected one of sleep, wake, reset_prefix_cache, found null"),
        (operation_in, b'{"operation": ["wake"]}', 'found ["wake"]'),
        (operation_in, b'{"operation": "wake", "level": 1}', "level: expected with sleep alone, found it with wake"),
        (operation_in, b'{"operation": "sleep", "level": true}', "level: expected 1 or 2, found true"),
        (operation_in, b'{"operation": "sleep", "level": 3}', "level: expected 1 or 2, found 3"),
        (operation_in, b'{"operation": "wake", "timeout_s": 0}', "expected a number from 0.1 to 3600, found 0"),
        (operation_in, b'{"operation": "wake", "timeout_s": 3601}', "found 3601"),
        (operation_in, b'{"operation": "wake", "timeout_s": NaN}', "found NaN"),
        (operation_in, b'{"operation": "wake", "timeout_s": "9"}', "timeout_s: expected a number from 0.1 to"),
    ],
)
def test_the_error_for_a_wrong_body_says_what_was_expected(
    read: Callable[[bytes], object], body: bytes, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert words in str(caught.value)


def test_right_bodies() -> None:
    assert [scale_in(b'{"replicas": %s}' % text).replicas for text in (b"1000", b'"auto"')] == [1000, "auto"]
    bodies = (b'{"services": ["b", "a", "b"]}', b'{"now": true}', b"")
    assert [deployment_in(body) for body in bodies] == [Deploy(("b", "a")), Deploy(now=True), Deploy()]
    assert [rollback_in(b'{"to": "1a2b3c4d"}').to, rollback_in(b"{}").to] == ["1a2b3c4d", None]
    assert [mark_in(b'{"fault": %s}' % text).fault for text in (b'"\\ud800\\nfan"', b"null")] == ["\\ud800 fan", None]
    assert operation_in(b'{"operation": "sleep", "level": 2, "timeout_s": 0.1}') == Operate("sleep", 2, 0.1)
    assert operation_in(b'{"operation": "wake"}') == Operate("wake", 1, 300.0)


async def test_scaling_and_refusals_that_change_nothing(control: Control) -> None:
    async with serving(control, web=2) as client:
        path, gzip = "/api/v1/services/web/scale", {"Content-Encoding": "gzip"} | JSON
        assert (await error_of(await client.put(path, data=b"x", headers=JSON)))[:2] == (400, "invalid_request")
        assert (await error_of(await client.put(path, data=b"x" * 100_000)))[0] == 413
        status, code, message = await error_of(await client.put("/api/v1/services/wep/scale", json={"replicas": 1}))
        assert (status, code) == (404, "unknown_service")
        assert "did you mean 'web'? Services: api, web" in message
        assert control.store.overrides == {}
        response = await client.put(path, json={"replicas": 4})
        assert (response.status, await response.json()) == (202, {"service": "web", "replicas": 4})
        await control.settled("web", 4)
        status, code, message = await error_of(await client.put(path, data=b"not gzip at all", headers=gzip))
        assert (status, code) == (400, "bad_request")
        assert message.startswith("body: expected one that its Content-Encoding describes, found: ")


CHANGES = (
    "services/web/scale",
    "services/web/rollback",
    "services/web/abort",
    "services/web/promote",
    "services/web/operations",
    "deploy",
    "gpus/0",
)


async def test_who_has_no_token_is_told_nothing(control: Control) -> None:
    async with serving(control, Gatekeeper(read_tokens("secret", ""), frozenset)) as client:
        await control.settled("web", 2)
        for path in CHANGES:
            change = client.put if path.startswith("gpus") or path.endswith("scale") else client.post
            assert (await error_of(await change(f"/api/v1/{path}", json={})))[:2] == (403, "forbidden"), path
            allowed = await change(f"/api/v1/{path}", json={}, headers=bearer("secret"))
            assert allowed.status in (202, 400), path
        for path in ("services", "services/web", "services/web/logs", "plan", "events", "openapi.json", "nowhere"):
            assert (await error_of(await client.get(f"/api/v1/{path}")))[:2] == (403, "forbidden"), path
        assert (await client.get("/api/v1/services", headers=bearer("secret"))).status == 200
        for path in ("/healthz", "/metrics", "/api/v1/targets"):
            assert (await client.get(path)).status == 200, f"Prometheus reads {path}"


async def test_each_change_needs_its_role(control: Control) -> None:
    named = ",".join(f"{role}:{role}:{digest_of(role)}" for role in ROLES)
    needed = {"scale": "scale", "operations": "scale", "gpus": "admin"}
    async with serving(control, Gatekeeper(read_tokens("secret", named), frozenset)) as client:
        await control.settled("web", 2)
        for path in CHANGES:
            change = client.put if path.startswith("gpus") or path.endswith("scale") else client.post
            may = ROLES.index(next((role for word, role in needed.items() if word in path), "deploy"))
            for number, role in enumerate(ROLES):
                status = (await change(f"/api/v1/{path}", json={"wrong": 1}, headers=bearer(role))).status
                assert status == (400 if number >= may else 403), (path, role)


async def test_nodes_are_an_admins(control: Control) -> None:
    named = ",".join(f"{role}:{role}:{digest_of(role)}" for role in ROLES)
    async with serving(control, Gatekeeper(read_tokens("secret", named), frozenset)) as client:
        for role in ROLES:
            status = (await client.post("/api/v1/nodes/n/drain", json={}, headers=bearer(role))).status
            assert (status == 403) is (role != "admin"), role


async def test_each_request_is_an_event_of_its_own(control: Control) -> None:
    async with serving(control) as client:
        await control.settled("web", 2)
        for number in range(25):
            body = {"replicas": 2 + number % 2}
            assert (await client.put("/api/v1/services/web/scale", json=body)).status == 202
        found = await (await client.get("/api/v1/events?kind=asked&limit=100")).json()
        assert [event["times"] for event in found["events"]] == [1] * 25


async def test_events_tell_who_asked_for_which_change_and_from_where(control: Control) -> None:
    tokens = read_tokens("secret", f"ci:scale:{digest_of('x')}")
    async with serving(control, Gatekeeper(tokens, frozenset)) as client:
        await control.settled("web", 2)
        path = "/api/v1/services/web/scale"
        assert (await client.put(path, json={"replicas": 3}, headers=bearer("x"))).status == 202
        for refused in (400, 403):
            body: dict[str, Any] = {"replicas": -1} if refused == 400 else {"replicas": 4}
            headers = bearer("x") if refused == 400 else {}
            assert (await client.put(path, json=body, headers=headers)).status == refused
        found = await (await client.get("/api/v1/events?kind=asked", headers=bearer("x"))).json()
        [event] = found["events"]
        assert (event["service"], event["message"]) == (
            "web", 'ci at 127.0.0.1: PUT services/web/scale {"replicas": 3}'
        )  # fmt: skip


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_page_that_rebinds_its_name_reads_nothing(control: Control) -> None:
    page, named = {"Host": "evil.example:8100"}, {"Host": "pierhead.example.com"}
    async with serving(control, Gatekeeper((), frozenset, frozenset({"pierhead.example.com"}))) as client:
        for path in ("api/v1/services", "api/v1/services/web/logs", "metrics", "healthz", "nowhere"):
            assert (await error_of(await client.get(f"/{path}", headers=page)))[:2] == (421, "unknown_host"), path
        assert (await client.get("/api/v1/services", headers=named)).status == 200


async def test_unknown_paths_and_methods(control: Control) -> None:
    async with serving(control, web=2) as client:
        assert (await error_of(await client.get("/api/v2")))[:2] == (404, "not_found")
        assert (await error_of(await client.post("/api/v1/plan")))[:2] == (405, "method_not_allowed")
        assert (await error_of(await client.get("/api/v1/services/nobody")))[:2] == (404, "unknown_service")
        assert (await error_of(await client.get("/api/v1/plan?format=xml")))[:2] == (400, "invalid_request")
        wrong = ("limit=0", "limit=x", "since=-1", "wait=61", "limit=1001", "kind=nope", "kind=", f"since={'9' * 30}")
        for query in wrong:
            assert (await error_of(await client.get(f"/api/v1/events?{query}")))[0] == 400, query


async def test_a_defect_is_a_500_without_its_inside(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(control, web=2) as client:
        monkeypatch.setattr("controller.daemon.api.Services", lambda **members: 1 / 0)
        status, code, message = await error_of(await client.get("/api/v1/services"))
        assert (status, code) == (500, "internal")
        assert "ZeroDivisionError" in message


WRITTEN = "the compose files say so"


async def test_a_row_has_the_load_and_what_failed_and_why(control: Control) -> None:
    control.work["web"] = 5
    control.waiting["api"] = {"web": 2}
    async with serving(control) as client:

        async def row(service: str) -> Any:
            return await (await client.get(f"/api/v1/services/{service}")).json()

        def shown(service: str, field: str) -> Any:
            return next(getattr(row, field) for row in control.view.services if row.name == service)

        await control.settled("web", 2)
        await control.settled("api", 1)
        await until(lambda: (shown("web", "in_flight"), shown("web", "waiting")) == (5, 2), 10)
        web = await row("web")
        assert (web["spec_replicas"], web["in_flight"], web["waiting"], web["failure"]) == (2, 5, 2, None)
        control.router.failing[AddServer] = RoutingError("HAProxy refused `add server`: no room")
        control.engine.behaviours["api"] = Behaviour(ready_after_s=1.0)
        control.engine.crash(next(c.name for c in control.engine.containers.values() if c.service == "api"))
        await until(lambda: shown("api", "failure"), 10)
        api = await row("api")
        assert api["failure"]["count"] == 1
        assert "exited by itself with code 1" in api["failure"]["detail"]
        assert [api["obstacles"][0]["key"], api["who_decides"]] == [["failure", api["failure"]["detail"]], WRITTEN]
        await until(lambda: shown("api", "refusals"), 10)
        api = await row("api")
        assert api["failure"] is None, "the replica that replaces it is ready"
        (refusal,) = api["refusals"]
        assert refusal["does"].startswith("add server svc_api/")
        assert refusal["error"] == "HAProxy refused `add server`: no room"
        assert (refusal["failures"] >= 1, 0 <= refusal["retry_in_s"] <= 30) == (True, True)


async def test_routes_are_what_haproxy_has(control: Control) -> None:
    control.source.edit(
        service("web", grpc_services=("p.v1.Web",)), service("api", replicas=1, route="/web/api", strip_prefix=True)
    )
    async with serving(control, web=2, api=1) as client:
        await until(lambda: len(control.router.ready("web")) == 2, 10)
        await until(lambda: routes(control.view).routes[-1].servers, 10)
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
    async with serving(control, web=2, api=1) as client:
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
        client = TestClient(TestServer(controller.api(Gatekeeper((), frozenset)).application()))
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
    async with serving(control, web=2) as client:
        document = await (await client.get("/api/v1/services/web/logs?tail=2")).json()
        assert [replica["lines"] for replica in document["replicas"]] == [["two", "three"]] * 2
        for replica in document["replicas"]:
            assert replica["times"] == sorted(set(replica["times"])), "each line has a time of its own"
            assert len(replica["times"]) == 2
        assert (await error_of(await client.get("/api/v1/services/nobody/logs")))[0] == 404
        assert (await error_of(await client.get("/api/v1/services/web/logs?tail=0")))[0] == 400


async def test_targets_health_and_metrics(control: Control) -> None:
    async with serving(control, web=2) as client:
        groups = await (await client.get("/api/v1/targets")).json()
        assert {group["labels"]["replica"] for group in groups} == set(control.router.ready("web"))
        assert await (await client.get("/api/v1/targets?job=haproxy")).json() == [], "Prometheus knows the one there is"
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


async def test_a_loop_that_stands_still_or_fails_is_not_healthy(control: Control) -> None:
    async with control.running(web=2) as controller:
        late_s = 0.0
        late = replace(controller, clock=lambda: control.clock() + late_s)
        application = late.api(Gatekeeper((), frozenset)).application()
        async with TestClient(TestServer(application)) as client:

            async def health() -> tuple[int, str, str]:
                response = await client.get("/healthz")
                body = await response.json()
                return response.status, body["status"], body["defect"]

            assert await health() == (200, "ok", "")
            late_s = 500.0
            assert (await health())[:2] == (503, "stuck")
            late_s = 0.0
            planner, controller.loop.planner = controller.loop.planner, lambda *_: 1 / 0  # type: ignore[assignment]
            await until(lambda: controller.publisher.defect)
            status, word, defect = await health()
            assert (status, word) == (503, "failing")
            assert defect.startswith("internal: a tick raised ZeroDivisionError")
            assert (await (await client.get("/api/v1/services")).json())["notices"] == [defect]
            controller.loop.planner = planner
            await until(lambda: not controller.publisher.defect)
            assert await health() == (200, "ok", "")
