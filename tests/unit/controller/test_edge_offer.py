"""What an edge makes of a controller's answer, what stands in its file, what it says before it is stopped, and what
its image has.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from controller.routing.haproxy_config import render
from controller.routing.haproxy_text import ServerLine, epoch_of, hash_of, with_epoch, with_servers
from controller.swarm.certificates import ROLE_NAMES
from controller.swarm.edges import agent as edge_agent
from controller.swarm.edges import leave as edge_leave
from controller.swarm.edges.offer import LONGEST_WHY, EdgeOffer, Known, judge, question
from controller.swarm.edges.routes import PublishedRoutes
from tests.harness.edge import service
from tests.harness.imports import ROOT
from tests.harness.waiting import PATIENCE_S

CONFIG = render([service("echo", max_ongoing_requests=10)], is_remote=True)
HASH = hash_of(CONFIG)


@pytest.mark.parametrize(
    ("known", "offer", "verdict"),
    [
        (Known(), EdgeOffer(1, CONFIG), "load"),
        (Known("other", epoch=7), EdgeOffer(7, CONFIG), "load"),
        (Known("other", epoch=7), EdgeOffer(8, CONFIG), "load"),
        (Known("other", epoch=7), EdgeOffer(6, CONFIG), "older"),
        (Known("other", epoch=7), EdgeOffer(6), "older"),
        (Known(HASH), EdgeOffer(1, CONFIG), "nothing"),
        (Known("other", refused=HASH), EdgeOffer(1, CONFIG), "nothing"),
        (Known("other", refused="another"), EdgeOffer(1, CONFIG), "load"),
        (Known(), EdgeOffer(1, "no configuration"), "nothing"),
        (Known(), EdgeOffer(1), "nothing"),
    ],
)
def test_what_an_edge_does_with_an_answer(known: Known, offer: EdgeOffer, verdict: str) -> None:
    assert judge(known, offer) == verdict


def test_a_question_carries_what_the_edge_knows() -> None:
    why = "[ALERT] & unknown keyword = 'x'\n" * 100
    asked = parse_qs(urlsplit(question("node 1", Known("a", 7, "b", why))).query)
    assert asked == {"edge": ["node 1"], "hash": ["a"], "epoch": ["7"], "refused": ["b"], "why": [why[:LONGEST_WHY]]}


async def test_refused_routes_are_tried_at_the_next_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what was refused in a question, the controller answers only when it waited in vain for other routes."""
    agent = edge_agent.Agent("n1", tmp_path, "controller", 1, ssl.create_default_context())
    asked, offers = list[str](), [EdgeOffer(7, CONFIG), EdgeOffer(7), EdgeOffer(7, CONFIG)]

    def fetch(path: str) -> EdgeOffer:
        asked.append("".join(parse_qs(urlsplit(path).query).get("refused", [])))
        return offers.pop(0)

    async def nothing() -> None:
        pass

    async def refusal(config: str, run_dir: Path) -> str:
        return "no memory"

    monkeypatch.setattr(agent, "_fetch", fetch)
    monkeypatch.setattr(agent, "_look", nothing)
    monkeypatch.setattr(edge_agent, "check", refusal)
    for _ in range(3):
        await agent.turn()
    assert asked == ["", HASH, ""]


@pytest.mark.parametrize(
    ("haproxy", "why"),
    [
        ("exit 0", ""),
        ("echo no such keyword; exit 1", "no such keyword"),
        ("exec sleep 3600", "`haproxy -c` has not ended after 0.5 s"),
    ],
)
async def test_what_haproxy_says_against_routes_also_where_it_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, haproxy: str, why: str
) -> None:
    program = tmp_path / "haproxy"
    program.write_text(f"#!/bin/sh\n{haproxy}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(edge_agent, "CHECK_S", 0.5 if "sleep" in haproxy else PATIENCE_S)
    assert await edge_agent.check(CONFIG, tmp_path) == why


async def test_an_edge_that_has_refused_routes_is_answered_when_they_are_published_again() -> None:
    routes, edge = PublishedRoutes(7), {"subject": ((("commonName", ROLE_NAMES["edge"]),),)}
    routes.publish(CONFIG)
    request: Any = SimpleNamespace(query={"refused": HASH}, transport=object(), get_extra_info=lambda _: edge)
    answer = asyncio.create_task(routes.answer(request))
    await asyncio.sleep(0)
    routes.publish(CONFIG)
    async with asyncio.timeout(5):
        assert (await answer).status == 204


async def test_the_address_of_a_lost_controller_is_left_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bounds = list[float]()

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        bounds.append(timeout)
        raise TimeoutError

    agent = edge_agent.Agent("n1", tmp_path, "controller", 1, ssl.create_default_context())
    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(TimeoutError):
        agent._fetch("/routes")
    assert bounds == [edge_agent.CONNECT_S]


def test_the_epoch_and_the_shares_are_in_the_file_and_not_in_its_hash() -> None:
    text = with_servers(with_epoch(CONFIG, 7), [ServerLine("svc_echo", "echo-1", "10.0.0.1:80", 1, limit=3)])
    assert (epoch_of(CONFIG), epoch_of(text), hash_of(text)) == (0, 7, HASH)
    [line] = [line for line in text.splitlines() if " echo-1 " in line]
    assert [word for word in line.split() if word.isdigit()][-1] == "3"
    assert with_epoch(render([]), 7) == render([]), "the only HAProxy of a stack has none"


@pytest.mark.parametrize("is_away", [False, True])
async def test_an_edge_says_again_and_again_that_it_leaves(monkeypatch: pytest.MonkeyPatch, is_away: bool) -> None:
    """A reload makes a worker that has not heard it; during a reload none may answer."""
    monkeypatch.setattr(edge_leave, "AGAIN_S", 0.01)
    asked, enough = list[bytes](), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"" if is_away else b"\n\n\n")
        writer.close()
        if len(asked) == 3:
            enough.set()

    # pytest's own directories are too deep for the path of a unix socket.
    with tempfile.TemporaryDirectory(prefix="pierhead-leave-") as directory:
        async with await asyncio.start_unix_server(serve, path=f"{directory}/admin.sock"):
            leaving = asyncio.create_task(edge_leave.leave(Path(directory), 3600.0))
            async with asyncio.timeout(PATIENCE_S):
                await enough.wait()
            assert not leaving.done()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        await edge_leave.leave(Path(directory), 0.0)
    assert set(asked) == {b"set severity-output number;experimental-mode on;set var proc.pierhead_leaving int(1)\n"}


def test_the_image_of_an_edge_has_what_its_programs_import(tmp_path: Path) -> None:
    dockerfile = (ROOT / "haproxy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for copied, place in re.findall(r"^COPY (.+) /usr/local/lib/pierhead/(\S+)$", dockerfile, re.MULTILINE):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for source in (ROOT / path for path in copied.split()):
            if source.is_dir():
                shutil.copytree(source, tmp_path / place, dirs_exist_ok=True)
            else:
                shutil.copy(source, tmp_path / place)
    command = (sys.executable, "-S", "-c", "import controller.swarm.edges.agent, controller.swarm.edges.leave")
    subprocess.run(command, cwd="/", env={"PYTHONPATH": str(tmp_path)}, check=True)
