"""Answers of vLLM's web application that are passed through: with an application that stands for it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pierhead.llm.objects import OpenAIRequest

PACKAGE = "pierhead.llm.server.engines.vllm"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """A request to an application, without vLLM, which counts its tokens."""
    stub = SimpleNamespace(TALLY=ContextVar("tally", default=None), TokenTally=object)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.counting", stub)
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.web", raising=False)
    from pierhead.llm.server.engines.vllm.web import WebRequest

    tally = Mock(take=Mock(return_value=0), usage=Mock(return_value=None))
    yield lambda app: WebRequest(app, OpenAIRequest.from_bytes(b"{}").sent_to("/v1/own"), tally)
    sys.modules.pop(f"{PACKAGE}.web", None)


@pytest.mark.parametrize("pieces", [1, 16, 40])
@pytest.mark.parametrize("fails", [True, False])
async def test_an_answer_that_breaks_off_ends(ask: Callable[[Any], Any], pieces: int, fails: bool) -> None:
    """With as many pieces as may wait for the reader there is no place for the word that it has ended."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(pieces - 1):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if fails:
            raise RuntimeError("it broke off")

    request = ask(app)
    await asyncio.sleep(0)
    ends: Any = pytest.raises(RuntimeError, match="it broke off") if fails else contextlib.nullcontext()
    async with asyncio.timeout(5):
        with ends:
            assert [part.data async for part in request.parts()] == [b"x"] * (pieces - 1)
    await request.close()
