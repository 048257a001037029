"""Operations on a language model: the API asks every ready replica, and `pierhead llm` shows the answers. Real gRPC
servers are in the place of the fake engine's containers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from pierhead import Unavailable
from pierhead.llm.server.service import LLMService
from pierhead.llm.v1.llm_pb2 import LLMRequest, Operation, OperationDone
from pierhead.llm.v1.llm_pb2_grpc import LLMServerServicer
from pierhead.llm_config import LLMConfig, ModelLoading
from pierhead.metrics import RuntimeMetrics

from controller.model import spec as model_spec
from controller.model.spec import unix_address
from controller.model.world import service_address
from tests.fakes.fake_engine import Behaviour
from tests.harness.ports import free_port
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_api import error_of, serving
from tests.unit.controller.test_cli import served
from tests.unit.controller.test_openapi import checked
from tests.unit.controller.worlds import service
from tests.unit.runtime.harness import Cluster, EchoService

NAME = "llm-qwen"
PATH = f"/api/v1/services/{NAME}/operations"
CONFIG = LLMConfig(engine="mock", model_loading=ModelLoading(model_id="qwen"))
ASK = LLMRequest(body=b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}', model="qwen")

Make = Callable[[str], object]
"""Makes a replica's part from the replica's token."""


class Replica(LLMServerServicer):
    """Has the one method, and remembers what it was asked."""

    def __init__(self, refuse: str = "", held: asyncio.Event | None = None) -> None:
        self.asked: list[Operation] = []
        self.refuse = refuse
        self._held = held

    async def Operate(self, request: Operation, context: Any) -> OperationDone:
        self.asked.append(request)
        if self._held is not None:
            await self._held.wait()
        if self.refuse:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refuse)
        return OperationDone()


def llm(token: str) -> LLMService:
    return LLMService(CONFIG, admin_token=token, metrics=RuntimeMetrics())


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


def controlling(directory: Path, *, has_socket: bool = False, replicas: int = 2) -> Control:
    model = service(
        NAME, protocol="grpc", port=50051, route=None, managed=True, has_socket=has_socket, replicas=replicas
    )
    return Control.of(directory, model, service("web", replicas=1))


async def put_in_place(control: Control, cluster: Cluster, *makes: Make | None) -> list[Any]:
    """Start a real server in the place of each replica; None: nothing listens there. Return the servers' parts."""
    spec, parts = control.source.services[NAME], []
    containers = [one for one in control.engine.containers.values() if one.service == NAME]
    for container, make in zip(sorted(containers, key=lambda one: one.number), makes, strict=True):
        parts.append(make(container.admin_token) if make else None)
        path = unix_address(NAME, container.name).removeprefix("unix:") if spec.has_socket else ""
        if path:
            Path(path).parent.mkdir(exist_ok=True)
        started = await cluster.start(parts[-1], socket=path) if make else None
        container.ip, container.port = "127.0.0.1", started.grpc_port if started else free_port()
    await control.controller.loop.look_again()
    seen = control.controller.observer.latest.containers_of(NAME)
    if not spec.has_socket:
        assert [service_address(one, spec) for one in seen] == [f"127.0.0.1:{one.port}" for one in seen]
    return parts


@pytest.mark.parametrize("has_socket", [False, True], ids=["tcp", "socket"])
async def test_every_ready_replica_sleeps_and_wakes_up(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, has_socket: bool
) -> None:
    monkeypatch.setattr(model_spec, "SOCKETS", str(tmp_path))
    control = controlling(tmp_path, has_socket=has_socket)
    async with serving(control) as client:
        await control.settled(NAME, 2)
        models = await put_in_place(control, cluster, llm, llm)
        done = await checked(await client.post(PATH, json={"operation": "sleep", "level": 1}), "operate")
        names = [one.name for one in control.controller.observer.latest.containers_of(NAME)]
        assert done == {
            "service": NAME,
            "operation": "sleep",
            "replicas": [{"name": name, "done": True, "message": "", "late": False} for name in names],
        }
        for model in models:
            with pytest.raises(Unavailable, match="sleeps"):
                await anext(model.Chat(ASK, None))
        for operation in ("wake", "reset_prefix_cache"):
            done = await checked(await client.post(PATH, json={"operation": operation}), "operate")
            assert [each["done"] for each in done["replicas"]] == [True, True]
        assert [(await anext(model.Chat(ASK, None))).status for model in models] == [200, 200]


async def test_replicas_that_do_not_do_it_say_why(tmp_path: Path, cluster: Cluster) -> None:
    held = asyncio.Event()
    control = controlling(tmp_path, replicas=6)
    makes: list[Make | None] = [
        lambda _: Replica(),  # type: ignore[abstract]
        lambda _: Replica("the engine mock\nhas no sleep"),  # type: ignore[abstract]
        lambda _: Replica(held=held),  # type: ignore[abstract]
        lambda token: llm(token + "0"),
        lambda _: EchoService(),
        None,
    ]
    async with serving(control) as client:
        await control.settled(NAME, 6)
        await put_in_place(control, cluster, *makes)
        asked = {"operation": "sleep", "level": 2, "timeout_s": 2.0}
        answers = (await checked(await client.post(PATH, json=asked), "operate"))["replicas"]
        held.set()
    assert [each["done"] for each in answers] == [True, False, False, False, False, False]
    assert [each["late"] for each in answers] == [False, False, True, False, False, False]
    for each, words in zip(
        answers,
        (
            "",
            "the engine mock has no sleep",
            "no answer within 2 s; the replica may still carry it out",
            "Operate is for the controller alone, by a token",
            "it is no replica of a language model",
            "failed to connect",
        ),
        strict=True,
    ):
        assert words in each["message"], each


async def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    control = controlling(tmp_path, replicas=0)
    async with serving(control, web=1) as client:
        for name, status, code, words in (
            ("llm-qwem", 404, "unknown_service", "did you mean 'llm-qwen'?"),
            ("web", 400, "invalid_request", "web is no language model: it speaks http; `pierhead status` names all"),
            (NAME, 409, "no_ready_replica", "llm-qwen has no ready replica to wake; `pierhead why llm-qwen` says why"),
        ):
            response = await client.post(f"/api/v1/services/{name}/operations", json={"operation": "wake"})
            found = await error_of(response)
            assert (*found[:2], words in found[2]) == (status, code, True), found


async def test_the_command_shows_each_answer(tmp_path: Path, cluster: Cluster) -> None:
    control = controlling(tmp_path)
    async with served(control, **{NAME: 2}) as pierhead:
        one, two = await put_in_place(
            control,
            cluster,
            lambda _: Replica(),  # type: ignore[abstract]
            lambda _: Replica("the engine mock has no sleep"),  # type: ignore[abstract]
        )
        first, second = [each.name for each in control.controller.observer.latest.containers_of(NAME)]
        done = await pierhead("llm", "sleep", NAME, "--level", "2")
        header, *lines = (line.split() for line in done.out.splitlines())
        assert header[:2] == ["REPLICA", "SLEEP"]
        assert [line[:2] for line in lines[:2]] == [[first, "done"], [second, "no"]]
        assert one.asked == two.asked == [Operation(sleep=Operation.Sleep(level=2))]
        assert done.code == 1, "one of them did not do it"
        assert done.err.startswith(f"{NAME}: 1 of 2 ready replicas did not do it: ")
        assert "the engine mock has no sleep" in done.err
        control.engine.behaviours[NAME] = Behaviour(ready_after_s=1e9)
        control.controller.commands.scale(NAME, 3)
        await until(lambda: control.row(NAME) == (3, 2, 3))
        two.refuse = ""
        done = await pierhead("llm", "reset-prefix-cache", NAME, "-o", "json")
        assert (done.code, json.loads(done.out)) == (
            0,
            {
                "service": NAME,
                "operation": "reset-prefix-cache",
                "replicas": [{"name": name, "done": True, "message": ""} for name in (first, second)],
            },
        )
        assert [each.WhichOneof("what") for each in one.asked[1:]] == ["reset_prefix_cache"]
        done = await pierhead("llm", "wake", "web")
        assert (done.code, "is no language model" in done.err) == (2, True)


async def test_the_command_ends_as_late_where_no_replica_answers_in_time(tmp_path: Path, cluster: Cluster) -> None:
    held = asyncio.Event()
    control = controlling(tmp_path, replicas=1)
    async with served(control, **{NAME: 1}) as pierhead:
        await put_in_place(control, cluster, lambda _: Replica(held=held))  # type: ignore[abstract]
        done = await pierhead("llm", "wake", NAME, "--timeout", "0.5")
        held.set()
    assert (done.code, "no answer within 0.5 s" in done.err) == (4, True), done
