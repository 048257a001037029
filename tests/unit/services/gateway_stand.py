"""A gateway before fake LLM services, for the gateway's tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest
from pierhead import override_handle
from pierhead.llm.gateway.app import make_app
from pierhead.llm.gateway.keys import EVERY_MODEL, KEY, MODELS
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models
from pierhead.llm.gateway.settings import GatewaySettings

from tests.unit.runtime.harness import Cluster
from tests.unit.services.fake_llm_server import FakeLLMServer, event

SERVED = {
    "qwen": "llm-qwen",
    "default": {"alias_of": "qwen"},
    "big": {"service": "llm-big", "prefill": "llm-prefill"},
    "away": "llm-away",
}
CHAT = "/v1/chat/completions"
ALL = b"".join(event(word) for word in FakeLLMServer.words) + b"data: [DONE]\n\n"


class Stand:
    """A gateway, what is behind it, and a client."""

    def __init__(self, cluster: Cluster, client: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.client = client
        self.metrics = GatewayMetrics()
        self.settings = GatewaySettings(read_models({VARIABLE: json.dumps(SERVED)}))
        self.qwen = FakeLLMServer(adapters=("support",))
        self.big = FakeLLMServer("big")
        self.prefill = FakeLLMServer("big")
        self.now = 1000.0
        self.base = ""

    async def start(self, **gateway: Any) -> None:
        app = make_app(self.settings, self.metrics, lambda: self.now)
        server = await self.cluster.start(app, service="gateway", **gateway)
        self.base = f"http://127.0.0.1:{server.http_port}"

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, bytes, Any]:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        async with self.client.post(self.base + path, data=data, headers=headers, **options) as answer:
            return answer.status, await answer.read(), answer.headers

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.client.get(self.base + path, **options) as answer:
            return answer.status, await answer.json()

    async def models(self, **options: Any) -> list[str]:
        """Those that are listed."""
        return [entry["id"] for entry in (await self.get("/v1/models", **options))[1]["data"]]

    def counted(self) -> dict[tuple[str, ...], float]:
        return dict(self.metrics.requests.values)


@pytest.fixture
async def stand(cluster: Cluster, client: aiohttp.ClientSession) -> AsyncIterator[Stand]:
    made = Stand(cluster, client)
    with ExitStack() as stack:
        for service, servicer in (("llm-qwen", made.qwen), ("llm-big", made.big), ("llm-prefill", made.prefill)):
            stack.enter_context(override_handle(service, servicer))
        yield made


@pytest.fixture
async def gateway(stand: Stand) -> Stand:
    await stand.start()
    return stand


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "qwen", "messages": [{"role": "user", "content": "What is the capital of France?"}]} | more


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def with_key(name: str, models: str = EVERY_MODEL) -> dict[str, str]:
    """The headers that HAProxy puts into a request, once it has checked its key."""
    return {KEY: name, MODELS: models}
