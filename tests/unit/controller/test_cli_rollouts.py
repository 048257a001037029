"""deploy, rollback, abort and promote, as a process against an API that plays a rollout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from controller.status.records.services import Service
from tests.unit.controller.cli_documents import AT, REJECTED, answered, document, rolling, settled
from tests.unit.controller.test_cli import Command

OLD = settled(version="1a2b3c4d")


@dataclass
class RolloutApi:
    """Shows one row after the other, once a change was asked for; the last one forever."""

    rows: list[Service]
    before: Service = field(default_factory=lambda: OLD)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    looks: int = 0

    async def services(self, request: web.Request) -> web.Response:
        if self.asked:
            self.looks += 1
        number = min(max(self.looks - 1, 0), len(self.rows) - 1)
        row = self.rows[number] if self.asked else self.before
        return answered(document(row, at=AT + self.looks))

    async def deploy(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        return web.json_response({"services": {"ranker": "1a2b3c4d -> 9f8e7d6c"}}, status=202)

    async def redirect(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        return web.json_response({"service": "ranker", "message": "goes back to 1a2b3c4d"}, status=202)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Command]:
        application = web.Application()
        application.router.add_get("/api/v1/services", self.services)
        application.router.add_post("/api/v1/deploy", self.deploy)
        application.router.add_post("/api/v1/services/ranker/{verb:rollback|abort|promote|restart}", self.redirect)
        async with TestServer(application) as server:
            yield Command(str(server.make_url("")).rstrip("/"))


async def test_a_deployment_is_seen_through() -> None:
    api = RolloutApi([OLD, rolling(phase="BAKING"), rolling(), settled()])
    async with api.served() as pierhead:
        done = await pierhead("deploy", "ranker")
        assert (done.code, done.out) == (0, "ranker: 1a2b3c4d -> 9f8e7d6c\nranker: 2 of 2 ready, version 9f8e7d6c\n")
        assert "ranker: BAKING, 1 of 2 ready; 1a2b3c4d -> 9f8e7d6c: 1 of 2 replaced\n" in done.err
        assert json.loads((await pierhead("deploy", "-o", "json")).out) == {
            "services": {"ranker": {"state": "HEALTHY", "version": "9f8e7d6c", "ready": 2, "wanted": 2}},
            "done": True,
            "message": "ranker: 2 of 2 ready, version 9f8e7d6c",
        }
        await pierhead("deploy", "--now", "ranker")
        assert api.asked == [
            ("/api/v1/deploy", {"services": ["ranker"]}),
            ("/api/v1/deploy", {}),
            ("/api/v1/deploy", {"services": ["ranker"], "now": True}),
        ]


async def test_a_version_that_is_rolled_back_ends_with_one_and_the_next_step() -> None:
    back = settled(version="1a2b3c4d", rejected=REJECTED)
    async with RolloutApi([rolling(), rolling(phase="ROLLING_BACK"), back]).served() as pierhead:
        done = await pierhead("deploy")
        assert done.code == 1
        assert done.err.endswith(
            "ranker: version 9f8e7d6c was rolled back: its replicas failed 3 times; version 1a2b3c4d serves\n"
            "See `pierhead why ranker`; correct the service, build it, then `pierhead deploy ranker`.\n"
        ), "there is no rollout that it could name"


async def test_a_deployment_continues_without_the_command() -> None:
    api = RolloutApi([rolling()])
    async with api.served() as pierhead:
        done = await pierhead("deploy", "--no-wait")
        assert (done.code, done.out, api.looks) == (0, "ranker: 1a2b3c4d -> 9f8e7d6c\n", 0)
        done = await pierhead("deploy", "--timeout", "0.5")
        assert done.code == 4
        assert "not done after 0.5 s: ranker: ROLLING, 1 of 2 ready; 1a2b3c4d -> 9f8e7d6c" in done.err
        assert "The rollout continues; `pierhead status` shows the progress." in done.err


@pytest.mark.parametrize(
    ("arguments", "before", "body"),
    [
        ("rollback ranker", settled(), {}),
        ("rollback ranker --to 1a2b3c4d", settled(), {"to": "1a2b3c4d"}),
        ("abort ranker", rolling(), {}),
        ("promote ranker", OLD, {}),
        ("restart ranker", OLD, {}),
    ],
)
async def test_rollback_abort_and_promote(arguments: str, before: Service, body: dict[str, str]) -> None:
    api = RolloutApi([rolling(phase="ROLLING_BACK"), settled(version="1a2b3c4d", rejected=REJECTED)], before)
    verb = arguments.split()[0]
    async with api.served() as pierhead:
        done = await pierhead(*arguments.split())
        assert api.asked == [(f"/api/v1/services/ranker/{verb}", body)]
        if verb in ("promote", "restart"):
            assert done.code == 1, "it should have continued, and was rolled back"
        else:
            assert (done.code, done.out) == (
                0,
                "ranker: goes back to 1a2b3c4d\nranker: 2 of 2 ready, version 1a2b3c4d\n",
            )
