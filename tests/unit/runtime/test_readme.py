"""What the runtime's README shows is run, and what it lists is complete."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import pierhead
import pytest
from aiohttp import ClientSession, web
from pierhead import BadRequest, errors, handle, routing_stats
from pierhead.echo.v1.echo_pb2 import GenerateRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.request import CURRENT, RequestContext

from tests.unit.runtime.harness import Cluster, EchoService, echo, know
from tests.unit.runtime.test_metrics import NAMES

README = (Path(pierhead.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^ *```python\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE)
SERVICE, CALLER, CONFIG, START, EVENTS, POLICY, NUMBERS, STREAM, MODELS, LOCAL, *_OUTSIDE = map(dedent, SHOWN)


async def test_the_service_shown_works(cluster: Cluster) -> None:
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(SERVICE, shown)  # noqa: S102 - our own README
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


def test_the_caller_shown_is_served() -> None:
    app = web.Application()
    with patch("pierhead.serve") as serve:
        exec("from pierhead import handle, serve\n" + CALLER, {"web": web, "EchoStub": EchoStub, "app": app})  # noqa: S102
    serve.assert_called_once_with(app)


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


async def test_the_batched_stream_shown_works() -> None:
    shown: dict[str, Any] = {}
    exec(STREAM, shown)  # noqa: S102
    assert await shown["show"](shown["Counter"]()) == [3, 2, 1]


async def test_the_multiplexed_service_shown_works() -> None:
    shown: dict[str, Any] = {}
    exec(MODELS, shown)  # noqa: S102
    CURRENT.set(RequestContext("r", float("inf"), model_id="fr"))
    assert await shown["Greeter"]().greet("Ada") == "Bonjour, Ada"


async def test_the_local_calls_shown_work() -> None:
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(SERVICE, shown)  # noqa: S102
    exec(LOCAL, shown)  # noqa: S102
    assert await shown["show"]() == ["ONE", "TWO"]


def test_the_error_table_is_the_tree() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d+)(, Retry-After)? \| (\w+) \|$", README, re.MULTILINE)
    assert len(rows) == 9
    for name, status, http, retry, kind in rows:
        error = getattr(errors, name)
        assert (error.grpc_status.name, error.http_status, error.kind) == (status, int(http), kind)
        assert (error.retry_after_s is not None) == bool(retry)


def test_the_metrics_table_is_complete() -> None:
    table = README[README.index("## Metrics") : README.index("## Inside")]
    names = set(re.findall(r"pierhead_\w+", table))
    names |= {f"pierhead_batch{suffix}" for suffix in re.findall(r", (_\w+)", table)}
    assert {name.removesuffix("_total") for name in names} == NAMES
