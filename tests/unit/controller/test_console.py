"""What the console's page is made of: its files, the stream of what it shows, and what it asks before a change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from yarl import URL

from controller.api_tokens import digest_of, read_tokens
from controller.daemon import live
from controller.daemon.callers import Gatekeeper
from controller.daemon.console import FILES
from controller.model.reports import Event
from controller.status.live import LiveParts, changes
from controller.status.view import View
from controller.storage.rows import StoredEvent
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_api import bearer, error_of, serving
from tests.unit.controller.worlds import service


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web", callees=("api",)), service("api", replicas=1))


async def parts_of(response: ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """The parts that a stream sends, one by one."""
    assert (response.status, response.content_type) == (200, "text/event-stream")
    async for line in response.content:
        if line.startswith(b"data: "):
            found = json.loads(line.removeprefix(b"data: "))
            yield found["part"], found["value"]


async def next_of(parts: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    async with asyncio.timeout(20):
        async for part, value in parts:
            if part == name:
                return value
    raise AssertionError(f"the stream ended before {name}")


async def test_the_stream_has_everything_at_first_and_then_what_changes(control: Control) -> None:
    async with serving(control, web=2, api=1) as client:
        parts = parts_of(await client.get("/api/v1/live"))
        assert (await next_of(parts, "stack"))["project"] == "p"
        web = await next_of(parts, "service/web")
        assert (web["ready"], web["calls"]) == (2, ["api"])
        assert await next_of(parts, "plan")
        answer = await client.put("/api/v1/services/web/scale", json={"replicas": 3})
        assert answer.status == 202
        while (await next_of(parts, "service/web"))["ready"] < 3:
            pass
        control.source.edit(*(one for one in control.source.services.values() if one.name == "api"))
        while await next_of(parts, "service/web") is not None:
            pass


async def test_a_quiet_stream_says_that_it_is_alive_and_ends_with_the_controller(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ALIVE_S", 0.1)
    async with serving(control, web=2, api=1) as client:
        response = await client.get("/api/v1/live")
        async with asyncio.timeout(20):
            async for line in response.content:
                if line.startswith(b": "):
                    break
    assert response.content.at_eof() or response.content.exception() is not None


async def test_so_many_pages_and_no_more(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST", 1)
    monkeypatch.setattr(live, "ALIVE_S", 0.0)
    async with serving(control, web=2, api=1) as client:
        first = await client.get("/api/v1/live")
        assert (await error_of(await client.get("/api/v1/live")))[:2] == (503, "too_many")
        first.close()

        async with asyncio.timeout(20):
            while (await client.get("/api/v1/live")).status == 503:
                pass


async def test_what_has_not_changed_is_not_sent_again(control: Control) -> None:
    async with control.running(web=2, api=1) as controller:
        parts, log = LiveParts(), controller.events

        def now() -> Any:
            return parts.now(controller.view, (), log.select(limit=200))

        before = now()
        assert list(changes({}, before)) == [part.text for part in before.values()]
        view = controller.view
        await until(lambda: controller.view is not view)
        assert list(changes(before, now())) == [], "another tick, the same world"
        log.record("scale", "web: 2 -> 3 replicas", service="web")
        (text,) = changes(before, now())
        assert json.loads(text.removeprefix("data: "))["value"]["message"] == "web: 2 -> 3 replicas"


def test_old_events_go_without_a_word() -> None:
    parts, view = LiveParts(), View(0.0, "p")
    old, new = (StoredEvent(number, Event(1.0, "scale", "web", "web", "said"), 1.0) for number in (1, 2))
    first = parts.now(view, (), [old, new])
    assert [name for name in first if name.startswith("event/")] == ["event/1", "event/2"]
    assert not list(changes(first, parts.now(view, (), [new])))


async def test_who_asks_and_what_it_may(control: Control) -> None:
    keeper = Gatekeeper(read_tokens("secret", f"grafana:read:{digest_of('r')}"), frozenset)
    async with serving(control, keeper, web=2, api=1) as client:
        for token, expected in (("secret", ("PIERHEAD_API_TOKEN", "admin")), ("r", ("grafana", "read"))):
            found = await (await client.get("/api/v1/caller", headers=bearer(token))).json()
            assert (found["name"], found["role"]) == expected
        assert (await client.get("/api/v1/live")).status == 403


async def test_the_page_is_for_everybody_and_runs_nothing_but_its_own_files(control: Control, tmp_path: Path) -> None:
    keeper = Gatekeeper(read_tokens("secret", ""), frozenset)
    async with serving(control, keeper, web=2, api=1) as client:
        page = await client.get("/")
        assert (page.status, page.content_type) == (200, "text/html")
        assert "default-src 'none'; script-src 'self'" in page.headers["Content-Security-Policy"]
        for file in FILES.iterdir():
            if file.suffix in (".js", ".css", ".svg"):
                assert (await client.get(f"/console/{file.name}")).status == 200, file
        outside = tmp_path / "secret.js"
        outside.write_text("secret")
        wrong = ("package.json", "../daemon/api.py", "%2e%2e/errors.py", "none.js", str(outside), f"/{outside}", "")
        for path in wrong:
            url = URL(f"{client.make_url('/console/')}{path}", encoded=True)
            answer = await client.session.get(url)
            assert (answer.status in (403, 404), await answer.text() != "secret") == (True, True), path
        assert (await client.get("/", headers={"Host": "evil.example"})).status == 421


async def test_the_plan_that_there_would_be(control: Control) -> None:
    async with serving(control, web=2, api=1) as client:

        async def plan(query: str) -> str:
            return str((await (await client.get(f"/api/v1/plan?{query}")).json())["text"])

        assert await plan("") == "nothing to do"
        assert (await plan("scale=web:4")).count("create p-web-") == 2
        assert "p-api-" in await plan("scale=web:1&scale=api:2")
        assert await plan("") == "nothing to do", "nothing was changed"
        for wrong in ("web", "web:", ":2", "web:-1", "web:two", "web:99999999"):
            status, _, message = await error_of(await client.get(f"/api/v1/plan?scale={wrong}"))
            assert (status, message.startswith("scale: expected name:replicas")) == (400, True), message
        assert (await client.get("/api/v1/plan?scale=nobody:1")).status == 404
