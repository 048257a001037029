"""The OpenAPI document against the real routes and real answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from pydantic import TypeAdapter

from controller.daemon.api import CALLS, LISTED
from controller.daemon.callers import Gatekeeper
from controller.daemon.console import page
from controller.status import openapi
from controller.status.records.answers import Error
from controller.status.records.document import as_json, read
from controller.status.records.services import Service
from tests.unit.controller.cli_documents import row
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_api import serving
from tests.unit.controller.test_nodes import swarm
from tests.unit.controller.worlds import gpu_service, gpus, service

PREFIX = "#/components/schemas/"


@pytest.fixture
def control(tmp_path: Path) -> Control:
    control = Control.of(tmp_path, service("web", metrics_port=9100), gpu_service("ranker", replicas=1))
    control.engine.gpus = gpus(2)
    return control


async def checked(response: ClientResponse, operation: str) -> Any:
    """The answer, which has exactly the members that the operation's schema names, in their types."""
    body = await response.read()
    assert response.status < 300, body
    kind = CALLS[operation].answer
    found = json.loads(body)
    TypeAdapter(kind).validate_json(body, strict=True)
    assert json.dumps(read(kind, found), default=as_json).encode() == body, "as the command reads it"
    return found


ROLES = {
    **dict.fromkeys(("targets", "healthz", "metrics"), None),
    **dict.fromkeys(("scale", "operate", "try_service", "silence", "end_silence"), "scale"),
    **dict.fromkeys(("deploy", "rollback", "abort", "promote", "restart"), "deploy"),
    **dict.fromkeys(("backup", "restore", "make_key", "revoke_key", "gpu"), "admin"),
    **dict.fromkeys(("drain_node", "activate_node", "label_node"), "admin"),
}
"""What is not here is only read."""


def test_who_may_make_which_call() -> None:
    assert len(CALLS) == len(LISTED), "two calls with one handler"
    assert {name: call.role for name, call in CALLS.items()} == dict.fromkeys(CALLS, "read") | ROLES
    assert all(call.method == "GET" for call in CALLS.values() if call.role in (None, "read"))


async def test_it_has_every_route_and_every_schema(control: Control) -> None:
    async with serving(control) as client:
        document = await (await client.get("/api/v1/openapi.json")).json()
        routes = client.server.app.router.routes()  # type: ignore[attr-defined]
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    found = [route for route in routes if route.method != "HEAD" and route.handler is not page]
    assert listed == {(route.method, route.resource.canonical) for route in found}
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert sorted(each["operationId"] for each in operations) == sorted(CALLS)
    assert all(each["summary"].endswith(".") for each in operations)
    text = json.dumps(document)
    assert {part.split('"')[0] for part in text.split(PREFIX)[1:]} <= set(document["components"]["schemas"])
    assert "$defs" not in text


async def test_real_answers_have_its_shapes(control: Control) -> None:
    async with serving(control, Gatekeeper((), lambda: frozenset({"127.0.0.1"}))) as client:
        await control.settled("web", 2)
        await control.settled("ranker", 1)
        for name in ("services", "plan", "routes", "events", "targets", "traffic", "alerts", "caller"):
            assert await checked(await client.get(f"/api/v1/{name}"), name)
        assert await checked(await client.get("/api/v1/services/web"), "service")
        for name in ("logs", "revisions", "contract"):
            assert await checked(await client.get(f"/api/v1/services/web/{name}"), name)
        assert (await checked(await client.get("/healthz"), "healthz"))["status"] == "ok"
        for path in ("services/nobody", "nowhere", "plan?format=xml"):
            refused = await (await client.get(f"/api/v1/{path}")).read()
            TypeAdapter(Error).validate_json(refused, strict=True)


async def test_changes_and_what_follows_them_have_its_shapes(control: Control) -> None:
    def is_rolling() -> bool:
        [web] = [row.rollout for row in control.view.services if row.name == "web"]
        return web is not None

    async with serving(control, web=2, ranker=1) as client:
        for replicas in (3, "auto"):
            done = await client.put("/api/v1/services/web/scale", json={"replicas": replicas})
            assert (await checked(done, "scale"))["replicas"] == replicas
        await checked(await client.post("/api/v1/deploy", json={}), "deploy")
        await checked(await client.put("/api/v1/gpus/GPU-1", json={"fault": "loud fan"}), "gpu")
        await checked(await client.post("/api/v1/services/web/restart", json={}), "restart")
        await until(lambda: not is_rolling())
        control.source.edit(service("web", definition_hash="d2"), gpu_service("ranker", replicas=1))
        await until(is_rolling)
        assert (await checked(await client.get("/api/v1/services/web"), "service"))["rollout"]["phase"]
        await checked(await client.get("/api/v1/plan"), "plan")
        await checked(await client.post("/api/v1/services/web/abort"), "abort")
        await until(lambda: not is_rolling())
        listed = await checked(await client.get("/api/v1/services"), "services")
        assert [each["name"] for each in listed["services"] if each["rejected"]] == ["web"]


async def test_nodes_and_their_changes_have_its_shapes(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web"), engine=swarm())
    async with serving(control, web=2) as client:
        await checked(
            await client.put("/api/v1/nodes/n1/labels", json={"labels": {"zone": "a", "old": None}}), "label_node"
        )
        await checked(await client.post("/api/v1/nodes/n3/drain", json={}), "drain_node")
        assert len((await checked(await client.get("/api/v1/nodes"), "nodes"))["nodes"]) == 3
        await checked(await client.get("/api/v1/services"), "services")
        await checked(await client.post("/api/v1/nodes/n3/activate"), "activate_node")


async def test_the_bounds_of_parameters_are_the_real_ones(control: Control) -> None:
    document = openapi.document(CALLS.values())
    bounded = [
        (path.replace("{name}", "web"), each["name"], each["schema"]["maximum"])
        for path, methods in document["paths"].items()
        for each in methods.get("get", {}).get("parameters", ())
        if "maximum" in each["schema"]
    ]
    assert len(bounded) == 5
    async with serving(control, web=2) as client:
        for path, name, most in bounded:
            assert (await client.get(f"{path}?{name}={most}")).status == 200
            assert (await client.get(f"{path}?{name}={most + 1}")).status == 400


def test_a_new_member_is_written_read_and_described_by_its_record_alone() -> None:
    @dataclass(frozen=True, slots=True)
    class Painted(Service):
        colour: str
        """What it is painted with."""
        from_: tuple[str, ...] = ()

    plain = row()
    painted = Painted(**{field.name: getattr(plain, field.name) for field in fields(plain)}, colour="red")
    written = json.loads(json.dumps(painted, default=as_json))
    assert list(written) == [*json.loads(json.dumps(plain, default=as_json)), "colour"], "a default is left out"
    assert read(Painted, {**written, "from": ["a shop"], "later": 1}) == replace(painted, from_=("a shop",))
    with pytest.raises(KeyError, match="colour"):
        read(Painted, json.loads(json.dumps(plain, default=as_json)))
    described = TypeAdapter(Painted).json_schema()
    assert described["properties"]["colour"]["description"] == "What it is painted with."
    assert ("colour" in described["required"], "from" in described["required"]) == (True, False)
