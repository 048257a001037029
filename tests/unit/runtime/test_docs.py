"""What the site shows of the runtime is run, and what it lists is complete."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pierhead
import pytest
from aiohttp import ClientSession, web
from pierhead import BadRequest, errors, handle, override_handle, routing_stats
from pierhead.classes.parts import made
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.policies.router import PolicyRouter
from pierhead.request import CURRENT, RequestContext
from pierhead.store.memory import OWN_STORE
from pierhead.testing import local

from tests.unit.runtime.harness import Cluster, EchoService, echo, know
from tests.unit.runtime.test_policies import FakeCall, candidates

DOCS = Path(__file__).parents[3] / "docs"


def shown_on(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python(?: title=[^\n]*)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


SERVICE, CALLER, START, *_FROM_OUTSIDE = shown_on("how-to/write-a-service.md")
[CONFIG] = shown_on("how-to/live-settings.md")
[EVENTS] = shown_on("how-to/http.md")
POLICY, NUMBERS, CACHE_AWARE, _APPLICATION = shown_on("how-to/routing.md")
_SIGNATURE, STREAM = shown_on("how-to/batching.md")
[MODELS] = shown_on("how-to/many-models.md")
[LOCAL] = shown_on("how-to/test-a-service.md")
[CLASSES] = shown_on("how-to/service-as-a-class.md")
HELLO, CHAIN = shown_on("tutorial.md")


async def test_the_service_shown_works(cluster: Cluster) -> None:
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(SERVICE, shown)  # noqa: S102 - our own pages
    know(await cluster.start(shown["Echo"]()))
    stub = handle(EchoStub, "echo-child")
    assert (await stub.Echo(echo("hi"))).response == "HI"
    with pytest.raises(BadRequest, match="message: expected some text, found none"):
        await stub.Echo(echo(""))


def test_the_numbers_shown_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = routing_stats.Published()
    monkeypatch.setattr(routing_stats, "STATS", stats)
    exec(NUMBERS, {})  # noqa: S102
    assert stats.numbers == {"running": 3.0, "waiting": 0.0, "kv_use": 0.25}


async def test_the_settings_shown_are_taken(cluster: Cluster) -> None:
    shown: dict[str, Any] = {}
    exec(CONFIG, shown)  # noqa: S102
    part = shown["Settings"]()
    await cluster.start(EchoService(), part, user_config='{"greeting":"Ahoy"}')
    assert part.greeting == "Ahoy"


def test_the_start_shown_tells_its_progress() -> None:
    told: list[str] = []
    with patch("pierhead.progress", side_effect=lambda *what: told.append(" ".join(map(str, what)))):
        exec(START, {"pierhead": pierhead, "shards": "ab", "load": told.append})  # noqa: S102
    assert told == ["loading weights 0 2", "a", "loading weights 1 2", "b", "compiling"]


async def test_the_caller_shown_is_served(cluster: Cluster) -> None:
    know(await cluster.start(EchoService()))
    shown: dict[str, Any] = {"EchoStub": EchoStub, "EchoRequest": EchoRequest}
    with patch("pierhead.serve") as serve:
        exec(CALLER.replace("timeout=0.2", "timeout=20"), shown)  # noqa: S102 - on a busy machine, too
    serve.assert_called_once_with(shown["app"])
    assert (await answer_of(cluster, shown["app"], "/echo?message=hi")) == {"response": "echo: hi"}


async def answer_of(cluster: Cluster, app: web.Application, path: str) -> Any:
    server = await cluster.start(app)
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{server.http_port}{path}") as response:
        return await response.json()


@pytest.mark.parametrize(("code", "greeting"), [(HELLO, "Hello, Ada!"), (CHAIN, "Good day, ADA!")], ids=["new", "own"])
async def test_the_tutorial_s_services_work(code: str, greeting: str) -> None:
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(code, shown)  # noqa: S102
    async with local(shown["app"]) as running:
        async with running.http.get("/?name=Ada") as response:
            assert await response.json() == {"greeting": greeting}
        async with running.http.get("/?name=") as response:
            assert response.status == (400 if code == CHAIN else 200)


async def test_the_events_shown_work(cluster: Cluster) -> None:
    know(await cluster.start(EchoService("hi")))
    shown: dict[str, Any] = {"web": web, "GenerateRequest": GenerateRequest, "echo": handle(EchoStub, "echo-child")}
    exec("from pierhead import sse, sse_event\n" + EVENTS, shown)  # noqa: S102
    app = web.Application()
    app.router.add_get("/", shown["stream"])
    server = await cluster.start(app)
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{server.http_port}/?message=hi") as response:
        assert await response.text() == 3 * "data: hi\n\n" + "data: [DONE]\n\n"


async def test_the_policy_shown_works(cluster: Cluster) -> None:
    know(await cluster.start(EchoService()))
    exec(POLICY, {})  # noqa: S102
    assert (await handle(EchoStub, "echo-child", policy="fullest").Echo(echo())).response == "echo: hi"


async def test_the_policy_shown_that_asks_the_store_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIERHEAD_REPLICA", "r1")
    shown: dict[str, Any] = {}
    exec(CACHE_AWARE, shown)  # noqa: S102
    router, of = PolicyRouter("power_of_two", Random(1)), candidates([0, 5, 0])
    of = [replace(one, name=f"r{number}") for number, one in enumerate(of)]
    router.policy = shown["CacheAware"](Random(1))
    prompt = "You are a helpful assistant. " * 40
    call: Any = FakeCall(request=SimpleNamespace(routing_text=prompt + "And now?"))
    assert await router.rank(of, call) == [of], "nobody has read it"
    try:
        await shown["remember"](prompt)
        assert await router.rank(of, call) == [[of[1]], [of[0], of[2]]]
        away = patch.object(pierhead.shared_store, "get_many", side_effect=pierhead.StoreUnavailable("away"))
        with away:
            assert await router.rank(of, call) == []
    finally:
        OWN_STORE.clear()
        await pierhead.close_handles()


async def test_the_batched_stream_shown_works() -> None:
    shown: dict[str, Any] = {}
    exec(STREAM, shown)  # noqa: S102
    assert await shown["show"](shown["Counter"]()) == [3, 2, 1]


async def test_the_multiplexed_service_shown_works() -> None:
    shown: dict[str, Any] = {}
    exec(MODELS, shown)  # noqa: S102
    CURRENT.set(RequestContext("r", float("inf"), model_id="fr"))
    assert await shown["Greeter"]().greet("Ada") == "Bonjour, Ada"


async def test_the_classes_shown_work(cluster: Cluster, client: ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ModuleType("shown")
    monkeypatch.setitem(sys.modules, "shown", shown)  # where dataclasses look up the names in their hints
    exec(CLASSES, vars(shown))  # noqa: S102
    server = await cluster.start(*made([shown.shop], ""))
    with override_handle("scorer", *made([shown.shop], "scorer")):
        async with client.get(f"http://127.0.0.1:{server.http_port}/recommend?user=3") as response:
            assert await response.json() == {"salt": 1.5}


async def test_the_local_calls_shown_work() -> None:
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(SERVICE, shown)  # noqa: S102
    exec(LOCAL, shown)  # noqa: S102
    assert await shown["show"]() == ["ONE", "TWO"]


def test_the_error_table_is_the_tree() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)`(?: \(a `\w+`\))? \| (\w+) \| (\d+)(, Retry-After)? \| (\w+) \|$", page, re.MULTILINE
    )
    assert len(rows) == len({name for name, *_ in rows}) > 10
    for name, status, http, retry, kind in rows:
        error = getattr(errors, name)
        assert (error.grpc_status.name, error.http_status, error.kind) == (status, int(http), kind)
        assert (error.retry_after_s is not None) == bool(retry)
