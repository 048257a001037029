"""The console in a real browser, in front of a controller on fakes. Its libraries come from the controller's image.

The pictures that the docs show are made here: PIERHEAD_SCREENSHOTS names the directory, docs/assets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import docker
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]
from playwright.async_api import FloatRect, Locator, Page, expect

from controller.api_tokens import digest_of, read_tokens
from controller.daemon.callers import Gatekeeper
from controller.daemon.edge_calls import EdgeAddress
from controller.model.machine import Machine
from controller.model.spec import RolloutSpec
from controller.observe.prober import Subject
from controller.observe.prometheus import AlertRule, FiringAlert, Series
from tests.fakes.fake_alertmanager import FakeAlertmanager
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.harness.applications import contract
from tests.harness.chromium import console_libraries, driven, fulfil, running
from tests.harness.stack import EVIDENCE
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import Control, version
from tests.unit.controller.worlds import gpu_service, gpus, service

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
expect.set_options(timeout=PATIENCE_S * 1000)  # a browser's first page may take seconds, where both cores are busy

PICTURES = Path(os.environ.get("PIERHEAD_SCREENSHOTS", EVIDENCE / "console"))
DESK, PHONE = (1300, 900), (390, 844)
LONG: FloatRect = {"x": 0, "y": 0, "width": 1285, "height": 1500}
FIRST_PICTURE_BYTES = 300_000
TOKENS = read_tokens("secret", f"viewer:read:{digest_of('v')}")
ERRORS = {"alertname": "ErrorRate", "service": "web", "severity": "critical"}
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    with contextlib.closing(docker.DockerClient()) as client:
        yield client


@pytest.fixture(scope="module")
def chromium(engine: docker.DockerClient) -> Iterator[str]:
    with running(engine) as address:
        yield address


@pytest.fixture(scope="module")
def libraries(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return console_libraries(engine, tmp_path_factory.mktemp("console"))


@pytest.fixture(scope="module")
def pictures() -> Path:
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES


async def traffic(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
    """A steady rate that rises a little, for every service."""
    times = [start + step_s * number for number in range(round((end - start) / step_s) + 1)]
    factors = {"rate": 1.0, "errors": 0.0, "p50_s": 1e-4, "p99_s": 1e-3, "ongoing": 0.1, "queued": 0.05, "edge": 1.0}
    of_model = {
        "tokens": 2.0,
        "first_p50_s": 1e-3,
        "first_p99_s": 4e-3,
        "running": 0.1,
        "waiting": 0.02,
        "kv_use": 4e-3,
    }
    of = {"web": factors, "ranker": factors, "chat": factors | of_model}
    return [
        Series({"service": name, "what": what}, [(at, factor * (40 + number)) for number, at in enumerate(times)])
        for name, its_factors in of.items()
        for what, factor in its_factors.items()
    ]


TRACE = "0af7651916cd43dd8448eb211c80319c"


async def kept_traces(control: Control, subject: Subject) -> Sequence[Any]:
    """A request that was slow because the service below waited for a batch, and one that failed."""
    began = subject.started_at + 1
    (own,) = [each for each in control.view.observed.containers if each.id == subject.container_id]

    def span(
        number: str, parent: str, name: str, kind: str, after: float, seconds: float, **more: Any
    ) -> dict[str, Any]:
        made = {"span": number * 16, "parent": parent * 16, "name": name, "kind": kind, "status": "OK", "links": []}
        return made | {"began": began + after, "seconds": seconds, "attributes": {}, "events": []} | more

    def kept(
        trace: str, number: str, parent: str, name: str, after: float, seconds: float, **more: Any
    ) -> dict[str, Any]:
        made = {"trace": trace, "request": "my-request-25", "why": "slow", "status": "OK", "spans": [], "left_out": 0}
        own = {"span": number * 16, "parent": parent * 16, "name": name, "began": began + after, "seconds": seconds}
        return made | own | more

    if own.number > 1:
        return []
    if own.service == "web":
        moved = {"at": began + 0.02, "name": "is tried again: draining", "detail": "replica ranker-2"}
        waited = span("6", "", "HAProxy", "proxy", -0.35, 2.5, status="200", attributes={"waited_s": "0.35"})
        calls = [
            waited,
            span("2", "1", "shop.Ranker/Rank", "client", 0.01, 1.9, attributes={"replica": "ranker-1"}, events=[moved]),
            span("3", "1", "shop.Store/Put", "client", 1.92, 0.2, status="deadline_exceeded"),
        ]
        failed = kept("1" * 32, "9", "", HOSTILE, 0.5, 0.01, why="failed", status="500", request="other")
        return [kept(TRACE, "1", "6", "GET /rank/{user}", 0, 2.15, status="200", spans=calls), failed]
    batch = span("5", "4", "batch Ranker.score", "batch", 0.1, 1.7, attributes={"members": 2}, links=["1" * 32])
    return [kept(TRACE, "4", "2", "shop.Ranker/Rank", 0.05, 1.84, spans=[batch])]


@pytest.fixture
def control(tmp_path: Path) -> Control:
    control = Control.of(
        tmp_path,
        service("web", callees=("ranker", "chat")),
        gpu_service("ranker", grpc_services=("shop.Ranker",)),
        gpu_service("chat", replicas=1, models=("smollm2", "smollm2:legal")),
    )
    control.contracts[version(control, control.source.services["ranker"])] = contract(service="ranker")
    control.grafana_port = 3000
    control.engine.gpus = gpus(4)
    control.engine.machine = Machine(16, 64 << 30, 41 << 30, 100_000, 900, load=3.4)
    control.engine.behaviours["web"] = Behaviour(output=f"one\n{HOSTILE}\n\x1b[2Jthree\n")
    control.engine.behaviours["chat"] = Behaviour(ready_after_s=1e6)
    control.starts["chat"] = (40, "loading weights, 40 %")
    control.series = traffic
    control.ask_traces = partial(kept_traces, control)
    return control


@contextlib.asynccontextmanager
async def console(control: Control, gatekeeper: Gatekeeper | None = None) -> AsyncIterator[str]:
    """The address of the console of a stack that has settled."""
    keeper = gatekeeper or Gatekeeper((), lambda: frozenset({"127.0.0.1"}))
    async with (
        control.running(web=2, ranker=2) as controller,
        TestServer(controller.api(keeper).application()) as server,
    ):
        yield f"http://127.0.0.1:{server.port}/"


async def answer(request: web.Request) -> web.StreamResponse:
    """HAProxy, with a service that answers as its path says."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    match request.path.rpartition("/")[2]:
        case "openapi.json":
            body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Buy"}}}}
            buy = {"type": "object", "properties": {"user": {"type": "integer"}, "note": {"default": "a gift"}}}
            paths = {"/web/buy": {"post": {"requestBody": body}}}
            return web.json_response({"paths": paths, "components": {"schemas": {"Buy": buy}}})
        case "buy":
            sent = await request.json()
            return web.json_response({"sold": sent, "key": request.headers.get("Authorization")})
        case "broken":
            return web.Response(status=500, text=f"{HOSTILE}\x1b[31m</pre>", headers={"X-Odd": "<b>"})
        case "large":
            return web.Response(body=b"0123456789" * 1024 * 1024)
        case "completions" if request.headers.get("Authorization") != "Bearer sk-mine":
            error = {"error": {"code": "invalid_api_key", "message": "This service needs a key."}}
            return web.json_response(error, status=401)
        case "completions":
            await response.prepare(request)
            for word in ("The ", "pier ", HOSTILE):
                delta = {"choices": [{"index": 0, "delta": {"content": word}}]}
                await response.write(f"data: {json.dumps(delta)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        case "endless":
            await response.prepare(request)
            try:
                while request.transport is not None:
                    await response.write(b"on and on\n")
                    await asyncio.sleep(0.05)
            finally:
                ENDED.set()
    return response


ENDED = asyncio.Event()


@contextlib.asynccontextmanager
async def trying(control: Control, gatekeeper: Gatekeeper | None = None) -> AsyncIterator[str]:
    """As `console`, and HAProxy answers."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as edge:
        control.edge = EdgeAddress(f"http://127.0.0.1:{edge.port}", "127.0.0.1:1")
        async with console(control, gatekeeper) as address:
            yield address


@contextlib.asynccontextmanager
async def seen(chromium: str, libraries: Path, *, inspected: bool = False) -> AsyncIterator[Page]:
    """A page of the browser; what goes wrong in it fails the test. `inspected`: scripts of the test may run in it."""
    wrong: list[str] = []

    async with driven(chromium) as browser:
        context = await browser.new_context(
            viewport={"width": DESK[0], "height": DESK[1]},
            color_scheme="light",
            bypass_csp=inspected,
        )
        page = await context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        await page.route("**/console/lib/*", partial(fulfil, libraries=libraries))
        yield page
        await context.close()
    assert wrong == []


async def test_the_picture_and_what_changes_in_it(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        sizes: list[int] = []
        page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", 0))))
        await page.goto(address)
        web = page.locator("a.card", has_text="web")
        await expect(web).to_contain_text("2/2 ready")
        await expect(web).to_contain_text("req/s")
        await expect(page.locator("a.card", has_text="chat")).to_contain_text("0/1 ready")
        await expect(page.locator(".arrows path.line")).to_have_count(4)
        await expect(page.locator("table")).to_contain_text("p-ranker-")
        assert 100_000 < sum(sizes) < FIRST_PICTURE_BYTES
        control.source.edit(*(one for one in control.source.services.values() if one.name != "chat"))
        await expect(page.locator("a.card", has_text="chat")).to_have_count(0)


async def test_a_scale_shows_its_plan_and_is_noted(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        await page.get_by_role("button", name="Scale").click()
        await page.get_by_label("Replicas, or auto").fill("3")
        await expect(page.locator("dialog pre")).to_contain_text(re.compile("create p-web-.*-3"))
        await page.get_by_role("button", name="Scale web").click()
        await expect(page.get_by_text("3 ready, 3 wanted: set by scale")).to_be_visible()
        await expect(page.locator(".events")).to_contain_text("web: 2 -> 3 replicas")
        (asked,) = control.said("asked")
        assert asked.startswith("this machine at 127.0.0.1: PUT services/web/scale")


async def test_what_touches_requests_asks_for_the_name(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        for button, deed in (("Scale", "Scale web"), ("Restart", "Restart web"), ("Roll back", "Roll web back")):
            await page.get_by_role("button", name=button, exact=True).click()
            if button == "Scale":
                await page.get_by_label("Replicas, or auto").fill("1")
            go = page.get_by_role("button", name=deed, exact=True)
            await expect(go).to_be_disabled()
            await page.get_by_label("Type web to go ahead").fill("web")
            await expect(go).to_be_enabled()
            await page.keyboard.press("Escape")
            await expect(page.locator("dialog")).to_have_count(0)
        assert control.said("asked") == []
        await page.get_by_role("button", name="Restart", exact=True).click()
        await page.get_by_label("Type web to go ahead").fill("web")
        await page.get_by_role("button", name="Restart web").click()
        await expect(page.get_by_role("heading", name="Rollout")).to_be_visible()


async def test_a_rollback_is_done_and_noted(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        first = version(control, control.source.services["web"])
        others = [one for one in control.source.services.values() if one.name != "web"]
        rollout = RolloutSpec(bake_s=1.0)
        control.source.edit(service("web", callees=("ranker", "chat"), definition_hash="d2", rollout=rollout), *others)
        await page.goto(f"{address}#/services/web")
        await expect(page.locator("main")).to_contain_text(re.compile(f"web: {first} -> \\w+ is done"))
        await page.get_by_role("button", name="Roll back", exact=True).click()
        await page.get_by_label("Type web to go ahead").fill("web")
        await page.get_by_role("button", name="Roll web back").click()
        await expect(page.locator("main")).to_contain_text(re.compile(f"web: \\w+ -> {first} is done"))
        (asked,) = control.said("asked")
        assert asked.startswith("this machine at 127.0.0.1: POST services/web/rollback")


async def test_the_keyboard_is_enough(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        scale = page.get_by_role("button", name="Scale", exact=True)
        await expect(scale).to_be_visible()
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        await expect(page.locator("h1")).to_contain_text("web")
        await scale.press("Enter")
        await expect(page.locator("dialog")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("dialog")).to_have_count(0)
        await expect(scale).to_be_focused()


async def test_a_reader_sees_and_touches_nothing(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control, Gatekeeper(TOKENS, frozenset)) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        await page.get_by_label("Token").fill("\u20ac")
        await page.get_by_role("button", name="Open").click()
        await expect(page.get_by_text("answers with a token only")).to_be_visible()
        await page.get_by_label("Token").fill("nonsense")
        await page.get_by_role("button", name="Open").click()
        await expect(page.get_by_text("none of the tokens that this stack knows")).to_be_visible()
        await page.get_by_label("Token").fill("v")
        await page.get_by_role("button", name="Open").click()
        await expect(page.get_by_text("viewer: read")).to_be_visible()
        await expect(page.get_by_text("2 ready, 2 wanted")).to_be_visible()
        await expect(page.get_by_role("button")).to_have_text(["Forget the token"])
        await page.get_by_role("button").click()
        await expect(page.get_by_text("answers with a token only")).to_be_visible()


async def test_a_token_that_ends_while_the_page_is_open(control: Control, chromium: str, libraries: Path) -> None:
    """The next `up` begins a controller that does not know it."""
    async with control.running(web=2) as controller, seen(chromium, libraries) as page:
        server = TestServer(controller.api(Gatekeeper(TOKENS, frozenset)).application())
        await server.start_server()
        port = server.port
        await page.goto(f"http://127.0.0.1:{port}/#/services/web")
        await page.get_by_label("Token").fill("secret")
        await page.get_by_role("button", name="Open").click()
        await page.get_by_role("button", name="Scale", exact=True).click()
        await server.close()
        keeper = Gatekeeper(read_tokens("another", ""), frozenset)
        async with TestServer(controller.api(keeper).application(), port=port):
            await expect(page.get_by_text("none of the tokens that this stack knows")).to_be_visible()
            await expect(page.get_by_text("2 ready, 2 wanted")).to_have_count(0)
            await page.get_by_label("Token").fill("another")
            await page.get_by_role("button", name="Open").click()
            await expect(page.get_by_text("2 ready, 2 wanted")).to_be_visible()


@pytest.mark.parametrize("wrong_by_s", [-86_400, 86_400])
async def test_a_browser_whose_clock_is_wrong(
    control: Control, chromium: str, libraries: Path, wrong_by_s: int
) -> None:
    """Ages are by the controller's clock."""
    control.rules = firing
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.clock.set_system_time(time.time() + wrong_by_s)
        await page.goto(f"{address}#/alerts")
        await expect(page.locator("main")).to_contain_text(re.compile("for [5-9][0-9] s\\."))


async def test_an_event_is_seen_within_a_second(control: Control, chromium: str, libraries: Path) -> None:
    """The fastest of five: other tests use both cores."""
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/events")
        await expect(page.locator("main")).to_contain_text("read the compose files")
        waits: list[float] = []
        for number in range(5):
            words = f"the disk is full, look {number}"
            began = time.monotonic()
            control.controller.events.record("note", words, each=True)
            await page.get_by_text(words).wait_for(timeout=PATIENCE_S * 1000)
            waits.append(time.monotonic() - began)
        assert min(waits) < 1.0, waits


async def test_a_controller_that_goes_and_comes_back(control: Control, chromium: str, libraries: Path) -> None:
    """What was seen stays, with its age."""
    async with control.running(web=2) as controller, seen(chromium, libraries) as page:
        keeper = Gatekeeper((), lambda: frozenset({"127.0.0.1"}))
        server = TestServer(controller.api(keeper).application())
        await server.start_server()
        port = server.port
        await page.goto(f"http://127.0.0.1:{port}/")
        await expect(page.locator("a.card", has_text="web")).to_be_visible()
        await server.close()
        await expect(page.get_by_text("It is tried again.")).to_be_visible()
        await expect(page.locator("a.card", has_text="web")).to_be_visible()
        async with TestServer(controller.api(keeper).application(), port=port):
            await expect(page.get_by_text("It is tried again.")).to_have_count(0, timeout=20_000)


async def test_what_a_replica_writes_is_text(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        await expect(page.locator(".log")).to_contain_text(HOSTILE)
        await page.get_by_label("Filter").first.fill("thr")
        await expect(page.locator(".log")).not_to_contain_text("one")
        await page.goto(f"{address}#/services/{HOSTILE}")
        await expect(page.locator("h1")).to_have_text(HOSTILE)
        await expect(page.locator("main img")).to_have_count(0)


async def test_a_traces_way_through_the_stack(control: Control, chromium: str, libraries: Path) -> None:
    """Each span is below the one that it belongs to; what a replica says is text."""
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/traces")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await expect(page.locator("tbody")).to_contain_text(HOSTILE)
        await page.get_by_label("Filter").fill("my-request-25")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="GET /rank/{user}").click()
        rows = page.locator(".waterfall tbody tr")
        await expect(rows).to_have_count(6)
        named = [
            "HAProxy",
            "GET /rank/{user}",
            "shop.Ranker/Rank",
            "shop.Ranker/Rank",
            "batch Ranker.score",
            "shop.Store/Put",
        ]
        for number, name in enumerate(named):
            await expect(rows.nth(number).locator("th")).to_contain_text(name)
        assert [await rows.nth(number).locator("th").get_attribute("class") for number in range(6)] == [
            "depth-0", "depth-1", "depth-2", "depth-3", "depth-4", "depth-2",
        ]  # fmt: skip
        await expect(rows.nth(2)).to_contain_text("is tried again: draining (replica ranker-2)")
        await expect(rows.nth(0)).to_contain_text("waited_s: 0.35")
        await page.goto(f"{address}#/traces/my-request-25")
        await expect(rows).to_have_count(6)
        await page.goto(f"{address}#/traces/nobody")
        await expect(page.locator("main")).to_contain_text("No replica keeps the trace nobody")


async def firing() -> Sequence[AlertRule]:
    words = {
        "summary": "5% of the answers of web are errors",
        "description": HOSTILE,
        "runbook_url": "docs/x.md#errorrate",
    }
    return [AlertRule("ErrorRate", [FiringAlert(ERRORS, words, time.time() - 60)])]


async def test_an_alert_is_shown_and_silenced(control: Control, chromium: str, libraries: Path) -> None:
    control.rules, control.silencer = firing, (alertmanager := FakeAlertmanager(control.wall))
    alertmanager.alerts = [ERRORS]
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(address)
        await page.get_by_role("link", name="Alerts (1)").click()
        await expect(page.locator("h1")).to_have_text("Alerts")
        await expect(page.locator("section.panel")).to_contain_text("5% of the answers of web are errors")
        await expect(page.locator("section.panel")).to_contain_text(HOSTILE)
        await page.get_by_role("button", name="Silence ErrorRate").click()
        dialog = page.locator("dialog")
        await dialog.get_by_label("Why").fill("a load test")
        await dialog.get_by_role("button", name="Silence ErrorRate of web").click()
        await expect(page.get_by_role("listitem")).to_contain_text("ErrorRate of web until")
        await expect(page.get_by_role("listitem")).to_contain_text("by this machine: a load test")
        await expect(page.locator("section.panel h2")).to_contain_text("silenced", timeout=20_000)
        await expect(page.get_by_role("link", name="Alerts", exact=True)).to_be_visible()
        await page.get_by_role("button", name="End it").click()
        await expect(page.get_by_role("listitem")).to_have_count(0)


async def send(page: Page, path: str, method: str = "GET") -> Locator:
    """The panel with the answer to a request that is tried."""
    panel = page.locator(".try")
    await panel.get_by_label("Method").select_option(method)
    await panel.get_by_label("Path").fill(path)
    await panel.get_by_role("button", name="Send").click()
    return panel


async def test_a_request_is_tried_with_what_the_contract_says(control: Control, chromium: str, libraries: Path) -> None:
    async with trying(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        panel = page.locator(".try")
        await panel.get_by_role("button", name="Look for its routes").click()
        await expect(panel.locator("datalist option")).to_have_count(1)
        await panel.get_by_label("Key").fill("sk-mine")
        await panel.get_by_label("Method").select_option("POST")
        await panel.get_by_label("Path").fill("/web/buy")
        await expect(panel.get_by_role("textbox", name="Body")).to_have_value(re.compile('"user": 1'))
        await panel.get_by_role("button", name="Send").click()
        await expect(panel.locator(".answer")).to_contain_text("200 OK")
        await expect(panel.locator(".answer")).to_contain_text('"key": "Bearer sk-mine"')
        await expect(panel.locator(".answer")).to_contain_text(re.compile("Request id [0-9a-f-]{36}"))
        assert control.said("asked")[-1] == "this machine at 127.0.0.1: try POST /web/buy"
        await page.reload()
        await expect(panel.get_by_label("Key")).to_have_value("sk-mine")
        await page.goto(f"{address}#/services/ranker")
        await expect(panel.get_by_label("Method")).to_have_value("gRPC /shop.Ranker/rank")
        await expect(panel.get_by_label("Message")).to_have_value(re.compile('"items": \\['))
        await panel.get_by_role("button", name="Send").click()
        await expect(panel.locator(".answer")).to_contain_text("UNAVAILABLE")


async def test_what_a_service_answers_is_text_and_bounded(control: Control, chromium: str, libraries: Path) -> None:
    async with trying(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        answered = (await send(page, "/web/broken")).locator(".answer")
        await expect(answered).to_contain_text("500 Internal Server Error")
        await expect(answered.get_by_role("region", name="Body")).to_contain_text(HOSTILE)
        await expect(answered.locator("img, b")).to_have_count(0)
        await send(page, "/web/large")
        await expect(answered).to_contain_text("only the first 1 MiB of the body were read")
        await expect(answered).to_contain_text("The first 195 KiB are shown.")
        await send(page, "/web/../x")
        await expect(answered).to_contain_text("path: expected one such as")
        assert await page.title() != "1"


async def test_an_endless_answer_is_shown_as_it_comes_and_stopped(
    control: Control, chromium: str, libraries: Path
) -> None:
    async with trying(control) as address, seen(chromium, libraries) as page:
        for stop in ("button", "page"):
            ENDED.clear()
            await page.goto(f"{address}#/services/web")
            panel = await send(page, "/web/endless")
            await expect(panel.get_by_role("region", name="Body")).to_contain_text("and on\non and")
            assert not ENDED.is_set()
            if stop == "button":
                await panel.get_by_role("button", name="Stop").click()
                await expect(panel.locator(".answer")).to_contain_text("stopped")
            else:
                await page.goto(f"{address}#/plan")
            await asyncio.wait_for(ENDED.wait(), 20)


async def test_a_model_answers_in_a_chat(control: Control, chromium: str, libraries: Path) -> None:
    async with trying(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/chat")
        await expect(page.get_by_text("smollm2:legal")).to_be_visible()
        await page.get_by_label("Message").fill("What is it?")
        await page.get_by_role("button", name="Ask").click()
        await expect(page.get_by_text("401 Unauthorized This service needs a key.")).to_be_visible()
        await page.get_by_label("Key").first.fill("sk-mine")
        await page.get_by_label("Message").fill("And now?")
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator(".chat .assistant")).to_have_text(f"assistant The pier {HOSTILE}")
        await expect(page.locator(".chat img")).to_have_count(0)


async def test_a_rollout_is_a_line_in_time(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        others = [one for one in control.source.services.values() if one.name != "web"]
        control.source.edit(service("web", callees=("ranker", "chat"), definition_hash="d2"), *others)
        await expect(page.get_by_role("heading", name="Last rollout")).to_be_visible(timeout=20_000)
        for phase in ("plan, shift", "start", "ready", "drain", "removed", "end"):
            await expect(page.get_by_role("img", name=re.compile(f"^{phase}: [0-9]"))).to_be_visible()
        await expect(page.get_by_role("link", name="More in Grafana")).to_have_attribute(
            "href", re.compile(":3000/d/pierhead-overview[?]var-service=web$")
        )


async def test_a_service_with_a_hostile_name(control: Control, chromium: str, libraries: Path) -> None:
    control.engine.add_image("image/<script>")
    named = service("<script>", route="/odd", replicas=0)
    control.source.edit(*control.source.services.values(), named)
    async with trying(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/%3Cscript%3E")
        await expect(page.locator("h1")).to_contain_text("<script>")
        panel = await send(page, "/odd/broken")
        await expect(panel.locator(".answer")).to_contain_text("500 Internal Server Error")
        await expect(page.locator("main script")).to_have_count(0)


async def test_arrows_follow_a_card_that_grows_in_a_short_column(
    control: Control, chromium: str, libraries: Path
) -> None:
    async with console(control) as address, seen(chromium, libraries, inspected=True) as page:
        await page.goto(address)
        await expect(page.locator(".arrows path.line")).to_have_count(4)

        async def grow(service: str, pixels: int) -> None:
            box = f"document.querySelector('[data-box=\"service/{service}\"]')"
            await page.evaluate(f"{box}.style.minHeight = '{pixels}px'")
            await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

        await grow("web", 900)  # its column is the longest one now
        arrow = page.locator(".arrows path.line").last
        before = await arrow.get_attribute("d")
        await grow("chat", 400)
        await expect(arrow).not_to_have_attribute("d", before or "")


async def test_no_arrow_passes_behind_a_card(control: Control, chromium: str, libraries: Path) -> None:
    """HAProxy's to `ranker` skips the column of `web`."""
    hidden = """() => {
        const cards = [...document.querySelectorAll(".picture .card")].map((card) => card.getBoundingClientRect());
        const { left, top } = document.querySelector(".picture").getBoundingClientRect();
        const isIn = (x, y) => (card) => x > card.left && x < card.right && y > card.top && y < card.bottom;
        const lengths = (line) => [...Array(Math.floor(line.getTotalLength())).keys()];
        const points = (line) => lengths(line).map((at) => line.getPointAtLength(at));
        return [...document.querySelectorAll(".arrows .line")].flatMap(points)
            .filter(({ x, y }) => cards.some(isIn(x + left, y + top))).map(({ x, y }) => `${x} ${y}`);
    }"""
    async with console(control) as address, seen(chromium, libraries, inspected=True) as page:
        await page.goto(address)
        await expect(page.locator(".arrows path.line")).to_have_count(4)
        assert await page.evaluate(hidden) == []


async def test_one_replica_is_asked_for_its_logs_alone(control: Control, chromium: str, libraries: Path) -> None:
    async with console(control) as address, seen(chromium, libraries) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/logs?" in request.url else None)
        await page.goto(f"{address}#/services/web")
        chosen = page.get_by_role("combobox", name="Replica")
        await expect(chosen.locator("option")).to_have_count(3)
        await chosen.select_option(index=1)
        name = await chosen.input_value()
        await expect(page.locator(".log")).to_contain_text(HOSTILE)
        async with page.expect_request(
            lambda request: request.url.endswith(f"&replica={name}") and "after" in request.url
        ):
            pass
        assert [url for url in asked if "replica=" not in url]


async def test_10_000_lines_a_second_are_followed(
    control: Control, chromium: str, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says that lines are missing and stays short; its filter and the events still answer."""

    async def logs(engine: FakeEngine, container_id: str, tail: int, *rest: object, timed: bool) -> str:
        newest = int(engine.clock() * 10_000)
        numbers = range(newest - tail, newest)
        at = (datetime.fromtimestamp(number // 10_000, UTC) for number in numbers)
        both = zip(at, numbers, strict=True)
        return "".join(f"{when:%Y-%m-%dT%H:%M:%S}.{number % 10_000:04}00000Z {number}\n" for when, number in both)

    monkeypatch.setattr(FakeEngine, "logs", logs)
    async with console(control) as address, seen(chromium, libraries) as page:
        await page.goto(f"{address}#/services/web")
        box = page.locator(".log")
        await expect(page.get_by_text("Lines are missing")).to_be_visible()
        assert await box.locator("span").count() <= 1000
        await expect(box).not_to_contain_text((await box.inner_text()).split()[-1])
        await page.get_by_label("Filter").first.fill("no such line")
        await expect(box).to_have_text("")
        control.controller.events.record("note", "the disk is full", service="web", each=True)
        await expect(page.get_by_text("the disk is full")).to_be_visible()


async def test_plots_take_the_colours_of_another_theme(control: Control, chromium: str, libraries: Path) -> None:
    canvas = "document.querySelector('.plot canvas').getContext('2d')"
    inked = f"[...{canvas}.getImageData(0, 0, 60, 60).data].reduce((a, b) => a + b)"
    async with console(control) as address, seen(chromium, libraries, inspected=True) as page:
        await page.goto(f"{address}#/services/web")
        await expect(page.locator(".plot canvas").first).to_be_visible()
        before = await page.evaluate(inked)
        await page.get_by_label("Colours").select_option("dark")
        await page.wait_for_function(f"{inked} !== {before}", timeout=3000)


VIEWS = {
    "stack": "", "service": "services/web", "try": "services/web", "grpc": "services/ranker", "model": "services/chat",
    "traces": "traces", "trace": f"traces/{TRACE}", "events": "events", "alerts": "alerts", "plan": "plan",
}  # fmt: skip

LOOKS: tuple[tuple[str, tuple[int, int], Literal["light", "dark"]], ...] = (
    ("-phone", PHONE, "light"), ("", DESK, "light"), ("-dark", DESK, "dark"),
)  # fmt: skip


async def filled(view: str, page: Page, control: Control) -> None:
    """Have everything there that the view can show."""
    if view == "service":
        others = [one for one in control.source.services.values() if one.name != "web"]
        rollout = RolloutSpec(bake_s=1.0)
        control.source.edit(service("web", callees=("ranker", "chat"), definition_hash="d2", rollout=rollout), *others)
        await expect(page.get_by_role("heading", name="Last rollout")).to_be_visible(timeout=30_000)
    elif view == "try":
        await page.get_by_role("button", name="Look for its routes").click()
        panel = await send(page, "/web/buy", "POST")
        await expect(panel.locator(".answer")).to_contain_text("sold")
        await panel.locator(".answer summary").click()
    elif view == "grpc":
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".answer")).to_contain_text("UNAVAILABLE")
    elif view == "model":
        await page.get_by_label("Key").fill("sk-mine")
        await page.get_by_label("Message").fill("What is a pier?")
        await page.get_by_role("button", name="Ask").click()
        await expect(page.get_by_role("button", name="Begin again")).to_be_visible()


@pytest.mark.parametrize("view", VIEWS)
async def test_everybody_can_use_each_view(
    control: Control, chromium: str, libraries: Path, pictures: Path, view: str
) -> None:
    """By the rules of WCAG AA that axe checks; and nothing is wider than the screen, first a phone's."""
    control.rules, control.silencer = firing, FakeAlertmanager(control.wall)
    async with trying(control) as address, seen(chromium, libraries, inspected=True) as page:
        await page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        await page.goto(f"{address}#/{VIEWS[view]}")
        await expect(page.locator("main h1")).to_be_attached()
        if plots := {"service": 3, "try": 3, "grpc": 3, "model": 7}.get(view):
            await expect(page.locator(".plot canvas")).to_have_count(plots)
        await filled(view, page, control)
        for name, size, scheme in LOOKS:
            await page.emulate_media(color_scheme=scheme)
            await page.set_viewport_size({"width": size[0], "height": size[1]})
            width = "document.documentElement.scrollWidth"
            await page.wait_for_function(f"{width} <= {size[0]}")
            path = pictures / f"console-{view}{name}.png"
            if view in ("try", "grpc"):
                await page.locator(".try").screenshot(path=path)
            else:
                is_long = bool(plots) and size == DESK
                await page.screenshot(path=path, full_page=is_long, clip=LONG if is_long else None)
            found = await Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
            assert [(one["id"], one["nodes"][0]["html"]) for one in found.response["violations"]] == [], name
