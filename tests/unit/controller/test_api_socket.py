"""The API at a Unix socket: who is let in is an admin, and the audit has the uid."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, UnixConnector, web

from controller.api_tokens import ApiToken, digest_of, read_tokens
from controller.daemon.api_socket import bound, socket_of_users
from controller.daemon.callers import Gatekeeper
from controller.tool.project.direct import lets_in
from tests.unit.controller.control import Control
from tests.unit.controller.worlds import service

US, OURS = os.getuid(), os.getgid()
TOKENS = read_tokens("secret", f"grafana:read:{digest_of('r')}")
NOBODY_ELSE: tuple[ApiToken, ...] = ()


@contextlib.asynccontextmanager
async def asking(path: Path, control: Control, tokens: tuple[ApiToken, ...]) -> AsyncIterator[ClientSession]:
    async with control.running() as controller:
        runner = web.AppRunner(controller.api(Gatekeeper(tokens, frozenset)).application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, bound(path, US, OURS)).start()
        try:
            async with ClientSession("http://localhost", connector=UnixConnector(str(path))) as session:
                yield session
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("tokens", [NOBODY_ELSE, TOKENS])
async def test_who_is_let_in_may_everything_and_is_named(tmp_path: Path, tokens: tuple[ApiToken, ...]) -> None:
    control = Control.of(tmp_path, service("web"))
    async with asking(tmp_path / "p.sock", control, tokens) as at_socket:
        made = await at_socket.post("/api/v1/keys", json={"name": "team"})
        assert made.status == 200, await made.text()
        assert (await at_socket.get("/api/v1/backup")).status == 200
        found = await (await at_socket.get("/api/v1/events?kind=asked")).json()
    assert [event["message"].partition(": ")[0] for event in found["events"]] == [f"uid {US} at the socket"] * 2


async def test_a_token_that_is_shown_decides(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web"))
    async with asking(tmp_path / "p.sock", control, TOKENS) as at_socket:
        statuses = [
            (await at_socket.get(f"/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})).status
            for path in ("services", "backup")
            for token in ("secret", "r", "wrong")
        ]
    assert statuses == [200, 200, 403, 200, 403, 403]


def test_the_socket_is_for_the_owner_and_the_group_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    with bound(path, US, OURS) as first:
        first.listen()
        assert lets_in(str(path))
    assert not lets_in(str(path)), "nobody listens any more"
    with bound(path, US, OURS) as second:
        found = path.stat()
        assert (stat.filemode(found.st_mode), found.st_uid, found.st_gid) == ("srw-rw----", US, OURS)
        assert not lets_in(str(path)), "it does not listen before it has its owner"
        second.listen()
        assert lets_in(str(path))


def engines_socket(path: Path, mode: int) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    path.chmod(mode)
    return path


@pytest.mark.parametrize(("mode", "group"), [(0o660, OURS), (0o600, 0)])
def test_a_group_that_may_not_use_docker_is_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, group: int
) -> None:
    owners: list[Any] = []
    monkeypatch.setattr(os, "chown", lambda *given: owners.append(given))
    path = tmp_path / "p.sock"
    with socket_of_users(path, tmp_path, engines_socket(tmp_path / "docker.sock", mode)) as made:
        assert made is not None
        assert owners == [(path, US, group)]
    assert not path.exists()


@pytest.mark.parametrize("place", ["missing", "x" * 120])
def test_where_there_can_be_none_the_port_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    engine = engines_socket(tmp_path / "docker.sock", 0o660)
    if place != "missing":
        (tmp_path / place).mkdir()
    with socket_of_users(tmp_path / place / "p.sock", tmp_path, engine) as made:
        assert made is None
    assert "users of this machine ask at the port" in caplog.text
