"""Methods of a class that answer HTTP without a web framework."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from fastapi import FastAPI
from pierhead import BadRequest, Service, endpoint
from pydantic import BaseModel

from tests.unit.runtime.harness import Cluster


class Base(Service):
    def __init__(self) -> None:
        self.asked = 0

    @endpoint("GET", "/base")
    async def base(self, _: web.Request) -> web.Response:
        return web.json_response({"asked": self.asked})


class Hello(Base, route="/"):
    @endpoint("GET", "/hello/{name}")
    @endpoint("GET", "/hi/{name}")
    async def hello(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"greeting": f"{request.path.split('/')[1]} {request.match_info['name']}"})

    @endpoint("POST", "/length")
    async def length(self, request: web.Request) -> web.Response:
        text = await request.text()
        if not text:
            raise BadRequest("the body: expected some text, found none")
        return web.json_response(await self.measure(text))

    async def measure(self, text: str) -> int:
        return len(text)

    @endpoint("GET", "/times/{name}")
    async def times(self, name: str, times: int, weight: float = 1.5) -> dict[str, float]:
        return {name: times * weight}

    @endpoint("PUT", "/count")
    async def count(self, request: web.Request, upto: int = 2) -> AsyncIterator[str]:
        return self.counted(int(await request.text()), upto)

    async def counted(self, first: int, upto: int) -> AsyncIterator[str]:
        for number in range(first, upto):
            yield f"at {number}"


async def test_they_are_served_behind_the_edge_with_the_methods(cluster: Cluster, client: ClientSession) -> None:
    server = await cluster.start(Hello())
    url = f"http://127.0.0.1:{server.http_port}"
    for path, body in {"/hello/Ada": {"greeting": "hello Ada"}, "/hi/Ada": {"greeting": "hi Ada"}}.items():
        async with client.get(url + path) as response:
            assert await response.json() == body
    async with client.head(f"{url}/hello/Ada") as response:
        assert response.status == 200
    async with client.get(f"{url}/base") as response:
        assert await response.json() == {"asked": 3}
    async with client.post(f"{url}/length", data="four") as response:
        assert await response.json() == 4
    async with client.post(f"{url}/length") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "bad_request")
    assert ("GET /hello/{name}", "200") in server.metrics.requests.values
    assert [method.name.rpartition("/")[2] for method in server.methods] == ["measure", "counted"]


async def test_parameters_are_the_requests_and_results_json_or_events(cluster: Cluster, client: ClientSession) -> None:
    server = await cluster.start(Hello())
    url = f"http://127.0.0.1:{server.http_port}"

    async def answer(path: str) -> tuple[int, Any]:
        async with client.get(url + path) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    assert await answer("/times/Ada?times=2") == (200, {"Ada": 3.0})
    assert await answer("/times/Ada?times=-2&weight=0.5&name=other") == (200, {"Ada": -1.0})
    assert await answer(f"/times/Ada?times={-(2**63)}&weight=1") == (200, {"Ada": -(2.0**63)})
    for query, message in {
        "": "times: missing in the query string; send /times/Ada?times=...",
        "times=": 'times: expected an integer, found ""',
        f"times={'x' * 50}": f'times: expected an integer, found "{"x" * 40}"',
        f"times={2**63}": 'times: expected an integer, found "9223372036854775808"',
        "times=1&weight=much": 'weight: expected a number, found "much"',
    }.items():
        status, body = await answer(f"/times/Ada?{query}")
        assert (status, body["error"]["message"]) == (400, message)
    assert (await answer("/times/Ada?times=1&weight=nan"))[0] == 500, "JSON has no NaN"
    async with client.put(f"{url}/count?upto=3", data="1") as response:
        assert (response.content_type, await response.text()) == ("text/event-stream", "data: at 1\n\ndata: at 2\n\n")


async def test_an_object_is_served_more_than_once(cluster: Cluster, client: ClientSession) -> None:
    hello = Hello()
    for _ in range(2):
        server = await cluster.start(hello)
        async with client.get(f"http://127.0.0.1:{server.http_port}/base") as response:
            assert response.status == 200


@dataclass
class Found:
    at: date
    kinds: set[Kind]
    inner: list[Inner]


class Inner(BaseModel):
    price: Decimal


class Kind(Enum):
    NEW = "new"


class Finder(Service, route="/"):
    @endpoint("GET", "/found")
    async def found(self) -> Found:
        return Found(date(2026, 1, 2), {Kind.NEW}, [Inner(price=Decimal("1.50"))])

    @endpoint("GET", "/each")
    async def each(self) -> AsyncIterator[Found | str]:
        async def items() -> AsyncIterator[Found | str]:
            yield await self.found()
            yield "é"

        return items()

    @endpoint("GET", "/numbers")
    async def numbers(self) -> object:
        scores = np.array([[0.5, 1.0]], np.float32)
        return {"best": scores.max(), "index": scores.argmax(), "sure": scores[0, 0] > 0, "all": scores, "large": 2**70}

    @endpoint("GET", "/lost/{kind}")
    async def lost(self, kind: str) -> object:
        return {
            "object": object(),
            "nan": [np.float32("nan")],
            "array": np.array([float("inf")]),
            "1j": np.complex64(1j),
        }[kind]


async def test_results_that_json_does_not_have(cluster: Cluster, client: ClientSession) -> None:
    server = await cluster.start(Finder())
    async with client.get(f"http://127.0.0.1:{server.http_port}/found") as response:
        text = await response.text()
        assert json.loads(text) == {"at": "2026-01-02", "kinds": ["new"], "inner": [{"price": "1.50"}]}
    async with client.get(f"http://127.0.0.1:{server.http_port}/each") as response:
        assert await response.text() == f"data: {text}\n\ndata: é\n\n"
    async with client.get(f"http://127.0.0.1:{server.http_port}/numbers") as response:
        assert await response.json() == {"best": 1.0, "index": 1, "sure": True, "all": [[0.5, 1.0]], "large": 2**70}
    for kind in ("object", "nan", "array", "1j"):
        async with client.get(f"http://127.0.0.1:{server.http_port}/lost/{kind}") as response:
            assert response.status == 500


def test_what_cannot_be_an_endpoint() -> None:
    with pytest.raises(TypeError, match="a method with @endpoint must be `async def`"):

        class Plain(Service):
            @endpoint("GET", "/")  # type: ignore[type-var]
            def plain(self, request: web.Request) -> web.Response:
                return web.Response()

    with pytest.raises(TypeError, match=r"Many.many\(names\): expected str, int or float, found names: 'list\[str\]'"):

        class Many(Service):
            @endpoint("GET", "/")
            async def many(self, number: int, names: list[str]) -> None: ...

    with pytest.raises(TypeError, match="class Both: expected asgi= or methods with @endpoint, found both"):

        class Both(Base, asgi=FastAPI()):
            pass
