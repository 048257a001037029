"""Every place that reads a body as JSON takes it by its Content-Type alone. A browser lets any web page send text, a
form or a body without a type to any address, this machine's included, and asks before it sends JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from pierhead import Service, close_handles, endpoint, override_handle
from pierhead.llm.gateway.app import make_app
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models
from pierhead.llm.gateway.settings import GatewaySettings

from controller.daemon.callers import Gatekeeper
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import service
from tests.unit.runtime.conftest import make_unknown
from tests.unit.runtime.harness import Cluster
from tests.unit.services.fake_llm_server import FakeLLMServer

TAKEN = ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
REFUSED = [
    None, "", "text/plain", "text/plain;charset=UTF-8", "text/plain; application/json", "text/json",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp", "text/plain+json",
]  # fmt: skip


@dataclass
class Place:
    """Something that reads JSON, and a body that it takes."""

    method: str
    url: str
    body: Any

    async def send(self, content_type: str | None) -> tuple[int, str]:
        headers = {} if content_type is None else {"Content-Type": content_type}
        skipped = ("Content-Type",) if content_type is None else ()
        async with (
            ClientSession(skip_auto_headers=skipped) as client,
            client.request(self.method, self.url, data=json.dumps(self.body).encode(), headers=headers) as answer,
        ):
            return answer.status, await answer.text()


class Reads(Service, route="/"):
    @endpoint("POST", "/read")
    async def read(self, request: web.Request) -> Any:
        return await request.json()

    def reconfigure(self, user_config: Any) -> None:
        pass


async def own_application(request: web.Request) -> web.Response:
    return web.json_response(await request.json())


class Site:
    """Starts places, and ends what runs for them."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.cluster = Cluster()

    async def endpoint(self) -> Place:
        server = await self.cluster.start(Reads())
        return Place("POST", f"http://127.0.0.1:{server.http_port}/read", {})

    async def application(self) -> Place:
        app = web.Application()
        app.router.add_post("/read", own_application)
        server = await self.cluster.start(app)
        return Place("POST", f"http://127.0.0.1:{server.http_port}/read", {})

    async def admin(self) -> Place:
        server = await self.cluster.start(Reads())
        return Place("PUT", f"http://127.0.0.1:{server.admin_port}/user-config", {"a": 1})

    async def gateway(self) -> Place:
        self.stack.enter_context(override_handle("llm", FakeLLMServer()))
        settings = GatewaySettings(read_models({VARIABLE: '{"qwen": "llm"}'}))
        server = await self.cluster.start(make_app(settings))
        url = f"http://127.0.0.1:{server.http_port}/v1/chat/completions"
        return Place("POST", url, {"model": "qwen", "messages": []})

    async def controller(self) -> Place:
        control = Control.of(self.folder, service("web"))
        controller = await self.stack.enter_async_context(control.running())
        api = TestServer(controller.api(Gatekeeper((), frozenset)).application())
        await self.stack.enter_async_context(api)
        await control.settled("web", 2)
        return Place("PUT", str(api.make_url("/api/v1/services/web/scale")), {"replicas": 1})


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made = Site(stack, tmp_path)
        yield made
        await close_handles()
        await made.cluster.close()


PLACES: dict[str, Callable[[Site], Any]] = {
    "a class's endpoint": Site.endpoint,
    "an aiohttp application": Site.application,
    "a replica's admin port": Site.admin,
    "the LLM gateway": Site.gateway,
    "the controller's API": Site.controller,
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_body_is_json_by_its_type_alone(site: Site, place: str) -> None:
    found = await PLACES[place](site)
    for content_type in REFUSED:
        status, text = await found.send(content_type)
        assert status == 400, (content_type, text)
        if "multipart" not in str(content_type):  # the gateway reads such a form, and finds no model in it
            assert "Content-Type: expected application/json, found " in text, content_type
    for content_type in TAKEN:
        status, text = await found.send(content_type)
        assert status in (200, 202), (content_type, text)


@pytest.mark.parametrize("place", ["a class's endpoint", "an aiohttp application"])
async def test_also_where_the_runtime_does_not_know_aiohttp(
    site: Site, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unknown(monkeypatch)
    found = await PLACES[place](site)
    status, text = await found.send("text/plain")
    assert status == 400, text
    assert (await found.send("application/json"))[0] == 200
