"""What a request router of `serve.run` receives: the routed calls, the replicas' numbers, and what fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import copy_context
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pierhead import rayserve as serve
from pierhead.errors import UserCodeError
from pierhead.rayserve.context import DeploymentID, _RequestContext
from pierhead.rayserve.request_router import RequestRouter, tell_routers

from tests.harness.ports import free_ports
from tests.harness.waiting import eventually


class ConsistentlyHighest(RequestRouter):
    """The replica with the highest number; a name like that of Ray Serve's router for sessions."""

    routed: ClassVar[list[tuple[str, Any]]] = []

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        if pending_request.kwargs.get("fail"):
            raise LookupError("no replica will do")
        return [[max(candidate_replicas, key=lambda each: each.routing_stats.get("number", 0))]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.routed.append((pending_request.metadata.call_method, replica_id.unique_id))


@serve.deployment(
    num_replicas=3,
    max_ongoing_requests=1,
    request_router_config={"request_router_class": ConsistentlyHighest, "request_routing_stats_period_s": 0.02},
)
class Numbered:
    def __init__(self) -> None:
        self.context = serve.get_replica_context()

    def record_routing_stats(self) -> dict[str, float]:
        return {"number": self.context.rank.rank}

    async def slowly(self) -> int:
        await asyncio.sleep(0.1)
        return self.context.rank.rank

    def who(self, fail: bool = False) -> tuple[int, str]:
        return self.context.rank.rank, self.context.replica_tag


@pytest.fixture
def handle() -> Iterator[Any]:
    serve.start(http_options={"port": free_ports(1)[0]})
    numbered: Any = Numbered
    yield serve.run(numbered.bind())
    serve.shutdown()


def test_a_router_sees_the_replicas_numbers_and_each_call(handle: Any) -> None:
    eventually(lambda: handle.who.remote().result()[0] == 2, "the numbers are known")
    slow = [handle.slowly.remote() for _ in range(3)]
    assert [response.result() for response in slow] == [2, 2, 2], "where the named replicas are full, a call waits"
    ConsistentlyHighest.routed.clear()
    replica = handle.who.remote().result()[1]
    assert ConsistentlyHighest.routed == [("who", replica)]


def test_an_exception_of_a_router_is_the_calls(handle: Any) -> None:
    with pytest.raises(UserCodeError, match="LookupError: no replica will do"):
        handle.who.remote(fail=True).result()
    assert handle.who.remote().result()


def test_a_router_sees_a_call_in_the_context_of_another_one() -> None:
    class First(RequestRouter):
        routed: ClassVar[list[Any]] = []

        async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            return [candidate_replicas]

        def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
            self.routed.append(pending_request.args)

    class Call:
        pass

    router, calls = First(Random()), {number: Call() for number in (1, 2)}
    candidate: Any = SimpleNamespace(name="one")

    async def choose(number: int) -> None:
        tell_routers(DeploymentID("Model"), 1, _RequestContext("id", call_method="get"), (number,), {})
        await router.choose([candidate], calls[number])

    copy_context().run(asyncio.run, choose(1))
    copy_context().run(asyncio.run, choose(2))
    for number in (1, 2):
        router.on_routed(candidate, calls[number])
    assert First.routed == [(1,), (2,)]


def test_a_router_s_methods_are_called_in_the_order_of_its_life() -> None:
    class Stateful(RequestRouter):
        def initialize_state(self, **kwargs: Any) -> None:
            self.lock, self.did = asyncio.Lock(), [f"step {kwargs['step']}"]

        async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            async with self.lock:
                self.did.append(f"choose of {len(candidate_replicas)}")
            return [candidate_replicas]

        def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
            self.did.append(f"routed to {replica_id.unique_id}")

        def on_replica_actor_died(self, replica_id: Any) -> None:
            self.did.append(f"{replica_id.unique_id} died, left {len(self.curr_replicas)}")

    router = Stateful(Random(), step=2)
    candidates: Any = [SimpleNamespace(name=name) for name in ("one", "two")]

    class Call:
        pass

    for _ in range(2):
        call = Call()
        [[first, _]] = asyncio.run(router.choose(candidates, call))
        router.on_routed(first, call)
    router.on_replica_gone("two")
    assert router.did == ["step 2", *["choose of 2", "routed to one"] * 2, "two died, left 1"]
