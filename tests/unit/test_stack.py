"""The stacks of tests: what they are asked while things go and break."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import docker.errors
import pytest

from tests.harness.http_answers import serving
from tests.harness.stack import Stack, request


def container(name: str, logs: Callable[..., bytes] = lambda **_: b"words", pid: int = 1) -> Any:
    return SimpleNamespace(name=name, logs=logs, reload=lambda: None, attrs={"State": {"Pid": pid}})


def being_removed(**_: object) -> bytes:
    raise docker.errors.APIError("can not get logs from container which is dead or marked for removal")


def too_slow(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
    raise subprocess.TimeoutExpired("docker", 330)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Stack:
    """One without an engine, and without anything in it that answers."""
    monkeypatch.setattr(docker, "from_env", lambda **_: None)
    return Stack("pierhead-test-nothing", [])


def test_what_disappears_during_the_report_is_named_in_its_place(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"goes": container("goes", being_removed), "stays": container("stays")}
    monkeypatch.setattr(stack, "replicas", lambda: there)
    monkeypatch.setattr(stack, "compose", too_slow)
    stack.save_evidence(tmp_path)
    assert (tmp_path / "stays.log").read_bytes() == b"words"
    assert "marked for removal" in (tmp_path / "goes.log").read_text()
    assert "TimeoutExpired" in (tmp_path / "logs.txt").read_text()
    assert "not available" in (tmp_path / "events.json").read_text()


def test_a_container_that_does_not_run_is_not_killed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **_: asked.append(arguments))
    with pytest.raises(AssertionError, match="does not run"):
        stack.kill_process(container("ended", pid=0))
    assert not asked, f"process 0 is the whole group of {os.getpid()}"


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable", b"HTTP/1.1"], ids=["good", "error", "nonsense"]
)
def test_an_answer_that_breaks_off_is_a_broken_connection(head: bytes) -> None:
    def break_off(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head + b"\r\nContent-Length: 100\r\n\r\nthe first of")

    with serving(break_off) as url, pytest.raises(OSError, match=r"127\.0\.0\.1"):
        request(f"{url}/")
