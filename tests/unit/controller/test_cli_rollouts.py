"""deploy, rollback, abort, promote and revisions, as a process against an API that plays a rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import unused_port

from tests.unit.controller.cli_documents import AT, document, rolling, settled
from tests.unit.controller.test_cli import Command

OLD = settled(version="1a2b3c4d")
REJECTED = {"version": "9f8e7d6c", "reason": "its replicas failed 3 times", "at": AT, "is_asked": False, "id": "1"}


@dataclass
class RolloutApi:
    """Shows one row after the other, once somebody has asked for a change; the last one for ever."""

    rows: list[dict[str, Any]]
    before: dict[str, Any] = field(default_factory=lambda: OLD)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    looks: int = 0

    async def services(self, request: web.Request) -> web.Response:
        if self.asked:
            self.looks += 1
        number = min(max(self.looks - 1, 0), len(self.rows) - 1)
        row = self.rows[number] if self.asked else self.before
        return web.json_response(document(row, at=AT + self.looks))

    async def deploy(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        return web.json_response({"services": {"ranker": "1a2b3c4d -> 9f8e7d6c"}}, status=202)

    async def redirect(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("to") == "nosuch":
            error = {"code": "invalid_request", "message": "to: ranker has no version nosuch; it has 1a2b3c4d"}
            return web.json_response({"error": error}, status=400)
        self.asked.append((request.path, body))
        return web.json_response({"service": "ranker", "message": "goes back to 1a2b3c4d"}, status=202)

    async def revisions(self, request: web.Request) -> web.Response:
        listed = [
            {
                "version": "9f8e7d6c",
                "image": "a",
                "image_id": "sha256:1",
                "first_at": AT,
                "current": True,
                "stable": False,
            },
            {
                "version": "1a2b3c4d",
                "image": "a",
                "image_id": "sha256:2",
                "first_at": AT - 60,
                "current": False,
                "stable": True,
            },
        ]
        return web.json_response({"service": "ranker", "at": AT, "revisions": listed})

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Command]:
        application = web.Application()
        application.add_routes(
            [
                web.get("/api/v1/services", self.services),
                web.post("/api/v1/deploy", self.deploy),
                web.get("/api/v1/services/ranker/revisions", self.revisions),
                web.post("/api/v1/services/ranker/{verb:rollback|abort|promote}", self.redirect),
            ]
        )
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        port = unused_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield Command(f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()


async def test_a_deployment_is_seen_through() -> None:
    api = RolloutApi([OLD, rolling(phase="BAKING"), rolling(), settled()])
    async with api.served() as pierhead:
        done = await pierhead("deploy", "ranker")
        assert (done.code, done.out) == (
            0,
            "ranker: 1a2b3c4d -> 9f8e7d6c\nranker: 2 of 2 ready, version 9f8e7d6c\n",
        )
        assert "ranker: 1a2b3c4d -> 9f8e7d6c BAKING: 1 of 2 ready\n" in done.err
        assert api.asked == [("/api/v1/deploy", {"services": ["ranker"]})]


async def test_everything_is_deployed_where_nothing_is_named_and_json_sums_it_up() -> None:
    api = RolloutApi([rolling(), settled()])
    async with api.served() as pierhead:
        done = await pierhead("deploy", "-o", "json")
        assert done.code == 0
        assert json.loads(done.out) == {
            "services": {"ranker": {"state": "HEALTHY", "version": "9f8e7d6c", "ready": 2, "wanted": 2}},
            "done": True,
            "message": "ranker: 2 of 2 ready, version 9f8e7d6c",
        }
        assert api.asked == [("/api/v1/deploy", {})]


async def test_a_version_that_is_rolled_back_ends_with_one_and_the_next_step() -> None:
    back = settled(version="1a2b3c4d", rejected=REJECTED)
    async with RolloutApi([rolling(), rolling(phase="ROLLING_BACK"), back]).served() as pierhead:
        done = await pierhead("deploy")
        assert done.code == 1
        assert "version 9f8e7d6c was rolled back: its replicas failed 3 times; version 1a2b3c4d serves" in done.err
        assert "`pierhead why ranker`; correct the service, build it, then `pierhead deploy ranker`" in done.err
        assert "goes on without you" not in done.err, "it has ended"


async def test_a_deployment_that_takes_too_long_goes_on() -> None:
    async with RolloutApi([rolling()]).served() as pierhead:
        done = await pierhead("deploy", "--timeout", "0.5")
        assert done.code == 4
        assert "not there after 0.5 s: ranker: 1a2b3c4d -> 9f8e7d6c ROLLING: 1 of 2 ready" in done.err
        assert "The rollout goes on without you" in done.err


async def test_interrupted_it_says_that_the_rollout_goes_on() -> None:
    async with RolloutApi([rolling()]).served() as pierhead:
        process = await pierhead.begin("deploy")
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"ROLLING" not in await process.stderr.readline():
                pass
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert process.returncode == 1
        assert "The rollout goes on without you; `pierhead status` shows how." in err.decode()


async def test_nobody_has_to_wait() -> None:
    api = RolloutApi([rolling()])
    async with api.served() as pierhead:
        done = await pierhead("deploy", "--no-wait")
        assert (done.code, done.out) == (0, "ranker: 1a2b3c4d -> 9f8e7d6c\n")
        assert api.looks == 0


async def test_back_on_and_away() -> None:
    back = settled(version="1a2b3c4d", rejected=REJECTED)
    for arguments, before, path, body in (
        (("rollback", "ranker"), settled(), "rollback", {}),
        (("rollback", "ranker", "--to", "1a2b3c4d"), settled(), "rollback", {"to": "1a2b3c4d"}),
        (("abort", "ranker"), rolling(), "abort", {}),
    ):
        api = RolloutApi([rolling(phase="ROLLING_BACK"), back], before)
        async with api.served() as pierhead:
            done = await pierhead(*arguments)
            assert (done.code, done.out) == (
                0,
                "ranker: goes back to 1a2b3c4d\nranker: 2 of 2 ready, version 1a2b3c4d\n",
            )
            assert api.asked == [(f"/api/v1/services/ranker/{path}", body)]
    async with RolloutApi([rolling(), back]).served() as pierhead:
        assert (await pierhead("promote", "ranker")).code == 1, "it was to go on, and went back"


async def test_a_version_that_does_not_exist_is_bad_input() -> None:
    api = RolloutApi([OLD])
    async with api.served() as pierhead:
        done = await pierhead("rollback", "ranker", "--to", "nosuch")
        assert (done.code, done.err) == (2, "to: ranker has no version nosuch; it has 1a2b3c4d\n")
        assert await pierhead.offers("pierhead rollback ranker --to 1") == ["1a2b3c4d"]
        done = await pierhead("revisions", "ranker")
        assert [line.split()[0] for line in done.out.splitlines()] == ["VERSION", "9f8e7d6c", "1a2b3c4d"]
